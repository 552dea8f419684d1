"""Messages are what readers of vLLM's KV events take, and come back as they were written."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.errors import InvalidArgument
from jpaged.kvevents.directory import Directory
from jpaged.kvevents.encoding import Cleared, Encoder, Encoding, RemovedBlocks, StoredBlocks, decode, to_hash
from jpaged.pool import Change, PrefixOwner, Removed, Stored


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(24)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """As vLLM declares it."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockStoredArray(msgspec.Struct, tag="BlockStored", array_like=True, omit_defaults=True):
    """As vLLM declared it before."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None


class BlockRemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None


class BatchOfArrays(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStoredArray | BlockRemovedArray]
    data_parallel_rank: int | None = None


CHAIN: list[Change] = [
    Stored("device", key(1), 0, None, (5, 6), PrefixOwner("salt", "team", "sql")),
    Stored("device", key(2), 0, key(1), (7, 8), PrefixOwner("salt", "team", "sql")),
    Stored("device", key(9), 0, key(4), (1, 2), PrefixOwner()),
    Stored("host", key(1), 0),
    Stored("host", key(9), 0),
    Removed("device", key(1), 0),
    Removed("device", key(2), 0),
    Removed("host", key(2), 0),
]


def test_a_message_is_what_vllms_readers_take():
    """Blocks that follow each other are one event; whose they are is in the extra keys of the first."""
    batch: Any = msgspec.msgpack.decode(Encoder(2, rank=3).encode(CHAIN, 1.5), type=Batch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    of_team: Any = [["sql", "salt", ["tenant", "team"]], ["sql"]]
    full: Any = {"kv_cache_spec_kind": "full_attention"}
    assert batch.events == [
        BlockStored([1, 2], None, [5, 6, 7, 8], 2, None, "GPU", "sql", of_team, **full),
        BlockStored([9], 4, [1, 2], 2, None, "GPU", None, [None], **full),
        BlockStored([1, 9], None, [], 2, None, "CPU", None, [None, None], **full),
        BlockRemoved([1, 2], "GPU"),
        BlockRemoved([2], "CPU"),
    ]


def test_older_readers_take_arrays():
    batch = msgspec.msgpack.decode(Encoder(2, encoding="array").encode(CHAIN, 1.5), type=BatchOfArrays)
    assert batch.events[0] == BlockStoredArray([1, 2], None, [5, 6, 7, 8], 2, None, "GPU", "sql")
    assert batch.events[3:] == [BlockRemovedArray([1, 2], "GPU"), BlockRemovedArray([2], "CPU")]


def test_groups_of_a_window_say_so():
    """Blocks of two groups are never one event, though their keys follow each other."""
    changes: list[Change] = [Stored("device", key(1), 0, None, (5,)), Stored("device", key(1), 1, None, (5,))]
    batch: Any = msgspec.msgpack.decode(Encoder(1, (None, 64)).encode(changes, 0.0), type=Batch)
    told = [(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in batch.events]
    assert told == [(0, "full_attention", None), (1, "sliding_window", 64)]
    for encoding in get_args(Encoding):
        events, _ = decode(Encoder(1, (None, 64), encoding=encoding).encode(changes, 0.0))
        assert [(e.kv_group, e.window) for e in events if isinstance(e, StoredBlocks)] == [(0, None), (1, 64)]
    removed: list[Change] = [Removed("device", key(1), 0), Removed("device", key(1), 1)]
    batch = msgspec.msgpack.decode(Encoder(1, (None, 64)).encode(removed, 0.0), type=Batch)
    assert batch.events == [BlockRemoved([1], "GPU", 0), BlockRemoved([1], "GPU", 1)]


def test_first_tokens_that_are_seen_besides_a_window_are_told_to_who_knows_of_them() -> None:
    changes = [Stored("device", key(1), 0, None, (1, 2), PrefixOwner())]
    message = Encoder(2, windows=(8,), num_sink_tokens=3).encode(changes, 1.0)
    (event,), _ = decode(message)
    assert isinstance(event, StoredBlocks)
    assert (event.window, event.num_sink_tokens) == (8, 3)
    (read,) = msgspec.msgpack.decode(message, type=Batch).events
    assert isinstance(read, BlockStored)
    assert (read.kv_cache_spec_kind, read.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    for other in (Encoder(2, windows=(8,)), Encoder(2, num_sink_tokens=3)):
        assert b"sink" not in other.encode(changes, 1.0)


names = st.sampled_from(["", "a", "tenant", "salt", "sql"])
owners = st.builds(PrefixOwner, names, names, names)
tiers: Any = st.sampled_from(["device", "host", "disk"])


@st.composite
def chains(draw: st.DrawFn) -> list[Stored | Removed]:
    changes: list[Stored | Removed] = []
    for _ in range(draw(st.integers(0, 5))):
        tier, length, owner = draw(tiers), draw(st.integers(1, 3)), draw(owners)
        first = draw(st.integers(1, 1 << 40))
        kind = draw(st.sampled_from(["stored", "below", "removed"]))
        for place in range(length):
            if kind == "removed":
                changes.append(Removed(tier, key(first + place), 0))
            elif kind == "below":
                changes.append(Stored(tier, key(first + place), 0))
            else:
                parent = key(first + place - 1) if place or draw(st.booleans()) else None
                changes.append(Stored(tier, key(first + place), 0, parent, (place, place + 1), owner))
    return changes


@settings(max_examples=60)
@given(chains(), st.sampled_from(["map", "array"]))
def test_what_is_written_is_read(changes: list[Stored | Removed], encoding: Any) -> None:
    """Block by block the same, in both encodings; whose a chain is where it begins a prompt."""
    events, rank = decode(Encoder(2, rank=2, encoding=encoding).encode(changes, 0.0))
    assert rank == 2
    found: list[Any] = []
    for event in events:
        assert not isinstance(event, Cleared)
        for place, one in enumerate(event.hashes):
            if isinstance(event, RemovedBlocks):
                found.append((event.tier, one))
                continue
            tokens = event.token_ids[2 * place : 2 * place + 2]
            parent = event.hashes[place - 1] if place and tokens else event.parent
            is_first = tokens and parent is None
            found.append((event.tier, one, parent, tokens, event.owner if is_first else None))
    told: list[Any] = []
    for change in changes:
        if isinstance(change, Removed):
            told.append((change.tier, to_hash(change.key)))
            continue
        parent = None if change.parent is None else to_hash(change.parent)
        is_first = change.token_ids and parent is None
        told.append((change.tier, to_hash(change.key), parent, change.token_ids, change.owner if is_first else None))
    assert found == told


def test_what_later_versions_add_is_passed_over():
    stored = {
        "type": "BlockStored",
        "block_hashes": [-1, b"\0\0\0\0\0\0\0\7rest"],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 1,
        "colour": "red",
    }
    message = [0.0, [stored, {"type": "BlockPainted"}, {**stored, "medium": "TAPE"}, ["AllBlocksCleared"]], None, "x"]
    events, rank = decode(msgpack.packb(message))
    assert events == [StoredBlocks("device", (2**64 - 1, 7), None, (1, 2), 1, PrefixOwner(), 0), Cleared()]
    assert rank == 0


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([0.0]),
        msgpack.packb([0.0, [{"type": "BlockStored"}]]),
        msgpack.packb([0.0, [7]]),
        msgpack.packb([0.0, [["BlockRemoved", ["x"], "GPU"]]]),
        msgpack.packb([0.0, [["BlockStored", [1], None, [1, 2, 3], 2, None, "GPU"]]]),
        msgpack.packb([0.0, [["BlockStored", [1], None, ["a"], 1, None, "GPU"]]]),
        msgpack.packb([0.0, [["BlockStored", [1], None, [-1], 1, None, "GPU"]]]),
        msgpack.packb([0.0, [["BlockStored", [1], None, [1 << 63], 1, None, "GPU"]]]),
    ],
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidArgument):
        decode(message)


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    2**64 - 1,
    -(2**63),
    1.5,
    math.inf,
    math.nan,
    "x",
    b"x",
    [],
    {},
    [[]],
    [None],
    [-1],
    {"x": 1},
]
WHOLE = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6],
    "block_size": 1,
    "medium": "GPU",
    "lora_name": "a",
    "extra_keys": [["a", "salt", ["tenant", "t"]], ["a"]],
    "group_idx": 0,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 2,
}


@pytest.mark.parametrize("field", ["time", "rank", "one token", *WHOLE])
def test_whatever_a_field_has_a_message_is_refused_or_a_directory_takes_it(field: str) -> None:
    for odd in ODD:
        event: dict[str, Any] = {**WHOLE, field: odd} if field in WHOLE else dict(WHOLE)
        if field == "one token":
            event["token_ids"] = [5, odd]
        message = [odd if field == "time" else 0.0, [event], odd if field == "rank" else 0]
        directory = Directory()
        try:
            events, _ = decode(msgpack.packb(message))
        except InvalidArgument:
            continue
        directory.take("a", events)
        assert set(directory.num_tokens_held([5, 6, 7])) <= {"a"}
