"""The course of one Generate request, on as many servers as it takes: what each is asked for, and what is new. No I/O.

    server A   begin ── chunk ── chunk ── gone
    server B                              begin behind their tokens ── chunk ── last
    caller              chunk    chunk                                  chunk    last

What is told only at the end (`whole`, beams, the best of several) is kept until it has all come, so that it can begin
again at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from jpaged._proto.v1 import inference_pb2
from jpaged.client import wire
from jpaged.client.failures import translated, was_accepted
from jpaged.client.routing.progress import Progress
from jpaged.client.routing.traces import with_trace
from jpaged.client.routing.tries import Tries
from jpaged.errors import InternalError, JpagedError

Message = inference_pb2.GenerateResponse


class Course:
    """One request. Used by one stream, which does the waiting.

    Attributes:
        call: the gRPC call that runs it now.
        num_tries: how often it was begun.
        is_elsewhere: it has gone on behind what has come of it: messages may be other than the server sent them.
        has_ended: its last message has come; however its call ends does not matter any more.
    """

    def __init__(
        self, request: inference_pb2.GenerateRequest, tries: Tries, metadata: tuple[tuple[str, str | bytes], ...]
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
        self._num_to_skip = 0
        self.has_ended = False
        self.num_tries = 0
        self.call = self._begin()

    @property
    def has_begun(self) -> bool:
        """Whether a server had taken it in, as far as one knows."""
        return self._first is not None or self._was_accepted

    def begin_again(self) -> None:
        """Ask a server to go on behind what has come."""
        self.call = self._begin()

    def take(self, message: Message) -> list[Message]:
        """What a message adds for the caller: none, itself, or several; it is kept here, and may be changed.

        Raises:
            InternalError: it does not go on behind what there is.
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
        """Refuse a call that ended with OK, and without its last message.

        Raises:
            InternalError: always, unless the last message has come.
        """
        if not self.has_ended:
            self._tries.leave()
            raise InternalError(
                f"request {self._request.request_id!r}: the server ended the stream without its last message"
            )

    def end(self) -> None:
        """It has ended, or nobody wants it any more."""
        self._tries.leave()

    def wait_s(self, error: grpc.RpcError) -> float:
        """How long to wait before it is begun again; where it is not, raises what its call failed with."""
        if was_accepted(error):  # it ran, and was not turned away
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
            request = wire.continued_request(request, generated, seed)
        methods: Mapping[str, Any] = self._tries.enter().methods
        return methods["Generate"](request, timeout=self._tries.remaining_s, metadata=self._metadata)

    def _can_go_on(self) -> bool:
        """Whether another server could tell the rest: it has to know the seed, and tells nothing of a prompt again."""
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
            raise self._broken("another server makes other tokens of the prompt")
        if message.usage.completion_tokens < num_tokens:
            raise self._broken(
                f"the server has begun again, and not gone on behind {num_tokens} tokens: it does not know "
                "generated_token_ids"
            )

    def _broken(self, problem: str) -> JpagedError:
        self.call.cancel()
        self._tries.leave()
        return InternalError(f"request {self._request.request_id!r} cannot go on elsewhere: {problem}")

    def _fit(self, message: Message, first: Message) -> None:
        """Make a message of a later server what the first would have told: nothing twice, cached and counted as there.

        What it had counted were tokens, too, that were lost on their way: they come again, and are the same.
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
        )
        message.usage.CopyFrom(usage)
