"""Whatever goes wrong ends a request in the same status on every service of the port.

| what goes wrong                         | status             | and then                         |
|-----------------------------------------|--------------------|----------------------------------|
| a step raises                           | INTERNAL           | health turns, the process exits 1|
| logits are not finite                   | INTERNAL           | the others go on                 |
| a step hangs, and the caller waits less | DEADLINE_EXCEEDED  | the others go on                 |
| the engine is ended from outside        | UNAVAILABLE        | the process exits 1              |
| the queue is full                       | RESOURCE_EXHAUSTED | the others go on                 |
| the server drains, and time is up       | UNAVAILABLE        | the process exits 0              |
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged.errors import Unavailable
from jpaged.server.compat.open_inference import GRPC_ERRORS
from jpaged.server.lifecycle import SERVICE_NAMES
from jpaged.testing import FakeExecutor, Faults
from tests.server.compat import test_open_inference as open_inference
from tests.server.compat import test_vllm_engine as vllm_engine
from tests.server.harness import Harness, collect, eventually, failure_of, request, running

PROMPT = "hel%o"
"""A token of it is what NaN is written for."""
OF_OTHERS = ("inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine")


def native(harness: Harness, **kwargs: Any) -> Any:
    return harness.inference.Generate(request(PROMPT, max_tokens=60), **kwargs)


def vllm_streamed(harness: Harness, **kwargs: Any) -> Any:
    return vllm_engine.stub_of(harness).Generate(vllm_engine.request(PROMPT, max_tokens=60), **kwargs)


def vllm_whole(harness: Harness, **kwargs: Any) -> Any:
    return vllm_engine.stub_of(harness).Generate(vllm_engine.request(PROMPT, stream=False, max_tokens=60), **kwargs)


def _infer(*tensors: Any) -> Any:
    text = open_inference.typed("text_input", "BYTES", bytes_contents=[PROMPT.encode()])
    asked = open_inference.parameters(max_tokens=60, temperature=0.0, ignore_eos=True)
    return open_inference.request(text, *tensors, parameters=asked)


def infer(harness: Harness, **kwargs: Any) -> Any:
    return open_inference.stub_of(harness).ModelInfer(_infer(), **kwargs)


def stream_infer(harness: Harness, **kwargs: Any) -> Any:
    """A stream that ends with the status of its request, as its caller wants."""
    message = _infer(open_inference.FLAG)
    return open_inference.stub_of(harness).ModelStreamInfer(
        iter([message]), metadata=((GRPC_ERRORS, "true"),), **kwargs
    )


CALLS = [native, vllm_streamed, vllm_whole, infer, stream_infer]
Call = Callable[..., Any]


async def error_of(call: Any) -> aio.AioRpcError:
    """The error of a call of any kind."""
    if isinstance(call, aio.StreamStreamCall):
        with pytest.raises(aio.AioRpcError) as failure:
            await collect(call)
        return failure.value
    error: aio.AioRpcError = await failure_of(call)
    return error


async def in_band(harness: Harness) -> asyncio.Task[Any]:
    """The first message of a stream that goes on behind its errors."""
    call = open_inference.stub_of(harness).ModelStreamInfer()
    await call.write(_infer())
    return asyncio.create_task(call.read())


async def a_step_that_raises(harness: Harness) -> None:
    harness.faults.fail_at_step = harness.executor.num_steps + 5  # some may be on their way
    harness.faults.release()


async def logits_that_are_not_finite(harness: Harness) -> None:
    harness.faults.release()


async def an_end_from_outside(harness: Harness) -> None:
    harness.server.fail(Unavailable("process 1 of 2 is lost"))


async def a_drain_past_its_time(harness: Harness) -> None:
    harness.server.request_stop()


FAULTS: list[tuple[Callable[[Harness], Awaitable[None]], grpc.StatusCode, str, int | None]] = [
    (a_step_that_raises, grpc.StatusCode.INTERNAL, "injected fault at step", 1),
    (logits_that_are_not_finite, grpc.StatusCode.INTERNAL, "the model's logits are not finite", None),
    (an_end_from_outside, grpc.StatusCode.UNAVAILABLE, "process 1 of 2 is lost", 1),
    (a_drain_past_its_time, grpc.StatusCode.UNAVAILABLE, "the server shut down before the request finished", 0),
]


@pytest.mark.thinned(7)
@pytest.mark.parametrize("ask", CALLS)
@pytest.mark.parametrize(("fault", "code", "details", "exit_code"), FAULTS)
async def test_a_fault_ends_a_request_in_one_status_on_every_service(ask, fault, code, details, exit_code):
    nan = frozenset({ord("%")}) if fault is logits_that_are_not_finite else frozenset[int]()
    executor = FakeExecutor(faults=Faults(nan_token_ids=nan))
    async with running(executor=executor, shutdown_timeout=0.0) as harness:
        harness.faults.hold_after(0)
        call, first = ask(harness), await in_band(harness)
        failure = asyncio.create_task(error_of(call))
        await eventually(lambda: harness.num_open_calls == 2 and harness.executor.num_steps > 0)
        await fault(harness)
        error = await failure
        assert error.code() is code
        assert details in str(error.details())
        assert details in (await first).error_message
        if exit_code is None:
            harness.faults.nan_token_ids = frozenset()
            await eventually(lambda: harness.num_blocks_used == 0)
            assert await collect(vllm_streamed(harness))
        else:
            harness.faults.release()
            assert await asyncio.wait_for(harness.run, 60) == exit_code


@pytest.mark.parametrize("ask", CALLS)
async def test_a_step_that_hangs_ends_a_call_when_its_caller_waits_no_longer(harness, ask):
    harness.faults.hold_after(0)
    error = await error_of(ask(harness, timeout=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: harness.num_open_calls == 0)
    harness.faults.release()
    await eventually(lambda: harness.num_blocks_used == 0)


@pytest.mark.parametrize("ask", CALLS)
async def test_a_full_queue_says_when_to_come_again(ask):
    executor = FakeExecutor(max_num_seqs=1)
    async with running(executor=executor, max_num_seqs=1, max_num_queued_reqs=1) as harness:
        harness.faults.hold_after(0)
        running_one = native(harness)
        await eventually(lambda: harness.executor.num_steps > 0)
        waiting = native(harness)
        await eventually(lambda: harness.serving.engine.is_full)
        error = await error_of(ask(harness))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert any(key == "grpc-retry-pushback-ms" for key, _ in error.trailing_metadata())
        harness.faults.release()
        assert (await collect(running_one))[-1].is_last
        assert (await collect(waiting))[-1].is_last


async def test_health_turns_for_every_service_when_the_engine_dies(harness):
    health: Any = health_pb2_grpc.HealthStub(harness.channel)
    watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in (*SERVICE_NAMES, *OF_OTHERS)]
    for watch in watches:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    harness.faults.fail_at_step = harness.executor.num_steps
    assert (await error_of(infer(harness))).code() is grpc.StatusCode.INTERNAL
    for watch in watches:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await asyncio.wait_for(harness.run, 60) == 1
