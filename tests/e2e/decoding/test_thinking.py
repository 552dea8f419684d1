"""Budgets of thinking, over the packaged model and tags that it writes as several tokens."""

from __future__ import annotations

import dataclasses

import pytest

from jpaged.llm import TokensPrompt
from jpaged.types import SamplingParams
from tests.e2e.rig import open_llm

BASE = {"max_model_len": 96, "num_blocks": 40, "max_num_seqs": 4}
TURN = [{"role": "user", "content": "Hi"}]


@pytest.mark.long
def test_thoughts_are_as_long_as_their_budget_and_the_answer_follows() -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)
    with open_llm("demo", reasoning_parser="deepseek_r1", **BASE) as llm:
        (free,) = llm.chat(TURN, params, use_tqdm=False)[0].outputs
        closes = llm._serving.tokenizer.encode("</think>", add_special_tokens=False)
        for budget in (0, 7):
            reasoning = {"thinking_token_budget": budget}
            (output,) = llm.chat(TURN, params, use_tqdm=False, reasoning=reasoning)[0].outputs
            assert output.token_ids[:budget] == free.token_ids[:budget]
            assert list(output.token_ids[budget : budget + len(closes)]) == closes
            assert output.text
            assert bool(output.reasoning_content) == bool(budget)
            assert len(output.token_ids) == 40
        assert not free.text


@pytest.mark.long
def test_a_budget_of_sampling_parameters_limits_completions_and_chats() -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
    limited = dataclasses.replace(params, thinking_token_budget=5)
    with open_llm("demo", reasoning_parser="deepseek_r1", **BASE) as llm:
        opens, closes = (
            llm._serving.tokenizer.encode(tag, add_special_tokens=False) for tag in ("<think>", "</think>")
        )
        words = llm._serving.tokenizer.encode("Once upon a time", add_special_tokens=False)
        for prompt, num_left in (([*words, *opens], 5), ([*opens, *words[:3]], 2), (words, None)):
            given = TokensPrompt(prompt_token_ids=prompt)
            (free,) = llm.generate(given, params, use_tqdm=False)[0].outputs
            (output,) = llm.generate(given, limited, use_tqdm=False)[0].outputs
            if num_left is None:
                assert output.token_ids == free.token_ids
                continue
            assert output.token_ids[:num_left] == free.token_ids[:num_left]
            assert list(output.token_ids[num_left : num_left + len(closes)]) == closes
        (chat,) = llm.chat(TURN, limited, use_tqdm=False)[0].outputs
        (same,) = llm.chat(TURN, params, use_tqdm=False, reasoning={"thinking_token_budget": 5})[0].outputs
        assert chat.token_ids == same.token_ids and list(chat.token_ids[5 : 5 + len(closes)]) == closes
