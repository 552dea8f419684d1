"""ModelInfer and what is told of the model, asked by Triton's own client."""

import asyncio
import json
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as sync_triton
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from jpaged._proto.open_inference import inference_pb2, inference_pb2_grpc
from jpaged.server.compat.open_inference_request import INPUTS, OUTPUTS
from jpaged.testing import ByteTokenizer, expected_tokens, with_adapters
from tests.server.compat.triton import GREEDY, client_of, inputs, strings, tensor
from tests.server.harness import error_details, eventually, failure_of, running

HELLO = expected_tokens(list(b"hello"), 8)
TEXT = ByteTokenizer().decode(HELLO)


def stub_of(harness: Any) -> Any:
    return inference_pb2_grpc.GRPCInferenceServiceStub(harness.channel)


def typed(name: str, datatype: str, **contents: Any) -> Any:
    """An input whose elements are in the field of their type."""
    (elements,) = contents.values()
    return inference_pb2.ModelInferRequest.InferInputTensor(
        name=name,
        datatype=datatype,
        shape=[len(elements)],
        contents=inference_pb2.InferTensorContents(**contents),
    )


def parameters(**values: Any) -> dict[str, Any]:
    fields = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    return {name: inference_pb2.InferParameter(**{fields[type(value)]: value}) for name, value in values.items()}


def request(*tensors: Any, **fields: Any) -> Any:
    """A ModelInferRequest, of a text unless told otherwise."""
    given = tensors or (typed("text_input", "BYTES", bytes_contents=[b"hello"]),)
    fields = {"model_name": "fake", "parameters": parameters(**GREEDY), **fields}
    return inference_pb2.ModelInferRequest(inputs=given, **fields)


async def test_a_text_is_answered_behind_its_prompt_unless_that_is_left_out(harness):
    async with client_of(harness) as client:
        result = await client.infer("fake", inputs(), parameters=GREEDY, request_id="mine")
        assert strings(result, "text_output") == [f"hello{TEXT}"]
        answer = result.get_response()
        assert (answer.model_name, answer.model_version, answer.id) == ("fake", "1", "mine")
        assert len(answer.outputs) == len(answer.raw_output_contents) == 1
        result = await client.infer("fake", inputs(exclude_input_in_output=True), parameters=GREEDY)
        assert strings(result, "text_output") == [TEXT]


def test_the_client_without_a_loop_is_answered_the_same():
    async def served() -> tuple[list[str], list[str]]:
        async with running() as harness:
            return await asyncio.to_thread(ask, harness.target)

    def ask(target: str) -> tuple[list[str], list[str]]:
        with sync_triton.InferenceServerClient(target) as client:
            assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("fake", "1")
            whole = client.infer("fake", inputs(exclude_input_in_output=True), parameters=GREEDY)
            results: list[Any] = []
            client.start_stream(lambda result, error: results.append(error or result))
            given = {"model_name": "fake", "parameters": GREEDY, "enable_empty_final_response": True}
            client.async_stream_infer(inputs=inputs(stream=True), **given)
            client.stop_stream()
            return strings(whole, "text_output"), [strings(one, "text_output")[0] for one in results]

    whole, pieces = asyncio.run(served())
    assert whole == [TEXT] == ["".join(pieces)]


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
async def test_token_ids_are_a_prompt_too_and_are_not_said_again(harness, datatype):
    async with client_of(harness) as client:
        given = [tensor("input_ids", datatype, *b"hello"), tensor("return_token_ids", "BOOL", True)]
        result = await client.infer("fake", given, parameters=GREEDY)
    assert strings(result, "text_output") == [TEXT]
    assert result.as_numpy("token_ids").tolist() == HELLO


