"""Whatever a peer does to its own calls: a status that says it, no trace in the log, and nobody else notices."""

import asyncio
import contextlib
import logging
import random
import sys
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2

from jpaged._proto.open_inference import inference_pb2 as open_inference_pb2
from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.server import grpc_server, servicer
from tests.server.connections.raw_http2 import HEADERS, INITIAL_WINDOW_SIZE, RST_STREAM, Connection, frame, message
from tests.server.harness import collect, error_details, eventually, failure_of, request

INFO = b"/jpaged.v1.ControlService/GetServerInfo"
METHODS: dict[str, Any] = {
    "/jpaged.v1.InferenceService/Generate": inference_pb2.GenerateRequest,
    "/jpaged.v1.InferenceService/GenerateMultiplexed": inference_pb2.GenerateMultiplexedRequest,
    "/jpaged.v1.InferenceService/Score": inference_pb2.ScoreRequest,
    "/jpaged.v1.InferenceService/Embed": inference_pb2.EmbedRequest,
    "/jpaged.v1.InferenceService/Tokenize": inference_pb2.TokenizeRequest,
    "/jpaged.v1.InferenceService/Detokenize": inference_pb2.DetokenizeRequest,
    "/jpaged.v1.ControlService/GetServerInfo": control_pb2.GetServerInfoRequest,
    "/jpaged.v1.ControlService/GetModelInfo": control_pb2.GetModelInfoRequest,
    "/jpaged.v1.ControlService/GetLoad": control_pb2.GetLoadRequest,
    "/jpaged.v1.ControlService/Abort": control_pb2.AbortRequest,
    "/jpaged.v1.ControlService/PinPrefix": control_pb2.PinPrefixRequest,
    "/jpaged.v1.ControlService/UnpinPrefix": control_pb2.UnpinPrefixRequest,
    "/jpaged.v1.ControlService/LoadAdapter": control_pb2.LoadAdapterRequest,
    "/jpaged.v1.ControlService/UnloadAdapter": control_pb2.UnloadAdapterRequest,
    "/jpaged.v1.ControlService/UpdateWeights": control_pb2.UpdateWeightsRequest,
    "/jpaged.v1.ControlService/SendWeights": control_pb2.SendWeightsRequest,
    "/jpaged.v1.ControlService/ListAdapters": control_pb2.ListAdaptersRequest,
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
    "/grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": reflection_pb2.ServerReflectionRequest,
}
OF_OTHERS = (
    *open_inference_pb2.DESCRIPTOR.services_by_name.values(),
    *vllm_engine_pb2.DESCRIPTOR.services_by_name.values(),
)
METHODS |= {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for service in OF_OTHERS
    for method in service.methods
}
STREAMS = ("Generate", "Watch", "GetTokenizer", "SubscribeKvEvents")
BOTH_WAYS = ("GenerateMultiplexed", "ServerReflectionInfo", "ModelStreamInfer")


def test_every_method_of_our_services_is_here():
    services = [*inference_pb2.DESCRIPTOR.services_by_name.values(), *control_pb2.DESCRIPTOR.services_by_name.values()]
    paths = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert paths == {path for path in METHODS if path.startswith("/jpaged.")}


NOT_A_MESSAGE = [b"\xff", b"\x0a\xff\xff\xff\xff\xff", b"\x0a\x05ab", b"\x07", b"\xff" * 5000]


