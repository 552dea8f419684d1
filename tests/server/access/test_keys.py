"""Keys at the gRPC port: every service but that for health wants one, and a call belongs to its key's tenant."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.client import AsyncClient
from jpaged.errors import PermissionDenied, Unauthenticated
from jpaged.types import SamplingParams
from tests.access.test_keys import FILE, HASHED, OTHER, TOKEN
from tests.server.harness import collect, error_details, eventually, failure_of, request, running

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


async def test_without_a_key_nothing_is_answered_but_health(keys):
    async with running(api_keys=str(keys)) as harness:
        health: Any = health_pb2_grpc.HealthStub(harness.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(harness.channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        for call in (
            harness.inference.Generate(request()),
            harness.inference.Tokenize(inference_pb2.TokenizeRequest(text="a")),
            harness.control.GetLoad(control_pb2.GetLoadRequest()),
            reflection.ServerReflectionInfo(iter(asked)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await (call.read() if isinstance(call, grpc.aio.StreamStreamCall) else _end_of(call))
            assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert error_details(failure.value)["ErrorInfo"].reason == "UNAUTHENTICATED"
        assert harness.num_open_calls == 0


async def _end_of(call):
    raise await failure_of(call)


async def test_a_client_with_a_key_is_its_tenant_and_no_other(keys):
    async with running(api_keys=str(keys)) as harness:
        async with AsyncClient(harness.target, api_key=TOKEN) as acme, AsyncClient(harness.target) as nobody:
            await acme.wait_until_ready(60)
            assert (await acme.complete("hello", GREEDY)).usage.completion_tokens == 4
            assert (await acme.load()).num_blocks > 0
            with pytest.raises(Unauthenticated, match="authorization: is missing"):
                await nobody.complete("hello", GREEDY)
        async with AsyncClient(harness.target, api_key=TOKEN, tenant="bolt") as liar:
            with pytest.raises(PermissionDenied, match="'bolt' is not the tenant of this key"):
                await liar.complete("hello", GREEDY)


async def test_two_keys_of_a_tenant_share_ids_and_those_of_another_do_not(keys):
    text = keys.read_text().replace('role = "observe"', 'role = "inference"')
    keys.write_text(text)
    async with running(api_keys=str(keys)) as harness:
        harness.faults.hold_after(3)
        first, second, other = ((("authorization", f"Bearer {token}"),) for token in (TOKEN, OTHER, HASHED))
        call = harness.inference.Generate(request(request_id="mine", max_tokens=100), metadata=first)
        await call.read()
        abort = control_pb2.AbortRequest(request_id="mine")
        assert (await failure_of(harness.control.Abort(abort, metadata=other))).code() is grpc.StatusCode.NOT_FOUND
        again = await failure_of(harness.inference.Generate(request(request_id="mine"), metadata=second))
        assert again.code() is grpc.StatusCode.ALREADY_EXISTS
        await harness.control.Abort(abort, metadata=first)
        harness.faults.release()
        assert (await collect(call))[-1].finish.reason == inference_pb2.FINISH_REASON_ABORT


async def test_acts_for_everybody_want_the_role_of_control_and_looks_none(keys):
    async with running(api_keys=str(keys)) as harness:
        async with AsyncClient(harness.target, api_key=TOKEN) as inference:
            for act in (
                inference.pin_prefix("system", "you are a story teller"),
                inference.unpin_prefix("system"),
                inference.load_adapter("a", "/nowhere"),
                inference.unload_adapter("a"),
            ):
                with pytest.raises(
                    PermissionDenied, match="needs a key of the role control; the role of this key is inference"
                ):
                    await act
        async with AsyncClient(harness.target, api_key=OTHER) as control:
            assert await control.pin_prefix("system", "you are a story teller") == 20
        async with AsyncClient(harness.target, api_key=HASHED) as observer:
            assert (await observer.model_info()).name == "fake"
            assert (await observer.load()).num_blocks > 0
            for call in (observer.complete("hello", GREEDY), observer.embed(["a"]), observer.score("a", ["b"])):
                with pytest.raises(
                    PermissionDenied, match="needs a key of the role inference; the role of this key is observe"
                ):
                    await call


@pytest.mark.long
async def test_new_keys_are_taken_while_the_server_runs(keys):
    async with running(api_keys=str(keys)) as harness:
        keys.write_text(FILE.replace(TOKEN, "a-token-that-is-new"))
        async with AsyncClient(harness.target, api_key="a-token-that-is-new") as client:
            is_known = False
            while not is_known:
                try:
                    await client.load()
                    is_known = True
                except Unauthenticated:
                    await eventually(lambda: True)
        async with AsyncClient(harness.target, api_key=TOKEN) as old:
            with pytest.raises(Unauthenticated):
                await old.load()
