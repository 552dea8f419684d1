"""Every field that chooses tokens, crossed with each other on a real engine: as oracles say, the same in every way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.weights import load_params
from jpaged.llm import LLM, TokensPrompt
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from jpaged.types import CompletionOutput, Prompt, RequestOutput, SamplingParams
from tests.e2e.decoding.edits_table import FIELDS, PAIRS, check, params_of
from tests.e2e.rig import assert_same, engine_of, generate, open_llm, random_prompts, write_model
from tests.models import dense

pytestmark = pytest.mark.usefixtures("quick_programs")

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "max_model_len": 48,
    "num_blocks": 120,
}
CASES = [*((name,) for name in FIELDS), *PAIRS]
PROMPTS = random_prompts([3 + 7 * i % 19 for i in range(len(CASES))], seed=5)
PARAMS = [params_of(case, seed=100 + i) for i, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3_tied", tmp_path_factory.mktemp("model"), with_tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, overlap=False, enable_prefix_caching=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[CompletionOutput]:
    """Each request by itself, the truth for the others."""
    return [generate(llm, [prompt], how)[0] for prompt, how in zip(PROMPTS, PARAMS, strict=True)]


def logits_of(folder: Path, sequences: Sequence[tuple[list[int], Sequence[int]]]) -> list[np.ndarray]:
    """The model's logits after each token of (prompt, output)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Model(from_hf(config), np.dtype("float32"))
    params = load_params(model, folder, "loop")
    found = []
    for prompt, output in sequences:
        token_ids = np.zeros(OPTIONS["max_model_len"], np.int32)
        token_ids[: len(prompt) + len(output)] = [*prompt, *output]
        found.append(np.asarray(dense.logits(model, params, jnp.asarray(token_ids), jnp.int32(len(prompt)))))
    return found


@pytest.mark.long
def test_each_token_is_the_oracles(folder: Path, llm: LLM, alone: list[CompletionOutput]) -> None:
    processor = llm._serving.input_processor
    all_logits = logits_of(folder, [(p, one.token_ids) for p, one in zip(PROMPTS, alone, strict=True)])
    for prompt, how, one, logits in zip(PROMPTS, PARAMS, alone, all_logits, strict=True):
        request = processor.make_request(request_id="x", sampling=how, prompt=Prompt(token_ids=prompt))
        check(logits, prompt, request, one)


@pytest.mark.long
def test_every_field_changes_something(llm: LLM) -> None:
    """Else a comparison would show nothing. Each against the same request without it."""
    changed = set()
    for name in FIELDS:
        if name in ("logprobs", "min_tokens"):  # which change no token
            changed.add(name)
            continue
        for i, prompt in enumerate(PROMPTS[:40]):
            plain, other = (generate(llm, [prompt], params_of(case, seed=i))[0] for case in ((), (name,)))
            if plain.token_ids != other.token_ids:
                changed.add(name)
                break
    assert changed == set(FIELDS)


WAYS: dict[str, dict[str, Any]] = {
    "in company": {},
    "one after the other": {"overlap": False},
    "several steps": {"num_scheduler_steps": 4},
    "recomputed": {"num_blocks": 24, "preemption_mode": "recompute"},
    "swapped": {"num_blocks": 24, "preemption_mode": "swap", "swap_space": 0.001},
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_no_way_changes_a_token(folder: Path, alone: list[CompletionOutput], way: str) -> None:
    """In one batch, in chunks of a few tokens, behind cached prefixes the second time."""
    with open_llm(folder, **{**OPTIONS, **WAYS[way]}) as llm:
        assert_same(generate(llm, PROMPTS, PARAMS), alone)
        load = engine_of(llm).load()
        assert (load.num_preemptions > 0) == ("num_blocks" in WAYS[way])
        again = slice(0, None, 5)
        assert_same(generate(llm, PROMPTS[again], PARAMS[again]), alone[again])
        assert engine_of(llm).load().num_prefix_hit_tokens > load.num_prefix_hit_tokens


@pytest.mark.long
def test_two_devices_sample_what_the_oracles_say(folder: Path) -> None:
    with open_llm(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        outputs = generate(llm, PROMPTS, PARAMS)
        processor = llm._serving.input_processor
    all_logits = logits_of(folder, [(p, one.token_ids) for p, one in zip(PROMPTS, outputs, strict=True)])
    for prompt, how, one, logits in zip(PROMPTS, PARAMS, outputs, all_logits, strict=True):
        request = processor.make_request(request_id="x", sampling=how, prompt=Prompt(token_ids=prompt))
        check(logits, prompt, request, one)


@pytest.mark.long
def test_each_sequence_of_a_request_has_counts_of_its_own(folder: Path, llm: LLM) -> None:
    processor, several = llm._serving.input_processor, PARAMS[:: len(CASES) // 12]
    prompts = PROMPTS[: len(several)]
    wrapped = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    outputs: list[RequestOutput] = llm.generate(wrapped, [_three(how) for how in several])
    for prompt, how, output in zip(prompts, several, outputs, strict=True):
        request = processor.make_request(request_id="x", sampling=how, prompt=Prompt(token_ids=prompt))
        all_logits = logits_of(folder, [(prompt, one.token_ids) for one in output.outputs])
        for one, logits in zip(output.outputs, all_logits, strict=True):
            check(logits, prompt, request, one, index=one.index)


def _three(how: SamplingParams) -> SamplingParams:
    return dataclasses.replace(how, n=3)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("how", [{"typical_p": 0.3}, {"typical_p": 0.7, "temperature": 0.9}, {"top_n_sigma": 0.01}])
@pytest.mark.long
def test_a_text_that_may_not_end_yet_goes_on_where_its_end_is_the_likeliest(how: dict[str, Any]) -> None:
    phrase = [1703, 2817, 1516, 335, 1829, 993, 3058]
    prompt = [1688, *phrase[1:], *phrase, *phrase[:2]]  # after which the demo model ends
    with open_llm("demo", max_model_len=64, num_blocks=16) as llm:
        (ended,) = generate(llm, [prompt], SamplingParams(temperature=0.0, max_tokens=8))
        (output,) = generate(
            llm, [prompt], SamplingParams(**{"temperature": 0.2, "seed": 7, **how}, min_tokens=6, max_tokens=7)
        )
    assert len(ended.token_ids) == 1
    assert len(output.token_ids) >= 6
