"""A request of any size holds up no other: it is refused by its size, or worked on beside the streams."""

import asyncio
import gc
import threading
from types import SimpleNamespace

import pytest

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.server import grpc_server
from jpaged.testing import ByteTokenizer, FakeExecutor, expected_tokens
from jpaged.types import MAX_DETOKENIZE_IDS, MIN_MAX_TOKENIZE_BYTES
from tests.server.harness import collect, error_details, eventually, failure_of, request, running

EMPTY_TURN = b"\x0a\x00"
NUM_TURNS = 500_000


def length_delimited(number, payload):
    """A field of a message: its tag, its length, itself."""
    size, length = [], len(payload)
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *size, length]) + payload


def many_turns(kind, field):
    return kind.FromString(length_delimited(field, EMPTY_TURN * NUM_TURNS))


def one_turn(kind, role, content):
    message = kind()
    message.chat.messages.add(role=role, content=content)
    return message


def generate(**fields):
    return inference_pb2.GenerateRequest(**fields)


def pinned(token_ids):
    return control_pb2.PinPrefixRequest(name="p", token_ids=inference_pb2.TokenIds(ids=token_ids))


def scoring(prompt, continuations):
    return inference_pb2.ScoreRequest(
        text=prompt, continuations=[inference_pb2.Continuation(text=one) for one in continuations]
    )


IDS = [1] * 1_000_000
SENT = [
    (
        "Generate",
        lambda: many_turns(inference_pb2.GenerateRequest, 4),
        "chat.messages",
        "500000 messages; at most 8192",
    ),
    (
        "Tokenize",
        lambda: many_turns(inference_pb2.TokenizeRequest, 2),
        "chat.messages",
        "500000 messages; at most 8192",
    ),
    ("Generate", lambda: generate(text="x" * 1_000_000), "prompt", "1000000 bytes of text"),
    (
        "Tokenize",
        lambda: inference_pb2.TokenizeRequest(text="x" * 1_000_000),
        "text",
        f"over the limit of {MIN_MAX_TOKENIZE_BYTES}",
    ),
    (
        "Generate",
        lambda: generate(token_ids=inference_pb2.TokenIds(ids=IDS)),
        "prompt",
        "over max_model_len (128)",
    ),
    (
        "Detokenize",
        lambda: inference_pb2.DetokenizeRequest(token_ids=IDS),
        "token_ids",
        f"1000000 ids; at most {MAX_DETOKENIZE_IDS}",
    ),
    ("Generate", lambda: request(stop=["x"] * 100_000), "sampling.stop", "100000 is out of range"),
    ("Generate", lambda: request(stop_token_ids=IDS), "sampling.stop_token_ids", "1000000 is out of range"),
    ("Generate", lambda: request(cache_salt="x" * 1_000_000), "sampling.cache_salt", "(1000000 characters)"),
    (
        "Generate",
        lambda: one_turn(inference_pb2.GenerateRequest, "", "x"),
        "chat.messages[0].role",
        "is missing or empty",
    ),
    (
        "Tokenize",
        lambda: one_turn(inference_pb2.TokenizeRequest, "", "x"),
        "chat.messages[0].role",
        "is missing or empty",
    ),
    (
        "Score",
        lambda: inference_pb2.ScoreRequest.FromString(b"\x0a\x01p" + length_delimited(3, b"") * NUM_TURNS),
        "continuations",
        "500000 are given; must be from 1 to 1024",
    ),
    (
        "Score",
        lambda: scoring("x" * 5000, ["x"] * 1000),
        "continuations",
        "have 5001000 characters and token ids, each with the prompt; at most 4194304 per call",
    ),
    ("Score", lambda: scoring("x" * 900_000, ["x"]), "prompt", "900000 bytes of text, over the limit of 4096"),
    (
        "Embed",
        lambda: inference_pb2.EmbedRequest.FromString(length_delimited(1, b"") * NUM_TURNS),
        "inputs",
        "500000 are given; must be from 1 to 1024",
    ),
    (
        "Embed",
        lambda: inference_pb2.EmbedRequest(
            inputs=[inference_pb2.EmbedInput(token_ids=inference_pb2.TokenIds(ids=IDS))]
        ),
        "inputs[0]",
        "1000000 tokens are over max_model_len (128)",
    ),
    ("PinPrefix", lambda: pinned(IDS), "token_ids", "1000000 tokens are not below max_model_len (128)"),
]


@pytest.mark.parametrize(("method", "message", "field", "problem"), SENT)
async def test_what_is_too_large_is_refused_by_its_size(harness, method, message, field, problem):
    stub = harness.control if method == "PinPrefix" else harness.inference
    error = await failure_of(getattr(stub, method)(message()))
    (violation,) = error_details(error)["BadRequest"].field_violations
    assert (error.code().name, violation.field) == ("INVALID_ARGUMENT", field)
    assert problem in violation.description
    assert len(violation.description) < 500


async def test_the_largest_message_is_what_the_operator_says():
    message = inference_pb2.TokenizeRequest(text="x" * 70_000)
    async with running(executor=FakeExecutor()) as harness:
        assert len((await harness.inference.Tokenize(message)).token_ids) == 70_000
    async with running(executor=FakeExecutor(), max_request_size=0.0625) as harness:
        error = await failure_of(harness.inference.Tokenize(message))
        assert error.code().name == "RESOURCE_EXHAUSTED"
        assert "65536" in error.details()