async def test_elements_in_the_fields_of_their_types_are_answered_in_such_fields(harness):
    given = (
        typed("text_input", "BYTES", bytes_contents=[b"hello"]),
        typed("exclude_input_in_output", "BOOL", bool_contents=[True]),
        typed("return_token_ids", "BOOL", bool_contents=[True]),
    )
    answer = await stub_of(harness).ModelInfer(request(*given))
    assert not answer.raw_output_contents
    assert list(answer.outputs[0].contents.bytes_contents) == [TEXT.encode()]
    assert list(answer.outputs[1].contents.int_contents) == HELLO
    ids = typed("input_ids", "INT64", int64_contents=list(b"hello"))
    answer = await stub_of(harness).ModelInfer(request(ids))
    assert list(answer.outputs[0].contents.bytes_contents) == [TEXT.encode()]


async def test_parameters_come_as_json_in_a_tensor_as_vllm_has_them(harness):
    given = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "stop": ["zzz"], "logit_bias": {"3": 0.5}}
    async with client_of(harness) as client:
        json_of = [tensor("sampling_parameters", "BYTES", json.dumps(given).encode())]
        result = await client.infer(
            "fake", [*inputs(exclude_input_in_output=True, return_num_output_tokens=True), *json_of]
        )
    assert result.as_numpy("num_output_tokens").tolist() == [4]


async def test_parameters_that_are_written_as_texts_are_read_as_what_they_are(harness):
    """As Triton's example of a client sends them, in both places at once."""
    given = {"max_tokens": "4", "temperature": "0.0", "ignore_eos": "True", "stop": '["zzz", "yyy"]', "top_k": "5"}
    both = {**given, "stop": ["zzz", "yyy"]}
    async with client_of(harness) as client:
        json_of = [tensor("sampling_parameters", "BYTES", json.dumps(both).encode())]
        result = await client.infer("fake", [*inputs(return_num_output_tokens=True), *json_of], parameters=given)
    assert result.as_numpy("num_output_tokens").tolist() == [4]


async def test_what_is_asked_beside_the_text_is_told_of_each_sequence(harness):
    names = [name.removeprefix("return_") for name in INPUTS if name.startswith("return_")]
    async with client_of(harness) as client:
        flags: dict[str, Any] = {f"return_{name}": True for name in names}
        result = await client.infer("fake", inputs(**flags), parameters={**GREEDY, "n": 2, "logprobs": 1})
        only = await client.infer(
            "fake", inputs(**flags), parameters=GREEDY, outputs=[triton.InferRequestedOutput("finish_reason")]
        )
    assert sorted(output.name for output in result.get_response().outputs) == sorted(OUTPUTS)
    assert strings(result, "text_output") == [f"hello{TEXT}"] * 2
    assert strings(result, "finish_reason") == ["length", "length"]
    assert result.as_numpy("num_input_tokens").tolist() == [5]
    assert result.as_numpy("num_output_tokens").tolist() == [8, 8]
    assert result.as_numpy("token_ids").tolist() == HELLO * 2
    assert result.as_numpy("cumulative_logprob").tolist() == [-1.0, -1.0]  # the fake's tokens have -0.125 each
    told = json.loads(strings(result, "logprobs")[1])
    assert [int(next(iter(position))) for position in told] == HELLO
    assert told[1]["11"] == {"logprob": -0.125, "rank": 1, "decoded_token": "\x0b"}
    assert [output.name for output in only.get_response().outputs] == ["finish_reason"]


async def test_log_probabilities_that_were_not_asked_for_are_null_though_their_sum_is_told(harness):
    async with client_of(harness) as client:
        given = inputs(return_logprobs=True, return_cumulative_logprob=True)
        result = await client.infer("fake", given, parameters=GREEDY)
    assert strings(result, "logprobs") == ["null"]
    assert result.as_numpy("cumulative_logprob").tolist() == [-1.0]


async def test_an_adapter_is_named_as_vllm_names_it(tmp_path):
    (tmp_path / "a").write_text("7")
    async with running(executor=with_adapters(2)(), enable_lora=True) as harness, client_of(harness) as client:
        await harness.server._service.load_adapter("mine", str(tmp_path / "a"))
        plain = await client.infer("fake", inputs(), parameters=GREEDY)
        other = await client.infer("fake", inputs(), parameters={**GREEDY, "lora_name": "mine"})
        assert strings(plain, "text_output") != strings(other, "text_output")
        with pytest.raises(InferenceServerException, match="NOT_FOUND"):
            await client.infer("fake", inputs(), parameters={**GREEDY, "lora_name": "nobody's"})


