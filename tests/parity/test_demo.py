"""The packaged model answers as transformers does (goldens/demo.json)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.llm import LLM
from jpaged.types import CompletionOutput, SamplingParams
from tests.e2e.rig import generate, only, open_llm, random_prompts

GOLDENS = Path(__file__).parent / "demo_goldens.json"
OPTIONS = {"max_num_batched_tokens": 16, "max_model_len": 256, "num_blocks": 64}
NUM_TOP = 8
HOW = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=NUM_TOP)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm("demo", **OPTIONS) as llm:
        yield llm


def read_answers() -> list[dict[str, Any]]:
    answers = json.loads(GOLDENS.read_text(encoding="utf-8"))["answers"]
    assert [len(answer["tokens"]) for answer in answers] == [64] * 4
    assert min(answer["smallest_gap"] for answer in answers) > 3e-4
    return answers


def check_answer(completion: CompletionOutput, answer: dict[str, Any]) -> None:
    """The same tokens, and at each place the same likeliest tokens with the same log-probabilities."""
    assert list(completion.token_ids) == answer["tokens"]
    assert completion.logprobs is not None
    for position, ids, logprobs in zip(completion.logprobs, answer["top_ids"], answer["top_logprobs"], strict=True):
        assert len(position.top) == NUM_TOP
        np.testing.assert_allclose([t.logprob for t in position.top], logprobs, rtol=0, atol=1e-4)
        # Tokens closer than rounding may change places.
        theirs = dict(zip(ids, logprobs, strict=True))
        for token in position.top:
            assert token.logprob == pytest.approx(theirs.get(token.token_id, logprobs[-1]), abs=1e-4)


def test_chats_and_texts_continue_as_with_transformers(llm: LLM) -> None:
    for answer in read_answers():
        if "messages" in answer:
            (output,) = llm.chat(answer["messages"], HOW)
        else:
            (output,) = llm.generate(answer["prompt"], HOW)
        assert list(output.prompt_token_ids) == answer["prompt_token_ids"]
        check_answer(only(output), answer)


def test_company_changes_no_answer(llm: LLM) -> None:
    answers = read_answers()
    prompts = [answer["prompt_token_ids"] for answer in answers] + random_prompts([1, 30, 7, 60])
    for completion, answer in zip(generate(llm, prompts, HOW)[:4], answers, strict=True):
        check_answer(completion, answer)


def test_its_text_is_that_of_its_tokens(llm: LLM) -> None:
    """Streamed piece by piece, the text is what decoding all tokens at once gives."""
    (output,) = llm.chat([{"role": "user", "content": "Tell me a story about an old robot."}], HOW)
    completion = only(output)
    whole = llm._serving.tokenizer.decode(completion.token_ids)
    assert completion.text == whole
    assert len(whole.split()) > 20
