"""Score and Embed: protos -> calls of the service, and the results -> protos."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jpaged._proto.v1 import inference_pb2
from jpaged.errors import InvalidArgument
from jpaged.service.records import NOBODY, Caller
from jpaged.service.score_embed import Asker, GivenContinuation, embed, require_parts, score
from jpaged.service.service import Service
from jpaged.types import Pooling, Prompt, Score, TokenLogprob, Usage

_POOLINGS: dict[int, Pooling] = {
    inference_pb2.POOLING_UNSPECIFIED: "last",
    inference_pb2.POOLING_LAST: "last",
    inference_pb2.POOLING_MEAN: "mean",
}


def asker_of(
    message: inference_pb2.ScoreRequest | inference_pb2.EmbedRequest,
    tenant: str,
    remaining_s: float | None,
    caller: Caller = NOBODY,
) -> Asker:
    """Return the caller and options of a call."""
    return Asker(
        model=message.model if message.HasField("model") else None,
        tenant=tenant,
        remaining_s=remaining_s,
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        priority=message.priority,
        caller=caller,
    )


async def scored(service: Service, asker: Asker, message: inference_pb2.ScoreRequest) -> inference_pb2.ScoreResponse:
    """Answer Score."""
    num = len(message.continuations)
    require_parts("continuations", num)

    def read() -> tuple[Prompt, Sequence[GivenContinuation]]:
        prompt = _prompt("prompt", message, message.WhichOneof("prompt"))
        return prompt, [_continuation(i, one) for i, one in enumerate(message.continuations)]

    size = num * _size(message) + sum(map(_size, message.continuations))
    scores = await score(service, asker, read, size)

    def response() -> inference_pb2.ScoreResponse:
        return inference_pb2.ScoreResponse(
            scores=[_message_of(one) for one in scores], usage=_usage(one.usage for one in scores)
        )

    return await service.work(response, sum(len(one.tokens) for one in scores))


async def embedded(service: Service, asker: Asker, message: inference_pb2.EmbedRequest) -> inference_pb2.EmbedResponse:
    """Answer Embed."""
    require_parts("inputs", len(message.inputs))
    if message.pooling not in _POOLINGS:
        raise InvalidArgument("pooling", f"{message.pooling} is not a value of Pooling")

    def read() -> list[Prompt]:
        return [_prompt(f"inputs[{i}]", one, one.WhichOneof("input")) for i, one in enumerate(message.inputs)]

    size = sum(map(_size, message.inputs))
    found = await embed(service, asker, read, size, _POOLINGS[message.pooling], normalize=message.normalize)

    def response() -> inference_pb2.EmbedResponse:
        return inference_pb2.EmbedResponse(
            embeddings=[inference_pb2.Embedding(values=one.values) for one in found],
            usage=_usage(one.usage for one in found),
        )

    return await service.work(response, sum(len(one.values) for one in found))


def _size(message: inference_pb2.ScoreRequest | inference_pb2.Continuation | inference_pb2.EmbedInput) -> int:
    """Return the number of characters or token ids."""
    return len(message.text) + len(message.token_ids.ids)


def _prompt(field: str, message: inference_pb2.ScoreRequest | inference_pb2.EmbedInput, form: str | None) -> Prompt:
    match form:
        case "text":
            return Prompt(text=message.text)
        case "token_ids":
            return Prompt(token_ids=list(message.token_ids.ids))
        case _:
            raise InvalidArgument(field, "is missing: set text or token_ids")


def _continuation(i: int, message: inference_pb2.Continuation) -> GivenContinuation:
    match message.WhichOneof("continuation"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case _:
            raise InvalidArgument(f"continuations[{i}]", "is missing: set text or token_ids")


def _message_of(score: Score) -> inference_pb2.Score:
    return inference_pb2.Score(
        logprob=score.logprob, is_greedy=score.is_greedy, tokens=[_token(one) for one in score.tokens]
    )


def _token(token: TokenLogprob) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob, rank=token.rank)


def _usage(usages: Iterable[Usage]) -> inference_pb2.Usage:
    """Return the sum of usages, without the sampled tokens, which are dropped."""
    many = list(usages)
    return inference_pb2.Usage(
        prompt_tokens=sum(one.prompt_tokens for one in many), cached_tokens=sum(one.cached_tokens for one in many)
    )
