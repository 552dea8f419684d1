"""The example of docs/tools.md runs as it stands, against a server whose model answers by a script."""

import asyncio
import re
from pathlib import Path
from typing import Any

import jpaged
from jpaged.service.chat.formats import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    AnswerFormat,
)
from jpaged.testing import scripted
from tests.server.harness import running

PAGE = Path(__file__).parents[3] / "docs" / "tools.md"
ANSWER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def test_the_example_of_the_page_runs(capsys, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    example = example.replace('f"8 degrees', 'asked.append(city) or f"8 degrees')
    asked: list[str] = []

    async def run() -> None:
        executor = scripted(ANSWER)(num_blocks=4096, max_model_len=2048)
        answer_format = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
        async with running(executor=executor, answer_format=answer_format) as harness:
            monkeypatch.setattr(jpaged, "Client", lambda target: client_of(harness.target), raising=False)
            await asyncio.to_thread(exec, example, {"asked": asked})

    client: Any = jpaged.Client

    def client_of(target: str) -> Any:
        return client(target)

    asyncio.run(run())
    assert asked == ["Oslo"]
    assert capsys.readouterr().out == "\n"


def test_the_page_names_every_format():
    text = PAGE.read_text()
    for name in (*TOOL_FORMATS, *TOOL_ALIASES, *REASONING_FORMATS, *REASONING_ALIASES):
        assert f"`{name}`" in text
