"""Snapshots of a KV pool, and KV cache events. Plain values.

A snapshot is a pool between two steps, with only ids and counts: no tokens, no text. Events are cached prefix blocks
that a memory tier stores or removes, published step by step. `jpaged.inspector.frames` encodes snapshots for viewers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BlockFlags:
    """Block flags that are not in the sequences' tables.

    Attributes:
        cached: [N + 1] 1 if a block holds a cached prefix.
        host_cached: [H + 1] the same for host memory.
        pinned: blocks of pinned prefixes, once for each pin that holds them.
        withheld: blocks withheld by a limit of the pool.
        reserved: blocks of the contiguous regions that a baseline policy has reserved, written or not.
    """

    cached: U8
    host_cached: U8
    pinned: I32
    withheld: I32
    reserved: I32


class SequenceSnapshot(NamedTuple):
    """A sequence: its block tables, one per KV group, with 0 for freed blocks.

    Attributes:
        sequence: its index in the request.
        host_tables: tables in host memory, while it is swapped out.
    """

    sequence: int
    num_tokens: int
    tables: tuple[I32, ...]
    host_tables: tuple[I32, ...]


class RequestSnapshot(NamedTuple):
    """A request that waits, runs or is swapped out. A named tuple, because hundreds are created at once.

    Attributes:
        number: index in the order of arrival at its engine.
        status: waiting, running, swapped; or finished, in a static batch that keeps its blocks.
    """

    number: int
    request_id: str
    status: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    chains: tuple[SequenceSnapshot, ...]


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """An event of a request or of blocks.

    Attributes:
        number: increasing; identifies the event if a viewer gets it twice.
        kind: admission, resumption, preemption_swap, preemption_recompute or end of a request; fork; or a move:
            copy_on_write, prefix_copy, swap_out and swap_in of groups, eviction and prefix_in of cached prefixes,
            prefix_out of prefixes that stay cached and are copied to disk or to another server.
        request: number of the request, or None.
        count: sequences of a fork, blocks of a move.
        blocks: source and destination blocks, alternating; the first ones if there are many.
        why: end reason of a request; for an admission, its id.
    """

    number: int
    kind: str
    request: int | None = None
    count: int = 1
    blocks: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Snapshot of one pool.

    Attributes:
        time_s: time of the engine's clock.
        limit: blocks that requests may use: all except those withheld now, or as soon as they become free.
        occupants: the requests that hold blocks, and the first of those that wait.
        num_waiting: all waiting requests that are not swapped out.
        happenings: events since the previous snapshot, the latest ones if there are many.
        totals: counters since the engine's start, named as in `jpaged.server_load.EngineLoad`.
    """

    time_s: float
    num_blocks: int
    num_host_blocks: int
    block_size: int
    num_kv_groups: int
    limit: int
    marks: BlockFlags
    occupants: tuple[RequestSnapshot, ...]
    num_waiting: int
    happenings: tuple[PoolEvent, ...]
    totals: Mapping[str, int]


Tier = Literal["device", "host", "disk", "external"]
"""Where a block is stored; "external" is a KV connector of a third party."""


class PrefixOwner(NamedTuple):
    """Owner of a prefix: the inputs of the root block hash, as given by the client."""

    salt: str = ""
    tenant: str = ""
    adapter_name: str = ""


class Stored(NamedTuple):
    """A tier stores a block from now on.

    Attributes:
        parent: hash of the previous block; None for the first block of a prompt, and if `token_ids` is empty.
        token_ids: tokens of the block; empty below the device tier, where only hashes are known.
        owner: owner of the prefix; None if token_ids is empty.
    """

    tier: Tier
    key: bytes
    kv_group: int
    parent: bytes | None = None
    token_ids: tuple[int, ...] = ()
    owner: PrefixOwner | None = None


class Removed(NamedTuple):
    """A tier no longer stores a block."""

    tier: Tier
    key: bytes
    kv_group: int


Change = Stored | Removed
