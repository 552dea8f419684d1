"""ModelStreamInfer: many requests on one call, each answered as its tokens come."""

import asyncio
import threading
from typing import Any

import grpc
import pytest
import tritonclient.grpc as sync_triton
from grpc import aio

from jpaged._proto.open_inference import inference_pb2, inference_pb2_grpc
from jpaged.server.compat import open_inference
from jpaged.testing import ByteTokenizer, FakeExecutor, expected_tokens
from tests.server.compat.triton import GREEDY, asked, client_of, each, inputs, is_final, strings
from tests.server.harness import eventually, running

STRICT = {"triton_grpc_error": "true"}


def text(prompt: str, num_tokens: int = 8) -> str:
    return ByteTokenizer().decode(expected_tokens(list(prompt.encode()), num_tokens))


async def results_of(responses: Any) -> dict[str, list[Any]]:
    """The results of each request, by its id; an error stands under the empty one."""
    found: dict[str, list[Any]] = {}
    async with asyncio.timeout(300):
        async for result, error in responses:
            found.setdefault("" if error else result.get_response().id, []).append(error or result)
    return found


async def test_each_response_has_what_is_new_and_the_last_says_that_it_is(harness):
    async with client_of(harness) as client:
        (results,) = (await results_of(client.stream_infer(each(asked(request_id="a"))))).values()
    assert "".join(strings(one, "text_output")[0] for one in results) == text("hello")
    assert [is_final(one) for one in results] == [False] * (len(results) - 1) + [True]


async def test_a_request_that_is_not_streamed_is_answered_once(harness):
    whole = {**asked(request_id="a"), "inputs": inputs()}
    async with client_of(harness) as client:
        (result,) = (await results_of(client.stream_infer(each(whole))))["a"]
    assert strings(result, "text_output") == [f"hello{text('hello')}"]
    assert is_final(result)


async def test_requests_of_one_call_run_side_by_side(harness):
    harness.faults.hold_after(4)
    requests = [asked(f"prompt {i}", f"{i}", max_tokens=20) for i in range(3)]
    async with client_of(harness) as client:
        reading = asyncio.create_task(results_of(client.stream_infer(each(*requests))))
        await eventually(lambda: harness.num_open_calls == 3)
        harness.faults.release()
        found = await reading
    for i in range(3):
        pieces = [strings(one, "text_output")[0] for one in found[f"{i}"]]
        assert "".join(pieces) == text(f"prompt {i}", 20)


async def test_sequences_of_a_request_come_in_one_tensor(harness):
    names = ("text_output", "finish_reason", "num_output_tokens", "token_ids", "cumulative_logprob")
    harness.faults.hold_after(3)  # so that the first response comes before the last token
    async with client_of(harness) as client:
        responses = client.stream_infer(each(asked(outputs=names, n=2, temperature=1.0, seed=3)))
        first, _ = await anext(responses)
        harness.faults.release()
        (rest,) = (await results_of(responses)).values()
    results = [first, *rest]
    counts = [sum(int(one.as_numpy("num_output_tokens")[i]) for one in results) for i in range(2)]
    assert counts == [8, 8]
    assert all(len(one.as_numpy("token_ids")) == sum(one.as_numpy("num_output_tokens")) for one in results)
    assert {len(one.as_numpy("text_output")) for one in results} == {2}
    assert strings(results[0], "finish_reason") == ["None", "None"]
    assert strings(results[-1], "finish_reason") == ["length", "length"]
    assert results[-1].as_numpy("cumulative_logprob").tolist() == [-1.0, -1.0]
    texts = ["".join(strings(one, "text_output")[i] for one in results) for i in range(2)]
    assert texts[0] != texts[1]


async def test_a_sequence_that_has_ended_is_told_as_ended_while_others_go_on(harness):
    sampled: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 3}
    async with client_of(harness) as client:
        whole = await client.infer("fake", inputs(return_token_ids=True), parameters={**GREEDY, **sampled})
        first, second = whole.as_numpy("token_ids").reshape(2, 8).tolist()
        ending = next(token_id for token_id in first if token_id not in second)
        names = ("finish_reason", "cumulative_logprob", "num_output_tokens")
        request = asked(outputs=names, stop_token_ids=f"[{ending}]", **sampled)
        (results,) = (await results_of(client.stream_infer(each(request)))).values()
    told = [strings(one, "finish_reason")[0] for one in results]
    assert set(told[told.index("stop") :]) == {"stop"}
    assert strings(results[-1], "finish_reason") == ["stop", "length"]
    assert results[-1].as_numpy("cumulative_logprob").tolist() == [-0.125 * (first.index(ending) + 1), -1.0]


async def test_a_request_that_cannot_be_is_told_in_a_message_and_the_others_go_on(harness):
    async with client_of(harness) as client:
        found = await results_of(
            client.stream_infer(each(asked(request_id="bad", top_p=2.0), asked(request_id="good")))
        )
    (error,) = found[""]
    assert error.message().startswith("parameters.top_p: 2.0 is out of range")
    assert "".join(strings(one, "text_output")[0] for one in found["good"]) == text("hello")


async def test_a_message_of_an_error_is_as_short_as_a_status(harness):
    stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(harness.channel)
    request = inference_pb2.ModelInferRequest(model_name="fake")
    request.parameters["x" * 100_000].int64_param = 1
    (response,) = [one async for one in stub.ModelStreamInfer(iter([request]))]
    assert response.error_message.startswith("parameters.xxx")
    assert len(response.error_message) < 2000