async def test_a_request_that_was_refused_is_not_kept(harness):
    """Not even until Python looks for cycles, which takes long enough to be felt."""
    sent = length_delimited(4, EMPTY_TURN * NUM_TURNS)
    gc.disable()
    try:
        method = harness.channel.unary_stream("/jpaged.v1.InferenceService/Generate")
        for _ in range(2):
            assert (await failure_of(method(sent))).code().name == "INVALID_ARGUMENT"
        await eventually(lambda: not any(map(is_large, gc.get_objects())))
    finally:
        gc.enable()


def is_large(thing):
    return type(thing) is inference_pb2.GenerateRequest and len(thing.chat.messages) == NUM_TURNS


def test_memory_is_given_back_once_after_large_messages_and_never_after_small_ones(monkeypatch):
    timers, num_trims = [], []

    class Timer:
        """A thread that runs when the test says so."""

        def __init__(self, seconds, function):
            self.function = function

        def start(self):
            timers.append(self)

    monkeypatch.setattr(grpc_server, "threading", SimpleNamespace(Timer=Timer))
    monkeypatch.setattr(grpc_server, "_trim", lambda: num_trims.append(1))
    freed = grpc_server.FreedMemory()
    freed.note(grpc_server.LARGE_BYTES - 1)
    for num_given_back in (1, 2):
        for _ in range(3):
            freed.note(grpc_server.LARGE_BYTES)
        assert len(timers) == num_given_back
        timers[-1].function()
        assert len(num_trims) == num_given_back


def test_memory_is_given_back_by_a_thread_that_no_end_of_a_loop_fails_and_none_waits_for(monkeypatch):
    threads, given_back = [], threading.Event()

    def trim():
        threads.append(threading.current_thread())
        given_back.set()

    async def serve():
        grpc_server.FreedMemory().note(grpc_server.LARGE_BYTES)

    monkeypatch.setattr(grpc_server, "_DELAY_S", 0.0)
    monkeypatch.setattr(grpc_server, "_trim", trim)
    asyncio.run(serve())
    assert given_back.wait(60)
    assert threads[0].daemon


class Held(ByteTokenizer):
    """A tokenizer that waits until it is let go: in a chat template that loops, or in a long text."""

    def __init__(self):
        super().__init__()
        self.is_asked, self.is_free = threading.Event(), threading.Event()

    def encode(self, text, *, add_special_tokens=True):
        if len(text) > 1000:
            self.wait()
        return super().encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, messages, *, max_bytes):
        self.wait()
        return super().apply_chat_template(messages, max_bytes=max_bytes)

    def wait(self):
        self.is_asked.set()
        assert self.is_free.wait(60)


CHAT = one_turn(inference_pb2.GenerateRequest, "user", "hi")
LONG = inference_pb2.TokenizeRequest(text="x" * 3000)


@pytest.mark.parametrize(("method", "held"), [("Generate", CHAT), ("Tokenize", LONG)])
async def test_streams_go_on_while_a_template_or_a_text_takes_its_time(method, held):
    tokenizer = Held()
    async with running(executor=FakeExecutor(), tokenizer=tokenizer) as harness:
        slow = getattr(harness.inference, method)(held)
        waiting = asyncio.ensure_future(collect(slow) if method == "Generate" else slow)
        assert await asyncio.to_thread(tokenizer.is_asked.wait, 60)
        responses = await collect(harness.inference.Generate(request("hello")))
        assert [i for r in responses for i in r.token_ids] == expected_tokens(list(b"hello"), 8)
        assert not waiting.done()
        tokenizer.is_free.set()
        await asyncio.wait_for(waiting, 60)


async def test_texts_are_tokenised_while_conversations_wait():
    tokenizer = Held()
    async with running(executor=FakeExecutor(), tokenizer=tokenizer) as harness:
        held = [asyncio.ensure_future(collect(harness.inference.Generate(CHAT))) for _ in range(20)]
        assert await asyncio.to_thread(tokenizer.is_asked.wait, 60)
        ids = inference_pb2.DetokenizeRequest(token_ids=[120] * 3000)
        assert (await asyncio.wait_for(harness.inference.Detokenize(ids), 60)).text == "x" * 3000
        tokenizer.is_free.set()
        await asyncio.wait_for(asyncio.gather(*held), 60)


async def test_large_messages_that_wait_are_bounded_together(monkeypatch):
    monkeypatch.setattr(grpc_server, "_MAX_LARGEST_IN_HAND", 3)
    tokenizer = Held()
    async with running(executor=FakeExecutor(), tokenizer=tokenizer, max_request_size=0.0625) as harness:
        large = inference_pb2.TokenizeRequest(text="x" * 60_000)
        held = [asyncio.ensure_future(harness.inference.Tokenize(large)) for _ in range(20)]
        await eventually(lambda: sum(call.done() for call in held) == 17)
        for call in [call for call in held if call.done()]:
            error = await failure_of(call)
            assert (error.code().name, error_details(error)["ErrorInfo"].reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
            assert (
                "60004 bytes and 180012 bytes of requests in progress are over the limit of 196608" in error.details()
            )
        assert len((await collect(harness.inference.Generate(request("hello"))))[-1].finish.ListFields()) > 0
        tokenizer.is_free.set()
        answers = await asyncio.gather(*held, return_exceptions=True)
        assert sum(isinstance(answer, inference_pb2.TokenizeResponse) for answer in answers) == 3
        for _ in range(5):
            assert len((await harness.inference.Tokenize(large)).token_ids) == 60_000
