"""The servers of a client: which of them are there, how busy they are, and which one a call goes to. No I/O.

    open ──lost──> away ──after a while: health? SERVING──> open      a client of one server calls it all the same
     │ full: not before the time that it names; silent: not before it was asked again

A call with a prompt goes where its beginning belongs, so that prefixes are computed once: to the server whose turn it
is (the highest of one hash for each server, so that servers that come or go move few of them), or as another
`Placement` says; one that is busier than others by more than a bound is passed over. Calls without a prompt go to the
least busy.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged._proto.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefixes_pb2,
    prefixes_pb2_grpc,
)
from jpaged.client.channel import Backoff
from jpaged.errors import DeadlineExceeded, Unavailable

Question = Literal["health", "load"]
"""What a server is asked of in the background."""

SERVING = health_pb2.HealthCheckResponse.SERVING
ASK_TIMEOUT_S = 2.0
"""A server that is asked how it is, and has not answered by then, is not there."""
_SILENT_S = 2 * ASK_TIMEOUT_S
"""One that has not said how busy it is is passed over for so long, which is until it has been asked again."""
_FIRST_AWAY_S, _MAX_AWAY_S = 0.2, 5.0
_LOAD_AGE_S = 1.0
"""A server is asked how busy it is when it was last asked so long ago, and a call is to be placed."""
_SLACK = 2
_SHARE_AHEAD = 0.5
"""A server that has more than the least busy, by this share of the mean or by _SLACK, is passed over."""
_KEY_CHARS, _KEY_TOKENS = 1024, 256
"""What counts of a prompt's beginning."""


class Endpoint:
    """One server, and what is known of it. Written by `Endpoints` alone.

    Attributes:
        name: the target that it was given by.
        methods: those of its channel, by name; those of the services where none are given.
        health: those of grpc.health.v1.
        num_open: calls from here that it has not ended.
        proxy: the HTTP proxy of the connection, for messages; "" is none.
    """

    def __init__(self, name: str, channel: Any, methods: Mapping[str, Any] | None = None, proxy: str = "") -> None:
        self.name, self.channel, self.proxy = name, channel, proxy
        self.methods: Mapping[str, Any] = stubs(channel) if methods is None else methods
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.num_open = 0
        self.num_others = 0
        self.is_there = True
        self.away_until_s = self.full_until_s = self.load_due_s = 0.0
        self.is_asked = False
        self.backoff = _backoff()

    def is_open(self, now_s: float) -> bool:
        """Whether it is there and takes calls, as far as one knows."""
        return self.is_there and now_s >= self.full_until_s

    @property
    def num_busy(self) -> int:
        """Calls that it has, those of other clients included as it last told."""
        return self.num_open + self.num_others


def stubs(channel: Any) -> dict[str, Any]:
    """Return the methods of the services, by name, over a channel."""
    inference = inference_pb2_grpc.InferenceServiceStub(channel)
    control = control_pb2_grpc.ControlServiceStub(channel)
    return vars(inference) | vars(control) | vars(prefixes_pb2_grpc.PrefixServiceStub(channel))


class Server(Protocol):
    """What a placement knows of a server."""

    @property
    def name(self) -> str:
        """Nobody else's."""

    @property
    def num_busy(self) -> int:
        """Calls that it has."""


S = TypeVar("S", bound=Server)


def not_ahead(usable: Sequence[S]) -> list[S]:
    """Return those of at least one server that do not have many more calls than the least busy."""
    least, total = min(one.num_busy for one in usable), sum(one.num_busy for one in usable)
    most = least + max(_SLACK, _SHARE_AHEAD * total / len(usable))
    return [one for one in usable if one.num_busy <= most]


class Placement(Protocol):
    """Where a prompt belongs."""

    def place(self, key: Any, usable: Sequence[Endpoint]) -> Endpoint:
        """Return the server that a call goes to, which it now does.

        Args:
            key: of the prompt's beginning.
            usable: at least one; those that are not ahead of the others.
        """


class Rendezvous:
    """The server whose turn a beginning is: the highest of one hash for each. It knows nothing of what was before."""

    def place(self, key: bytes, usable: Sequence[Endpoint]) -> Endpoint:
        """See `Placement`."""
        return max(usable, key=lambda one: rank(key, one.name))


