"""Responses that a server keeps, and those that it runs in the background.

`ResponseStore` keeps responses in memory, separately per tenant. A response that continues another one refers to the
turns of that one, so that each turn is in memory once:

    StoredResponse 1    body    earlier ()              input A    output B
    StoredResponse 2    body    earlier (A, B)          input C    output D
    StoredResponse 3    body    earlier (A, B, C, D)    input E    output F

A response in the background is a task (`BackgroundRun`). It has its events, if it may be streamed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpaged import json_text
from jpaged.errors import (
    AlreadyExists,
    Cancelled,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    QueueFull,
    RequestTooLong,
)

_CHUNK_BYTES = 128
"""Approximate size of the objects that hold events."""
_END_OF_EVENT = b"\n\n"
_MAX_SHOWN = 80


class StoredTurn:
    """Encoded items of one turn, which all responses that continue it share.

    Attributes:
        num_uses: number of stored responses that refer to it.
    """

    __slots__ = ("items", "num_uses")

    def __init__(self, items: Sequence[Mapping[str, Any]] = ()) -> None:
        self.items = b"".join(json_text.pieces(list(items)))
        self.num_uses = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the items."""
        found: list[dict[str, Any]] = json.loads(self.items)
        return found


class StoredResponse:
    """A response in the store.

    Attributes:
        owner: the tenant that may read it.
        expires_s: time of the removal.
        body: the encoded response.
        earlier: turns that it continues.
        input: turn with the input.
        output: turn with the answer.
        run: the running request; None unless it runs in the background.
    """

    def __init__(
        self, owner: str, response_id: str, body: bytes, earlier: tuple[StoredTurn, ...], given: StoredTurn
    ) -> None:
        self.owner = owner
        self.response_id = response_id
        self.expires_s = 0.0
        self.body = body
        self.earlier = earlier
        self.input = given
        self.output = StoredTurn()
        self.run: BackgroundRun | None = None

    @property
    def turns(self) -> tuple[StoredTurn, ...]:
        """The turns of the conversation, with this one."""
        return (*self.earlier, self.input, self.output)

    @property
    def num_own_bytes(self) -> int:
        """Size without turns."""
        num_events = 0 if self.run is None else self.run.num_bytes
        return _OVERHEAD_BYTES + len(self.body) + num_events

    @property
    def num_bytes(self) -> int:
        """Size if no other response shares its turns."""
        return self.num_own_bytes + sum(len(turn.items) for turn in self.turns)

    @property
    def is_running(self) -> bool:
        return self.run is not None and not self.run.is_over


_OVERHEAD_BYTES = 2048
"""Approximate size of an entry without its texts."""


@dataclass(slots=True)
class _TenantResponses:
    """Responses of one tenant by id, the oldest first, and their size."""

    responses: dict[str, StoredResponse] = field(default_factory=dict)
    num_bytes: int = 0


