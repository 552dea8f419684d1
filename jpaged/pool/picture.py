"""A pool as it is between two steps. Ids and counts alone: no token, no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MemoryMarks:
    """What memory knows of blocks besides the tables of sequences.

    Attributes:
        cached: [N + 1] 1 where a block holds a prefix that is known.
        host_cached: [H + 1] the same of host memory.
        pinned: blocks of pinned prefixes, one that several pins hold as often.
        aside: blocks that nobody may have, for a limit of the pool.
        reserved: blocks of the regions that a baseline has reserved, written or not.
    """

    cached: U8
    host_cached: U8
    pinned: I32
    aside: I32
    reserved: I32


class Chain(NamedTuple):
    """A sequence: its tables, one for each KV group, with 0 at places that were given up.

    Attributes:
        sequence: its index in the request.
        host_tables: in host memory, while it is swapped out.
    """

    sequence: int
    num_tokens: int
    tables: tuple[I32, ...]
    host_tables: tuple[I32, ...]


class Occupant(NamedTuple):
    """A request that waits, runs or is swapped out; hundreds are made at once.

    Attributes:
        number: in the order of arrival at its engine.
        status: waiting, running, swapped; or finished, in a static batch that keeps its blocks.
    """

    number: int
    request_id: str
    status: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    chains: tuple[Chain, ...]


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happened to a request or to blocks.

    Attributes:
        number: counts up; a watcher that sees one twice knows it.
        kind: admission, resumption, preemption_swap, preemption_recompute or end of a request; fork; what is moved:
            copy_on_write, prefix_copy, swap_out and swap_in of groups, eviction and prefix_in of cached prefixes,
            prefix_out of those that stay, and are copied to disk or to another server.
        request: the number of whose it is; None where it is nobody's in particular.
        count: sequences of a fork, blocks of a move.
        blocks: those concerned, where they were and where they went in turns; the first of them where they are many.
        why: what ended a request; of one that is admitted, its id.
    """

    number: int
    kind: str
    request: int | None = None
    count: int = 1
    blocks: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class PoolPicture:
    """One pool.

    Attributes:
        time_s: of the engine's clock.
        limit: blocks that requests may have: all but those that are set aside, or will be as they come free.
        occupants: those that hold blocks, and the first of those that wait.
        num_waiting: all that wait and were not swapped out.
        happenings: since the picture before this one, the latest where they are many.
        totals: counts since the engine's start, by the names of `jpaged.load.EngineLoad`.
    """

    time_s: float
    num_blocks: int
    num_host_blocks: int
    block_size: int
    num_kv_groups: int
    limit: int
    marks: MemoryMarks
    occupants: tuple[Occupant, ...]
    num_waiting: int
    happenings: tuple[Happening, ...]
    totals: Mapping[str, int]
