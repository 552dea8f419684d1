"""A call that a grammar requires comes out typed, in each form of arguments, whatever the model would write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jpaged.config.engine_options import ToolCallParser
from jpaged.types import SamplingParams
from tests.e2e.rig import open_llm

PROPERTIES: dict[str, Any] = {
    "code": {"type": "string", "maxLength": 8},
    "days": {"type": "integer", "minimum": 1, "maximum": 9},
    "unit": {"enum": ["C", "F"]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "deepseek_v32", "kimi_k2", "pythonic", "gemma4"])
def test_a_required_call_follows_its_schema(name: ToolCallParser) -> None:
    turn = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=400)
    with open_llm("demo", max_model_len=1024, num_blocks=200, tool_call_parser=name) as llm:
        (output,) = llm.chat(
            turn, params, use_tqdm=False, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
        )
    for one in output.outputs:
        (call,) = one.tool_calls
        given = json.loads(call.arguments)
        assert (call.name, one.text, one.finish_reason) == ("find", "", "tool_calls")
        assert given.keys() == PROPERTIES.keys()
        assert len(given["code"]) <= 8 and given["days"] in range(1, 10) and given["unit"] in ("C", "F")
