"""Budgets of thinking, over the packaged model and tags that it writes as several tokens."""

from __future__ import annotations

import pytest

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
