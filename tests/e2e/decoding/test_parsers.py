"""The options that name how a model writes calls and thoughts, over the packaged model."""

from __future__ import annotations

import pytest

from jpaged.errors import RequestTooLong, Unsupported
from jpaged.types import SamplingParams
from tests.e2e.rig import open_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BASE = {"max_model_len": 64, "num_blocks": 40}


@pytest.mark.long
def test_parsers_say_what_of_an_answer_is_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jpaged")
    turn, tool = [{"role": "user", "content": "Hi"}], {"type": "function", "function": {"name": "f"}}
    with open_llm("demo", **BASE) as llm:
        (plain,) = llm.chat(turn, GREEDY, use_tqdm=False)[0].outputs
        assert (llm._serving.model.tool_call_parser, llm._serving.model.reasoning_parser) == ("hermes", "")
        with pytest.raises(RequestTooLong, match=r"over max_model_len \(64\)"):  # of the built-in prompt
            llm.chat(turn, GREEDY, tools=[tool], use_tqdm=False)
    unknown = pytest.raises(Unsupported, match=r"^tools: the tool call format of this model is unknown")
    with open_llm("demo", tool_call_parser="none", **BASE) as llm, unknown:
        llm.chat(turn, GREEDY, tools=[tool], use_tqdm=False)
    assert plain.text and not plain.reasoning_content
    with open_llm("demo", tool_call_parser="hermes", reasoning_parser="deepseek_r1", **BASE) as llm:
        (thought,) = llm.chat(turn, GREEDY, use_tqdm=False)[0].outputs
        assert (llm._serving.model.tool_call_parser, llm._serving.model.reasoning_parser) == ("hermes", "deepseek_r1")
    texts = [message.partition(" of ") for message in caplog.messages if "_parser of " in message]
    chosen = [(what, how.partition(": ")[2]) for what, _, how in texts]
    detected = [
        ("tool_call_parser", "hermes (from its chat template)"),
        ("reasoning_parser", "none (from its chat template)"),
    ]
    assert chosen[:2] == detected
    assert ("tool_call_parser", "none (by option)") in chosen
    assert chosen[-1] == ("reasoning_parser", "deepseek_r1 (by option)")
    assert (thought.token_ids, thought.text) == (plain.token_ids, "")
    assert thought.reasoning_content.strip() == plain.text.strip()
