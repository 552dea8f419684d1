"""What is told of blocks on disk is what is there, and a directory knows of a prefix as long as any tier has it."""

import random
from typing import Any, get_args

import pytest

from jpaged.blockstore.store import BlockStore
from jpaged.engine.kv_cache import events as tellings
from jpaged.engine.kv_cache.blocks import block_key, root_block_hash
from jpaged.engine.kv_cache.events import ConnectorKVEvents, KVEventRecorder
from jpaged.kvevents.directory import Directory
from jpaged.kvevents.encoding import Encoder, decode
from jpaged.pool import Change, Removed, Tier
from tests.engine.kv_cache.offload.disks import IDENTITY, PROMPT, Server, second_life


class Reader:
    """Who reads along: the sets of what is told, and a directory."""

    def __init__(self, prefixes: Any, windows: tuple[int | None, ...] = (None,)) -> None:
        self.held: dict[str, set[tuple[bytes, int]]] = {tier: set() for tier in get_args(Tier)}
        self.directory = Directory()
        self._encoder = Encoder(4, windows)
        prefixes.changes.publish_to(self)

    def publish(self, changes: list[Change]) -> bool:
        for change in changes:
            one, held = (change.key, change.kv_group), self.held[change.tier]
            assert (one in held) is isinstance(change, Removed)
            held ^= {one}
        self.directory.take("here", decode(self._encoder.encode(changes, 0.0))[0])
        return True

    def close(self) -> None:
        """Nothing is open."""

    def num_held(self, prompt: list[int]) -> int:
        return self.directory.num_tokens_held(prompt).get("here", 0)


def keys_of(prompt: list[int]) -> list[bytes]:
    keys, parent = [], root_block_hash("")
    for start in range(0, len(prompt) - 3, 4):
        parent = block_key(parent, prompt[start : start + 4])
        keys.append(parent)
    return keys


def test_a_prefix_is_held_until_disk_has_given_it_up_too(tmp_path):
    server = Server(tmp_path, sizes={"num_blocks": 12, "num_host_blocks": 8})
    reader = Reader(server.memory.prefixes)
    server.ask("a", PROMPT)
    assert {key for key, _ in reader.held["disk"]} == {*keys_of(PROMPT)}
    for i in range(6):
        server.ask(f"{i}", [40 + i, *range(20)])
    assert not {key for tier in ("device", "host") for key, _ in reader.held[tier]} & {*keys_of(PROMPT)}
    assert reader.num_held(PROMPT) == 28
    server.store.remove(keys_of(PROMPT)[5])
    server.step(1)
    assert reader.num_held(PROMPT) == 20
    server.h.engine.reset_prefix_cache()
    server.run()
    assert not any(reader.held.values()) and reader.directory.num_blocks("here") == 0
    server.kill()


def test_what_an_earlier_life_left_is_told_when_it_comes_back(tmp_path):
    server = second_life(tmp_path, sizes={"num_blocks": 12, "num_host_blocks": 8})
    reader = Reader(server.memory.prefixes)
    server.step(2)
    assert not any(reader.held.values())
    assert server.ask("a", PROMPT) == 24
    assert {key for key, _ in reader.held["disk"]} == {*keys_of(PROMPT)}
    for i in range(6):
        server.ask(f"{i}", [40 + i, *range(20)])
    assert reader.num_held(PROMPT) == 28
    server.kill()


def test_a_disk_that_fails_holds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tellings, "_MAX_REMOVED", 2)
    server = Server(tmp_path)
    reader = Reader(server.memory.prefixes)
    server.ask("a", PROMPT)
    assert len(reader.held["disk"]) == 7
    server.store._turn_off(OSError(5, "Input/output error"))
    left = []
    for _ in range(4):
        server.step(1)
        left.append(len(reader.held["disk"]))
    assert left == [5, 3, 1, 0]
    assert reader.num_held(PROMPT) == 28  # the device has it
    server.kill()


def test_what_goes_while_it_is_told_is_not_told_for_good(tmp_path):
    """Another replica gives a key up between two looks at the store."""
    store = BlockStore(tmp_path, IDENTITY, 64, 1 << 20)
    key, changes = bytes(32), KVEventRecorder()
    found: list[Change] = []
    told = ConnectorKVEvents(store, "disk", changes, lambda key: True)
    changes.publish_to(Keeping(found))
    store.save(key, memoryview(bytes(64)))
    told.may_hold(key)
    store.remove(key)
    store.save(key, memoryview(bytes(64)))
    told.may_hold(key)
    told.advance()
    changes.flush()
    assert [type(change).__name__ for change in found] == ["Stored"]  # it is there again
    store.remove(key)
    assert told.is_busy
    told.advance()
    told.may_hold(key)
    changes.flush()
    assert [type(change).__name__ for change in found] == ["Stored", "Removed"] and not told.is_busy
    store.close()


def test_what_goes_between_two_looks_is_not_told(tmp_path):
    store = BlockStore(tmp_path, IDENTITY, 64, 1 << 20)
    key, changes = bytes(32), KVEventRecorder()
    found: list[Change] = []

    def forgotten(key):  # another thread, at the worst moment
        store.remove(key)
        return True

    told = ConnectorKVEvents(store, "disk", changes, forgotten)
    changes.publish_to(Keeping(found))
    store.save(key, memoryview(bytes(64)))
    told.may_hold(key)
    told.advance()
    changes.flush()
    assert not found and not told.is_busy
    store.close()


class Keeping:
    """A sink."""

    def __init__(self, found: list[Change]) -> None:
        self._found = found

    def publish(self, changes: list[Change]) -> bool:
        self._found += changes
        return True

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_lives_with_a_small_disk_tell_what_is_there(tmp_path, seed):
    """Disk, host memory and device each give blocks up, in whatever order; a directory knows what some tier has."""
    choose = random.Random(seed)
    texts = [[choose.randrange(3) for _ in range(12)] for _ in range(12)]
    limit = 8192 + 30 * 64
    server = Server(tmp_path, limit=limit, sizes={"num_blocks": 9, "num_host_blocks": 8})
    reader = Reader(server.memory.prefixes)
    for i in range(50):
        server.ask(f"{i}", [*choose.choice(texts), 9], max_tokens=1)
        if choose.random() < 0.1:
            server.store.remove(choose.choice(keys_of(choose.choice(texts))))
        server.step(1)
        assert {key for key, _ in reader.held["disk"]} <= server.store._slots.known.keys()
        somewhere = {key for held in reader.held.values() for key, _ in held}
        for text in texts:
            keys = keys_of(text)
            truth = next((place for place, key in enumerate(keys) if key not in somewhere), len(keys))
            assert reader.num_held(text) == 4 * truth
    assert server.store.counts.num_evicted
    server.kill()