async def test_a_tenant_is_whose_metadata_says_so(harness):
    async with client_of(harness) as client:

        async def cached(tenant: str) -> int:
            before = harness.serving.engine.load().num_prefix_hit_tokens
            await client.infer("fake", inputs("x" * 20), parameters=GREEDY, headers={"x-jpaged-tenant": tenant})
            return harness.serving.engine.load().num_prefix_hit_tokens - before

        assert [await cached(tenant) for tenant in ("a", "b")] == [0, 0]
        assert await cached("a") > 0


async def test_a_request_that_takes_longer_than_its_timeout_ends(harness):
    async with client_of(harness) as client:
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            await client.infer("fake", inputs(), parameters=GREEDY, timeout=1)  # a microsecond
        assert await client.infer("fake", inputs(), parameters=GREEDY, timeout=10**9)
        assert await client.infer("fake", inputs(), parameters=GREEDY, timeout=0)


async def test_a_request_that_takes_longer_than_its_caller_waits_frees_its_blocks(harness):
    harness.faults.hold_after(2)
    async with client_of(harness) as client:
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            await client.infer("fake", inputs(), parameters={**GREEDY, "max_tokens": 100}, client_timeout=0.3)
    harness.faults.release()
    await eventually(lambda: harness.num_blocks_used == 0)


async def test_a_caller_that_goes_away_frees_its_blocks(harness):
    harness.faults.hold_after(2)
    call = stub_of(harness).ModelInfer(request(parameters=parameters(**{**GREEDY, "max_tokens": 100})))
    await eventually(lambda: harness.num_open_calls == 1 and harness.executor.num_steps > 0)
    call.cancel()
    await eventually(lambda: harness.num_open_calls == 0)
    harness.faults.release()
    await eventually(lambda: harness.num_blocks_used == 0)


FLAG = typed("stream", "BOOL", bool_contents=[True])
TEXT_INPUT = typed("text_input", "BYTES", bytes_contents=[b"hello"])
SHARED = inference_pb2.ModelInferRequest.InferInputTensor(
    name="text_input", datatype="BYTES", shape=[1], parameters=parameters(shared_memory_region="x")
)
SCALED = inference_pb2.ModelInferRequest.InferRequestedOutputTensor(
    name="text_output", parameters=parameters(classification=3)
)


def output(name: str) -> Any:
    return inference_pb2.ModelInferRequest.InferRequestedOutputTensor(name=name)


def said(**values: Any) -> Any:
    return typed("sampling_parameters", "BYTES", bytes_contents=[json.dumps(values).encode()])


def text_of(*texts: bytes) -> Any:
    return typed("text_input", "BYTES", bytes_contents=texts)


def json_of(*texts: bytes) -> Any:
    return typed("sampling_parameters", "BYTES", bytes_contents=texts)


TOLD = typed("exclude_input_in_output", "BOOL", bool_contents=[False])
WRONG_FIELD = typed("input_ids", "INT32", int64_contents=[1])
ONE_ID = typed("input_ids", "INT64", int64_contents=[1])


