"""Answers over HTTP: too large ones are refused before they are computed, and large ones are sent in pieces."""

import asyncio
import json
import threading
from typing import Any

import httpx2
import pytest

from jpaged import json_text
from jpaged.errors import InvalidArgument
from jpaged.http.embeddings import LocalServer
from jpaged.http.exchange import build_answer
from jpaged.http.port import Connection
from jpaged.openai.embeddings import embed_job
from jpaged.openai.lines import Answers
from jpaged.openai.response import AnswerSize
from jpaged.outputs import Evaluated
from jpaged.types import SamplingParams, Usage
from tests.server.harness import MODEL, Harness, running


def client_of(harness: Harness) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=harness.http_url, timeout=120)


TOLD = {"echo": True, "logprobs": 20, "max_tokens": 1}
LONG = {"logprobs": True, "top_logprobs": 20, "n": 8, "max_tokens": 100}
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [[5] * 100] * 1000, **TOLD}, "logprobs"),
        ("/v1/completions", {"prompt": ["x" * 100] * 1000, **TOLD}, "logprobs"),
        ("/v1/completions", {"prompt": [[5] * 100] * 1000, **TOLD, "stream": True}, "logprobs"),
        ("/v1/completions", {"prompt": [[5] * 100] * 1000, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": ["x"] * 100, "logprobs": 20, "max_tokens": 100, "n": 2}, "logprobs"),
        ("/v1/chat/completions", {"messages": USER, **LONG, "n": 20}, "top_logprobs"),
    ],
)
async def test_too_large_an_answer_is_refused_before_it_is_computed(path: str, body: Any, param: str) -> None:
    async with running(http_port=0, max_response_size=1.0) as harness, client_of(harness) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert "over the limit of 1 MiB (max_response_size)" in error["message"]
        assert harness.num_open_calls == 0


async def test_embeddings_that_make_too_large_an_answer_are_refused_after_the_first_call() -> None:
    calls: list[int] = []

    class Wide:
        async def embed(self, inputs: Any, **how: Any) -> Evaluated[tuple[float, ...]]:
            calls.append(len(inputs))
            return Evaluated([(0.5,) * 8192] * len(inputs), Usage(prompt_tokens=1))

    job = embed_job({"input": ["x"] * 2048})
    with pytest.raises(InvalidArgument, match="input: 2048 with 16777216 numbers make an answer of about 352 MiB"):
        await Answers(MODEL, max_bytes=128 << 20).evaluate(Wide(), job)  # type: ignore[arg-type]
    assert calls == [256]
    job = embed_job({"input": ["x"] * 2048, "encoding_format": "base64"})
    await Answers(MODEL, max_bytes=128 << 20).evaluate(Wide(), job)  # type: ignore[arg-type]
    assert calls == [256] * 9


async def test_a_chat_without_a_limit_ends_where_its_answer_is_full() -> None:
    async with running(http_port=0, max_response_size=0.0625) as harness, client_of(harness) as client:
        body = {"messages": USER, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert {one["finish_reason"] for one in answer["choices"]} == {"length"}
        assert {len(one["logprobs"]["content"]) for one in answer["choices"]} == {(1 << 16) // (21 * 80)}


async def test_the_prompt_of_a_batch_line_counts_towards_its_answer() -> None:
    async with running(http_port=0, max_response_size=0.0625) as harness:
        server = LocalServer(service=harness.server._service)
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=20)
        assert (await server.complete("x" * 8, sampling)).outputs
        with pytest.raises(InvalidArgument, match="max_response_size"):
            await server.complete("x" * 80, sampling)


def test_a_stream_keeps_nothing_of_what_it_has_sent() -> None:
    sampling = SamplingParams(logprobs=20, max_tokens=1 << 20)
    AnswerSize(sampling, vocab_size=257, is_chat=True, counts_generated=False, max_bytes=1 << 20)
    with pytest.raises(InvalidArgument, match="21 at each of 1 x 1048576 tokens"):
        AnswerSize(sampling, vocab_size=257, is_chat=True, max_bytes=1 << 20)


async def test_a_large_answer_is_written_off_the_event_loop_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    written_on: set[str] = set()
    pieces = json_text.pieces

    def watched(value: object) -> Any:
        for piece in pieces(value):
            sizes.append(len(piece))
            written_on.add(threading.current_thread().name)
            yield piece

    monkeypatch.setattr(json_text, "pieces", watched)
    async with running(http_port=0) as harness, client_of(harness) as client:
        body = {"prompt": [[5] * 100] * 40, **TOLD, "max_tokens": 1}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.headers["transfer-encoding"] == "chunked"
        assert len(answer.json()["choices"]) == 40
        assert {len(one["logprobs"]["tokens"]) for one in answer.json()["choices"]} == {101}
        assert len(sizes) > 2
        assert max(sizes) < 1.5 * json_text.PIECE_BYTES
        assert threading.main_thread().name not in written_on
        small = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert int(small.headers["content-length"]) == len(small.content)


class Part:
    """A value of an answer, and how many have been freed."""

    num_freed = 0

    def __del__(self) -> None:
        Part.num_freed += 1


@pytest.mark.parametrize("stays", [True, False])
async def test_values_of_a_large_answer_are_freed_one_at_a_time_after_it(stays: bool) -> None:
    Part.num_freed = 0
    parts, freed = [Part() for _ in range(5)], list[tuple[int, int]]()

    class Parts(list[Part]):
        def pop(self, *place: Any) -> Part:
            freed.append((Part.num_freed, len(self)))
            return super().pop(*place)

    class Inline:
        async def run_blocking(self, work: Any, size: int) -> Any:
            return work()

    def body() -> object:
        return {"text": ["x" * json_text.PIECE_BYTES] * 3, "values": json_text.Items(lambda: map(str, held))}

    held = Parts(parts)
    parts.clear()
    answer = await build_answer(Inline(), body, 1, held)  # type: ignore[arg-type]
    sent: list[int] = []

    async def send(message: Any) -> None:
        sent.append(Part.num_freed)

    async def receive() -> Any:
        if stays:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    await answer({"type": "http"}, receive, send)
    assert set(sent) <= {0}
    assert (len(held), Part.num_freed) == (0, 5)
    assert freed == [(number, 5 - number) for number in range(5)]


async def test_a_stream_has_the_same_echo_as_a_whole_answer() -> None:
    async with running(http_port=0) as harness, client_of(harness) as client:
        body = {"prompt": [5] * 100, **TOLD, "temperature": 0}
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        text = (await client.post("/v1/completions", json={**body, "stream": True})).text
        chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        for name in ("tokens", "top_logprobs", "text_offset"):
            assert [one for part in told for one in part[name]] == whole[name]


async def test_a_client_that_leaves_a_large_answer_ends_its_writing() -> None:
    async with running(http_port=0) as harness:
        port = harness.server.http_port
        content = json.dumps({"prompt": [[5] * 100] * 50, **TOLD}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(content) + content)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.transport.abort()
        async with client_of(harness) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert answer.status_code == 200


async def test_chunks_of_one_byte_are_passed_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    num_passed = 0
    pass_body = Connection._pass_body

    def counted(self: Connection) -> None:
        nonlocal num_passed
        num_passed += bool(self._chunks)
        pass_body(self)

    monkeypatch.setattr(Connection, "_pass_body", counted)
    async with running(http_port=0) as harness:
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.server.http_port)
        body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "y" * 400, "stop": ["z"]}).encode()
        body += b" " * 60_000
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert 1 <= num_passed < 1000
        writer.close()
