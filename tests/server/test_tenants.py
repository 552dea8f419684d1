"""Tenants keep their ids, names and prefixes to themselves, and an operator can take names from everybody."""

import grpc
import pytest

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.client import AsyncClient
from jpaged.config import EngineConfig
from jpaged.errors import AlreadyExists, InvalidArgument, NotFound, PermissionDenied
from jpaged.server.replica import Replica
from jpaged.testing import FakeExecutor, Faults
from jpaged.types import SamplingParams
from tests.server.harness import collect, error_details, eventually, failure_of, make_serving, request, running

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PREFIX = "you are a story teller"  # 22 tokens: 5 blocks of 4, and 2 more
A, B = (("x-jpaged-tenant", "a"),), (("x-jpaged-tenant", "b"),)


async def cached_tokens(target, tenant, salt=""):
    async with AsyncClient(target, tenant=tenant) as client:
        sampling = SamplingParams(max_tokens=4, temperature=0.0, cache_salt=salt)
        return (await client.complete(PREFIX, sampling)).usage.cached_tokens


async def test_what_one_tenant_asked_is_no_hit_for_another(harness):
    assert [await cached_tokens(harness.target, tenant) for tenant in ("a", "b", "")] == [0, 0, 0]
    assert [await cached_tokens(harness.target, tenant) for tenant in ("a", "b", "")] == [21, 21, 21]
    assert await cached_tokens(harness.target, "ab", "c") == await cached_tokens(harness.target, "a", "bc") == 0


async def test_tenants_share_where_the_operator_says_so():
    async with running(isolate_tenants=False) as harness:
        assert [await cached_tokens(harness.target, tenant) for tenant in ("a", "b", "")] == [0, 21, 21]


async def test_an_id_is_a_tenants_own(harness):
    harness.faults.hold_after(3)
    call = harness.inference.Generate(request(request_id="secret", max_tokens=100), metadata=A)
    first = await call.read()
    other = harness.inference.Generate(request(request_id="secret", max_tokens=4), metadata=B)
    await eventually(lambda: harness.num_open_calls == 2)
    abort = control_pb2.AbortRequest(request_id="secret")
    assert (await failure_of(harness.control.Abort(abort))).code() is grpc.StatusCode.NOT_FOUND
    await harness.control.Abort(abort, metadata=B)  # its own
    error = await failure_of(harness.inference.Generate(request(request_id="secret"), metadata=A))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    harness.faults.release()
    await collect(other)
    messages = [first, *await collect(call)]
    assert messages[-1].finish.reason == inference_pb2.FINISH_REASON_LENGTH
    assert messages[-1].usage.completion_tokens == 100


async def test_pins_are_a_tenants_own(harness):
    async with AsyncClient(harness.target, tenant="a") as a, AsyncClient(harness.target, tenant="b") as b:
        assert await a.pin_prefix("system", PREFIX) == 20
        with pytest.raises(NotFound):
            await b.unpin_prefix("system")
        assert (await b.complete(PREFIX, GREEDY)).usage.cached_tokens == 0
        assert await b.pin_prefix("system", PREFIX) == 20
        with pytest.raises(AlreadyExists):
            await a.pin_prefix("system", PREFIX)
        await a.unpin_prefix("system")
        await b.unpin_prefix("system")


async def test_pins_end_at_the_limit_and_a_request_beside_them_runs():
    async with running(max_pinned_blocks=5) as harness, AsyncClient(harness.target) as client:
        await client.pin_prefix("one", PREFIX)
        with pytest.raises(InvalidArgument, match=r"1 blocks, added to 5 pinned ones, exceed max_pinned_blocks \(5\)"):
            await client.pin_prefix("two", "four")
        output = await client.complete("x" * 100, SamplingParams(max_tokens=28, temperature=0.0, ignore_eos=True))
        assert output.usage.completion_tokens == 28


async def test_control_by_name_can_be_turned_off(tmp_path):
    (tmp_path / "prefix.txt").write_text(PREFIX)
    async with running(disable_control=True, pin_prefix=str(tmp_path / "prefix.txt")) as harness:
        harness.faults.hold_after(3)
        call = harness.inference.Generate(request(request_id="r", max_tokens=20))
        await call.read()
        for refused, method in (
            (harness.control.Abort(control_pb2.AbortRequest(request_id="r")), "Abort"),
            (harness.control.PinPrefix(control_pb2.PinPrefixRequest(name="n", text=PREFIX)), "PinPrefix"),
            (harness.control.UnpinPrefix(control_pb2.UnpinPrefixRequest(name="pin-prefix")), "UnpinPrefix"),
        ):
            error = await failure_of(refused)
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            assert error.details() == f"{method} is turned off on this server (disable_control)"
            assert error_details(error)["ErrorInfo"].reason == "PERMISSION_DENIED"
        harness.faults.release()
        assert len(await collect(call)) > 0
        await harness.control.GetLoad(control_pb2.GetLoadRequest())
        await harness.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        async with AsyncClient(harness.target) as client:
            assert (await client.complete(PREFIX, GREEDY)).usage.cached_tokens == 20  # the operator's stays
            with pytest.raises(PermissionDenied, match="Abort is turned off"):
                await client.abort("r")


async def test_a_replica_without_a_port_keeps_tenants_apart_too():
    replica = Replica(make_serving(FakeExecutor(faults=Faults()), EngineConfig.load({})))
    try:
        seen = []
        for metadata in (A, B, A):
            messages = [message async for message in replica.generate(request(PREFIX), metadata)]
            seen.append(messages[-1].usage.cached_tokens)
        assert seen == [0, 0, 21]
    finally:
        replica.stop()
