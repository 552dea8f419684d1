"""What an engine tells of its blocks is what its cache holds, whatever happens in its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jpaged.engine.kv_cache import events
from jpaged.engine.kv_cache.events import ConnectorKVEvents, KVEventRecorder
from jpaged.engine.kv_cache.prefix_cache import PrefixCacheManager
from jpaged.kvevents.directory import Directory
from jpaged.kvevents.encoding import Encoder, decode, to_hash
from jpaged.pool import Change, PrefixOwner, Removed
from jpaged.testing import FakeAdapter, FakeExecutor, with_adapters
from jpaged.types import LoadedAdapter
from tests.engine.harness import Harness
from tests.engine.lives import WINDOWS, Life


class Told:
    """A sink that keeps which keys each tier holds, as it is told."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.held: dict[str, set[tuple[bytes, int]]] = {"device": set(), "host": set(), "disk": set()}
        self.is_full = self.is_closed = False

    def publish(self, changes: list[Change]) -> bool:
        if self.is_full:
            return False
        for change in changes:
            one, held = (change.key, change.kv_group), self.held[change.tier]
            if isinstance(change, Removed):
                held.remove(one)
            else:
                assert one not in held
                held.add(one)
        self.changes += changes
        return True

    def close(self) -> None:
        self.is_closed = True


def listen(h: Harness) -> Told:
    told = Told()
    prefixes_of(h).changes.publish_to(told)
    return told


def prefixes_of(h: Harness) -> PrefixCacheManager:
    assert h.engine.prefixes is not None
    return h.engine.prefixes


def held_by(h: Harness) -> dict[str, set[tuple[bytes, int]]]:
    """What the cache and the host tier hold in truth."""
    prefixes = prefixes_of(h)
    found = {"device": prefixes.cache._blocks, "host": prefixes._host.blocks}
    return {tier: {(key[:32], key[32] if len(key) > 32 else 0) for key in keys} for tier, keys in found.items()}


@pytest.mark.parametrize("windows", [(None,), *WINDOWS[:2]], ids=str)
@pytest.mark.parametrize("first", range(0, 12, 2))
@pytest.mark.thinned(7)
def test_lives_tell_all_that_becomes_known_and_is_forgotten(windows, first):
    num_told = 0
    for seed in range(first, first + 2):
        life = Life(seed, windows, enable_prefix_caching=True)
        told = listen(life.h)
        life.run()
        life.h.engine.reset_prefix_cache()
        life.h.step()
        assert held_by(life.h) == {tier: told.held[tier] for tier in ("device", "host")}
        num_told += len(told.changes)
        assert life.h.engine.load().num_kv_events <= len(told.changes)
    assert num_told > 50


def test_a_directory_knows_of_an_engine_whose_prefix_it_has():
    """A prompt of a salt, a tenant and an adapter; tokens are those of the prompt and of what was said."""
    executor = with_adapters(1)(block_size=4, num_blocks=24, max_num_batched_tokens=16, max_model_len=64)
    h = Harness(executor=executor)
    told = listen(h)
    adapter = LoadedAdapter("sql", "", 1, FakeAdapter(7))
    prompt = list(range(50, 61))
    h.submit("a", prompt, cache_salt="pepper", cache_tenant="team", adapter=adapter, max_tokens=6)
    h.submit("b", prompt, max_tokens=1)
    h.run()
    directory = Directory()
    directory.take("here", decode(Encoder(4).encode(told.changes, 0.0))[0])
    text = [*prompt, *h.tokens("a")]
    assert directory.num_tokens_held(text, PrefixOwner("pepper", "team", "sql")) == {"here": 16}
    assert directory.num_tokens_held([*prompt, *h.tokens("b")]) == {"here": 8}
    assert directory.num_tokens_held(text, PrefixOwner("pepper", "team")) == {}
    h.engine.reset_prefix_cache()
    h.step()
    directory.take("here", decode(Encoder(4).encode(told.changes, 0.0))[0])
    assert directory.num_blocks("here") == 0


def test_what_goes_to_host_memory_is_held_there_and_not_on_the_device():
    h = Harness(executor=FakeExecutor(block_size=4, num_blocks=6, num_host_blocks=6, max_model_len=24))
    told = listen(h)
    h.submit("a", list(range(16)), max_tokens=1)
    h.run()
    first = {to_hash(change.key) for change in told.changes}
    h.submit("b", list(range(100, 120)), max_tokens=1)
    h.run()
    assert {to_hash(key) for key, _ in told.held["host"]} <= first
    assert told.held["host"] and not told.held["host"] & told.held["device"]
    directory = Directory()
    directory.take("here", decode(Encoder(4).encode(told.changes, 0.0))[0])
    assert directory.num_blocks("here") == len(told.held["host"] | told.held["device"])
    h.submit("a again", list(range(16)), max_tokens=1)
    h.run()
    assert h.last("a again").usage.cached_tokens > 0
    assert held_by(h) == {tier: told.held[tier] for tier in ("device", "host")}


