"""A tool whose schema no grammar can be made of is refused by its own name, where calls are held to schemas."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged.checkpoints.hub import find_folder
from jpaged.errors import InvalidArgument
from jpaged.llm import LLM
from jpaged.structured import StructuredOutputs
from jpaged.types import SamplingParams
from tests.e2e.rig import open_llm

TURN = [{"role": "user", "content": "Hi"}]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}}
BEHIND = {"type": "string", "pattern": "(?<=a)b"}
TEMPLATE = "{{ tools | tojson if tools else '' }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(find_folder("demo"), folder)
    path: Path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    with open_llm(str(folder), max_model_len=512, num_blocks=80, tool_call_parser="hermes") as found:
        yield found


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"type": "object", "properties": {"x: y": BEHIND}}, "at /properties/x: y: the regular expression"),
        ({"type": "object", "properties": {"x": {"$ref": "http://example.com/y"}}}, "at /properties/x"),
        (BEHIND, "the regular expression"),
    ],
    ids=["a pattern", "a reference", "the schema itself"],
)
def test_errors_of_schemas_name_the_tool_and_the_place(llm: LLM, parameters: dict[str, Any], place: str) -> None:
    for tools in ([tool("bad", parameters)], [tool("good", GOOD), tool("bad", parameters)]):
        with pytest.raises(InvalidArgument) as raised:
            llm.chat(TURN, PARAMS, tools=tools, tool_choice="required", use_tqdm=False)
        assert raised.value.field == f"tools[{len(tools) - 1}].function.parameters"
        assert raised.value.problem.startswith(place)


def test_a_structural_tag_of_the_callers_own_keeps_its_name(llm: LLM) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": BEHIND}}
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(structural_tag=tag))
    with pytest.raises(InvalidArgument) as raised:
        llm.chat(TURN, params, tools=[tool("good", GOOD)], use_tqdm=False)
    assert raised.value.field.startswith("structured_outputs.structural_tag")


@pytest.mark.long
def test_tools_that_hold_are_called(llm: LLM) -> None:
    (answer,) = llm.chat(TURN, PARAMS, tools=[tool("good", GOOD)], tool_choice="required", use_tqdm=False)[0].outputs
    assert answer.finish_reason is not None
