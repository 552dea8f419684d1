"""The option that bounds how many likeliest tokens are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from jpaged.errors import InvalidArgument
from jpaged.llm import TokensPrompt
from jpaged.types import SamplingParams
from tests.e2e.rig import open_llm, write_model
from tests.models.tiny import tiny_case

BASE = {"max_model_len": 64, "num_blocks": 40}


@pytest.mark.long
def test_as_many_likeliest_tokens_are_told_as_the_option_allows(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path)
    asked = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=-1)
    prompt = TokensPrompt(prompt_token_ids=[1, 2])
    with (
        open_llm(folder, **BASE) as llm,
        pytest.raises(InvalidArgument, match=r"^logprobs: -1 is over max_logprobs \(20\)"),
    ):
        llm.generate([prompt], asked)
    with open_llm(folder, max_logprobs=-1, **BASE) as llm:
        (output,) = llm.generate([prompt], asked)
    told = [position.top for position in output.outputs[0].logprobs or ()]
    assert [len(top) for top in told] == [tiny_case("llama_mha").config["vocab_size"]] * 2
