"""A server that is killed in the middle of a batch, as a process, and what the next one makes of the batch."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.processes import WAIT_S, Process

NUM_LINES = 400


@contextmanager
def served(folder: Path) -> Iterator[tuple[Process, openai.OpenAI]]:
    words = ("-m", "tests.cli.fake_jpaged", "serve", "fake-model", "--port", "0", "--http-port", "0")
    process = Process((*words, "--batch-dir", str(folder)))
    try:
        url = process.wait_for(r"OpenAI's API on (http://\S+)$").group(1)
        process.wait_for(r"^ready on ")
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield process, client
    finally:
        if process.popen.poll() is None:
            process.end(signal.SIGKILL)


def send(client: openai.OpenAI) -> str:
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"of {i}", "max_tokens": 32, "temperature": 1.0, "ignore_eos": True},
        }
        for i in range(NUM_LINES)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def done(client: openai.OpenAI, batch_id: str, num_lines: int) -> Any:
    """The batch once so many lines have ended, and has ended itself where they are all."""
    until_s = time.monotonic() + WAIT_S
    while True:
        batch = client.batches.retrieve(batch_id)
        assert batch.status != "failed", batch
        assert batch.request_counts is not None
        is_over = num_lines < NUM_LINES or batch.status == "completed"
        if batch.request_counts.completed >= num_lines and is_over:
            return batch
        assert time.monotonic() < until_s, batch
        time.sleep(0.01)


def texts(client: openai.OpenAI, file_id: str) -> dict[str, str]:
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert len(lines) == NUM_LINES
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}


@pytest.mark.long
def test_a_batch_survives_servers_that_are_killed(tmp_path: Path) -> None:
    with served(tmp_path) as (process, client):
        batch_id = send(client)
        done(client, batch_id, 1)
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
    with served(tmp_path) as (process, client):
        done(client, batch_id, 20)
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
    with served(tmp_path) as (process, client):
        killed = done(client, batch_id, NUM_LINES)
        undisturbed = done(client, send(client), NUM_LINES)
        # Noise depends on the line's custom_id alone: what two servers have begun ends as what one has run.
        assert texts(client, killed.output_file_id) == texts(client, undisturbed.output_file_id)
        assert killed.request_counts.failed == 0
        assert process.end(signal.SIGTERM) == 0