@pytest.mark.parametrize(
    ("message", "field", "problem"),
    [
        (request(typed("image", "BYTES", bytes_contents=[b""])), "inputs.image", "is unknown"),
        (request(TEXT_INPUT, TEXT_INPUT), "inputs.text_input", "is given twice"),
        (request(typed("stream", "BOOL", bool_contents=[False])), "inputs.text_input", "is missing"),
        (request(TEXT_INPUT, ONE_ID), "inputs.text_input", "conflicts with input_ids: give only one of them"),
        (request(typed("text_input", "INT64", int64_contents=[1])), "inputs.text_input", "must be BYTES"),
        (request(text_of(b"a", b"b")), "inputs.text_input", "has 2 elements"),
        (request(text_of(b"\xff")), "inputs.text_input", "is not UTF-8"),
        (request(text_of(b"")), "inputs.text_input", "is empty"),
        (request(typed("input_ids", "INT64", int64_contents=[])), "inputs.input_ids", "is empty"),
        (request(typed("input_ids", "INT64", int64_contents=[-1])), "inputs.input_ids", "-1 is not a token id"),
        (request(WRONG_FIELD), "inputs.input_ids.contents.int64_contents", "elements of INT32 belong in int_contents"),
        (request(TEXT_INPUT, FLAG), "inputs.stream", "requires ModelStreamInfer"),
        (
            request(ONE_ID, TOLD),
            "inputs.exclude_input_in_output",
            "must be true with input_ids, which have no text",
        ),
        (request(outputs=[output("mood")]), "outputs.mood", "is unknown"),
        (request(outputs=[output("text_output")] * 8), "outputs", "8 are given; at most 7"),
        (request(outputs=[SCALED]), "outputs.text_output.parameters.classification", "is not supported"),
        (request(TEXT_INPUT, raw_input_contents=[b"", b""]), "raw_input_contents", "has 2 tensors; inputs has 1"),
        (request(TEXT_INPUT, raw_input_contents=[b""]), "inputs.text_input.contents", "must be left out"),
        (request(parameters=parameters(tempo=1)), "parameters.tempo", "is unknown: must be one of max_tokens"),
        (request(parameters=parameters(sequence_id=1)), "parameters.sequence_id", "have no state"),
        (request(parameters=parameters(headers="x")), "parameters.headers", "metadata"),
        (request(parameters={"top_p": inference_pb2.InferParameter()}), "parameters.top_p", "has no value"),
        (request(parameters=parameters(top_p=2.0)), "parameters.top_p", "2.0 is out of range"),
        (request(parameters=parameters(n=99)), "parameters.n", "99 is over max_num_seqs (8)"),
        (request(parameters=parameters(max_tokens=1000)), "parameters.max_tokens", "over max_model_len (128)"),
        (request(parameters=parameters(timeout=-1)), "parameters.timeout", "-1 is not a number of microseconds"),
        (request(parameters=parameters(ignore_eos="maybe")), "parameters.ignore_eos", "'maybe' is not true or false"),
        (request(parameters=parameters(lora_name=False)), "parameters.lora_name", "False is not a string"),
        (request(parameters=parameters(logit_bias="[3]")), "parameters.logit_bias", "[3] is not a JSON object"),
        (request(parameters=parameters(stop_token_ids="3")), "parameters.stop_token_ids", "3 is not a list"),
        (request(parameters=parameters(**{f"p{i}": 1 for i in range(65)})), "parameters", "65 are given; at most 64"),
        (request(TEXT_INPUT, said(top_p=2.0)), "sampling_parameters.top_p", "2.0 is out of range"),
        (request(TEXT_INPUT, said(tempo=2.0)), "sampling_parameters.tempo", "is unknown"),
        (request(TEXT_INPUT, said(logit_bias={"x": 1})), "sampling_parameters.logit_bias", "'x' is not a token id"),
        (request(TEXT_INPUT, said(max_tokens=9)), "parameters.max_tokens", "8 conflicts with 9 in sampling_parameters"),
        (request(TEXT_INPUT, json_of(b"{")), "sampling_parameters", "JSON"),
        (request(TEXT_INPUT, json_of(b"[]")), "sampling_parameters", "object"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_name(harness, message, field, problem):
    error = await failure_of(stub_of(harness).ModelInfer(message))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = error_details(error)["BadRequest"].field_violations
    assert violation.field == field
    assert problem in violation.description


@pytest.mark.parametrize(
    ("raw", "shape", "problem"),
    [
        (b"\x05\0\0\0hell", [1], "ends within an element: 9 bytes are declared, 8 are present"),
        (b"\x05\0", [1], "ends within the length of an element"),
        (b"\x01\0\0\0a\x01\0\0\0b", [1], "has 2 elements; its shape [1] requires 1"),
        (b"", [1], "has 0 elements; its shape [1] requires 1"),
        (b"\x01\0\0\0a", [-1], "the shape [-1] must have at most 8 dimensions, none negative"),
        (b"\x01\0\0\0a", [1] * 9, "must have at most 8 dimensions"),
    ],
)
async def test_bytes_that_are_no_tensor_are_refused(harness, raw, shape, problem):
    tensors = [inference_pb2.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=shape)]
    message = request(*tensors, raw_input_contents=[raw])
    error = await failure_of(stub_of(harness).ModelInfer(message))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in error.details()


@pytest.mark.parametrize(
    ("name", "datatype", "raw"), [("input_ids", "INT32", b"\1\2\3"), ("stream", "BOOL", b"\2"), ("stream", "BOOL", b"")]
)
async def test_bytes_that_are_no_numbers_are_refused(harness, name, datatype, raw):
    tensors = [inference_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[1])]
    error = await failure_of(stub_of(harness).ModelInfer(request(*tensors, raw_input_contents=[raw])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"inputs.{name}: ")


async def test_shared_memory_is_not_there(harness):
    error = await failure_of(stub_of(harness).ModelInfer(request(SHARED)))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details().startswith("inputs.text_input.parameters.shared_memory_region: ")


@pytest.mark.parametrize(("name", "version"), [("other", ""), ("", ""), ("fake", "2")])
async def test_another_model_or_version_is_not_found(harness, name, version):
    async with client_of(harness) as client:
        for asking in (
            client.infer(name, inputs(), model_version=version),
            client.get_model_metadata(name, version),
            client.get_model_config(name, version),
        ):
            with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*is not served here"):
                await asking
        assert not await client.is_model_ready(name, version)


async def test_the_model_is_told_of(harness):
    async with client_of(harness) as client:
        metadata = await client.get_model_metadata("fake", "1")
        config = (await client.get_model_config("fake")).config
        index = await client.get_model_repository_index()
        server = await client.get_server_metadata()
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("fake", ["1"], "jpaged")
    assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == [
        (one.name, one.datatype, [one.length]) for one in INPUTS.values()
    ]
    assert [one.name for one in metadata.outputs] == [one.name for one in config.output] == list(OUTPUTS)
    assert config.model_transaction_policy.decoupled and all(one.optional for one in config.input)
    assert [(one.name, one.version, one.state) for one in index.models] == [("fake", "1", "READY")]
    assert (server.name, list(server.extensions)) == (
        "jpaged",
        ["model_configuration", "schedule_policy", "parameters"],
    )


async def test_what_triton_has_besides_says_why_it_is_not_here(harness):
    async with client_of(harness) as client:
        for asking, reason in (
            (client.get_inference_statistics("fake"), "GetLoad"),
            (client.load_model("fake"), "one model, which never changes"),
            (client.register_system_shared_memory("x", "y", 1), "shared memory is not supported"),
            (client.update_log_settings({}), "when the server is started"),
        ):
            with pytest.raises(InferenceServerException, match=f"UNIMPLEMENTED.*{reason}"):
                await asking


async def test_numbers_of_every_axis_of_a_batch_of_one_are_the_same(harness):
    """KServe's runtimes put one request into a batch of one."""
    async with client_of(harness) as client:
        ids = triton.InferInput("input_ids", [1, 5], "INT64")
        ids.set_data_from_numpy(np.array([list(b"hello")], np.int64))
        result = await client.infer("fake", [ids], parameters=GREEDY)
    assert strings(result, "text_output") == [TEXT]


async def test_it_can_be_turned_off():
    async with running(enable_open_inference=False) as harness:
        error = await failure_of(stub_of(harness).ServerLive(inference_pb2.ServerLiveRequest()))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_prompt_that_is_too_long_names_the_input(harness):
    long = typed("text_input", "BYTES", bytes_contents=[b"x" * 5000])
    error = await failure_of(stub_of(harness).ModelInfer(request(long)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_details(error)["BadRequest"].field_violations[0].field == "inputs.text_input"
