"""A served model that forgets old tokens gives what dense attention under the same mask gives, in bounded memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.weights import load_params
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument, RequestTooLong, Unsupported
from jpaged.llm import LLM, TokensPrompt
from jpaged.models.decoder.config import apply_lossy_window
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from jpaged.service.kv_protocol import get_facts
from jpaged.types import CompletionOutput, SamplingParams
from tests.e2e.rig import assert_same, engine_of, generate, open_llm, random_prompts, write_model
from tests.models import dense
from tests.models.tiny import tiny_case, write_checkpoint

WINDOW, SINKS = 11, 5
LOSSY: dict[str, Any] = {"lossy_kv_window": WINDOW, "lossy_kv_sinks": SINKS}
SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
SEEDED = [dataclasses.replace(GREEDY, temperature=0.9, seed=seed) for seed in range(4)]
LENGTHS = [3, 40, 17, 70]


def write_long(name: str, folder: Path, max_position_embeddings: int = 1024) -> Path:
    """A tiny checkpoint of two layers for long texts."""
    case = tiny_case(name)
    config = {**case.config, "num_hidden_layers": 2, "max_position_embeddings": max_position_embeddings}
    return write_checkpoint(dataclasses.replace(case, config=config), folder)


def expected(folder: Path, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
    """Greedy tokens of the model with dense attention under the mask."""
    published = from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    config = apply_lossy_window(published, EngineConfig.load({**LOSSY, **options}))
    model = Model(config, np.dtype("float32"))
    params = load_params(model, folder, "loop")
    end = len(prompt) + num_tokens
    token_ids = np.zeros(-(-end // 96) * 96, np.int32)  # few shapes, each a program
    token_ids[: len(prompt)] = prompt
    for length in range(len(prompt), end):
        logits = dense.logits(model, params, jnp.asarray(token_ids), jnp.int32(len(prompt)))
        token_ids[length] = int(jnp.argmax(logits[length - 1]))
    return token_ids[len(prompt) : end].tolist()


def tokens_of(completions: list[CompletionOutput]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_long("llama3_tied", tmp_path_factory.mktemp("model"))


@pytest.mark.long
def test_tokens_are_those_of_the_mask_in_bounded_memory(folder: Path) -> None:
    """The longest prompt and its answer fill 21 blocks, of which 16 are in the pool: 2 of sinks are always held."""
    prompts = random_prompts([3, 70])
    want = [expected(folder, prompt, 12) for prompt in prompts]
    assert want[1] != expected(folder, prompts[1], 12, lossy_kv_window=900)
    with open_llm(folder, **{**SIZES, "num_blocks": 16}, **LOSSY) as llm:
        assert tokens_of(generate(llm, prompts, GREEDY)) == want
        assert tokens_of(generate(llm, prompts, GREEDY)) == want  # behind their own prefixes
        geometry, info = engine_of(llm).geometry, llm._serving.model
        assert (geometry.windows, geometry.num_sink_tokens, geometry.cascade) == ((WINDOW,), SINKS, None)
        assert (info.lossy_kv_window, info.lossy_kv_sinks) == (WINDOW, SINKS)
    with open_llm(folder, **{**SIZES, "num_blocks": 16}) as llm:
        with pytest.raises(RequestTooLong, match="blocks"):
            generate(llm, prompts, GREEDY)
        assert (llm._serving.model.lossy_kv_window, llm._serving.model.lossy_kv_sinks) == (0, 0)


WAYS: dict[str, dict[str, Any]] = {
    "one row": {"max_num_seqs": 1},
    "other chunks": {"max_num_batched_tokens": 64},
    "other blocks": {"block_size": 16},
    "one step at a time": {"num_scheduler_steps": 1, "overlap": False},
    "preempted, recomputed": {"num_blocks": 20, "preemption_mode": "recompute", "enable_prefix_caching": False},
    "preempted, swapped": {"num_blocks": 20, "preemption_mode": "swap"},
    "n-grams": {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
    "XLA": {"attention_backend": "xla"},
    "heads over devices": {"tensor_parallel_size": 2},
    "copies": {"data_parallel_size": 2},
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_same_whatever_the_batch_the_chunks_and_the_memory(way: str, folder: Path) -> None:
    prompts = [*random_prompts(LENGTHS), [7, 8, 9] * 9]
    params = [*SEEDED, GREEDY]
    with open_llm(folder, **SIZES, **LOSSY) as llm:
        want = generate(llm, prompts, params)
        alone = [generate(llm, [prompt], [how])[0] for prompt, how in zip(prompts, params, strict=True)]
    assert_same(alone, want, atol=1e-4)
    with open_llm(folder, **{**SIZES, **WAYS[way]}, **LOSSY) as llm:
        assert_same(generate(llm, prompts, params), want, atol=1e-4)
        assert_same(generate(llm, prompts, params), want, atol=1e-4)


@pytest.mark.long
def test_contexts_in_parts_see_the_same(folder: Path) -> None:
    options = {"lossy_kv_window": 12, "lossy_kv_sinks": 6}
    prompts = random_prompts(LENGTHS)
    with open_llm(folder, **SIZES, **options) as llm:
        want = generate(llm, prompts, GREEDY)
    with open_llm(folder, **SIZES, context_parallel_size=2, **options) as llm:
        assert_same(generate(llm, prompts, GREEDY), want, atol=1e-4)


@pytest.mark.long
def test_samples_and_beams_share_what_they_see(folder: Path) -> None:
    (prompt,) = random_prompts([40])
    for params in (SamplingParams(n=3, seed=5, max_tokens=20), SamplingParams(beam_width=3, n=3, max_tokens=20)):
        found = []
        for sizes in ({"num_blocks": 200}, {"num_blocks": 24}, {"num_blocks": 24, "preemption_mode": "swap"}):
            with open_llm(folder, **{**SIZES, **sizes}, **LOSSY) as llm:
                (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params)
                found.append([list(completion.token_ids) for completion in output.outputs])
        assert found[0] == found[1] == found[2]


@pytest.mark.long
def test_a_prompt_of_many_times_the_pool_runs(folder: Path) -> None:
    """800 tokens are 200 blocks; the pool has 12. What is held never grows with the text."""
    (prompt,) = random_prompts([800])
    with open_llm(folder, block_size=4, num_blocks=12, **LOSSY) as llm:
        engine = engine_of(llm)
        (completion,) = generate(llm, [prompt], dataclasses.replace(GREEDY, max_tokens=100))
        assert engine.load().peak_blocks_used <= 8
        assert engine.geometry.num_blocks_of_longest == 8
    assert list(completion.token_ids[:4]) == expected(folder, prompt, 4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_tied", "deepseek_v2", "mixtral", "gpt2"])
def test_other_attention_under_the_mask(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case(name), tmp_path)
    prompts = random_prompts([3, 40])
    with open_llm(folder, **SIZES, **LOSSY) as llm:
        assert tokens_of(generate(llm, prompts, GREEDY)) == [expected(folder, prompt, 12) for prompt in prompts]


def identity_of(llm: LLM) -> bytes:
    blocks = engine_of(llm)._executor.host_blocks
    assert blocks is not None
    return blocks.kv_identity()


@pytest.mark.long
def test_blocks_mean_something_else_than_exact_ones_and_those_of_other_windows(folder: Path) -> None:
    identities, facts = [], []
    for options in ({}, LOSSY, {**LOSSY, "lossy_kv_sinks": 4}, {**LOSSY, "lossy_kv_window": 12}, LOSSY):
        with open_llm(folder, **SIZES, **options) as llm:
            identities.append(identity_of(llm))
            facts.append(dict(get_facts(llm._serving)))
    assert identities[1] == identities[4]
    assert len(set(identities)) == 4
    differing = [{name for name, fact in facts[1].items() if other[name] != fact} for other in facts]
    window, sinks = "lossy_kv_window", "lossy_kv_sinks"
    assert differing == [{window, sinks}, set(), {sinks}, {window}, set()]


REFUSED = [
    ({"lossy_kv_sinks": 4}, "lossy_kv_sinks: 4 requires lossy_kv_window"),
    ({"lossy_kv_window": 0}, "lossy_kv_window: 0 is below the limit of 1"),
    ({**LOSSY, "kv_policy": "reserve-max"}, "lossy_kv_window: 11: kv_policy reserve-max reserves memory"),
    ({**LOSSY, "max_model_len": 16}, r"lossy_kv_window: 11 tokens and the first 5 .* max_model_len \(16\)"),
    ({**LOSSY, "lossy_kv_window": 2000}, r"lossy_kv_window: 2000 tokens .* max_model_len \(1024\)"),
    (
        {**LOSSY, "speculative_config": '{"method": "draft_model", "model": "demo", "num_speculative_tokens": 2}'},
        "lossy_kv_window: 11: speculative_config has method draft_model",
    ),
    ({**LOSSY, "context_parallel_size": 2}, "context_parallel_size: 2 does not divide .* of 11 tokens"),
    (
        {**LOSSY, "lossy_kv_window": 12, "context_parallel_size": 2},
        "context_parallel_size: 2 does not divide lossy_kv_sinks, 5",
    ),
]


@pytest.mark.parametrize(("options", "problem"), REFUSED)
def test_what_does_not_go_with_it_is_refused(options: dict[str, Any], problem: str, folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=problem), open_llm(folder, **options):
        pass


def test_a_model_with_windows_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = write_model("mistral_window", tmp_path)
    problem = r"lossy_kv_window: 11: .* their own windows of .*"
    with pytest.raises(InvalidArgument, match=problem), open_llm(folder, **{**LOSSY, "lossy_kv_sinks": 1}):
        pass


def test_windows_of_its_own_that_no_sequence_fills_are_none() -> None:
    """Phi-3's windows are longer than some of its contexts, and hide nothing there."""
    published = from_hf(tiny_case("phi3").config)  # a window of 11
    options = {"lossy_kv_window": 4, "lossy_kv_sinks": 2}
    config = apply_lossy_window(published, EngineConfig.load({**options, "max_model_len": 11}))
    assert {(kind.sliding_window, kind.num_sink_tokens) for kind in config.attention_kinds} == {(4, 2)}
    with pytest.raises(
        InvalidArgument, match="lossy_kv_window: 4: Phi3ForCausalLM has layers with their own windows of 11 tok"
    ):
        apply_lossy_window(published, EngineConfig.load({**options, "max_model_len": 12}))


def test_a_model_of_one_kind_of_attention_is_refused(tmp_path: Path) -> None:
    folder = write_model("opt", tmp_path)
    with pytest.raises(Unsupported, match="lossy_kv_window: OPTForCausalLM"), open_llm(folder, **LOSSY):
        pass
