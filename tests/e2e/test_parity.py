"""The engine's tokens and log-probabilities equal those that transformers gave (tests/models/goldens)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.llm import LLM
from jpaged.types import CompletionOutput, SamplingParams
from tests.e2e.rig import chosen_logprobs, generate, open_llm, random_prompts, write_model
from tests.models.tiny import tiny_cases

GOLDENS = Path(__file__).parent.parent / "parity" / "goldens"
BLOCK_SIZES = (1, 8, 16, 32)
CASES = [case.name for case in tiny_cases()]
CHUNK_SIZES = (8, 11, 16, 32)
# A Latin square: each case meets every block size and every chunk size once, and over the cases those meet each other.
# What the three have to do with each other is in pairs: a program is made for a model and one of the sizes, and the
# slots of a chunk are those of blocks, whatever the model.
LONG = [(name, BLOCK_SIZES[j], CHUNK_SIZES[(i + j) % 4]) for i, name in enumerate(CASES) for j in range(4)]
QUICK = [(name, BLOCK_SIZES[i % 4], (8, 11, 16)[i % 3]) for i, name in enumerate(CASES[::2])]
LONG_PROMPTS = ("llama3_tied", "llama3_new_style")  # of 90 tokens; the other models end at 128
TOP = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)


def read_golden(name: str) -> dict[str, Any]:
    golden = json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))
    assert len(golden["tokens"]) == 64
    return golden


def open_case(name: str, folder: Path, *, block_size: int, max_num_batched_tokens: int):
    max_model_len = 160 if name in LONG_PROMPTS else 128
    return open_llm(
        write_model(name, folder),
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_blocks=8 * -(-max_model_len // block_size),
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)


def log_softmax(logits: list[float]) -> np.ndarray:
    shifted = np.array(logits) - max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def check_golden_text(completion: CompletionOutput, golden: dict[str, Any], num_tokens: int) -> None:
    """64 tokens, or as many as the model's length allows, and the log-probabilities of the first and the last."""
    assert list(completion.token_ids) == golden["tokens"][:num_tokens]
    logprobs = chosen_logprobs(completion)
    first = log_softmax(golden["logits"][-1])[completion.token_ids[0]]
    assert logprobs[0] == pytest.approx(first, abs=1e-4)
    if num_tokens == 64:
        assert logprobs[-1] == pytest.approx(log_softmax(golden["last_logits"])[completion.token_ids[-1]], abs=1e-4)
    assert completion.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-4)


def check_distributions(completions: list[CompletionOutput], golden: dict[str, Any]) -> None:
    """The twenty likeliest tokens after the prompt's beginnings."""
    for completion, logits in zip(completions, golden["logits"], strict=True):
        assert completion.logprobs is not None
        (position,) = completion.logprobs
        want = log_softmax(logits)
        assert len(position.top) == 20
        np.testing.assert_allclose([t.logprob for t in position.top], np.sort(want)[::-1][:20], rtol=0, atol=1e-4)
        np.testing.assert_allclose(
            [t.logprob for t in position.top], want[[t.token_id for t in position.top]], atol=1e-4
        )


def check_alone_and_in_company(llm: LLM, name: str) -> None:
    """The golden prompt by itself; then with its own beginnings and three strangers of other lengths."""
    golden, limit = read_golden(name), llm.config.model.max_model_len
    assert limit is not None
    prompt = golden["prompt"]
    num_tokens = min(64, limit - len(prompt))
    params = greedy(num_tokens)
    check_golden_text(generate(llm, [prompt], params)[0], golden, num_tokens)

    # Dynamic RoPE turns a prompt by its whole length once that is beyond the original one.
    beginnings = [] if name == "llama_dynamic_long" else [prompt[: row + 1] for row in golden["rows"]]
    strangers = random_prompts([1, 9, 33, 17, 60, 5, 2][len(beginnings) :], seed=len(prompt))
    others = [*beginnings, *strangers]
    completions = generate(
        llm, [*others[:5], prompt, *others[5:]], [*[TOP] * len(beginnings), *[params] * (8 - len(beginnings))]
    )
    check_golden_text(completions[5], golden, num_tokens)
    if beginnings:
        check_distributions(completions[:4], golden)


@pytest.mark.parametrize(("name", "block_size", "chunk"), QUICK)
def test_tokens_equal_those_of_transformers(name: str, block_size: int, chunk: int, tmp_path: Path) -> None:
    with open_case(name, tmp_path, block_size=block_size, max_num_batched_tokens=chunk) as llm:
        check_alone_and_in_company(llm, name)


@pytest.mark.long
@pytest.mark.parametrize(("name", "block_size", "chunk"), LONG)
def test_tokens_equal_in_blocks_and_chunks_of_every_size(
    name: str, block_size: int, chunk: int, tmp_path: Path
) -> None:
    with open_case(name, tmp_path, block_size=block_size, max_num_batched_tokens=chunk) as llm:
        check_alone_and_in_company(llm, name)


def test_the_sizes_cover_all_pairs() -> None:
    for a, b in ((0, 1), (0, 2), (1, 2)):
        levels = [{row[i] for row in LONG} for i in (a, b)]
        assert {(row[a], row[b]) for row in LONG} == set(itertools.product(*levels))


def test_the_gaps_between_the_best_tokens_allow_the_comparison() -> None:
    for name in CASES:
        assert read_golden(name)["smallest_gap"] > 1e-4
