"""Bad input is refused with the field, the value and the limit."""

import dataclasses
import math
from typing import Any

import pytest

from jpaged.engine.tokenizer import NoTokenizer
from jpaged.errors import InternalError, InvalidArgument, RequestTooLong, Unsupported
from jpaged.service.input_processor import InputProcessor
from jpaged.testing import ByteTokenizer, FakeExecutor
from jpaged.types import (
    MAX_CHAT_MESSAGES,
    MAX_DETOKENIZE_IDS,
    MAX_SEED,
    MIN_MAX_CHAT_BYTES,
    MIN_MAX_TOKENIZE_BYTES,
    Prompt,
    SamplingParams,
)

TURN = {"role": "user", "content": "x"}


@pytest.fixture
def input_processor():
    return InputProcessor(ByteTokenizer(), FakeExecutor().geometry, eos_token_ids=frozenset({256}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("seed", -(2**63) - 1),
        ("seed", MAX_SEED + 1),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("truncate_prompt_tokens", 0),
        ("thinking_token_budget", -2),
        ("thinking_token_budget", True),
        ("thinking_token_budget", 2**31),
        ("thinking_token_budget", 1.5),
        ("stop", ("",)),
        ("stop", ("x" * 2000,)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(33))),
        ("stop_token_ids", range(10**12)),
    ],
)
def test_a_sampling_value_out_of_range_is_named(field, value):
    with pytest.raises(InvalidArgument, match=rf"^{field}: .*must be") as error:
        SamplingParams(**{field: value})
    assert error.value.field == field


def beyond(limit: float) -> float:
    return math.nextafter(limit, math.copysign(math.inf, limit))


LIMITS: list[tuple[str, Any, Any]] = [
    ("max_tokens", 1, 0),
    ("min_tokens", 0, -1),
    ("min_tokens", 16, 17),
    ("temperature", 0.0, -1e-300),
    ("temperature", 100.0, beyond(100.0)),
    ("top_p", 5e-324, 0.0),
    ("top_p", 1.0, beyond(1.0)),
    ("min_p", 0.0, -1e-300),
    ("min_p", 1.0, beyond(1.0)),
    ("typical_p", 5e-324, 0.0),
    ("typical_p", 1.0, beyond(1.0)),
    ("top_n_sigma", 0.0, -1e-300),
    ("top_n_sigma", 100.0, beyond(100.0)),
    ("top_k", -1, -2),
    ("seed", -(2**63), -(2**63) - 1),
    ("seed", 2**64 - 1, 2**64),
    ("logprobs", -1, -2),
    ("prompt_logprobs", -1, -2),
    ("truncate_prompt_tokens", 1, 0),
    ("truncate_prompt_tokens", -1, -2),
    ("presence_penalty", 2.0, beyond(2.0)),
    ("presence_penalty", -2.0, beyond(-2.0)),
    ("frequency_penalty", 2.0, beyond(2.0)),
    ("frequency_penalty", -2.0, beyond(-2.0)),
    ("repetition_penalty", 5e-324, 0.0),
    ("repetition_penalty", 100.0, beyond(100.0)),
    ("logit_bias", {0: 100.0}, {0: beyond(100.0)}),
    ("logit_bias", {0: -100.0}, {0: beyond(-100.0)}),
    ("logit_bias", {0: 1.0}, {-1: 1.0}),
    ("logit_bias", dict.fromkeys(range(300), 1.0), dict.fromkeys(range(301), 1.0)),
    ("logprob_token_ids", range(128), range(129)),
    ("logprob_token_ids", [0], [-1]),
    ("allowed_token_ids", [0], [-1]),
    ("allowed_token_ids", [0], []),
    ("bad_words", ["x"] * 128, ["x"] * 129),
    ("bad_words", ["x" * 256], ["x" * 257]),
    ("bad_words", ["x"], [""]),
    ("bad_words", ["x"], [" "]),
    ("stop", ["x"] * 16, ["x"] * 17),
    ("stop", ["x" * 1024], ["x" * 1025]),
    ("stop", ["x"], [""]),
    ("stop_token_ids", range(32), range(33)),
    ("stop_token_ids", [0], [-1]),
    ("n", 1, 0),
    ("n", 256, 257),
    ("best_of", 1, 0),
    ("best_of", 256, 257),
    ("beam_width", 0, -1),
    ("beam_width", 16, 17),
    ("priority", -(2**31), -(2**31) - 1),
    ("priority", 2**31 - 1, 2**31),
    ("cache_salt", "x" * 256, "x" * 257),
]
LIMITS_BY_OTHERS: list[tuple[dict[str, Any], str, Any, Any]] = [
    ({"max_tokens": 1}, "min_tokens", 1, 2),
    ({"n": 2}, "best_of", 2, 1),
    ({"beam_width": 4}, "n", 4, 5),
    ({"beam_width": 2}, "temperature", 0.0, 0.5),
    ({"beam_width": 2}, "temperature", 1.0, 0.5),
    ({"beam_width": 2}, "logprobs", 32, 33),
    ({"beam_width": 2}, "length_penalty", 100.0, beyond(100.0)),
    ({"beam_width": 2}, "length_penalty", -100.0, beyond(-100.0)),
]


