"""One Generate request, on one or more servers: the request to each, and the new output of each. No I/O.

    server A   begin ── chunk ── chunk ── gone
    server B                              resume after their tokens ── chunk ── last
    caller              chunk    chunk                                  chunk    last

The output so far is needed to resume on another server, and to skip repeated output. Output that is delivered only at
the end (`whole`, beams, best_of) is buffered until it is complete, so that the request can restart at any time.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import grpc

from jpaged._proto.v1 import inference_pb2
from jpaged.client import convert
from jpaged.client.errors import translated, was_accepted
from jpaged.client.routing.retry import RetryState, with_trace
from jpaged.errors import InternalError, JpagedError
from jpaged.types import PriorOutput


class StreamDelta(Protocol):
    """Addition of a message, or an event, to a sequence."""

    @property
    def index(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[Any]:
        """One position for each token, with `chosen`, or none."""

    @property
    def prompt_logprobs(self) -> Sequence[Any]: ...


class _StreamedSequence:
    """Output of one sequence so far."""

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.cumulative_logprob = 0.0
        self.has_finished = False

    def add(self, delta: StreamDelta, has_finished: bool) -> None:
        self.token_ids.extend(delta.token_ids)
        # one by one, in the engine's order, so that the sum is identical to the last bit
        for position in delta.logprobs:
            self.cumulative_logprob += position.chosen.logprob
        self.has_finished = self.has_finished or has_finished


class Progress:
    """The collected deltas of one request, from any number of servers.

    Attributes:
        num_prompt_logprobs: prompt positions whose log-probabilities have come.
    """

    def __init__(self) -> None:
        self.num_prompt_logprobs = 0
        self._sequences: dict[int, _StreamedSequence] = {}

    def add(self, delta: StreamDelta, has_finished: bool) -> None:
        """Add a delta.

        Args:
            has_finished: it is the sequence's last.
        """
        self.num_prompt_logprobs += len(delta.prompt_logprobs)
        if delta.token_ids or has_finished:
            self._sequences.setdefault(delta.index, _StreamedSequence()).add(delta, has_finished)

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, over all sequences."""
        return sum(len(one.token_ids) for one in self._sequences.values())

    def generated(self) -> tuple[PriorOutput, ...]:
        """Return the tokens of each sequence that has begun."""
        return tuple(
            PriorOutput(index, tuple(one.token_ids), min(0.0, one.cumulative_logprob), one.has_finished)
            for index, one in sorted(self._sequences.items())
            if one.token_ids
        )


Message = inference_pb2.GenerateResponse


