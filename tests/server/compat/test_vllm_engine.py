"""vllm.grpc.engine.VllmEngine, asked by the published stub."""

import hashlib
import io
import threading
import zipfile
from typing import Any

import grpc
import pytest
from grpc import aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument
from jpaged.server.compat import vllm_engine
from jpaged.server.compat.vllm_engine import parse_sampling
from jpaged.service.tokenizer import HuggingFaceTokenizer
from jpaged.structured import ConstraintKind
from jpaged.testing import FakeExecutor, expected_tokens
from tests.server import harness as harnesses
from tests.server.harness import error_details, eventually, failure_of, running

HELLO = list(b"hello")


async def collect(call: Any) -> list[Any]:
    """All messages of a call, which are of no type that is known here."""
    return [*await harnesses.collect(call)]


def stub_of(harness: Any) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(harness.channel)


def sampling(**fields: Any) -> Any:
    return vllm_engine_pb2.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **fields})


def request(text: str | None = "hello", *, stream: bool = True, token_ids: Any = None, **fields: Any) -> Any:
    """A GenerateRequest: streamed and greedy, unless told otherwise; sampling_params has the rest."""
    own = {
        name: fields.pop(name)
        for name in list(fields)
        if name in vllm_engine_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    }
    if token_ids is not None:
        own["tokenized"] = vllm_engine_pb2.TokenizedInput(input_ids=token_ids)
    elif text is not None:
        own["text"] = text
    return vllm_engine_pb2.GenerateRequest(**{"sampling_params": sampling(**fields), **own}, stream=stream)


def ends(messages: Any) -> list[Any]:
    return [message.complete for message in messages if message.HasField("complete")]


def chunks(messages: Any) -> list[Any]:
    return [message.chunk for message in messages if message.HasField("chunk")]


@pytest.mark.parametrize("given", [{"text": "hello"}, {"token_ids": HELLO}])
async def test_a_stream_is_chunks_of_what_is_new_and_then_the_whole(harness, given):
    messages = await collect(stub_of(harness).Generate(request(**given)))
    assert [token_id for chunk in chunks(messages) for token_id in chunk.token_ids] == expected_tokens(HELLO, 8)
    assert [chunk.completion_tokens for chunk in chunks(messages)] == [
        len(chunk.token_ids) for chunk in chunks(messages)
    ]
    (end,) = ends(messages)
    assert messages[-1].HasField("complete")
    assert list(end.output_ids) == expected_tokens(HELLO, 8)
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens, end.cached_tokens) == ("length", 5, 8, 0)
    assert end.WhichOneof("matched_stop") is None


async def test_without_a_stream_there_is_one_message_for_each_sequence(harness):
    messages = await collect(stub_of(harness).Generate(request(stream=False, n=2, temperature=1.0, seed=4)))
    assert [message.WhichOneof("response") for message in messages] == ["complete", "complete"]
    assert [end.index for end in ends(messages)] == [0, 1]
    assert [end.completion_tokens for end in ends(messages)] == [8, 8]
    streamed = await collect(stub_of(harness).Generate(request(n=2, temperature=1.0, seed=4)))
    for whole in ends(messages):
        pieces = [chunk.token_ids for chunk in chunks(streamed) if chunk.index == whole.index]
        assert [token_id for piece in pieces for token_id in piece] == list(whole.output_ids)
    assert ends(messages)[0].output_ids != ends(messages)[1].output_ids
    assert sorted(end.index for end in ends(streamed)) == [0, 1]


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_are_told_of_tokens_and_of_the_prompt(harness, stream):
    messages = await collect(stub_of(harness).Generate(request(stream=stream, logprobs=2, prompt_logprobs=1, n=2)))
    told = chunks(messages) if stream else ends(messages)
    tokens = expected_tokens(HELLO, 8)
    for index in range(2):
        mine = [one for one in told if one.index == index]
        assert [token_id for one in mine for token_id in one.output_logprobs.token_ids] == tokens
        assert {value for one in mine for value in one.output_logprobs.token_logprobs} == {-0.125}
        top = [top for one in mine for top in one.output_logprobs.top_logprobs]
        assert [list(one.token_ids) for one in top] == [[token_id, (token_id + 1) % 257] for token_id in tokens]
        assert [one.HasField("input_logprobs") for one in mine] == [True] + [False] * (len(mine) - 1)
        of_prompt = mine[0].input_logprobs
        assert list(of_prompt.token_ids) == HELLO
        assert [one.HasField("value") for one in of_prompt.token_logprobs] == [False, True, True, True, True]
        assert [len(one.values) for one in of_prompt.top_logprobs] == [0, 1, 1, 1, 1]


