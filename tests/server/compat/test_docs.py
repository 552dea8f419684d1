"""The examples of docs/grpc.md run as they stand, but for the address and the model's name."""

import asyncio
import re
from pathlib import Path

import pytest

from jpaged.server.compat.open_inference_request import INPUTS, OUTPUTS
from jpaged.testing import FakeExecutor
from tests.server.harness import running

PAGE = (Path(__file__).parents[3] / "docs" / "grpc.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_the_page_runs(example, capsys):
    async def run() -> None:
        async with running(executor=FakeExecutor()) as harness:
            text = example.replace("127.0.0.1:50051", harness.target).replace('"demo"', '"fake"')
            await asyncio.to_thread(exec, text, {})

    asyncio.run(run())
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("Once upon a time") or lines[-1].startswith("[] ")


def test_the_page_names_every_tensor():
    assert len(EXAMPLES) == 2
    for name in (*INPUTS, *OUTPUTS):
        assert f"`{name}`" in PAGE