def test_what_there_is_no_room_for_is_counted_and_the_end_is_told():
    h = Harness(executor=FakeExecutor(block_size=4, num_blocks=12))
    told = listen(h)
    told.is_full = True
    h.submit("a", list(range(16)), max_tokens=2)
    h.run()
    assert (h.engine.load().num_kv_events, h.engine.load().num_kv_events_dropped) == (0, 4)
    told.is_full = False
    h.submit("b", list(range(100, 116)), max_tokens=2)
    h.run()
    assert h.engine.load().num_kv_events == 4
    h.engine.stop()
    assert told.is_closed


def test_what_is_left_is_told_before_the_end():
    told, changes = Told(), KVEventRecorder()
    changes.publish_to(told)
    changes.stored("host", bytes(32))
    changes.stored("host", bytes(32) + b"\1")
    changes.close()
    assert told.held["host"] == {(bytes(32), 0), (bytes(32), 1)}
    assert told.is_closed


def test_nothing_is_noted_where_nobody_wants_to_know():
    h = Harness(executor=FakeExecutor(block_size=4, num_blocks=12))
    h.submit("a", list(range(16)), max_tokens=2)
    h.run()
    changes = prefixes_of(h).changes
    assert not changes.is_on and not changes._changes
    assert h.engine.load().num_kv_events == 0


# --- stores below memory ----------------------------------------------------------------------------------------------

KEYS = [bytes([i]) * 32 for i in range(4)]


class Store:
    """Keys of a store, and who is told of removals."""

    def __init__(self, *keys: bytes) -> None:
        self.keys, self.is_on = set(keys), True
        self.num_lookups = 0
        self.note: Callable[[bytes | None], None] = lambda key: None

    def add_removal_listener(self, note: Callable[[bytes | None], None]) -> None:
        self.note = note

    def lookup(self, key: bytes) -> bool:
        self.num_lookups += 1
        return self.is_on and key in self.keys

    def remove(self, *keys: bytes) -> None:
        for key in keys:
            self.keys.remove(key)
            self.note(key)

    def reset(self) -> None:
        self.keys.clear()
        self.note(None)


class Published:
    """What is published of a store, while memory has these keys; `take` is what is new."""

    def __init__(self, store: Store, *in_memory: bytes, is_on: bool = True) -> None:
        self.recorder, self.told, self.memory = KVEventRecorder(), Told(), set(in_memory)
        if is_on:
            self.recorder.publish_to(self.told)
        given: Any = store
        self.events = ConnectorKVEvents(given, "disk", self.recorder, self.memory.__contains__)

    def take(self) -> list[tuple[str, bytes]]:
        self.recorder.flush()
        found = [(type(one).__name__, one.key) for one in self.told.changes]
        self.told.changes.clear()
        return found


def test_a_key_is_published_once_memory_and_the_store_have_it() -> None:
    store = Store(KEYS[0], KEYS[1])
    published = Published(store, KEYS[0], KEYS[2])
    for key in (*KEYS, KEYS[0]):
        published.events.may_hold(key)
    assert published.take() == [("Stored", KEYS[0])]
    published.memory.add(KEYS[1])
    published.events.may_hold(KEYS[1])
    assert published.take() == [("Stored", KEYS[1])] and not published.events.is_busy


def test_nothing_is_looked_up_for_nobody() -> None:
    store = Store(KEYS[0])
    published = Published(store, KEYS[0], is_on=False)
    published.events.may_hold(KEYS[0])
    assert store.num_lookups == 0 and not published.take()


def test_removals_are_published_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MAX_REMOVED", 2)
    store = Store(*KEYS)
    published = Published(store, *KEYS[:3])
    for key in KEYS:
        published.events.may_hold(key)
    published.take()
    store.remove(*KEYS)
    assert published.events.is_busy and not published.take()
    published.events.advance()
    first = published.take()
    assert published.events.is_busy and len(first) == 2
    published.events.advance()
    assert {*first, *published.take()} == {("Removed", key) for key in KEYS[:3]} and not published.events.is_busy
    published.events.advance()
    assert not published.take()


def test_a_key_that_came_again_was_not_removed() -> None:
    store = Store(KEYS[0])
    published = Published(store, KEYS[0])
    published.events.may_hold(KEYS[0])
    store.remove(KEYS[0])
    store.keys.add(KEYS[0])
    published.events.advance()
    assert published.take() == [("Stored", KEYS[0])]


def test_a_key_that_goes_while_it_is_published_is_not() -> None:
    store = Store(KEYS[0])
    published = Published(store)

    def is_in_memory(key: bytes) -> bool:
        store.keys.discard(key)
        return True

    published.events._is_in_memory = is_in_memory
    published.events.may_hold(KEYS[0])
    assert not published.take()
    store.keys.add(KEYS[0])
    published.events._is_in_memory = lambda key: True
    published.events.may_hold(KEYS[0])
    assert published.take() == [("Stored", KEYS[0])]


@pytest.mark.parametrize("way", ["reset", "off"])
def test_a_store_that_loses_all_keys_is_told_of_as_empty(way: str) -> None:
    store = Store(*KEYS[:2])
    published = Published(store, *KEYS)
    for key in KEYS:
        published.events.may_hold(key)
    published.take()
    if way == "reset":
        store.reset()
        assert published.events.is_busy
    else:
        store.is_on = False
    published.events.advance()
    assert sorted(published.take()) == [("Removed", key) for key in KEYS[:2]]
    published.events.advance()
    assert not published.take() and not published.events.is_busy