@pytest.fixture
def quiet(caplog):
    """Nothing at warning level or above was logged, by anybody, when the test is over."""
    caplog.set_level(logging.DEBUG)
    yield
    loud = [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert [(record.name, record.getMessage(), record.exc_info) for record in loud] == []


async def send(harness, path, content):
    """Calls a method with these bytes as its request; the error."""
    if path.endswith(BOTH_WAYS):
        call = harness.channel.stream_stream(path)(iter([content]))
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        return caught.value
    kind = harness.channel.unary_stream if path.endswith(STREAMS) else harness.channel.unary_unary
    return await failure_of(kind(path)(content))


@pytest.mark.parametrize("path", METHODS)
async def test_bytes_that_are_no_message_are_an_invalid_argument_of_every_method(harness, quiet, path):
    for content in NOT_A_MESSAGE:
        error = await send(harness, path, content)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, content
        assert f"{len(content)} bytes are not a valid message" in error.details()
        assert METHODS[path].DESCRIPTOR.full_name in error.details()
        assert error_details(error)["BadRequest"].field_violations[0].field == "request"


async def test_a_string_that_is_not_utf8_is_one_of_them(harness, quiet):
    error = await send(harness, "/jpaged.v1.InferenceService/Generate", b"\x12\x02\xff\xfe")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "GenerateRequest" in error.details()


@pytest.mark.long
async def test_random_bytes_are_answered_with_a_status_that_means_something(harness, quiet):
    rng, seen = random.Random(5), set()
    for number in range(300):
        path = rng.choice(list(METHODS))
        content = rng.randbytes(rng.randint(1, 40))
        if path.endswith(("Info", "GetLoad", "Watch")):
            content = b"\x07" + content  # a group that was not begun: these take any fields
        try:
            error = await send(harness, path, content)
        except (AssertionError, pytest.fail.Exception):  # it was a message
            continue
        seen.add(error.code().name)
        assert error.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), (number, content, error)
    assert "INVALID_ARGUMENT" in seen


@pytest.mark.parametrize("path", [path for path in METHODS if not path.endswith(BOTH_WAYS)])
async def test_a_call_that_ends_without_a_message_is_told_so(harness, quiet, path):
    async with Connection(harness.port) as connection:
        code, text = await connection.status(connection.begin(path.encode(), b""))
    assert (code, text) == (3, "request: is missing: the call ended without a message")


@pytest.mark.parametrize("path", [b"/jpaged.v1.ControlService/\xff\xfe", b"", b"*", b"/", b"x" * 3000, b"/\x00\x80"])
async def test_a_method_that_is_not_here_is_unimplemented_whatever_its_name(harness, quiet, path):
    async with Connection(harness.port) as connection:
        for _ in range(3):
            code, text = await connection.status(connection.begin(path, message(b"")))
            assert (code, text) == (12, "Method not found!")
    info = await harness.control.GetServerInfo(control_pb2.GetServerInfoRequest())
    assert info.state == control_pb2.SERVER_STATE_SERVING


async def test_an_unknown_method_does_not_end_the_streams_of_others(harness):
    harness.faults.hold_after(3)
    call = harness.inference.Generate(request(max_tokens=50))
    first = await call.read()
    async with Connection(harness.port) as connection:
        assert (await connection.status(connection.begin(b"/\xff", message(b""))))[0] == 12
    harness.faults.release()
    messages = [first, *await collect(call)]
    assert messages[-1].usage.completion_tokens == 50


async def test_metadata_that_is_no_text_is_let_pass_or_named(harness, quiet):
    async with Connection(harness.port) as connection:
        code, _ = await connection.status(connection.begin(INFO, message(b""), ((b"x-other", b"\xff\xfe"),)))
        assert code == 0
        prompt = message(request("hello").SerializeToString())
        tenant = ((b"x-jpaged-tenant", b"\xff\xfe"),)
        path = b"/jpaged.v1.InferenceService/Generate"
        code, text = await connection.status(connection.begin(path, prompt, tenant))
        assert code == 3
        assert text.startswith("x-jpaged-tenant:")


async def test_a_call_that_is_reset_at_once_leaves_nothing(harness, quiet):
    async with Connection(harness.port) as connection:
        for path in METHODS:
            for body in (None, message(b"\x12\x01a"), message(b"\xff")):
                stream = connection.begin(path.encode(), body)
                connection.writer.write(frame(RST_STREAM, 0, stream, (8).to_bytes(4, "big")))
        assert (await connection.status(connection.begin(INFO, message(b""))))[0] == 0
    await eventually(lambda: harness.num_open_calls == 0 and harness.num_blocks_used == 0)


CHILD = """
import sys, time
import grpc
from jpaged._proto.v1 import inference_pb2, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
sampling = inference_pb2.SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
calls = [stub.Generate(inference_pb2.GenerateRequest(text=f"p{i}", sampling=sampling)) for i in range(8)]
for call in calls:
    next(call)
print("streaming", flush=True)
time.sleep(600)
"""