async def test_log_probabilities_are_not_told_where_nobody_asks(harness):
    for stream in (True, False):
        for message in await collect(stub_of(harness).Generate(request(stream=stream))):
            told = message.chunk if message.HasField("chunk") else message.complete
            assert not told.HasField("output_logprobs") and not told.HasField("input_logprobs")


async def test_what_ends_a_sequence_is_told(harness):
    tokens = expected_tokens(HELLO, 8)
    by_id = await collect(stub_of(harness).Generate(request(stop_token_ids=[tokens[3]])))
    (end,) = ends(by_id)
    assert (end.finish_reason, end.matched_token_id, list(end.output_ids)) == ("stop", tokens[3], tokens[:4])
    by_text = await collect(stub_of(harness).Generate(request(stop=[chr(tokens[2])])))
    (end,) = ends(by_text)
    assert (end.finish_reason, end.matched_stop_str) == ("stop", chr(tokens[2]))
    assert end.completion_tokens == 3


async def test_a_prompt_that_was_there_before_is_told_as_cached(harness):
    first = ends(await collect(stub_of(harness).Generate(request("x" * 20))))
    again = ends(await collect(stub_of(harness).Generate(request("x" * 20))))
    assert [one.cached_tokens for one in (*first, *again)] == [0, 19]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("prompt", ["hello", "x" * 100, "x" * 500])
async def test_without_max_tokens_all_that_fits_is_generated(prompt):
    executor = FakeExecutor(num_blocks=256, max_model_len=512)
    async with running(executor=executor) as harness:
        message = request(prompt, stream=False)
        message.sampling_params.ClearField("max_tokens")
        (end,) = ends(await collect(stub_of(harness).Generate(message)))
    assert (end.finish_reason, end.prompt_tokens + end.completion_tokens) == ("length", 512)


@pytest.mark.parametrize(("limit", "num_prompt"), [(3, 3), (-1, 127)])
async def test_a_prompt_is_cut_where_that_is_asked_for(harness, limit, num_prompt):
    message = request("x" * 200, stream=False, truncate_prompt_tokens=limit)
    message.sampling_params.ClearField("max_tokens")
    (end,) = ends(await collect(stub_of(harness).Generate(message)))
    assert (end.prompt_tokens, end.completion_tokens) == (num_prompt, 128 - num_prompt)


@pytest.mark.parametrize("n", [1, 2, 5])
async def test_what_is_left_behind_a_prompt_fits_into_the_pool_too(n):
    executor = FakeExecutor(num_blocks=16, block_size=4, max_num_seqs=8, max_model_len=128)
    geometry, message = executor.geometry, request("x" * 8, stream=False, n=n)
    message.sampling_params.ClearField("max_tokens")
    async with running(executor=executor) as harness:
        found = ends(await collect(stub_of(harness).Generate(message)))
    (room,) = {end.completion_tokens for end in found}
    assert geometry.num_blocks_alone(8, room, n) <= 16 < geometry.num_blocks_alone(8, room + 1, n)


async def test_a_prompt_beside_which_nothing_fits_is_refused(harness):
    message = request("x" * 128)
    message.sampling_params.ClearField("max_tokens")
    error = await failure_of(stub_of(harness).Generate(message))
    assert error_details(error)["BadRequest"].field_violations[0].field == "input"


@pytest.mark.parametrize("stream", [True, False])
async def test_many_log_probabilities_are_told_on_a_thread(stream, monkeypatch):
    threads = set[str]()
    told = vllm_engine._input_logprobs

    def noted(*given: Any) -> Any:
        threads.add(threading.current_thread().name)
        return told(*given)

    monkeypatch.setattr(vllm_engine, "_input_logprobs", noted)
    executor = FakeExecutor(num_blocks=2048, max_model_len=1024)
    async with running(executor=executor, max_num_batched_tokens=1024) as harness:
        await collect(stub_of(harness).Generate(request("x" * 900, stream=stream, prompt_logprobs=5, max_tokens=2)))
    assert all(name.startswith("jpaged-text") for name in threads) and threads