async def test_a_message_of_an_error_says_whose_it_is(harness):
    stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(harness.channel)
    call = stub.ModelStreamInfer(iter([inference_pb2.ModelInferRequest(id="mine", model_name="other")]))
    (response,) = [one async for one in call]
    assert response.error_message == "model_name: 'other' is not served here; 'fake' is"
    assert (response.infer_response.id, response.infer_response.model_name) == ("mine", "other")
    assert response.infer_response.parameters["triton_final_response"].bool_param


async def test_a_caller_that_wants_statuses_gets_one_and_its_other_requests_end(harness):
    harness.faults.hold_after(3)
    requests = [asked(request_id="good", max_tokens=100), {**asked(), "model_name": "other"}]
    async with client_of(harness) as client:
        with pytest.raises(aio.AioRpcError, match=r"NOT_FOUND(.|\n)*'other' is not served here"):
            await results_of(client.stream_infer(each(*requests), headers=STRICT))
    await eventually(lambda: harness.num_open_calls == 0)
    harness.faults.release()
    await eventually(lambda: harness.num_blocks_used == 0)


async def test_a_cancelled_stream_frees_the_blocks_of_all_its_requests(harness):
    harness.faults.hold_after(4)
    async with client_of(harness) as client:
        responses = client.stream_infer(each(*(asked(f"{i}", f"{i}", max_tokens=100) for i in range(3))))
        await anext(responses)
        await eventually(lambda: harness.num_open_calls == 3)
        responses.cancel()
        await eventually(lambda: harness.num_open_calls == 0)
    harness.faults.release()
    await eventually(lambda: harness.num_blocks_used == 0)
    assert harness.serving.engine.load().num_generation_tokens < 300


def test_the_client_without_a_loop_cancels_a_stream_and_a_request():
    async def served() -> None:
        async with running() as harness:
            harness.faults.hold_after(3)
            errors = await asyncio.to_thread(ask, harness.target)
            assert [error.status() for error in errors] == ["StatusCode.CANCELLED"] * 2
            await eventually(lambda: harness.num_open_calls == 0)
            harness.faults.release()
            await eventually(lambda: harness.num_blocks_used == 0)

    def ask(target: str) -> list[Any]:
        errors: list[Any] = []
        has_begun, has_ended = threading.Event(), threading.Event()

        def told(result: Any, error: Any) -> None:
            if error is None:
                has_begun.set()
            else:
                errors.append(error)
                has_ended.set()

        long = {**GREEDY, "max_tokens": 100}
        with sync_triton.InferenceServerClient(target) as client:
            client.start_stream(told)
            client.async_stream_infer("fake", inputs(stream=True), parameters=long)
            assert has_begun.wait(60)
            client.stop_stream(cancel_requests=True)
            assert has_ended.wait(60)
            has_ended.clear()
            client.async_infer("fake", inputs(), told, parameters=long).cancel()
            assert has_ended.wait(60)
        return errors

    asyncio.run(served())


async def test_a_stream_that_waits_for_requests_ends_with_the_server(harness):
    requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def coming() -> Any:
        while True:
            yield await requests.get()

    await requests.put(asked(request_id="a"))
    async with client_of(harness) as client:
        responses = client.stream_infer(coming())
        while not is_final((await anext(responses))[0]):
            pass
        harness.server.request_stop()
        with pytest.raises(aio.AioRpcError, match=r"UNAVAILABLE(.|\n)*the server has shut down"):
            await anext(responses)
    assert await harness.run == 0


async def test_requests_that_are_running_when_the_server_drains_are_answered(harness):
    harness.faults.hold_after(3)
    async with client_of(harness) as client:
        responses = client.stream_infer(each(asked(max_tokens=30)))
        first, _ = await anext(responses)
        harness.server.request_stop()
        harness.faults.release()
        (rest,) = (await results_of(responses)).values()
    assert "".join(strings(one, "text_output")[0] for one in (first, *rest)) == text("hello", 30)


@pytest.mark.long
async def test_a_reader_that_is_slow_loses_nothing():
    executor = FakeExecutor(num_blocks=1024, block_size=16, max_model_len=4096)
    async with running(executor=executor) as harness, client_of(harness) as client:
        responses = client.stream_infer(each(asked("slow", "a", max_tokens=2000)))
        first, _ = await anext(responses)
        await eventually(lambda: harness.num_blocks_used == 0)  # it has run to its end meanwhile
        (rest,) = (await results_of(responses)).values()
    assert "".join(strings(one, "text_output")[0] for one in (first, *rest)) == text("slow", 2000)


async def test_no_more_requests_are_read_than_may_be_open(harness, monkeypatch):
    monkeypatch.setattr(open_inference, "MAX_OPEN", 2)
    harness.faults.hold_after(1)
    requests = [asked(f"{i}", f"{i}") for i in range(6)]
    async with client_of(harness) as client:
        reading = asyncio.create_task(results_of(client.stream_infer(each(*requests))))
        await eventually(lambda: harness.num_open_calls == 2)
        harness.faults.release()
        found = await reading
    assert sorted(found) == [f"{i}" for i in range(6)]


async def test_large_requests_are_bounded_together():
    async with running(max_request_size=0.0625) as harness, client_of(harness) as client:
        harness.faults.hold_after(0)
        face: Any = harness.server._faces._open_inference
        with face._in_hand.counted(256 * 65536 - 5000):
            found = await results_of(client.stream_infer(each(asked("x" * 6000))))
        assert "are over the limit of 16777216" in found[""][0].message()


async def test_bytes_that_are_no_message_end_the_call_with_what_is_wrong(harness):
    call = harness.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([b"\xff"]))
    with pytest.raises(aio.AioRpcError) as failure:
        await call.read()
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "1 bytes are not a valid message" in str(failure.value.details())
