"""Scores and embeddings as requests: what is refused before anything runs, and which tokens a continuation is."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import InternalError, InvalidArgument, RequestTooLong, Unsupported
from jpaged.sampling_params import PoolingParams
from jpaged.service.input_processor import InputProcessor
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.score_embed import (
    MAX_PARTS,
    MAX_SCORE_SIZE,
    VectorOptions,
    continued,
    embeddable,
    get_class_output,
    get_embedding,
    get_pair_output,
    get_pooling_output,
    get_score,
    require_parts,
    require_score_size,
)
from jpaged.testing import ByteTokenizer, FakeExecutor
from jpaged.types import PositionLogprobs, Prompt, RequestOutput, TokenLogprob, Usage
from tests.server.harness import FakePooler, make_serving


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
        ("p" * 127, ["xy"], RequestTooLong, "continuations[0]: with the prompt, 129 tokens are over max_model_len"),
        ("p" * 128, ["x"], RequestTooLong, "prompt: 128 tokens are not below max_model_len (128)"),
        ([1] * 9, ["x", [1] * 120], RequestTooLong, "continuations[1]: with the prompt, 129 tokens are over max_model"),
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
        (["x" * 129], "inputs[0]: 129 tokens are over max_model_len (128)"),
        ([[1] * 129], "inputs[0]: 129 tokens are over max_model_len (128)"),
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


HIDDEN = RequestOutput("a", None, (1, 2), (), Usage(2, 0, 1), embedding=(3.0, 4.0, 12.0))


def model_with(*labels: str) -> LoadedModel:
    pooler = FakePooler(labels, len(labels)) if labels else None
    return replace(make_serving(FakeExecutor(), EngineConfig.load({})), pooler=pooler)


def test_a_classification_is_activated_unless_that_is_turned_off():
    model = model_with("no", "yes")
    found = get_class_output(model, HIDDEN, PoolingParams())
    assert (found.request_id, found.outputs.probs, found.outputs.num_classes) == ("a", (6.0, 8.0), 2)
    assert found.prompt_token_ids == (1, 2)
    plain = get_class_output(model, HIDDEN, PoolingParams(use_activation=False))
    assert plain.outputs.probs == (3.0, 4.0)
    pair = get_pair_output(model_with("score"), HIDDEN, PoolingParams())
    assert (pair.request_id, pair.outputs.score, pair.prompt_token_ids) == ("a", 6.0, (1, 2))
    with pytest.raises(Unsupported, match="no classification head"):
        get_class_output(model_with(), HIDDEN, PoolingParams())
    with pytest.raises(InternalError, match="'a' has no pooled hidden states"):
        get_class_output(model, replace(HIDDEN, embedding=None), PoolingParams())


def test_a_pooled_vector_is_that_of_the_models_layers_unless_a_pooling_is_given():
    pooler = FakePooler(width=2)
    for params, values in (
        (PoolingParams(), (0.6, 0.8)),
        (PoolingParams(use_activation=False), (3.0, 4.0)),
        (PoolingParams(use_activation=False, dimensions=1), (3.0,)),
    ):
        found = get_pooling_output(HIDDEN, VectorOptions.of_encode(params, None), pooler)
        assert found.outputs.data == pytest.approx(values)
        assert found.num_cached_tokens == HIDDEN.usage.cached_tokens
        assert found.prompt_token_ids == (1, 2)
    whole = get_pooling_output(HIDDEN, VectorOptions("last", normalize=False), pooler)
    assert whole.outputs.data == (3.0, 4.0, 12.0)
    assert VectorOptions().embedding(replace(pooler, normalizes=True), HIDDEN).values == pytest.approx((0.6, 0.8))
    assert VectorOptions().embedding(pooler, HIDDEN).values == (3.0, 4.0)


def test_hidden_states_of_tokens_are_an_array_of_which_each_row_has_length_one():
    states = memoryview(np.array([3, 4, 0, 0], np.float32).tobytes())
    output = replace(HIDDEN, embedding=states)
    found = get_pooling_output(output, VectorOptions.of_encode(PoolingParams(), "token_embed"), None)
    assert isinstance(found.outputs.data, np.ndarray)
    assert found.outputs.data.tolist() == [[np.float32(0.6), np.float32(0.8)], [0, 0]]
    plain = VectorOptions.of_encode(PoolingParams(use_activation=False), "token_embed")
    data = get_pooling_output(output, plain, None).outputs.data
    assert isinstance(data, np.ndarray) and data.tolist() == [[3, 4], [0, 0]]


@pytest.mark.parametrize(
    ("options", "pooler", "problem"),
    [
        (VectorOptions(), FakePooler(("no", "yes"), 2), "classifies texts"),
        (VectorOptions("mean"), FakePooler(("no", "yes"), 2), None),
        (VectorOptions(prompt_name="x"), None, "'x' is not a prompt of this model: none"),
        (VectorOptions(prompt_name="x"), FakePooler(), "'x' is not a prompt of this model: none"),
        (VectorOptions(prompt_name="x"), FakePooler(prompts={"y": "", "z": ""}), "of this model: y, z"),
        (VectorOptions(prompt_name="y"), FakePooler(prompts={"y": ""}), None),
        (VectorOptions(dimensions=3), None, None),
        (VectorOptions(dimensions=2), None, "2 is not supported: the model's vectors have 3 dimensions"),
        (VectorOptions(dimensions=2), FakePooler(width=2), None),
        (VectorOptions(dimensions=3), FakePooler(width=2), "have 2 dimensions"),
        (VectorOptions("last", dimensions=3), FakePooler(width=2), None),
        (VectorOptions(dimensions=1), FakePooler(width=2, can_shorten=True), None),
        (VectorOptions(dimensions=3), FakePooler(width=2, can_shorten=True), "have 2 or fewer dimensions"),
    ],
)
def test_options_of_a_vector_must_fit_the_model(options, pooler, problem):
    if problem is None:
        options.check(pooler, 3)
    else:
        with pytest.raises((InvalidArgument, Unsupported), match=problem):
            options.check(pooler, 3)
