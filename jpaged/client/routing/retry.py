"""Retry rules of a call: which failures are retried, on which server, and how often. No I/O.

    a call            UNAVAILABLE, lost        full queue           INTERNAL from a server   anything else
    no output yet     elsewhere; MAX_ATTEMPTS  elsewhere, once      elsewhere, once          raises
    it was accepted   elsewhere; as `ResumePolicy` after its retry time elsewhere, once          raises

"Elsewhere" is another available server, without a delay. A call is lost if its server goes away while it runs: the
status is UNAVAILABLE, a CANCELLED that this client did not request, or one made up by the transport.

Calls carry the W3C trace context of the caller: a server's spans become part of the caller's trace.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jpaged.client.channel import Attempts, Backoff
from jpaged.client.errors import is_of_server, translated
from jpaged.client.routing.endpoints import Endpoint, Endpoints
from jpaged.errors import AlreadyExists, InternalError, InvalidArgument, JpagedError, QueueFull, TryLater

_FIRST_WAIT_S, _MAX_WAIT_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Limits for resuming a stream whose server fails, on another server or the same one.

    Attributes:
        within_s: seconds that a stream looks for a server after a loss; its timeout applies too.
        max_times: number of servers that one stream may lose; the request itself may be what crashes them.
    """

    within_s: float = 60.0
    max_times: int = 64

    def __post_init__(self) -> None:
        if not (self.within_s > 0 and math.isfinite(self.within_s)):
            raise InvalidArgument("resuming.within_s", f"{self.within_s} is not a number above 0")
        if self.max_times < 1:
            raise InvalidArgument("resuming.max_times", f"{self.max_times} is below the limit of 1")


class RetryState:
    """The attempts of one call: the server and the timeout of each, and whether another follows.

    Args:
        key: key of the prompt's beginning, as the placement of the endpoints defines it; None without a prompt.
        resuming: limits for resuming a stream that has begun; None disables it.
    """

    def __init__(
        self, endpoints: Endpoints, key: Any, timeout_s: float | None, resuming: ResumePolicy | None = None
    ) -> None:
        self._endpoints = endpoints
        self._key = key
        self._attempts = Attempts(timeout_s)
        self._resuming = resuming
        self._endpoint: Endpoint | None = None
        self._num_losses = self._num_faults = 0
        self._failed: list[Endpoint] = []  # servers where this call has failed since the last answer
        self._lost_s: float | None = None
        self._backoff = _backoff()

    @property
    def can_go_on(self) -> bool:
        """True if a stream that has begun may resume on another server."""
        return self._resuming is not None

    @property
    def proxy(self) -> str:
        """The proxy of this try's connection, for messages; "" is none."""
        return "" if self._endpoint is None else self._endpoint.proxy

    @property
    def remaining_s(self) -> float | None:
        """Remaining time for the next attempt: all attempts share one timeout."""
        return self._attempts.remaining_s

    def enter(self) -> Endpoint:
        """Return the server of the next attempt."""
        self._endpoint = self._endpoints.enter(self._key, self._failed)
        return self._endpoint

    def answered(self) -> None:
        """Record that the current attempt has been answered."""
        if self._endpoint is not None:
            self._endpoints.note_answer(self._endpoint)
        if self._failed or self._lost_s is not None:
            self._failed, self._lost_s, self._backoff = [], None, _backoff()

    def leave(self) -> None:
        """Release the server of the current attempt. Idempotent."""
        if self._endpoint is not None:
            self._endpoints.leave(self._endpoint)
            self._endpoint = None

    def wait_s(self, error: grpc.RpcError, *, has_begun: bool = False) -> float:
        """Return the delay before another attempt after a failure; if there is none, raise the failure.

        Args:
            has_begun: it is a stream that a server had accepted, and that can resume after its output so far.
        """
        failure = translated(error, self.proxy)
        try:
            wait_s = self._after(failure, error, has_begun)
            if wait_s is None:
                raise failure from error
            return wait_s
        finally:
            del failure  # its traceback would keep the failure and the request alive

    def _after(self, failure: JpagedError, error: grpc.RpcError, has_begun: bool) -> float | None:
        """Return the delay before another attempt; None if there is none."""
        retry_after_s, endpoint = 0.0, self._endpoint
        self.leave()
        if endpoint is not None and endpoint not in self._failed:
            self._failed.append(endpoint)
        is_fault = isinstance(failure, InternalError) and is_of_server(error)
        is_lost = not is_fault and _is_lost(error)
        if endpoint is not None and is_lost:
            self._endpoints.note_absence(endpoint)
        if endpoint is not None and is_fault:
            self._endpoints.note_fault(endpoint)
        if isinstance(failure, TryLater):
            retry_after_s = failure.retry_after_s
            if endpoint is not None:
                self._endpoints.note_full(endpoint, retry_after_s, is_for_all=isinstance(failure, QueueFull))
        is_again = has_begun and isinstance(failure, AlreadyExists) and self._lost_s is not None
        self._num_faults += is_fault
        if (has_begun and self._resuming is None) or not (
            is_lost or is_again or isinstance(failure, TryLater) or (is_fault and self._num_faults == 1)
        ):
            return None
        if has_begun and not self._may_be_lost():
            return None
        if self._endpoints.has_open(self._failed):
            return 0.0
        if has_begun and not is_fault:
            return self._attempts.within(self._backoff.next_s(retry_after_s))
        return self._attempts.wait_s(grpc.StatusCode.UNAVAILABLE) if is_lost else None

    def _may_be_lost(self) -> bool:
        """Count the loss of a server by a stream; return False if the limits of `ResumePolicy` are exceeded."""
        now_s = time.monotonic()
        if self._lost_s is None:
            self._lost_s = now_s
            self._num_losses += 1
        resuming = self._resuming
        if resuming is None:
            return False
        return self._num_losses <= resuming.max_times and now_s - self._lost_s < resuming.within_s


def _is_lost(error: Any) -> bool:
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return True
    return code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and not is_of_server(error)


def _backoff() -> Backoff:
    return Backoff(_FIRST_WAIT_S, 2.0, _MAX_WAIT_S)


Metadata = tuple[tuple[str, str | bytes], ...]

_PROPAGATOR = TraceContextTextMapPropagator()


def with_trace(metadata: Metadata) -> Metadata:
    """Return metadata with the current span of OpenTelemetry, if the program has one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return (*metadata, *carrier.items()) if carrier else metadata
