"""A port of its own for acts of control: pins and adapters there alone, and what clients ask for everywhere else."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged._proto.v1 import control_pb2
from jpaged.client import AsyncClient
from jpaged.errors import InvalidArgument, PermissionDenied, Unauthenticated, Unsupported
from jpaged.types import SamplingParams
from tests.access.test_keys import FILE, OTHER, TOKEN
from tests.server.harness import collect, request, running

PREFIX = "you are a story teller"
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


async def test_acts_are_answered_on_the_control_port_and_there_alone():
    async with running(control_port=0, http_port=0) as harness:
        control = f"127.0.0.1:{harness.server.control_port}"
        async with AsyncClient(harness.target) as client, AsyncClient(control) as operator:
            for act in (
                client.pin_prefix("system", PREFIX),
                client.unpin_prefix("system"),
                client.load_adapter("a", "/nowhere"),
                client.unload_adapter("a"),
            ):
                with pytest.raises(PermissionDenied, match=r"is served only on the control port \(control_port\)"):
                    await act
            assert (await client.model_info()).name == "fake"
            await operator.wait_until_ready(60)
            assert await operator.pin_prefix("system", PREFIX) == 20
            assert (await client.complete(PREFIX, GREEDY)).usage.cached_tokens == 20
            await operator.unpin_prefix("system")
            with pytest.raises(Unsupported):
                await operator.complete("hello", GREEDY)


async def test_whoever_asked_may_abort_on_the_port_that_it_asked():
    async with running(control_port=0) as harness:
        harness.faults.hold_after(3)
        call = harness.inference.Generate(request(request_id="mine", max_tokens=100))
        await call.read()
        await harness.control.Abort(control_pb2.AbortRequest(request_id="mine"))
        harness.faults.release()
        await collect(call)


async def test_the_control_port_wants_keys_of_the_role_of_control(tmp_path):
    (tmp_path / "keys.toml").write_text(FILE)
    async with running(control_port=0, api_keys=str(tmp_path / "keys.toml")) as harness:
        control = f"127.0.0.1:{harness.server.control_port}"
        async with grpc.aio.insecure_channel(control) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status  # type: ignore[attr-defined]
        for key, error in (("", Unauthenticated), (TOKEN, PermissionDenied)):
            async with AsyncClient(control, api_key=key) as client:
                with pytest.raises(error):
                    await client.pin_prefix("system", PREFIX)
        async with AsyncClient(control, api_key=OTHER) as client:
            assert await client.pin_prefix("system", PREFIX) == 20


async def test_a_control_port_that_is_taken_is_named():
    async with running() as harness:
        with pytest.raises(InvalidArgument, match=r"control_port: 127.0.0.1:.* cannot be bound"):
            async with running(control_port=harness.port):
                pass
        with pytest.raises(InvalidArgument, match=r"control_host: '192.0.2.7' is not an address of this machine"):
            async with running(control_port=0, control_host="192.0.2.7"):
                pass