def test_sampling_values_pass_up_to_their_limits_and_no_further():
    for others, name, last, out in [*(({}, *one) for one in LIMITS), *LIMITS_BY_OTHERS]:
        SamplingParams(**{name: last}, **others)
        with pytest.raises(InvalidArgument) as error:
            SamplingParams(**{name: out}, **others)
        assert error.value.field.partition("[")[0] == name


def test_a_single_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(bad_words="END").bad_words == ("END",)


def test_parameters_with_another_seed_differ_in_nothing_else():
    params = SamplingParams(max_tokens=7, temperature=0.5, stop=["a"], logit_bias={3: 1.0}, stop_token_ids=[4])
    assert params.seed is None
    assert params.with_seed(2**64 - 1) == dataclasses.replace(params, seed=2**63 - 1).with_seed(2**64 - 1)
    assert dataclasses.replace(params.with_seed(5), seed=None) == params


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_told_of(input_processor):
    few = InputProcessor(ByteTokenizer(), FakeExecutor(vocab_size=100).geometry, eos_token_ids=frozenset())
    for prompt, field in (({"text": "axb"}, "prompt"), ({"messages": [TURN]}, "chat.messages")):
        with pytest.raises(InvalidArgument, match=r"returned token 120; the model has tokens from 0 to 99") as error:
            few.make_request(request_id="", sampling=SamplingParams(), prompt=Prompt(**prompt))
        assert error.value.field == field
    assert few.tokenize(Prompt(text="ABC")) == [65, 66, 67]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"text": ""}, "prompt"),
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [1, 257]}, "prompt.token_ids"),
        ({"token_ids": [-1]}, "prompt.token_ids"),
        ({"token_ids": [True]}, "prompt.token_ids"),
        ({}, "prompt"),
        ({"text": "a", "token_ids": [1]}, "prompt"),
        ({"messages": []}, "chat.messages"),
        ({"messages": [{"role": "user"}]}, "chat.messages[0].content"),
        ({"messages": [{"role": "", "content": "x"}]}, "chat.messages[0].role"),
        ({"messages": [TURN] * (MAX_CHAT_MESSAGES + 1)}, "chat.messages"),
        ({"messages": [TURN, {"role": "user", "content": "x" * MIN_MAX_CHAT_BYTES}]}, "chat.messages"),
        ({"messages": [TURN, {"role": "user", "content": "\udc80"}]}, "chat.messages[1].content"),
        ({"text": "a\ud800"}, "prompt"),
        ({"text": "x" * 5000}, "prompt"),
        ({"token_ids": range(10**12)}, "prompt"),
        ({"token_ids": [1.0]}, "prompt.token_ids"),
    ],
)
def test_a_bad_prompt_is_named(input_processor, prompt, field):
    with pytest.raises(InvalidArgument) as error:
        input_processor.make_request(request_id="a", sampling=SamplingParams(), prompt=Prompt(**prompt))
    assert error.value.field == field


def test_a_stop_token_out_of_the_vocabulary_is_named(input_processor):
    with pytest.raises(InvalidArgument, match="257 is not below 257"):
        input_processor.make_request(
            request_id="a", sampling=SamplingParams(stop_token_ids=(257,)), prompt=Prompt(text="x")
        )


def test_text_ids_and_messages_all_become_ids(input_processor):
    make = input_processor.make_request
    assert make(request_id="a", sampling=SamplingParams(), prompt=Prompt(text="ab")).prompt_token_ids == (97, 98)
    assert make(request_id="a", sampling=SamplingParams(), prompt=Prompt(token_ids=[97])).prompt_token_ids == (97,)
    request = make(
        request_id="a", sampling=SamplingParams(), prompt=Prompt(messages=[{"role": "user", "content": "hi"}])
    )
    assert bytes(request.prompt_token_ids) == b"user: hi\nassistant: "


@pytest.mark.parametrize(("side", "kept"), [("left", "yz"), ("right", "xx")])
def test_a_prompt_is_truncated_however_long_its_text_is(input_processor, side, kept):
    text = "x" * (MIN_MAX_TOKENIZE_BYTES - 2) + "yz"
    for given in ({"text": text}, {"token_ids": list(text.encode())}):
        request = input_processor.make_request(
            request_id="a",
            sampling=SamplingParams(truncate_prompt_tokens=2),
            prompt=Prompt(**given, truncation_side=side),
        )
        assert bytes(request.prompt_token_ids).decode() == kept
    with pytest.raises(RequestTooLong, match=f"over the limit of {MIN_MAX_TOKENIZE_BYTES}"):
        input_processor.make_request(
            request_id="a", sampling=SamplingParams(truncate_prompt_tokens=2), prompt=Prompt(text=text + "x")
        )


