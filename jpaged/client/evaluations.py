"""Score and Embed: values <-> messages. No I/O; shared by both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jpaged._proto.v1 import inference_pb2
from jpaged.client.wire import Call, checked_ids, checked_int32, logprob_of
from jpaged.completions import Evaluated
from jpaged.errors import InvalidArgument
from jpaged.types import Pooling, Score, Usage, require_whole_characters

_T = TypeVar("_T")

GivenText = str | Sequence[int]
"""A text, or its token ids."""

_POOLINGS: Mapping[Pooling, inference_pb2.Pooling] = {
    "last": inference_pb2.POOLING_LAST,
    "mean": inference_pb2.POOLING_MEAN,
}


@dataclass(frozen=True, slots=True)
class Asker:
    """Options of a call: the common fields of both requests."""

    model: str | None = None
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields by name; raise InvalidArgument for values that the message cannot hold."""
        require_whole_characters("adapter", self.adapter)
        require_whole_characters("cache_salt", self.cache_salt)
        checked_int32("priority", self.priority)
        return {name: getattr(self, name) for name in self.__slots__}


def score_call(prompt: GivenText, continuations: Sequence[GivenText], asker: Asker) -> Call[Evaluated[Score]]:
    """Build a Score call: a prompt and continuations -> scores."""
    _require_several("continuations", continuations)
    request = inference_pb2.ScoreRequest(
        **_form_of("prompt", prompt),
        continuations=[
            inference_pb2.Continuation(**_form_of(f"continuations[{i}]", one)) for i, one in enumerate(continuations)
        ],
        **asker.fields(),
    )
    return Call("Score", request, _scores_of)


def embed_call(
    inputs: Sequence[GivenText], asker: Asker, *, pooling: Pooling, normalize: bool
) -> Call[Evaluated[tuple[float, ...]]]:
    """Build an Embed call: texts or token ids -> vectors."""
    _require_several("inputs", inputs)
    if pooling not in _POOLINGS:
        raise InvalidArgument("pooling", f"{pooling!r} is neither 'last' nor 'mean'")
    request = inference_pb2.EmbedRequest(
        inputs=[inference_pb2.EmbedInput(**_form_of(f"inputs[{i}]", one)) for i, one in enumerate(inputs)],
        pooling=_POOLINGS[pooling],
        normalize=normalize,
        **asker.fields(),
    )
    return Call("Embed", request, _vectors_of)


def _require_several(field: str, texts: Sequence[GivenText]) -> None:
    """Reject a single string, whose characters would be taken for texts."""
    if isinstance(texts, str):
        raise InvalidArgument(field, f"{texts[:40]!r} is one string: give a list of strings, or of lists of token ids")


def _form_of(field: str, given: GivenText) -> dict[str, Any]:
    """Return a text or token ids as fields of a message."""
    if isinstance(given, str):
        require_whole_characters(field, given)
        return {"text": given}
    try:
        token_ids = list(given)
    except TypeError as error:
        raise InvalidArgument(field, f"{given!r} is neither a string nor a list of token ids") from error
    return {"token_ids": inference_pb2.TokenIds(ids=checked_ids(field, token_ids))}


def _scores_of(response: inference_pb2.ScoreResponse) -> Evaluated[Score]:
    scores = [Score(tuple(logprob_of(token) for token in one.tokens), one.is_greedy) for one in response.scores]
    return Evaluated(scores, _usage_of(response))


def _vectors_of(response: inference_pb2.EmbedResponse) -> Evaluated[tuple[float, ...]]:
    return Evaluated([tuple(one.values) for one in response.embeddings], _usage_of(response))


def _usage_of(response: inference_pb2.ScoreResponse | inference_pb2.EmbedResponse) -> Usage:
    return Usage(response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.cached_tokens)
