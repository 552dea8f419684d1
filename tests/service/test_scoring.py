"""Scores and embeddings as requests: what is refused before anything runs, and which tokens a continuation is."""

from typing import Any

import pytest

from jpaged.config import EngineConfig
from jpaged.errors import InternalError, InvalidArgument, RequestTooLong
from jpaged.service.input_processor import InputProcessor
from jpaged.service.score_embed import (
    MAX_PARTS,
    MAX_SCORE_SIZE,
    continued,
    embeddable,
    get_embedding,
    get_score,
    require_parts,
    require_score_size,
)
from jpaged.testing import ByteTokenizer, FakeExecutor
from jpaged.types import PositionLogprobs, Prompt, RequestOutput, TokenLogprob, Usage
from tests.server.harness import make_serving


class Merging(ByteTokenizer):
    """Two characters "ab" are one token, 200, also where a prompt's last meets a continuation's first."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [200 if part == "ab" else byte for part in _parts(text) for byte in part.encode()[:1]]


def _parts(text: str) -> list[str]:
    parts = []
    while text:
        length = 2 if text.startswith("ab") else 1
        parts.append(text[:length])
        text = text[length:]
    return parts


@pytest.fixture
def processor() -> InputProcessor:
    return processor_of(ByteTokenizer())


def processor_of(tokenizer: ByteTokenizer) -> InputProcessor:
    return make_serving(FakeExecutor(), EngineConfig.load({}), tokenizer).input_processor


def wholes(processor: InputProcessor, prompt: Prompt, continuations: list[Any]) -> list[tuple[list[int], int | None]]:
    given = continued(processor, prompt, continuations)
    prompts = [given.prompt(i) for i in range(len(given))]
    assert [given.size(i) for i in range(len(given))] == [prompt.size for prompt in prompts]
    return [(list(prompt.token_ids or ()), prompt.prompt_logprobs_start) for prompt in prompts]


def test_a_continuation_comes_behind_its_prompt(processor):
    want = [(list(b"pqx"), 2), ([*b"pq", 7, 8], 2)]
    assert wholes(processor, Prompt(text="pq"), ["x", [7, 8]]) == want
    assert wholes(processor, Prompt(token_ids=list(b"pq")), ["x", (7, 8)]) == want


def test_a_text_that_merges_with_its_prompt_is_tokenised_with_it():
    processor = processor_of(Merging())
    assert wholes(processor, Prompt(text="xa"), ["bc", "c"]) == [([120, 200, 99], 2), ([120, 97, 99], 2)]
    with pytest.raises(InvalidArgument, match=r"^continuations\[1\]: adds no token to the prompt$"):
        continued(processor, Prompt(text="xa"), ["bc", "b"])


def test_what_continuations_share_is_held_once(processor):
    given = continued(processor, Prompt(text="p" * 100), ["x", "yz"])
    assert given.tails == ((100, (120,)), (100, (121, 122)))


@pytest.mark.parametrize(
    ("prompt", "continuations", "kind", "message"),
    [
        ("p", [], InvalidArgument, f"continuations: 0 are given; must be from 1 to {MAX_PARTS}"),
        ("p", ["x"] * 1025, InvalidArgument, "continuations: 1025 are given; must be from 1 to 1024"),
        ("p", ["x", ""], InvalidArgument, "continuations[1]: is empty"),
        ("p", ["x", []], InvalidArgument, "continuations[1]: is empty"),
        ("p", ["x", [5, 257]], InvalidArgument, "continuations[1]: 257 is not a token id from 0 to 256"),
        ("", ["x"], InvalidArgument, "prompt: is empty: at least one token is needed"),
        ([], ["x"], InvalidArgument, "prompt: is empty: at least one token is needed"),
        ([999], ["x"], InvalidArgument, "prompt: 999 is not a token id from 0 to 256"),
        ("p" * 127, ["x"], RequestTooLong, "continuations[0]: with the prompt, 128 tokens are not below max_model_len"),
        ("p" * 128, ["x"], RequestTooLong, "prompt: 128 tokens are not below max_model_len (128)"),
        ([1] * 9, ["x", [1] * 119], RequestTooLong, "continuations[1]: with the prompt, 128 tokens are not below"),
        ("p", ["x" * 5000], RequestTooLong, "continuations[0]: 5001 bytes of text, over the limit of 4096"),
        ("p" * 5000, ["x"], RequestTooLong, "prompt: 5000 bytes of text, over the limit of 4096"),
    ],
)
def test_what_cannot_be_scored_names_the_part_and_the_limit(processor, prompt, continuations, kind, message):
    given = Prompt(text=prompt) if isinstance(prompt, str) else Prompt(token_ids=prompt)
    with pytest.raises(InvalidArgument) as raised:
        continued(processor, given, continuations)
    assert type(raised.value) is kind
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["x", ""], "inputs[1]: is empty"),
        (["x", [257]], "inputs[1]: 257 is not a token id"),
        (["x" * 128], "inputs[0]: 128 tokens are not below max_model_len (128)"),
        ([[1] * 128], "inputs[0]: 128 tokens are not below max_model_len (128)"),
    ],
)
def test_what_cannot_be_embedded_names_the_input_and_the_limit(processor, inputs, message):
    prompts = [Prompt(text=one) if isinstance(one, str) else Prompt(token_ids=one) for one in inputs]
    with pytest.raises(InvalidArgument) as raised:
        embeddable(processor, prompts)
    assert str(raised.value).startswith(message)


def test_bounds_are_what_they_say():
    require_parts("inputs", 1)
    require_parts("inputs", MAX_PARTS)
    require_score_size(MAX_SCORE_SIZE)
    with pytest.raises(InvalidArgument, match=r"continuations: have 4194305 characters .*; at most 4194304 per call"):
        require_score_size(MAX_SCORE_SIZE + 1)


def output(**fields: Any) -> RequestOutput:
    return RequestOutput("r", None, (1, 2), (), Usage(2, 1), **fields)


def test_a_score_is_the_sum_of_what_was_told():
    told = tuple(PositionLogprobs(TokenLogprob(7, logprob, rank)) for logprob, rank in ((-1.0, 1), (-0.5, 2)))
    score = get_score(output(prompt_logprobs=(None, *told)))
    assert (score.logprob, score.token_ids, score.is_greedy) == (-1.5, (7, 7), False)
    assert get_score(output(prompt_logprobs=(None, told[0]))).is_greedy
    with pytest.raises(InternalError, match="'r' has no prompt log-probabilities"):
        get_score(output())


def test_a_vector_is_scaled_where_that_is_wanted_and_not_where_it_has_no_length():
    assert get_embedding(output(embedding=(3.0, 4.0))).values == (3.0, 4.0)
    assert get_embedding(output(embedding=(3.0, 4.0)), normalize=True).values == (0.6, 0.8)
    assert get_embedding(output(embedding=(0.0, 0.0)), normalize=True).values == (0.0, 0.0)
    with pytest.raises(InternalError, match="'r' has no pooled hidden states"):
        get_embedding(output())