def test_zeros_and_what_is_unset_mean_what_the_published_messages_say():
    found = parse_sampling(vllm_engine_pb2.SamplingParams(), 7)
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert (found.n, found.max_tokens, found.seed, found.logprobs, found.stop) == (1, 7, None, None, ())
    assert not found.detokenize and not found.skip_special_tokens
    given = vllm_engine_pb2.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=2,
        min_tokens=2,
        stop=["x"],
        stop_token_ids=[4],
        skip_special_tokens=True,
        ignore_eos=True,
        n=2,
        logprobs=3,
        prompt_logprobs=0,
        seed=9,
        logit_bias={5: 1.5},
        include_stop_str_in_output=True,
        truncate_prompt_tokens=6,
        regex="a+",
        grammar_from_first_token=True,
    )
    found = parse_sampling(given, 7)
    for field, value in given.ListFields():
        if field.name not in ("stop", "stop_token_ids", "regex", "grammar_from_first_token"):
            assert getattr(found, field.name) == value
    assert (found.stop, found.stop_token_ids, found.detokenize) == (("x",), (4,), True)
    assert found.structured_outputs is not None
    assert (found.structured_outputs.kind, found.structured_outputs.regex) == (ConstraintKind.REGEX, "a+")


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("json_schema", '{"type": "object"}', ConstraintKind.JSON),
        ("regex", "a+", ConstraintKind.REGEX),
        ("grammar", "root ::= 'a'", ConstraintKind.GRAMMAR),
        ("structural_tag", "{}", ConstraintKind.STRUCTURAL_TAG),
        ("json_object", True, ConstraintKind.JSON_OBJECT),
        ("choice", vllm_engine_pb2.ChoiceConstraint(choices=["a", "b"]), ConstraintKind.CHOICE),
    ],
)
def test_each_constraint_is_one_of_ours(field, value, kind):
    found = parse_sampling(vllm_engine_pb2.SamplingParams(**{field: value}), 1)
    assert found.structured_outputs is not None and found.structured_outputs.kind is kind
    with pytest.raises(InvalidArgument):
        parse_sampling(vllm_engine_pb2.SamplingParams(regex=""), 1)
    assert parse_sampling(vllm_engine_pb2.SamplingParams(json_object=False), 1).structured_outputs is None