def test_a_prompt_that_is_truncated_to_the_model_leaves_room_for_its_output(input_processor):
    geometry = FakeExecutor().geometry
    request = input_processor.make_request(
        request_id="a",
        sampling=SamplingParams(truncate_prompt_tokens=-1, max_tokens=3),
        prompt=Prompt(text="x" * 2 * geometry.max_model_len),
    )
    assert len(request.prompt_token_ids) == geometry.max_model_len - 3


def test_a_prompt_that_is_too_long_without_any_output_names_its_tokens_alone(input_processor):
    prompt = Prompt(token_ids=[1] * 129, is_only_told=True)
    with pytest.raises(RequestTooLong, match=r": 129 prompt tokens, over max_model_len \(128\)$"):
        input_processor.make_request(request_id="a", sampling=SamplingParams(), prompt=prompt)


def test_a_model_without_a_tokenizer_takes_ids_alone():
    input_processor = InputProcessor(NoTokenizer(257), FakeExecutor().geometry)
    input_processor.make_request(request_id="a", sampling=SamplingParams(), prompt=Prompt(token_ids=[1]))
    with pytest.raises(InvalidArgument, match="send token ids"):
        input_processor.make_request(request_id="a", sampling=SamplingParams(), prompt=Prompt(text="x"))
    with pytest.raises(Unsupported, match="chat template"):
        input_processor.make_request(
            request_id="a", sampling=SamplingParams(), prompt=Prompt(messages=[{"role": "user", "content": "x"}])
        )
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        input_processor.make_request(request_id="a", sampling=SamplingParams(stop=("x",)), prompt=Prompt(token_ids=[1]))


def test_more_ending_tokens_than_a_row_can_forbid_are_refused_at_once():
    with pytest.raises(InternalError, match="at most 8"):
        InputProcessor(ByteTokenizer(), FakeExecutor().geometry, eos_token_ids=frozenset(range(9)))


class Unasked(ByteTokenizer):
    """A tokenizer that must not be asked."""

    def encode(self, text, *, add_special_tokens=True):
        raise AssertionError(f"{len(text)} characters were tokenised")

    def apply_chat_template(self, messages, *, max_bytes):
        raise AssertionError(f"{len(messages)} messages were laid out")

    def decode(self, token_ids, *, skip_special_tokens=True):
        raise AssertionError(f"{len(token_ids)} ids were told")


def test_what_cannot_fit_is_refused_before_it_is_tokenised():
    input_processor = InputProcessor(Unasked(), FakeExecutor().geometry)
    sampling = SamplingParams()
    with pytest.raises(RequestTooLong, match=r"prompt: 5000 bytes of text, over the limit of 4096: max_mod"):
        input_processor.make_request(request_id="a", sampling=sampling, prompt=Prompt(text="\u00e9" * 2500))
    with pytest.raises(InvalidArgument, match=r"chat\.messages: 8193 messages; at most 8192"):
        input_processor.make_request(request_id="a", sampling=sampling, prompt=Prompt(messages=[TURN] * 8193))
    with pytest.raises(RequestTooLong, match=r"chat\.messages: 1048585 bytes, over the limit of 1048576"):
        input_processor.make_request(
            request_id="a", sampling=sampling, prompt=Prompt(messages=[TURN, {"role": "user", "content": "x" * 2**20}])
        )


def test_tokenize_has_limits_of_its_own():
    input_processor = InputProcessor(Unasked(), FakeExecutor().geometry)
    size = MIN_MAX_TOKENIZE_BYTES
    with pytest.raises(RequestTooLong, match=f"^text: {size + 1} bytes of text, over the limit of {size}"):
        input_processor.tokenize(Prompt(text="x" * (size + 1)))
    with pytest.raises(InvalidArgument, match=rf"^token_ids: {10**12} ids; at most {MAX_DETOKENIZE_IDS}"):
        input_processor.detokenize(range(10**12))
    with pytest.raises(RequestTooLong, match=r"^token_ids: 1000000000000 tokens are not below max_model_len \(128\)"):
        input_processor.prefix(Prompt(token_ids=range(10**12)))
    with pytest.raises(RequestTooLong, match=r"^text: 4097 bytes of text, over the limit of 4096"):
        input_processor.prefix(Prompt(text="x" * 4097))


def test_tokenize_takes_what_a_prompt_could_not_be(input_processor):
    text = "x" * MIN_MAX_TOKENIZE_BYTES
    assert input_processor.tokenize(Prompt(text=text)) == [120] * len(text)
    assert input_processor.detokenize([120] * len(text)) == text
    assert input_processor.tokenize(Prompt(text="")) == []
    with pytest.raises(InvalidArgument, match=r"^token_ids: 257 is not a token id from 0 to 256"):
        input_processor.detokenize([1, 257])


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [TURN] * 8193, [{"role": "", "content": "x"}]])
def test_tokenize_refuses_a_conversation_as_generate_does(input_processor, messages):
    errors = []
    for work in (
        lambda: input_processor.make_request(
            request_id="a", sampling=SamplingParams(), prompt=Prompt(messages=messages)
        ),
        lambda: input_processor.tokenize(Prompt(messages=messages)),
    ):
        with pytest.raises(InvalidArgument) as raised:
            work()
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]