async def test_a_client_that_is_killed_leaves_no_trace_and_no_block(harness, quiet):
    harness.faults.hold_after(0)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, harness.target, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    await eventually(lambda: harness.num_open_calls == 8)  # however slowly they come, none runs ahead of the others
    harness.faults.hold_after(30)
    harness.faults.gate.set()
    async with asyncio.timeout(300):
        assert await child.stdout.readline() == b"streaming\n"
        child.kill()
        harness.faults.release()
        await child.wait()
    await eventually(lambda: harness.num_open_calls == 0 and harness.num_blocks_used == 0)


async def test_a_message_that_cannot_be_sent_ends_its_call_quietly(harness, quiet, monkeypatch):
    def fail(*_):
        raise aio.InternalError("Failed grpc_call_start_batch")  # as writing does to a connection that is gone

    monkeypatch.setattr(servicer, "build_response", fail)
    call = harness.inference.Generate(request())
    await eventually(lambda: harness.executor.num_steps > 0 and harness.num_open_calls == 0)
    call.cancel()
    await eventually(lambda: harness.num_blocks_used == 0)


async def test_a_peer_that_is_gone_is_told_nothing_and_its_call_does_not_go_on():
    nobody: Any = None  # who is asked for nothing
    with pytest.raises(aio.InternalError, match="start_batch"):
        async with grpc_server.status_on_error(nobody):
            raise aio.InternalError("Failed grpc_call_start_batch")


async def test_what_grpc_logs_of_peers_is_left_out_and_what_it_logs_of_faults_is_not(harness, caplog):
    log = logging.getLogger("grpc._cython.cygrpc")
    for error in (
        aio.InternalError("of a peer"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "of a peer"),
        KeyError("ours"),
    ):
        try:
            raise error
        except Exception:
            log.exception("raised in core")
    assert [repr(record.exc_info[1]) for record in caplog.records if record.levelno >= logging.WARNING] == [
        "KeyError('ours')"
    ]


async def test_a_connection_that_ends_in_the_middle_of_anything_leaves_no_trace(harness, quiet):
    rng = random.Random(3)
    whole = message(request("hello", max_tokens=100).SerializeToString())
    for number in range(60):
        connection = Connection(harness.port)
        await connection.__aenter__()
        for path in rng.sample(list(METHODS), 4):
            body = whole if path.endswith("Generate") else rng.choice([message(b""), whole[: rng.randint(1, 9)], None])
            connection.begin(path.encode(), body)
        await connection.writer.drain()
        if number % 2:
            with contextlib.suppress(asyncio.IncompleteReadError):
                await connection.read()
        connection.writer.transport.abort()
    await eventually(lambda: harness.num_open_calls == 0 and harness.num_blocks_used == 0)


async def test_a_watch_that_reads_nothing_does_not_keep_the_server_from_its_end(harness):
    async with Connection(harness.port, {INITIAL_WINDOW_SIZE: 0}) as connection:
        connection.begin(b"/grpc.health.v1.Health/Watch", message(b""))
        connection.begin(b"/grpc.health.v1.Health/Watch", message(b"\x0a\x01x"))
        assert (await harness.control.GetLoad(control_pb2.GetLoadRequest())).num_blocks > 0
        while (await connection.read())[0] != HEADERS:  # it is being told
            pass
        harness.server.request_stop()
        async with asyncio.timeout(20):
            assert await asyncio.shield(harness.run) == 0


async def test_health_and_reflection_still_answer(harness):
    health: Any = health_pb2_grpc.HealthStub(harness.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    assert (
        await failure_of(health.Check(health_pb2.HealthCheckRequest(service="x")))
    ).code() is grpc.StatusCode.NOT_FOUND
    stub: Any = reflection_pb2_grpc.ServerReflectionStub
    reflection = stub(harness.channel)
    asked = [reflection_pb2.ServerReflectionRequest(list_services="") for _ in range(2)]
    answers = [answer async for answer in reflection.ServerReflectionInfo(iter(asked))]
    assert [len(answer.list_services_response.service) for answer in answers] == [7, 7]