class ResumableStream:
    """One request. Used by one stream, which does the waiting.

    Attributes:
        call: the current gRPC call.
        num_tries: number of times it was started.
        is_elsewhere: it has resumed; its messages may differ from those that the server sent.
        has_ended: its last message has come; the call's status no longer matters.
    """

    def __init__(
        self, request: inference_pb2.GenerateRequest, tries: RetryState, metadata: tuple[tuple[str, str | bytes], ...]
    ) -> None:
        self._request = request
        self._tries = tries
        self._metadata = with_trace(metadata)
        sampling = request.sampling
        is_ranked = bool(sampling.beam_width) or sampling.best_of > max(1, sampling.n)
        self._is_held = request.whole or is_ranked
        self._held: list[Message] = []
        self._progress = Progress()
        self._first: Message | None = None
        self._usage = inference_pb2.Usage()
        self._is_fresh = True
        self.is_elsewhere = self._was_accepted = False
        self.has_ended = False
        self.num_tries = 0
        self.call = self._begin()

    @property
    def has_begun(self) -> bool:
        """True if a server is known to have accepted it."""
        return self._first is not None or self._was_accepted

    def begin_again(self) -> None:
        """Resume the request on a server, after the output so far."""
        self.call = self._begin()

    def take(self, message: Message) -> list[Message]:
        """Return the messages for the caller: none, this one, or several. The message is kept, and may be modified.

        Raises:
            InternalError: it does not continue the output so far.
        """
        self._tries.answered()
        if message.is_last:
            self.has_ended = True
            self._tries.leave()
        if self._is_fresh:
            self._check_seam(message)
        if self._is_held:
            self._held.append(message)
            if not message.is_last:
                return []
            held, self._held = self._held, []
            return held
        if self._first is None:
            self._first = message
        elif self.is_elsewhere:
            self._fit(message, self._first)
        self._is_fresh = False
        self._progress.add(message, message.HasField("finish"))
        self._usage = message.usage
        return [message]

    def require_end(self) -> None:
        """Raise if the call ended with OK but without its last message.

        Raises:
            InternalError: the last message has not come.
        """
        if not self.has_ended:
            self._tries.leave()
            raise InternalError(
                f"request {self._request.request_id!r}: the server ended the stream without its last message"
            )

    def end(self) -> None:
        """Release the server: the request has ended, or was cancelled."""
        self._tries.leave()

    def wait_s(self, error: grpc.RpcError) -> float:
        """Return the delay before a retry; if there is none, raise the call's error."""
        if was_accepted(error):  # it ran, i.e. was not refused
            self._was_accepted = True
            self._tries.answered()
        has_told = not self._is_held and self._first is not None
        if has_told and not self._can_go_on():
            proxy = self._tries.proxy
            self._tries.leave()
            raise translated(error, proxy) from error
        self._held.clear()
        return self._tries.wait_s(error, has_begun=has_told or (self._was_accepted and self._tries.can_go_on))

    def _begin(self) -> Any:
        self._is_fresh = True
        self.num_tries += 1
        generated, request = self._progress.generated(), self._request
        self._num_to_skip = 0 if generated else self._progress.num_prompt_logprobs
        if self._first is not None:
            self.is_elsewhere = True
            seed = self._first.seed if self._first.HasField("seed") else None
            request = convert.continued_request(request, generated, seed)
        methods: Mapping[str, Any] = self._tries.enter().methods
        return methods["Generate"](request, timeout=self._tries.remaining_s, metadata=self._metadata)

    def _can_go_on(self) -> bool:
        """Return True if another server can continue: seed known, and no prompt log-probabilities pending."""
        sampling, first = self._request.sampling, self._first
        is_sampled = not sampling.HasField("temperature") or sampling.temperature > 0
        if is_sampled and not sampling.HasField("seed") and (first is None or not first.HasField("seed")):
            return False
        num_told, num_all = self._progress.num_prompt_logprobs, self._usage.prompt_tokens - 1
        return not (sampling.HasField("prompt_logprobs") and self._progress.num_tokens and num_told < num_all)

    def _check_seam(self, message: Message) -> None:
        first, num_tokens = self._first, self._progress.num_tokens
        if first is None:
            return
        if message.prompt_token_ids and message.prompt_token_ids != first.prompt_token_ids:
            raise self._broken("another server tokenizes the prompt differently")
        if message.usage.completion_tokens < num_tokens:
            raise self._broken(
                f"the server started again instead of continuing after {num_tokens} tokens: it does not support "
                "generated_token_ids"
            )

    def _broken(self, problem: str) -> JpagedError:
        self.call.cancel()
        self._tries.leave()
        return InternalError(f"request {self._request.request_id!r} cannot continue on another server: {problem}")

    def _fit(self, message: Message, first: Message) -> None:
        """Rewrite a message of a later server to match the first one: no repeated output, the first server's counts.

        The first server may have counted tokens that were lost in transit; they are generated again and are the same.
        """
        num_skipped = min(self._num_to_skip, len(message.prompt_logprobs))
        self._num_to_skip -= num_skipped
        del message.prompt_logprobs[:num_skipped]
        message.ClearField("prompt_token_ids")
        message.ClearField("seed")
        usage = inference_pb2.Usage(
            prompt_tokens=message.usage.prompt_tokens,
            completion_tokens=max(message.usage.completion_tokens, self._usage.completion_tokens),
            cached_tokens=first.usage.cached_tokens,
            image_tokens=message.usage.image_tokens,
        )
        message.usage.CopyFrom(usage)
