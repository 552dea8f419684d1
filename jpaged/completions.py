"""Folds what comes of one request, piece by piece, into a `RequestOutput`: one completion an index."""

from __future__ import annotations

from typing import Protocol

from jpaged.errors import InternalError
from jpaged.types import CompletionOutput, PositionLogprobs, RequestOutput, SequenceFinish, Usage


class Piece(Protocol):
    """What one message or one event added to one sequence."""

    @property
    def index(self) -> int: ...

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def finish(self) -> SequenceFinish | None: ...

    @property
    def cumulative_logprob(self) -> float | None: ...

    @property
    def is_last(self) -> bool: ...


class Completions:
    """The pieces of one request, in the order in which they came.

    Args:
        has_logprobs: log-probabilities were asked for; without them completions have none.
    """

    def __init__(self, *, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs
        self._pieces: dict[int, list[Piece]] = {}
        self._last: Piece | None = None

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self._pieces.setdefault(piece.index, []).append(piece)
        self._last = piece

    def output(self, request_id: str, prompt: str | None, prompt_token_ids: tuple[int, ...]) -> RequestOutput:
        """Return everything, the sequences in the order of their indices.

        Raises:
            InternalError: the last piece is missing, or the finish of a sequence.
        """
        if self._last is None or not self._last.is_last:
            raise InternalError(f"the stream of request {request_id!r} ended without its last message")
        outputs = tuple(self._completion(index) for index in sorted(self._pieces))
        return RequestOutput(request_id, prompt, prompt_token_ids, outputs, self._last.usage)

    def _completion(self, index: int) -> CompletionOutput:
        pieces = self._pieces[index]
        last = pieces[-1]
        if last.finish is None or last.cumulative_logprob is None:
            raise InternalError(f"the stream ended without a finish of sequence {index}")
        return CompletionOutput(
            index=index,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
            cumulative_logprob=last.cumulative_logprob,
            logprobs=tuple(p for piece in pieces for p in piece.logprobs) if self._has_logprobs else None,
            finish_reason=last.finish.reason.value,
            matched_stop=last.finish.matched_stop,
        )