class ResponseStore:
    """Responses in memory, separately per tenant. Bound to the event loop, except `find`.

    A tenant's oldest responses are evicted for its newer ones. If the whole store is full, the oldest responses of the
    tenant with the most bytes are. Responses that run are never evicted.

    Args:
        max_bytes: maximum size of all responses; 0 stores none.
        max_responses: maximum responses of one tenant.
        share: fraction of `max_bytes` that one tenant may use.
        expiry_s: time after which a response is removed.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        max_bytes: int,
        max_responses: int,
        share: float,
        expiry_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_owned_bytes = int(max_bytes * share)
        self._max_responses = max_responses
        self._expiry_s = expiry_s
        self._clock = clock
        self._owners: dict[str, _TenantResponses] = {}
        self._by_age: dict[StoredResponse, None] = {}
        self.num_bytes = 0

    @property
    def max_response_bytes(self) -> int:
        """Maximum size of one response; 0 stores none."""
        return self._max_owned_bytes

    def __len__(self) -> int:
        return len(self._by_age)

    def find(self, owner: str, response_id: str) -> StoredResponse:
        """Return a tenant's response; raise NotFound if there is none."""
        owned = self._owners.get(owner)
        found = None if owned is None else owned.responses.get(response_id)
        if found is None or (found.expires_s <= self._clock() and not found.is_running):
            why = (
                "it was never stored, was deleted, has expired, or was evicted"
                if self._max_bytes
                else "nothing is stored"
            )
            problem = f"Response with id {ascii(response_id)[:_MAX_SHOWN]} not found."
            raise NotFound(f"{problem} Responses are in the memory of one server until it restarts: {why}.")
        return found

    def add(self, response: StoredResponse) -> bool:
        """Store a response, in place of one of the same id; return False if it is too large.

        Raises:
            AlreadyExists: a response of this id is running.
            QueueFull: all responses that the tenant may have are running.
        """
        self._drop_expired()
        if response.num_bytes > self._max_owned_bytes:
            return False
        owned = self._owners.setdefault(response.owner, _TenantResponses())
        replaced = owned.responses.get(response.response_id)
        if replaced is not None:
            if replaced.is_running:
                raise AlreadyExists(f"response {response.response_id!r} is running")
            self.remove(replaced)
            owned = self._owners.setdefault(response.owner, owned)
        if response.is_running and sum(one.is_running for one in owned.responses.values()) >= self._max_responses:
            what = f"{self._max_responses} responses are running in the background"
            raise QueueFull(f"{what}, the limit of a tenant (max_stored_responses)", retry_after_s=1.0)
        response.expires_s = self._clock() + self._expiry_s
        owned.responses[response.response_id] = response
        self._by_age[response] = None
        self._count(owned, response.num_own_bytes)
        for turn in response.turns:
            self._use(owned, turn)
        self._make_room(response)
        return True

    def holds(self, response: StoredResponse) -> bool:
        """Return True if a response has not been removed."""
        return response in self._by_age

    def update(self, response: StoredResponse, body: bytes, output: StoredTurn) -> None:
        """Set the body and the answer of a response, which then expires later; no-op if it has been removed."""
        if not self.holds(response):
            return
        owned = self._owners[response.owner]
        self._count(owned, len(body) - len(response.body))
        self._use(owned, output)
        self._release(owned, response.output)
        response.body, response.output = body, output
        response.expires_s = self._clock() + self._expiry_s
        self._by_age[response] = self._by_age.pop(response)
        self._make_room(response)

    def add_events(self, response: StoredResponse, events: bytes) -> None:
        """Add events to a running response, which loses its oldest ones if nothing else can be removed."""
        run = response.run
        if run is None:
            return
        before = run.num_bytes
        run.add(events)
        if not self.holds(response):
            return
        owned = self._owners[response.owner]
        self._count(owned, run.num_bytes - before)
        self._make_room(response)
        while self._is_over(owned) and (num_dropped := run.drop_oldest()):
            self._count(owned, -num_dropped)

    def remove(self, response: StoredResponse) -> None:
        """Remove a response; no-op if it has been removed."""
        if not self.holds(response):
            return
        owned = self._owners[response.owner]
        del owned.responses[response.response_id]
        del self._by_age[response]
        self._count(owned, -response.num_own_bytes)
        for turn in response.turns:
            self._release(owned, turn)
        if not owned.responses:
            del self._owners[response.owner]

    def _count(self, owned: _TenantResponses, num_bytes: int) -> None:
        owned.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _use(self, owned: _TenantResponses, turn: StoredTurn) -> None:
        turn.num_uses += 1
        if turn.num_uses == 1:
            self._count(owned, len(turn.items))

    def _release(self, owned: _TenantResponses, turn: StoredTurn) -> None:
        turn.num_uses -= 1
        if turn.num_uses == 0:
            self._count(owned, -len(turn.items))

    def _is_over(self, owned: _TenantResponses) -> bool:
        return owned.num_bytes > self._max_owned_bytes or self.num_bytes > self._max_bytes

    def _drop_expired(self) -> None:
        now_s = self._clock()
        for one in list(itertools.takewhile(lambda one: one.expires_s <= now_s, self._by_age)):
            if not one.is_running:
                self.remove(one)

    def _make_room(self, kept: StoredResponse) -> None:
        """Evict responses until the limits hold, or nothing except `kept` and running responses is left."""
        owned = self._owners[kept.owner]
        while len(owned.responses) > self._max_responses or owned.num_bytes > self._max_owned_bytes:
            if not self._evict_oldest(owned, kept):
                break
        while self.num_bytes > self._max_bytes:
            by_size = sorted(self._owners.values(), key=lambda one: -one.num_bytes)
            if not any(self._evict_oldest(one, kept) for one in by_size):
                break

    def _evict_oldest(self, owned: _TenantResponses, kept: StoredResponse) -> bool:
        for one in owned.responses.values():
            if one is not kept and not one.is_running:
                self.remove(one)
                return True
        return False


