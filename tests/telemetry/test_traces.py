"""Spans of requests, as a collector receives them over OTLP."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from jpaged._proto.v1 import inference_pb2
from jpaged.client import AsyncClient, Client
from jpaged.errors import InvalidArgument
from jpaged.service.calls import Caller, Records, RequestRecord, get_parts
from jpaged.telemetry.traces import Traces, exporter_to
from jpaged.testing import FakeExecutor
from jpaged.types import RequestTimes, SamplingParams
from tests.server.harness import Harness, collect, eventually, failure_of, request, running

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"), ("tracestate", "theirs=1"))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.service_names: set[str] = set()

    async def Export(self, request: Any, context: Any) -> Any:
        for of_resource in request.resource_spans:
            names = {one.key: one.value.string_value for one in of_resource.resource.attributes}
            self.service_names.add(names["service.name"])
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collected(**options: Any) -> AsyncIterator[tuple[Harness, Collector]]:
    """A server that sends its spans to a collector; all of them have come when the context is left."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with running(otlp_traces_endpoint=f"127.0.0.1:{port}", **options) as harness:
            yield harness, collector
    finally:
        await server.stop(None)


def attributes_of(span: Any) -> dict[str, Any]:
    def value_of(value: Any) -> Any:
        if value.WhichOneof("value") == "array_value":
            return [value_of(one) for one in value.array_value.values]
        return getattr(value, value.WhichOneof("value"))

    return {one.key: value_of(one.value) for one in span.attributes}


async def test_a_request_is_a_span_below_its_callers_and_has_its_parts() -> None:
    async with collected() as (harness, collector):
        call = harness.inference.Generate(request("a secret", seed=7, temperature=0.5), metadata=TRACE)
        messages = await collect(call)
        answered = dict(await call.initial_metadata())
    (span,) = [one for one in collector.spans if one.name == "text_completion fake"]
    parts = [one for one in collector.spans if one is not span]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert answered["traceparent"] == f"00-{TRACE_ID}-{span.span_id.hex()}-01"
    assert answered["tracestate"] == "theirs=1"
    assert sorted(one.name for one in parts) == ["decode", "prefill", "queue"]
    assert {one.parent_span_id for one in parts} == {span.span_id}
    queue, prefill, decode = (next(one for one in parts if one.name == name) for name in ("queue", "prefill", "decode"))
    assert span.start_time_unix_nano <= decode.end_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    told = attributes_of(span)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.usage.output_tokens"] == messages[-1].usage.completion_tokens == 8
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert (told["gen_ai.request.seed"], told["gen_ai.request.temperature"]) == (7, 0.5)
    assert told["jpaged.face"] == "grpc"
    assert "a secret" not in str(collector.spans)
    assert collector.service_names == {"jpaged"}


async def test_a_request_that_is_refused_is_a_span_with_an_error() -> None:
    async with collected() as (harness, collector):
        await failure_of(harness.inference.Generate(request("it is refused", top_p=2.0)))
    (span,) = collector.spans
    assert span.status.message == "INVALID_ARGUMENT"
    assert attributes_of(span)["error.type"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("seed", [2**63 - 1, 2**63, 2**64 - 1])
async def test_every_seed_of_64_bits_is_exported(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    async with collected() as (harness, collector):
        await collect(harness.inference.Generate(request(seed=seed, max_tokens=2)))
    (span,) = [one for one in collector.spans if one.name == "text_completion fake"]
    found = attributes_of(span)
    assert int(found["jpaged.seed"] if seed > 2**63 - 1 else found["gen_ai.request.seed"]) == seed
    assert not caplog.records


async def test_what_utf_8_cannot_write_loses_no_span(caplog: pytest.LogCaptureFixture) -> None:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    traces = Traces(exporter_to(f"127.0.0.1:{port}"))
    record = RequestRecord(operation="chat", tenant="\ud800", caller=Caller(peer="a\udfff"), adapter="\ud800")
    traces.begin(record)
    record.end()
    traces.end(record)
    await asyncio.to_thread(traces.stop)
    await server.stop(None)
    (span,) = collector.spans
    assert attributes_of(span)["jpaged.tenant"] == "?"
    assert not caplog.records


async def test_a_request_does_not_depend_on_its_observers(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def begin(self, record: RequestRecord) -> None:
            raise RuntimeError("begin")

        def end(self, record: RequestRecord) -> None:
            raise RuntimeError("end")

    record = RequestRecord(operation="chat", tenant="", caller=Caller(), adapter="")
    with Records([Broken()]).observing(record):
        pass
    assert record.status == "OK"
    assert [one.message for one in caplog.records] == ["a request observer failed"] * 2


class Hanging(SpanProcessor):
    """Does not end its shutdown before it is released."""

    def __init__(self) -> None:
        self.released, self.has_ended = threading.Event(), threading.Event()

    def shutdown(self) -> None:
        self.released.wait(60)
        self.has_ended.set()


def test_the_end_does_not_wait_for_a_collector_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jpaged.telemetry.traces._FLUSH_TIMEOUT_S", 0.05)
    hanging = Hanging()
    Traces(hanging).stop()
    assert not hanging.has_ended.is_set()
    hanging.released.set()


def test_the_call_to_a_silent_collector_ends_with_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jpaged.telemetry.traces._FLUSH_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        traces = Traces(exporter_to(f"127.0.0.1:{silent.getsockname()[1]}"))
        record = RequestRecord(operation="chat", tenant="", caller=Caller(), adapter="")
        traces.begin(record)
        traces.end(record)
        traces.stop()
    assert "the last spans are lost" in caplog.messages[0]


async def test_a_call_that_is_cancelled_says_so() -> None:
    async with collected() as (harness, collector):
        harness.faults.gate.clear()
        call = harness.inference.Generate(request())
        await eventually(lambda: harness.num_open_calls == 1)
        call.cancel()
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
    assert [one.status.message for one in collector.spans if "text_completion" in one.name] == ["CANCELLED"]


async def test_scores_and_embeddings_are_a_span_each() -> None:
    async with collected() as (harness, collector):
        several = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text=text) for text in ("one", "two")])
        await harness.inference.Embed(several)
        one = inference_pb2.ScoreRequest(text="a", continuations=[inference_pb2.Continuation(text="b")])
        await harness.inference.Score(one)
    told = {one.name: attributes_of(one) for one in collector.spans}
    assert set(told) == {"embeddings fake", "score fake"}
    assert told["embeddings fake"]["gen_ai.usage.input_tokens"] == len("one") + len("two")