class Endpoints:
    """All servers of a client. Safe to call from several threads.

    Args:
        endpoints: at least one, unless they are watched; with several they are asked how they are.
        ask: sends a question without waiting; the answer goes to `told`.
        clock: seconds.
        lock: guards what is known of them; None makes one.
        placement: where prompts belong.
        is_watched: somebody else calls `look` again and again; then one that is not there is not called on a guess.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        ask: Callable[[Endpoint, Question], None],
        clock: Callable[[], float] = time.monotonic,
        lock: threading.Lock | None = None,
        *,
        placement: Placement | None = None,
        is_watched: bool = False,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._ask = ask
        self._clock = clock
        self._lock = lock or threading.Lock()
        self._placement = Rendezvous() if placement is None else placement
        self._is_watched = is_watched
        self._turn = itertools.count()

    def __len__(self) -> int:
        return len(self._endpoints)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints)

    def each(self) -> Iterator[Endpoints]:
        """Every server by itself, for calls that are of one."""
        return (Endpoints((one,), self._ask, self._clock, self._lock) for one in self._endpoints)

    def add(self, endpoint: Endpoint) -> None:
        """Another server; nothing where it is one already."""
        with self._lock:
            if endpoint not in self._endpoints:
                self._endpoints = (*self._endpoints, endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        """No call goes to it any more; those that it has go on."""
        with self._lock:
            self._endpoints = tuple(one for one in self._endpoints if one is not endpoint)

    @property
    def names(self) -> str:
        """All of them, to call them by."""
        return ", ".join(endpoint.name for endpoint in self._endpoints)

    def enter(self, key: Any, avoided: Collection[Endpoint] = ()) -> Endpoint:
        """The server for the next call, which is open there from now on until `leave`.

        Args:
            key: of the prompt's beginning; None is no prompt.
            avoided: servers that are used only if there is no other: the call has failed there.

        Raises:
            Unavailable: they are watched, and none is there.
        """
        with self._lock:
            now_s = self._clock()
            endpoint = self._chosen(key, now_s, avoided)
            endpoint.num_open += 1
            questions = self._due(now_s)
        for asked, question in questions:
            self._ask(asked, question)
        return endpoint

    def look(self) -> None:
        """Ask what is due, though no call is to be placed."""
        with self._lock:
            questions = self._due(self._clock())
        for asked, question in questions:
            self._ask(asked, question)

    def leave(self, endpoint: Endpoint) -> None:
        """A call is no longer open."""
        with self._lock:
            endpoint.num_open -= 1

    def has_open(self, avoided: Collection[Endpoint] = ()) -> bool:
        """Return True if a server that is not avoided is there and takes calls, as far as one knows."""
        with self._lock:
            now_s = self._clock()
            return any(one.is_open(now_s) for one in self._endpoints if one not in avoided)

    def note_answer(self, endpoint: Endpoint) -> None:
        """It has answered: it is there."""
        if not endpoint.is_there or endpoint.full_until_s:
            with self._lock:
                endpoint.is_there, endpoint.full_until_s, endpoint.backoff = True, 0.0, _backoff()

    def note_absence(self, endpoint: Endpoint) -> None:
        """It is not there, or has ended a call by going: it is left for a while, which grows until it answers.

        One that is watched is asked at once: calls of many come through here, and one may be lost for its own sake.
        """
        with self._lock:
            now_s = self._clock()
            if endpoint.is_there or now_s >= endpoint.away_until_s:  # all its calls end at once, and count once
                is_news = endpoint.is_there and self._is_watched
                endpoint.is_there, endpoint.num_others = False, 0
                endpoint.away_until_s = now_s + (0.0 if is_news else endpoint.backoff.next_s())
            questions = self._due(now_s) if self._is_watched else []
        for asked, question in questions:
            self._ask(asked, question)

    def note_fault(self, endpoint: Endpoint) -> None:
        """It has ended a call with a fault of its own; whoever watches it sees by its health whether it is more."""
        if not self._is_watched:
            self.note_absence(endpoint)

    def note_full(self, endpoint: Endpoint, retry_after_s: float, *, is_for_all: bool) -> None:
        """It takes no call before the time that it names, of this caller or of anybody."""
        if is_for_all or not self._is_watched:  # else callers are many, and one of them has had its share
            with self._lock:
                endpoint.full_until_s = self._clock() + retry_after_s

    def told(self, endpoint: Endpoint, question: Question, answer: Any, error: Exception | None) -> None:
        """What came of a question; an answer is a health status as a number, or a GetLoadResponse."""
        if question == "health":
            if error is None and answer.status == SERVING:
                self.note_answer(endpoint)
            else:
                self.note_absence(endpoint)
        elif isinstance(error, Unavailable):
            self.note_absence(endpoint)
        with self._lock:
            endpoint.is_asked = False
            if question == "load" and isinstance(error, DeadlineExceeded):  # others are better than one that is silent
                endpoint.full_until_s = self._clock() + _SILENT_S
            if question == "load" and error is None:
                endpoint.num_others = max(0, answer.num_running + answer.num_waiting - endpoint.num_open)

    def has_any(self) -> bool:
        """Whether a server is there, though it may be full."""
        with self._lock:
            return any(endpoint.is_there for endpoint in self._endpoints)

    def _chosen(self, key: Any, now_s: float, avoided: Collection[Endpoint]) -> Endpoint:
        there = [endpoint for endpoint in self._endpoints if endpoint.is_there]
        usable = [endpoint for endpoint in there if endpoint.is_open(now_s)] or there
        usable = [endpoint for endpoint in usable if endpoint not in avoided] or usable
        if not usable:
            if self._is_watched:
                raise Unavailable(f"no server is there: {self.names or 'there is none'}")
            return min(self._endpoints, key=lambda endpoint: endpoint.away_until_s)
        if key is None:
            least = min(one.num_busy for one in usable)
            idle = [endpoint for endpoint in usable if endpoint.num_busy == least]
            return idle[next(self._turn) % len(idle)]
        return self._placement.place(key, not_ahead(usable))

    def _due(self, now_s: float) -> list[tuple[Endpoint, Question]]:
        """What is to be asked now, of those that are asked nothing."""
        found: list[tuple[Endpoint, Question]] = []
        for endpoint in self._endpoints if len(self._endpoints) > 1 or self._is_watched else ():
            if endpoint.is_asked:
                continue
            if not endpoint.is_there and now_s >= endpoint.away_until_s:
                found.append((endpoint, "health"))
            elif endpoint.is_there and now_s >= endpoint.load_due_s:
                endpoint.load_due_s = now_s + _LOAD_AGE_S
                found.append((endpoint, "load"))
        for endpoint, _ in found:
            endpoint.is_asked = True
        return found


def asked_of(endpoint: Endpoint, question: Question) -> tuple[Any, Any]:
    """The method that a question is asked with, and its message."""
    if question == "health":
        return endpoint.health.Check, health_pb2.HealthCheckRequest()
    return endpoint.methods["GetLoad"], control_pb2.GetLoadRequest()


def key_of(request: Any) -> bytes | None:
    """What of a request decides which server has its prefix; None where it has no prompt."""
    field = "prompt"
    if isinstance(request, prefixes_pb2.SavePrefixRequest | prefixes_pb2.FetchPrefixRequest):
        salt, field = request.cache_salt, "prefix"
    elif isinstance(request, inference_pb2.GenerateRequest):
        salt = request.sampling.cache_salt
    elif isinstance(request, inference_pb2.ScoreRequest):
        salt = request.cache_salt
    else:
        return None
    match request.WhichOneof(field):
        case "text":
            start = request.text[:_KEY_CHARS]
        case "token_ids":
            start = repr(request.token_ids.ids[:_KEY_TOKENS])
        case _:
            start = ""
            for message in request.chat.messages:
                start += f"{message.role}\0{message.content}\0"
                if len(start) >= _KEY_CHARS:
                    break
    return "\0".join((request.adapter, salt, start[:_KEY_CHARS])).encode(errors="replace")


def rank(key: bytes, name: str) -> bytes:
    """Return a server's number for a key: the highest of all servers' has it."""
    return hashlib.blake2b(key, digest_size=8, key=hashlib.blake2b(name.encode(), digest_size=16).digest()).digest()


def _backoff() -> Backoff:
    return Backoff(_FIRST_AWAY_S, 2.0, _MAX_AWAY_S)