class ReferredItems:
    """Items of a tenant's responses that one input refers to; each response is read once.

    Args:
        max_bytes: limit of all items together, each as often as it is referred to.
    """

    def __init__(self, store: ResponseStore, owner: str, max_bytes: int) -> None:
        self._store = store
        self._owner = owner
        self._num_left = max_bytes
        self._read: dict[str, dict[Any, tuple[dict[str, Any], int]]] = {}

    def find(self, item_id: str) -> Mapping[str, Any]:
        """Return an item.

        Raises:
            NotFound: there is none.
            RequestTooLong: the items have more than `max_bytes`.
        """
        response_id = f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"
        if response_id not in self._read:
            self._read[response_id] = self._items(response_id)
        if item_id not in self._read[response_id]:
            problem = f"Item with id {ascii(item_id)[:_MAX_SHOWN]} not found."
            raise NotFound(f"{problem} Only items of stored responses can be referred to: send the item itself.")
        item, num_bytes = self._read[response_id][item_id]
        self._num_left -= num_bytes
        if self._num_left < 0:
            raise RequestTooLong("input", "the items that it refers to exceed max_request_size")
        return item

    def _items(self, response_id: str) -> dict[Any, tuple[dict[str, Any], int]]:
        try:
            found = self._store.find(self._owner, response_id)
        except NotFound:
            return {}
        items = (*found.input.read(), *found.output.read())
        named = [item for item in reversed(items) if isinstance(item["id"], str)]
        return {item["id"]: (item, len(json_text.dumps(item))) for item in named}


class BackgroundRun:
    """A request that runs without a connection, and its events.

    Args:
        keeps_events: events are kept, so that the response can be streamed.

    Attributes:
        num_bytes: size of the events.
        admitted: done when the request has been admitted; has the error if it was refused.
        is_ending: the request has ended, and its response is being stored: it is too late to cancel it.
        is_over: the response has ended.
        task: runs the request.
    """

    def __init__(self, *, keeps_events: bool) -> None:
        self.keeps_events = keeps_events
        self.num_bytes = 0
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.admitted.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.is_ending = False
        self.is_over = False
        self.task: asyncio.Task[None] | None = None
        self._chunks: deque[tuple[int, bytes]] = deque()
        self._num_events = 0
        self._num_dropped = 0
        self._changed = asyncio.Event()

    def set_admitted(self) -> None:
        """Report that the request has been admitted."""
        self.admitted.set_result(None)

    def add(self, events: bytes) -> None:
        """Add encoded events."""
        if self.keeps_events and events:
            self._chunks.append((self._num_events, events))
            self._num_events += events.count(_END_OF_EVENT)
            self.num_bytes += _CHUNK_BYTES + len(events)
            self._notify()

    def drop_oldest(self) -> int:
        """Drop the oldest events except the last ones; return their size, 0 if none were dropped."""
        if len(self._chunks) < 2:
            return 0
        _, events = self._chunks.popleft()
        self._num_dropped += 1
        size = _CHUNK_BYTES + len(events)
        self.num_bytes -= size
        return size

    def end(self) -> None:
        """Mark the response as ended."""
        self.is_over = True
        if not self.admitted.done():
            self.admitted.set_exception(Cancelled("the response was cancelled"))
        self._notify()

    def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events whose number is above `after`, until the response has ended.

        Raises:
            InvalidArgument: they are not kept.
        """
        if not self.keeps_events:
            raise InvalidArgument("stream", "true requires a response that was created with stream and background")
        kept = self._chunks[0][0] if self._chunks else 0
        if after + 1 < kept:
            problem = f"{after} is too small: the first event that is still stored has the number {kept}"
            raise InvalidArgument("starting_after", problem)
        return self._follow(after)

    async def _follow(self, after: int) -> AsyncGenerator[bytes, None]:
        index = self._num_dropped
        while True:
            changed = self._changed
            while index < self._num_dropped + len(self._chunks):
                if index < self._num_dropped:
                    raise LimitExceeded("events were dropped before they were read, to keep max_response_storage")
                first, events = self._chunks[index - self._num_dropped]
                index += 1
                if left := events.split(_END_OF_EVENT)[max(0, after + 1 - first) : -1]:
                    yield b"".join(part + _END_OF_EVENT for part in left)
            if self.is_over:
                return
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
