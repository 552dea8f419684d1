"""The servers of a client: availability, load, and choice of a server per call. No I/O.

    open ──lost──> away ──after a while: health? SERVING──> open      a client of one server calls it anyway
      │ full: not before its retry time; silent: not before the next query

A call with a prompt goes to the server that its beginning is hashed to, so that prefixes are computed once. Rendezvous
hashing is used (the highest of one hash per server), so that few prefixes move when servers come or go; another
`ServerPlacement` may replace it. A server with much more load than others is skipped. Calls without a prompt go to the
least loaded server.
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
"""Background queries of a server."""

SERVING = health_pb2.HealthCheckResponse.SERVING
ASK_TIMEOUT_S = 2.0
"""A server that does not answer a query within this time counts as unavailable."""
_SILENT_S = 2 * ASK_TIMEOUT_S
"""A server that does not report its load is skipped for this time, i.e. until the next query."""
_FIRST_AWAY_S, _MAX_AWAY_S = 0.2, 5.0
_LOAD_AGE_S = 1.0
"""The load is queried again if it is older than this when a call is placed."""
_SLACK = 2
_SHARE_AHEAD = 0.5
"""A server whose load exceeds the lowest one by this share of the mean, or by _SLACK, is skipped."""
_KEY_CHARS, _KEY_TOKENS, _KEY_EMBED_BYTES = 1024, 256, 1 << 18
"""Length of a prompt's beginning that is hashed."""