async def test_who_was_preempted_has_that_time_as_a_part() -> None:
    executor = FakeExecutor(num_blocks=24)
    async with collected(executor=executor) as (harness, collector):
        calls = [harness.inference.Generate(request("x" * 20, max_tokens=60)) for _ in range(2)]
        await asyncio.gather(*map(collect, calls))
        assert harness.serving.engine.load().num_preemptions > 0
    left = [one for one in collector.spans if one.name == "preempted"]
    assert left
    assert all(one.start_time_unix_nano <= one.end_time_unix_nano for one in left)


async def test_a_call_of_our_client_belongs_to_the_trace_that_is_current_there() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    async with collected() as (harness, collector), AsyncClient(harness.target) as client:
        with provider.get_tracer("test").start_as_current_span("evaluation") as outer:
            await client.complete("hello", SamplingParams(max_tokens=2))
            await client.embed(["hello"])
            await asyncio.to_thread(_complete, harness.target)
    theirs = outer.get_span_context()
    whole = [one for one in collector.spans if one.name.endswith(" fake")]
    assert sorted(one.name for one in whole) == ["embeddings fake", "text_completion fake", "text_completion fake"]
    assert {one.trace_id for one in whole} == {theirs.trace_id.to_bytes(16)}
    assert {one.parent_span_id for one in whole} == {theirs.span_id.to_bytes(8)}


def _complete(target: str) -> None:
    with Client(target) as client:
        client.complete("hello", SamplingParams(max_tokens=2))


async def test_a_span_of_a_request_over_http_is_below_its_callers_too() -> None:
    async with collected(http_port=0) as (harness, collector), httpx2.AsyncClient(base_url=harness.http_url) as client:
        body = {"model": "fake", "prompt": "hello", "max_tokens": 2}
        answer = await client.post("/v1/completions", json=body, headers=dict(TRACE))
    (span,) = [one for one in collector.spans if one.name == "text_completion fake"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert answer.headers["traceparent"] == f"00-{TRACE_ID}-{span.span_id.hex()}-01"
    assert attributes_of(span)["jpaged.face"] == "http"


def test_a_part_without_an_end_is_not_told() -> None:
    assert get_parts(RequestTimes(1.0)) == []
    assert get_parts(RequestTimes(1.0, 2.0)) == [("queue", 1.0, 2.0)]
    times = RequestTimes(1.0, 2.0, 3.0, 4.0, (3.2, 3.4))
    assert [name for name, _, _ in get_parts(times)] == ["queue", "prefill", "decode", "preempted"]


@pytest.mark.parametrize("endpoint", ["", "http://", "ftp://host:1", "host:many"])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="otlp_traces_endpoint"):
        exporter_to(endpoint)


@pytest.mark.parametrize("endpoint", ["http://me:pass@host:4317", "me:pass@host:4317", "ftp://:pass@host"])
def test_an_address_with_a_password_is_refused_without_repeating_it(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="OTEL_EXPORTER_OTLP_HEADERS") as error:
        exporter_to(endpoint)
    assert "pass" not in str(error.value)
