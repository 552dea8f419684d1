"""A lossy window with every other option: what is told of each token is what dense attention under the mask says.

The tokens that a server gives, whoever chose them, are run once more without a cache: log-probabilities are of the
model's own distribution, so that each shows whether its token saw the first tokens, the window, and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.weights import load_params
from jpaged.config import EngineConfig
from jpaged.demo import FOLDER
from jpaged.llm import LLM, TokensPrompt
from jpaged.models.decoder.config import apply_lossy_window
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from jpaged.structured import StructuredOutputs
from jpaged.types import RequestOutput, SamplingParams
from tests.e2e.rig import open_llm, random_prompts, write_model
from tests.models import dense
from tests.models.adapters import TinyAdapter
from tests.models.tiny import tiny_case, write_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_programs")]

LOSSY: dict[str, Any] = {"lossy_kv_window": 11, "lossy_kv_sinks": 5}
SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 200, "max_num_batched_tokens": 16, "max_model_len": 120}
HOT = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, logprobs=0)
MIX: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0),
    "several": dataclasses.replace(HOT, n=3, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    "best": dataclasses.replace(HOT, n=2, best_of=3, top_k=20),
    "edits": dataclasses.replace(HOT, logit_bias={7: 4.0, 9: -100.0}, min_tokens=6),
    "prompt": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=1),
    "short": dataclasses.replace(HOT, max_tokens=30),
    "beams": SamplingParams(beam_width=3, n=2, temperature=0.0, max_tokens=15),
}
"""A request of each kind, all of them in one engine."""
LENGTHS = (3, 40, 17, 33, 45, 1, 26)
SUFFIX = json.dumps({"method": "suffix", "num_speculative_tokens": 6})
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3})


def prompts_of() -> list[list[int]]:
    """The longer ones begin alike, beyond first tokens and a block; all end with what comes again."""
    (common,) = random_prompts([19])
    prompts = [own if len(own) < 18 else [*common, *own[19:]] for own in random_prompts(LENGTHS, 7)]
    return [[*prompt, *prompt[-4:]] for prompt in prompts]


def answers(llm: LLM, **rest: Any) -> list[RequestOutput]:
    """The mix twice, behind its own prefixes the second time."""
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts_of()]
    return [output for _ in range(2) for output in llm.generate(prompts, [*MIX.values()], **rest)]


class Dense:
    """A checkpoint under the mask, without a cache."""

    def __init__(self, folder: Path, **options: Any) -> None:
        published = from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        self._model = Model(apply_lossy_window(published, EngineConfig.load(options)), np.dtype("float32"))
        self._params = load_params(self._model, folder, "loop")

    def logprobs(self, token_ids: Sequence[int], prompt_len: int) -> np.ndarray:
        """`[T, V]`, after each token."""
        padded = np.zeros(128, np.int32)
        padded[: len(token_ids)] = token_ids
        logits = dense.logits(self._model, self._params, jnp.asarray(padded), jnp.int32(prompt_len))
        return np.asarray(jax.nn.log_softmax(logits, axis=-1))[: len(token_ids)]


def check(output: RequestOutput, kind: str, of: Dense, atol: float) -> None:
    """Holds what was told of each token to the reference."""
    prompt = list(output.prompt_token_ids)
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        want_tv = of.logprobs([*prompt, *tokens], len(prompt))
        after = np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        if completion.logprobs is not None:
            told = [position.chosen.logprob for position in completion.logprobs]
            np.testing.assert_allclose(told, want_tv[after, tokens], rtol=0, atol=atol, err_msg=kind)
        if MIX[kind].temperature == 0.0 and kind != "beams":
            assert (want_tv[after, tokens] >= want_tv[after].max(axis=1) - atol).all(), kind
        if output.prompt_logprobs is not None:
            told = [position.chosen.logprob for position in output.prompt_logprobs if position is not None]
            places = np.arange(len(prompt) - 1)
            np.testing.assert_allclose(told, want_tv[places, prompt[1:]], rtol=0, atol=atol, err_msg=kind)


def check_all(outputs: Sequence[RequestOutput], of: Callable[[int], Dense], atol: float = 1e-4) -> None:
    kinds = [*MIX, *MIX]
    assert len(outputs) == len(kinds)
    for place, (kind, output) in enumerate(zip(kinds, outputs, strict=True)):
        check(output, kind, of(place % len(MIX)), atol)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama3_tied", tmp_path_factory.mktemp("model"), with_tokenizer=True)


SHAPES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a window within a block": {"lossy_kv_window": 3, "block_size": 8},
    "a window of one token": {"lossy_kv_window": 1, "lossy_kv_sinks": 6},
    "first tokens of many blocks": {"lossy_kv_window": 6, "lossy_kv_sinks": 21},
    "first tokens of one, and a window of whole blocks": {"lossy_kv_window": 9, "lossy_kv_sinks": 1},
    "no first tokens": {"lossy_kv_sinks": 0},
    "nearly everything": {"lossy_kv_window": 80, "lossy_kv_sinks": 39},
    "blocks of a token": {"block_size": 1},
    "chunks beyond the window": {"max_num_batched_tokens": 64},
    "a little memory": {"num_blocks": 24},
    "a little memory, swapped": {"num_blocks": 24, "preemption_mode": "swap", "swap_space": 0.01},
}
OTHERS: dict[str, dict[str, Any]] = {
    "suffixes": {"speculative_config": SUFFIX},
    "suffixes in a little memory": {
        "speculative_config": SUFFIX,
        "num_blocks": 26,
        "preemption_mode": "recompute",
        "swap_space": 0.0,
    },
    "n-grams one step at a time": {"speculative_config": NGRAM, "num_scheduler_steps": 1, "overlap": False},
    "what is worth least": {"eviction_policy": "worth", "num_blocks": 40, "swap_space": 0.002},
    "parts of everything": {
        "lossy_kv_window": 12,
        "lossy_kv_sinks": 6,
        "context_parallel_size": 2,
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "speculative_config": SUFFIX,
    },
}


@pytest.mark.parametrize("name", [*SHAPES, *OTHERS])
def test_every_token_is_that_of_the_mask(name: str, folder: Path) -> None:
    options = {**SIZES, **LOSSY, **SHAPES.get(name, {}), **OTHERS.get(name, {})}
    with open_llm(folder, **options) as llm:
        outputs, load = answers(llm), llm.load()
    if "speculative_config" in options:
        assert load.speculation.num_draft_tokens > 0
    if "preemption_mode" in options:
        assert load.num_preemptions > 0
        assert (load.num_blocks_swapped_in > 0) == (options["preemption_mode"] == "swap")
    assert load.num_prefix_hit_tokens > 0
    of = Dense(folder, **options)
    check_all(outputs, lambda place: of)


@pytest.mark.parametrize("options", [{}, {"speculative_config": SUFFIX}, {"num_blocks": 24}], ids=str)
def test_bytes_instead_of_floats_are_as_near(options: dict[str, Any], folder: Path) -> None:
    """A pool of int8 rounds keys and values; what is forgotten would be told otherwise by far more."""
    with open_llm(folder, **{**SIZES, **options}, **LOSSY, kv_cache_dtype="int8") as llm:
        outputs = answers(llm)
    of = Dense(folder, **SIZES, **LOSSY)
    check_all(outputs, lambda place: of, 0.05)


@pytest.mark.parametrize("options", [{}, {"speculative_config": SUFFIX, "num_blocks": 26}], ids=str)
def test_rows_of_adapters_are_those_of_the_mask(options: dict[str, Any], tmp_path: Path) -> None:
    case = tiny_case("llama_gqa_bias")
    base = write_checkpoint(case, write_model("llama3_tied", tmp_path / "base", with_tokenizer=True))
    adapters = (TinyAdapter(case, "a"), TinyAdapter(case, "b", 2, 7.0))
    merged: dict[str | None, Path] = {None: base}
    for adapter in adapters:
        adapter.write(tmp_path / adapter.name)
        merged[adapter.name] = adapter.write_merged(tmp_path / f"{adapter.name}-merged")
    lora = {"lora": [f"{name}={tmp_path / name}" for name in "ab"], "max_loras": 2}
    names = [(None, "a", "b")[i % 3] for i in range(len(MIX))]
    with open_llm(base, **{**SIZES, **options}, **LOSSY, **lora) as llm:
        outputs = answers(llm, adapter=names)
    of = {name: Dense(path, **SIZES, **LOSSY) for name, path in merged.items()}
    check_all(outputs, lambda place: of[names[place]])


@pytest.mark.parametrize("options", [{}, {"speculative_config": NGRAM}], ids=str)
def test_what_a_grammar_allows_is_drawn_from_the_mask(options: dict[str, Any]) -> None:
    """The demo model, whose tokens are pieces of text."""
    grammar = StructuredOutputs(regex="(a|b|the cat )+[0-9]{20,60}")
    params = dataclasses.replace(HOT, structured_outputs=grammar, max_tokens=40, n=2)
    prompt = TokensPrompt(prompt_token_ids=random_prompts([30])[0])
    with open_llm("demo", **{**SIZES, **options}, **LOSSY) as llm:
        (output,) = llm.generate([prompt], params)
    for completion in output.outputs:
        assert len(completion.token_ids) > 20
        assert re.fullmatch("(a|b|the cat |the ca|the c|the |the|th|t)*[0-9]*", completion.text)
    check(output, "several", Dense(FOLDER, **SIZES, **LOSSY), 1e-4)
