"""Rows of the embedding in place of a prompt's tokens give the same tokens, whatever happens to the request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged.config import EngineConfig
from jpaged.distributed_env import MultiHost
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.llm import LLM, TokensPrompt
from jpaged.local_model import EmbedsPrompt
from jpaged.types import RequestOutput, SamplingParams
from tests.e2e.rig import engine_of, open_llm, random_prompts
from tests.models.tiny import tiny_case, write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "two": SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=10, ignore_eos=True),
    "beams": SamplingParams(beam_width=3, n=3, max_tokens=8),
    "counted": SamplingParams(temperature=0.0, presence_penalty=1.2, max_tokens=10, ignore_eos=True),
}
PROMPTS = random_prompts([5, 21, 9, 17, 1, 12])
GIVEN_SCALE = ("gemma", "gemma2", "granite", "granitemoe", "granitemoehybrid")
"""Families that multiply embeddings of callers, too, as in vLLM."""


def table_of(folder: Path, name: str) -> np.ndarray:
    """Rows of the embedding as the first layer takes them."""
    tensors, config = load_file(folder / "model.safetensors"), tiny_case(name).config
    ends = (".embed_tokens.weight", ".wte.weight", ".embed_in.weight", ".embeddings.weight")
    (table,) = [tensor for tensor_name, tensor in tensors.items() if tensor_name.endswith(ends)]
    if name.startswith("gemma") and name not in GIVEN_SCALE:
        table = table * np.float32(float(str(config["hidden_size"])) ** 0.5)
    return np.asarray(table, np.float32)


def as_tokens(prompts: Sequence[list[int]]) -> list[TokensPrompt]:
    return [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]


def as_embeds(table: np.ndarray, prompts: Sequence[list[int]]) -> list[EmbedsPrompt]:
    return [EmbedsPrompt(prompt_embeds=table[prompt]) for prompt in prompts]


def texts(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def check_same(llm: LLM, table: np.ndarray) -> None:
    """Each kind of request, alone and among prompts of tokens, in chunks, and again after a cached prefix."""
    for params in KINDS.values():
        want = texts(llm.generate(as_tokens(PROMPTS), params))
        mixed: list[Any] = [*as_tokens(PROMPTS[::2]), *as_embeds(table, PROMPTS)]
        for _ in range(2):
            outputs = llm.generate(mixed, params)
            assert texts(outputs) == want[::2] + want
        assert outputs[4].prompt_token_ids == (0,) * 21
    found = [output.usage.cached_tokens for output in llm.generate(as_embeds(table, PROMPTS), GREEDY)]
    known = [output.usage.cached_tokens for output in llm.generate(as_tokens(PROMPTS), GREEDY)]
    assert found == [number // 4 * 4 for number in known]  # whole blocks


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        *("llama_mha", "opt_post_norm", "gpt2", "gpt_neox", "gemma", "gemma2", "gemma3", "gemma4_keys", "granite"),
        *("phi3", "granitemoe", "deepseek_v3", "gpt_oss", "lfm2", "qwen3_next", "granitemoehybrid", "mamba2"),
    ],
)
def test_rows_of_the_embedding_give_the_tokens_of_the_prompt(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tiny_case(name), tmp_path)
    with open_llm(folder, num_blocks=96, block_size=4, enable_prompt_embeds=True) as llm:
        check_same(llm, table_of(folder, name))


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"num_scheduler_steps": 1, "overlap": False},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
        {"data_parallel_size": 2},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
        {"kv_cache_dtype": "int8"},
        {"linear_backend": "xla"},
    ],
    ids=str,
)
def test_options_change_no_token_of_embedded_prompts(tmp_path: Path, options: dict[str, Any]) -> None:
    config = {**tiny_case("llama_mha").config, "num_hidden_layers": 2}
    folder = write_checkpoint(type(tiny_case("llama_mha"))("llama_mha", config, 24), tmp_path)
    with open_llm(folder, num_blocks=96, block_size=4, enable_prompt_embeds=True, **options) as llm:
        check_same(llm, table_of(folder, "llama_mha"))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_keep_their_embeddings(tmp_path: Path, mode: str) -> None:
    folder = write_checkpoint(tiny_case("llama_mha"), tmp_path)
    params = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, seed=11)
    options = {"max_model_len": 44, "block_size": 4, "num_blocks": 14, "swap_space": 0.001}
    with open_llm(folder, preemption_mode=mode, enable_prompt_embeds=True, **options) as llm:
        table = table_of(folder, "llama_mha")
        want = [texts(llm.generate(one, params))[0] for one in as_tokens(PROMPTS)]
        assert engine_of(llm).load().num_preemptions == 0
        outputs = llm.generate(as_embeds(table, PROMPTS), params)
        assert texts(outputs) == want
        assert engine_of(llm).load().num_preemptions > 0


def test_embeddings_that_differ_share_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case("llama_mha"), tmp_path)
    with open_llm(folder, num_blocks=64, block_size=4, enable_prompt_embeds=True) as llm:
        table = table_of(folder, "llama_mha")
        first, other = table[PROMPTS[1]], table[PROMPTS[1]].copy()
        other[9, 0] += 1e-3
        cached = []
        for embeds in (first, first, other, first + np.float32(1e-3)):
            (output,) = llm.generate([EmbedsPrompt(prompt_embeds=embeds)], GREEDY)
            cached.append(output.usage.cached_tokens)
        assert cached == [0, 20, 8, 0]
        (output,) = llm.generate([EmbedsPrompt(prompt_embeds=first, cache_salt="another")], GREEDY)
        assert output.usage.cached_tokens == 0
        zeros = llm.generate(as_tokens([[0] * 21]), GREEDY)
        assert zeros[0].usage.cached_tokens == 0


@pytest.mark.long
def test_arrays_of_other_libraries_are_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case("llama_mha"), tmp_path)
    with open_llm(folder, num_blocks=64, enable_prompt_embeds=True) as llm:
        rows = table_of(folder, "llama_mha")[PROMPTS[0]]
        want = texts(llm.generate(as_tokens(PROMPTS[:1]), GREEDY))
        import jax.numpy as jnp

        given: list[Any] = [rows, rows.tolist(), jnp.asarray(rows), rows[None]]
        given.append(pytest.importorskip("torch").asarray(rows).requires_grad_())
        assert texts(llm.generate([EmbedsPrompt(prompt_embeds=one) for one in given], GREEDY)) == want * 5
        rounded = jnp.asarray(rows, jnp.bfloat16)
        half = [rounded, np.asarray(rounded, np.float32), pytest.importorskip("torch").asarray(rows).bfloat16()]
        (a, b, c) = texts(llm.generate([EmbedsPrompt(prompt_embeds=one) for one in half], GREEDY))
        assert a == b == c
        with pytest.raises(InvalidArgument, match=r"prompt_embeds: has the shape \(5, 63\); the model takes"):
            llm.generate({"prompt_embeds": rows[:, 1:]}, GREEDY)
        both: Any = {"prompt_embeds": rows, "prompt": "a"}
        with pytest.raises(InvalidArgument, match=r"given; must be one of prompt, prompt_token_ids, prompt_embeds"):
            llm.generate(both, GREEDY)


@pytest.mark.long
def test_models_that_take_no_embeddings_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case("gemma3n_text"), tmp_path)
    with pytest.raises(InvalidArgument, match=r"enable_prompt_embeds: True, but Gemma3n\w+ has inputs of each layer"):
        LLM(str(folder), enable_prompt_embeds=True)
    with open_llm(folder, num_blocks=64) as llm, pytest.raises(Unsupported, match="without --enable-prompt-embeds"):
        llm.generate({"prompt_embeds": np.zeros((3, 64), np.float32)}, GREEDY)


def test_options_that_need_tokens_are_refused_by_name() -> None:
    draft = '{"method": "draft_model", "model": "demo", "num_speculative_tokens": 2}'
    with pytest.raises(InvalidArgument, match=r"draft_model reads tokens only \(enable_prompt_embeds is True\)"):
        EngineConfig.load({"enable_prompt_embeds": True, "speculative_config": draft})
    config = EngineConfig.load({"enable_prompt_embeds": True})
    with pytest.raises(InvalidArgument, match=r"enable_prompt_embeds: True requires a single process \(there are 2"):
        config.for_multihost(MultiHost("a:1", 2, 0, "the options"))


def test_messages_with_embeddings_may_be_larger_unless_a_limit_is_set() -> None:
    for given, limit in (({}, 16.0), ({"max_request_size": 2.0}, 2.0)):
        assert EngineConfig.load({"enable_prompt_embeds": True, **given}).server.max_request_size == limit
    assert EngineConfig.load({}).server.max_request_size == 1.0
