"""Bad input is refused with the field, the value and the limit."""

import math

import pytest

from jpaged.engine.intake import Intake
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.errors import InternalError, InvalidArgument, Unsupported
from jpaged.testing import ByteTokenizer, FakeExecutor
from jpaged.types import MAX_SEED, SamplingParams


@pytest.fixture
def intake():
    return Intake(ByteTokenizer(), FakeExecutor().geometry, eos_token_ids=frozenset({256}))


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
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", ("x" * 2000,)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(33))),
    ],
)
def test_a_sampling_value_out_of_range_is_named(field, value):
    with pytest.raises(InvalidArgument, match=rf"sampling\.{field}: .*must be") as error:
        SamplingParams(**{field: value})
    assert error.value.field == f"sampling.{field}"


def test_a_single_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [1, 257]}, "prompt.token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt.token_ids"),
        ({"prompt_token_ids": [True]}, "prompt.token_ids"),
        ({}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt"),
        ({"messages": []}, "chat.messages"),
        ({"messages": [{"role": "user"}]}, "chat.messages[0].content"),
    ],
)
def test_a_bad_prompt_is_named(intake, prompt, field):
    with pytest.raises(InvalidArgument) as error:
        intake.make_request(request_id="a", sampling=SamplingParams(), **prompt)
    assert error.value.field == field


def test_a_stop_token_out_of_the_vocabulary_is_named(intake):
    with pytest.raises(InvalidArgument, match="257 is not below 257"):
        intake.make_request(request_id="a", sampling=SamplingParams(stop_token_ids=(257,)), prompt="x")


def test_text_ids_and_messages_all_become_ids(intake):
    make = intake.make_request
    assert make(request_id="a", sampling=SamplingParams(), prompt="ab").prompt_token_ids == (97, 98)
    assert make(request_id="a", sampling=SamplingParams(), prompt_token_ids=[97]).prompt_token_ids == (97,)
    request = make(request_id="a", sampling=SamplingParams(), messages=[{"role": "user", "content": "hi"}])
    assert bytes(request.prompt_token_ids) == b"user: hi\nassistant: "


def test_a_model_without_a_tokenizer_takes_ids_alone():
    intake = Intake(NoTokenizer(257), FakeExecutor().geometry)
    intake.make_request(request_id="a", sampling=SamplingParams(), prompt_token_ids=[1])
    with pytest.raises(InvalidArgument, match="send token ids"):
        intake.make_request(request_id="a", sampling=SamplingParams(), prompt="x")
    with pytest.raises(Unsupported, match="chat template"):
        intake.make_request(request_id="a", sampling=SamplingParams(), messages=[{"role": "user", "content": "x"}])
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        intake.make_request(request_id="a", sampling=SamplingParams(stop=("x",)), prompt_token_ids=[1])


def test_more_ending_tokens_than_a_row_can_forbid_are_refused_at_once():
    with pytest.raises(InternalError, match="at most 8"):
        Intake(ByteTokenizer(), FakeExecutor().geometry, eos_token_ids=frozenset(range(9)))