class Endpoint:
    """One server, and its known state. Written only by `Endpoints`.

    Attributes:
        name: its target, as given.
        methods: RPC methods of the channel, by name; by default those of the services.
        health: methods of grpc.health.v1.
        num_open: open calls from this client.
        proxy: the HTTP proxy of the connection, for messages; "" for none.
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
        """Return True if it is believed to be available and accepting calls."""
        return self.is_there and now_s >= self.full_until_s

    @property
    def num_busy(self) -> int:
        """Number of open calls, including those of other clients as last reported."""
        return self.num_open + self.num_others


def stubs(channel: Any) -> dict[str, Any]:
    """Return the RPC methods of the services on a channel, by name."""
    inference = inference_pb2_grpc.InferenceServiceStub(channel)
    control = control_pb2_grpc.ControlServiceStub(channel)
    return vars(inference) | vars(control) | vars(prefixes_pb2_grpc.PrefixServiceStub(channel))


class ServerState(Protocol):
    """A server as a placement sees it."""

    @property
    def name(self) -> str:
        """Unique name."""

    @property
    def num_busy(self) -> int:
        """Number of open calls."""


S = TypeVar("S", bound=ServerState)


def within_load_margin(usable: Sequence[S]) -> list[S]:
    """Return the servers whose load is not much higher than the lowest."""
    least, total = min(one.num_busy for one in usable), sum(one.num_busy for one in usable)
    most = least + max(_SLACK, _SHARE_AHEAD * total / len(usable))
    return [one for one in usable if one.num_busy <= most]


class ServerPlacement(Protocol):
    """Strategy that maps a prompt to a server."""

    def place(self, key: Any, usable: Sequence[Endpoint]) -> Endpoint:
        """Return the server for a call, and record that the call goes there.

        Args:
            key: key of the prompt's beginning.
            usable: at least one; servers that are not overloaded.
        """


class Rendezvous:
    """Stateless rendezvous hashing: the server with the highest hash for a key."""

    def place(self, key: bytes, usable: Sequence[Endpoint]) -> Endpoint:
        """See `ServerPlacement`."""
        return max(usable, key=lambda one: rank(key, one.name))


class Endpoints:
    """All servers of a client. Thread-safe.

    Args:
        endpoints: at least one, unless they are watched; several are queried in the background.
        ask: sends a query without blocking; `handle_answer` handles the answer.
        clock: seconds.
        lock: guards the state of the servers; None creates one.
        placement: strategy for prompts.
        is_watched: the owner calls `look` periodically; unavailable servers are then never called on a guess.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        ask: Callable[[Endpoint, Question], None],
        clock: Callable[[], float] = time.monotonic,
        lock: threading.Lock | None = None,
        *,
        placement: ServerPlacement | None = None,
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
        """Yield every server as an `Endpoints` with only this one, for calls to a specific server."""
        return (Endpoints((one,), self._ask, self._clock, self._lock) for one in self._endpoints)

    def add(self, endpoint: Endpoint) -> None:
        """Add a server, unless it is known."""
        with self._lock:
            if endpoint not in self._endpoints:
                self._endpoints = (*self._endpoints, endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        """Remove a server: it gets no new calls, and its open calls continue."""
        with self._lock:
            self._endpoints = tuple(one for one in self._endpoints if one is not endpoint)

    @property
    def names(self) -> str:
        """The names of all servers, for messages."""
        return ", ".join(endpoint.name for endpoint in self._endpoints)

    def enter(self, key: Any, avoided: Collection[Endpoint] = ()) -> Endpoint:
        """Return the server for the next call, which counts as open there until `leave`.

        Args:
            key: key of the prompt's beginning; None without a prompt.
            avoided: servers where the call has failed; used only if there is no other.

        Raises:
            Unavailable: the servers are watched, and none is available.
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
        """Send due queries even though no call is placed."""
        with self._lock:
            questions = self._due(self._clock())
        for asked, question in questions:
            self._ask(asked, question)

    def leave(self, endpoint: Endpoint) -> None:
        """Record that a call has ended."""
        with self._lock:
            endpoint.num_open -= 1

    def has_open(self, avoided: Collection[Endpoint] = ()) -> bool:
        """Return True if a server outside `avoided` is believed to be available and accepting calls."""
        with self._lock:
            now_s = self._clock()
            return any(one.is_open(now_s) for one in self._endpoints if one not in avoided)

    def note_answer(self, endpoint: Endpoint) -> None:
        """Record an answer: the server is available."""
        if not endpoint.is_there or endpoint.full_until_s:
            with self._lock:
                endpoint.is_there, endpoint.full_until_s, endpoint.backoff = True, 0.0, _backoff()

    def note_absence(self, endpoint: Endpoint) -> None:
        """Record that a server is unavailable or ended a call by disconnecting; back off until it answers.

        A watched server is queried at once: it serves many callers, and a single call may fail for another reason.
        """
        with self._lock:
            now_s = self._clock()
            if endpoint.is_there or now_s >= endpoint.away_until_s:  # its calls all fail at once, and count once
                is_news = endpoint.is_there and self._is_watched
                endpoint.is_there, endpoint.num_others = False, 0
                endpoint.away_until_s = now_s + (0.0 if is_news else endpoint.backoff.next_s())
            questions = self._due(now_s) if self._is_watched else []
        for asked, question in questions:
            self._ask(asked, question)

    def note_fault(self, endpoint: Endpoint) -> None:
        """Record an internal error of the server; if watched, its health shows whether it is unavailable."""
        if not self._is_watched:
            self.note_absence(endpoint)

    def note_full(self, endpoint: Endpoint, retry_after_s: float, *, is_for_all: bool) -> None:
        """Record that it accepts no call before its retry time, from this caller or from anyone."""
        if is_for_all or not self._is_watched:  # otherwise the limit is that of one of many callers
            with self._lock:
                endpoint.full_until_s = self._clock() + retry_after_s

    def handle_answer(self, endpoint: Endpoint, question: Question, answer: Any, error: Exception | None) -> None:
        """Handle the answer to a query: a health response, a GetLoadResponse, or an error."""
        if question == "health":
            if error is None and answer.status == SERVING:
                self.note_answer(endpoint)
            else:
                self.note_absence(endpoint)
        elif isinstance(error, Unavailable):
            self.note_absence(endpoint)
        with self._lock:
            endpoint.is_asked = False
            # prefer others to a server that does not answer
            if question == "load" and isinstance(error, DeadlineExceeded):
                endpoint.full_until_s = self._clock() + _SILENT_S
            if question == "load" and error is None:
                endpoint.num_others = max(0, answer.num_running + answer.num_waiting - endpoint.num_open)

    def has_any(self) -> bool:
        """Return True if a server is available, even if full."""
        with self._lock:
            return any(endpoint.is_there for endpoint in self._endpoints)

    def _chosen(self, key: Any, now_s: float, avoided: Collection[Endpoint]) -> Endpoint:
        there = [endpoint for endpoint in self._endpoints if endpoint.is_there]
        usable = [endpoint for endpoint in there if endpoint.is_open(now_s)] or there
        usable = [endpoint for endpoint in usable if endpoint not in avoided] or usable
        if not usable:
            if self._is_watched:
                raise Unavailable(f"no server is available: {self.names or 'there are none'}")
            return min(self._endpoints, key=lambda endpoint: endpoint.away_until_s)
        if key is None:
            least = min(one.num_busy for one in usable)
            idle = [endpoint for endpoint in usable if endpoint.num_busy == least]
            return idle[next(self._turn) % len(idle)]
        return self._placement.place(key, within_load_margin(usable))

    def _due(self, now_s: float) -> list[tuple[Endpoint, Question]]:
        """Return the due queries of servers without a pending query."""
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


def build_query(endpoint: Endpoint, question: Question) -> tuple[Any, Any]:
    """Return the method and the message of a query."""
    if question == "health":
        return endpoint.health.Check, health_pb2.HealthCheckRequest()
    return endpoint.methods["GetLoad"], control_pb2.GetLoadRequest()


def get_key(request: Any) -> bytes | None:
    """Return the key of a request's beginning, which decides the server; None if it has no prompt."""
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
        case "prompt_embeds":
            given = request.prompt_embeds.values or request.prompt_embeds.torch_file
            start = hashlib.sha256(given[:_KEY_EMBED_BYTES]).hexdigest()
        case _:
            start = ""
            for message in request.chat.messages:
                start += f"{message.role}\0{message.content}\0"
                if len(start) >= _KEY_CHARS:
                    break
    return "\0".join((request.adapter, salt, start[:_KEY_CHARS])).encode(errors="replace")


def rank(key: bytes, name: str) -> bytes:
    """Return a server's hash for a key: the server with the highest one is chosen."""
    return hashlib.blake2b(key, digest_size=8, key=hashlib.blake2b(name.encode(), digest_size=16).digest()).digest()


def _backoff() -> Backoff:
    return Backoff(_FIRST_AWAY_S, 2.0, _MAX_AWAY_S)
