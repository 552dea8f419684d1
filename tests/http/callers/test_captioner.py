"""The demo captioner over HTTP: 200 pictures that it has never seen, through the packages of OpenAI and Anthropic."""

import base64
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.captioner.evaluate import REQUIRED, ask, count_right, to_png, unseen
from tests.http.callers.test_anthropic import called
from tests.processes import Process

pytestmark = pytest.mark.long

PICTURES = unseen(200)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    words = ["-m", "jpaged", "serve", "demo-captioner", "--port", "0", "--http-port", "0", "--num-blocks", "256"]
    process = Process([*words, "--max-num-seqs", "8", "--max-num-batched-tokens", "128"])
    try:
        yield process.wait_for(r"OpenAI's API on (http://\S+)/v1").group(1)
        assert process.end(signal.SIGTERM) == 0
    finally:
        if process.popen.poll() is None:
            process.end(signal.SIGKILL)


def test_openai_streams_the_right_descriptions(url: str) -> None:
    answers = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for shown in PICTURES:
            messages: Any = ask(shown)
            with client.chat.completions.create(
                model="demo-captioner", messages=messages, temperature=0, max_tokens=12, stream=True
            ) as stream:
                answers.append("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))
    assert count_right(answers, PICTURES)["all"] >= len(PICTURES) * REQUIRED


async def test_anthropic_streams_the_right_descriptions(url: str, tmp_path: Path) -> None:
    written = tmp_path / "pictures.json"
    written.write_text(json.dumps([base64.b64encode(to_png(shown)).decode() for shown in PICTURES]))
    answers = await called("captions", url, str(written))
    assert count_right(answers, PICTURES)["all"] >= len(PICTURES) * REQUIRED