@pytest.mark.parametrize(
    ("message", "field", "problem"),
    [
        (request(None), "input", "is missing: set tokenized or text"),
        (request(""), "input", "is empty"),
        (request(token_ids=[]), "input", "is empty"),
        (request(token_ids=[3, 257]), "tokenized.input_ids", "257 is not a token id from 0 to 256"),
        (request(top_p=1.5), "sampling_params.top_p", "1.5 is out of range"),
        (request(n=4_000_000_000), "sampling_params.n", "4000000000 is out of range"),
        (request(n=9), "sampling_params.n", "9 is over max_num_seqs (8)"),
        (request(max_tokens=0), "sampling_params.max_tokens", "0 is out of range"),
        (request(max_tokens=124), "sampling_params.max_tokens", "over max_model_len (128)"),
        (request(stop=[""]), "sampling_params.stop", "'' is out of range"),
        (request(regex=""), "sampling_params.regex", "is empty"),
        (request(json_schema=" "), "sampling_params.json_schema", "is empty"),
        (request(choice=vllm_engine_pb2.ChoiceConstraint()), "sampling_params.choice", "0 strings"),
        (request(logit_bias={300: 1.0}), "sampling_params.logit_bias", "300 is not below 257"),
        (request(data_parallel_rank=1), "data_parallel_rank", "1 is not from 0 to 0"),
        (request(request_id="ä"), "request_id", "is not 1 to 128 printable ASCII characters"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_published_name(harness, message, field, problem):
    error = await failure_of(stub_of(harness).Generate(message))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = error_details(error)["BadRequest"].field_violations
    assert violation.field == field
    assert problem in violation.description


async def test_a_number_of_sequences_that_is_huge_is_refused_before_anything_is_made_of_it(harness):
    message = request(n=4_000_000_000)
    message.sampling_params.ClearField("max_tokens")
    error = await failure_of(stub_of(harness).Generate(message))
    assert error_details(error)["BadRequest"].field_violations[0].field == "sampling_params.n"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("kv_transfer_params", {"kv_transfer_params": vllm_engine_pb2.KvTransferParams()}),
        ("kv_transfer_params_json", {"kv_transfer_params_json": "{}"}),
        ("mm_inputs", {"mm_inputs": vllm_engine_pb2.MultimodalInputs()}),
        ("extra_mm_inputs", {"extra_mm_inputs": [vllm_engine_pb2.MultimodalInputs()]}),
        ("media_refs", {"media_refs": vllm_engine_pb2.MediaRefs()}),
    ],
)
async def test_what_is_not_done_here_says_so_by_its_name(harness, field, fields):
    error = await failure_of(stub_of(harness).Generate(request(**fields)))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details().startswith(f"{field}: ")


async def test_every_field_of_the_published_messages_is_known_here():
    """A new one has to be honoured or refused before this is right again."""
    fields = {one.name for one in vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields}
    assert fields == {
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("max_tokens", "min_tokens", "stop", "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        *("ignore_eos", "n", "logprobs", "prompt_logprobs", "seed", "include_stop_str_in_output", "logit_bias"),
        *("truncate_prompt_tokens", "grammar_from_first_token", "json_schema", "regex", "grammar", "structural_tag"),
        *("json_object", "choice"),
    }
    fields = {one.name for one in vllm_engine_pb2.GenerateRequest.DESCRIPTOR.fields}
    assert fields == {
        *("request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"),
        *("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs"),
    }


async def test_a_cancelled_call_frees_its_blocks(harness):
    harness.faults.hold_after(3)
    call = stub_of(harness).Generate(request(max_tokens=100))
    await call.read()
    call.cancel()
    await eventually(lambda: harness.num_open_calls == 0)
    harness.faults.release()
    await eventually(lambda: harness.num_blocks_used == 0)
    assert harness.serving.engine.load().num_generation_tokens < 100


@pytest.mark.parametrize("n", [1, 2])
async def test_an_abort_ends_requests_by_id_and_passes_over_others(harness, n):
    harness.faults.hold_after(3)
    call = stub_of(harness).Generate(request(request_id="doomed", max_tokens=60, n=n))
    first = await call.read()
    await stub_of(harness).Abort(vllm_engine_pb2.AbortRequest(request_ids=["nobody", "doomed"]))
    harness.faults.release()
    messages = [first, *await collect(call)]
    assert [end.finish_reason for end in ends(messages)] == ["abort"] * n
    assert all(end.completion_tokens < 60 for end in ends(messages))


@pytest.mark.parametrize(("ids", "problem"), [(["x", ""], "is empty"), (["x"] * 4097, "4097 are given; at most 4096")])
async def test_an_abort_that_cannot_be_names_its_field(harness, ids, problem):
    error = await failure_of(stub_of(harness).Abort(vllm_engine_pb2.AbortRequest(request_ids=ids)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"request_ids: {problem}"


async def test_a_tenant_is_whose_metadata_says_so(harness):
    harness.faults.hold_after(3)
    call = stub_of(harness).Generate(request(request_id="mine", max_tokens=60), metadata=(("x-jpaged-tenant", "a"),))
    first = await call.read()
    mine = vllm_engine_pb2.AbortRequest(request_ids=["mine"])
    await stub_of(harness).Abort(mine, metadata=(("x-jpaged-tenant", "b"),))
    assert harness.num_open_calls == 1
    await stub_of(harness).Abort(mine, metadata=(("x-jpaged-tenant", "a"),))
    harness.faults.release()
    assert ends([first, *await collect(call)])[0].finish_reason == "abort"


async def test_an_id_in_flight_is_not_taken_twice(harness):
    harness.faults.hold_after(3)
    call = stub_of(harness).Generate(request(request_id="once", max_tokens=60))
    await call.read()
    error = await failure_of(stub_of(harness).Generate(request(request_id="once")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()


async def test_an_embedding_has_a_length_of_1(harness):
    tokenized = vllm_engine_pb2.TokenizedInput(original_text="ab", input_ids=b"ab")
    found = await stub_of(harness).Embed(vllm_engine_pb2.EmbedRequest(request_id="e", tokenized=tokenized))
    assert (found.prompt_tokens, found.embedding_dim) == (2, 3)
    assert sum(value * value for value in found.embedding) == pytest.approx(1.0)
    assert list(found.embedding) == pytest.approx([value / 218.1489 for value in (98.0, 2.0, 195.0)], rel=1e-2)


@pytest.mark.parametrize(
    ("tokenized", "field"),
    [
        (None, "tokenized"),
        ([], "tokenized.input_ids"),
        ([257], "tokenized.input_ids"),
        ([1] * 129, "tokenized.input_ids"),
    ],
)
async def test_an_embedding_that_cannot_be_names_its_field(harness, tokenized, field):
    given = None if tokenized is None else vllm_engine_pb2.TokenizedInput(input_ids=tokenized)
    error = await failure_of(stub_of(harness).Embed(vllm_engine_pb2.EmbedRequest(tokenized=given)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_details(error)["BadRequest"].field_violations[0].field == field


async def test_the_model_the_server_and_its_load_are_told(harness):
    stub = stub_of(harness)
    model = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("fake", 128, 257)
    assert (list(model.architectures), list(model.eos_token_ids)) == (["FakeForCausalLM"], [256])
    before = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
    assert (before.last_receive_timestamp, before.block_size, before.max_num_seqs) == (0, 4, 8)
    harness.faults.hold_after(3)
    call = stub.Generate(request(max_tokens=60))
    await call.read()
    info = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
    assert (info.active_requests, info.data_parallel_size, info.constrained_decoding_start) == (1, 1, "first_token")
    assert info.last_receive_timestamp > 0 and info.uptime_seconds > before.uptime_seconds
    (load,) = (await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=0, include=["core"]))).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 0, 1)
    assert (load.max_total_num_tokens, load.max_running_requests, load.utilization) == (256, 8, 0.125)
    assert load.num_used_tokens > 0 and load.token_usage == load.num_used_tokens / 256
    call.cancel()


async def test_tokens_a_second_are_those_between_two_calls(harness):
    stub = stub_of(harness)
    (first,) = (await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
    await collect(stub.Generate(request(max_tokens=60)))
    begun = harness.serving.engine.clock()
    await eventually(lambda: harness.serving.engine.clock() - begun > 1.0)
    (second,) = (await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
    assert first.gen_throughput == 0
    assert 0 < second.gen_throughput <= 60


@pytest.mark.parametrize(
    ("fields", "field"), [({"dp_rank": 1}, "dp_rank"), ({"include": ["core", "mood"]}, "include[1]")]
)
async def test_a_load_that_is_not_there_is_refused(harness, fields, field):
    error = await failure_of(stub_of(harness).GetLoads(vllm_engine_pb2.GetLoadsRequest(**fields)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_details(error)["BadRequest"].field_violations[0].field == field


async def test_health_is_said_as_grpcs_own_says_it(harness):
    healthy = await stub_of(harness).HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert (healthy.healthy, healthy.message) == (True, "serving")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
        ("GetTokenizer", common_pb2.GetTokenizerRequest()),  # of a tokenizer that has no files
    ],
)
async def test_what_is_not_here_says_why(harness, method, message):
    error = await failure_of(getattr(stub_of(harness), method)(message))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details().startswith(f"{method}: ")


async def test_cached_prefixes_are_forgotten_where_that_is_asked_for(harness):
    await collect(stub_of(harness).Generate(request("x" * 20)))
    answer = await stub_of(harness).FlushCache(common_pb2.FlushCacheRequest())
    assert answer.success and answer.message == "removed 6 blocks from the prefix cache"
    (end,) = ends(await collect(stub_of(harness).Generate(request("x" * 20))))
    assert end.cached_tokens == 0


async def test_an_operator_can_turn_control_off():
    async with running(disable_control=True) as harness:
        for asking in (
            stub_of(harness).Abort(vllm_engine_pb2.AbortRequest(request_ids=["x"])),
            stub_of(harness).FlushCache(common_pb2.FlushCacheRequest()),
        ):
            assert (await failure_of(asking)).code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_tokenizer_is_made_again_of_its_files(tmp_path):
    tokenizer: Any = HuggingFaceTokenizer(FOLDER)
    async with running(executor=FakeExecutor(vocab_size=3072), tokenizer=tokenizer) as harness:
        pieces = await collect(stub_of(harness).GetTokenizer(common_pb2.GetTokenizerRequest()))
        again = await collect(stub_of(harness).GetTokenizer(common_pb2.GetTokenizerRequest()))
    content = b"".join(piece.data for piece in pieces)
    assert [piece.sha256 for piece in pieces] == [""] * (len(pieces) - 1) + [hashlib.sha256(content).hexdigest()]
    assert again[-1].sha256 == pieces[-1].sha256
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(tmp_path)
    assert HuggingFaceTokenizer(tmp_path).encode("Once upon a time") == tokenizer.encode("Once upon a time")


async def test_it_can_be_turned_off():
    async with running(enable_vllm_engine=False) as harness:
        with pytest.raises(aio.AioRpcError, match="UNIMPLEMENTED"):
            await stub_of(harness).HealthCheck(vllm_engine_pb2.HealthCheckRequest())
