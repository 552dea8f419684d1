"""What the scheduler asks of KV memory, whatever the policy behind it. Owned by the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from jpaged.engine.executor import I32
from jpaged.engine.kv.aside import Aside
from jpaged.engine.kv.blocks import MemoryCounts, MemoryOps
from jpaged.engine.kv.prefixes import Held, Prefixes
from jpaged.engine.kv.swapping import Swapping
from jpaged.engine.kv.tiers.disk import DiskTier
from jpaged.engine.kv.tiers.host import HostTier
from jpaged.engine.kv.tiers.nearing import Nearing
from jpaged.engine.kv.windows import Windows
from jpaged.engine.sequence import Group, Sequence
from jpaged.pool import MemoryMarks

Shares = list[tuple[Sequence, int]]
"""Sequences of one group, each with the tokens that it computes in this step."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A count of blocks: free + cached + referenced + aside is num_blocks.

    Cached ones are free and still hold a prefix; nobody may have those that are aside.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_aside: int = 0


class KVMemory(Protocol):
    """Blocks for sequences: who gets them, who shares them, where they are.

    Attributes:
        host: prefixes in host memory; None where there is none.
        held: cached blocks that somebody outside reads; None where nothing is cached.
        nearing: what brings prefixes in host memory to the device over several steps; None without either.
        disk: prefixes on disk; None where there are none.
    """

    num_blocks: int
    counts: MemoryCounts
    host: HostTier | None
    held: Held | None
    nearing: Nearing | None
    disk: DiskTier | None

    @property
    def limit(self) -> int:
        """Blocks that requests and pins may have: all, but for those that are set aside."""
        ...

    @property
    def prefixes(self) -> Prefixes | None:
        """What is found again of earlier requests; None in memory that finds nothing."""
        ...

    @property
    def swapping(self) -> Swapping | None:
        """The way to host memory and back; None where there is none."""
        ...

    @property
    def windows(self) -> Windows | None:
        """What takes back blocks that nobody sees any more; None where every token is seen, or every block kept."""
        ...

    @property
    def aside(self) -> Aside | None:
        """What makes the pool smaller; None where that cannot be."""
        ...

    def can_admit(self, group: Group, num_spare_blocks: int) -> bool:
        """Whether a waiting group's whole prompt (and what it sampled before) finds blocks, with so many left free."""
        ...

    def admit(self, group: Group) -> int:
        """Gives a waiting group what is already known of its prompt; the number of tokens that need not run."""
        ...

    def num_outstanding_blocks(self, group: Group) -> int:
        """Blocks that a running group will still take for tokens that it has already."""
        ...

    def can_grow(self, shares: Shares) -> bool:
        """Whether so many more tokens of a group's sequences can be written, on copies where blocks are shared."""
        ...

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes the slots of the next num_tokens the sequence's own: copies a shared block, adds new ones."""
        ...

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives the child everything that the parent has computed, shared."""
        ...

    def rewind(self, sequence: Sequence) -> None:
        """Takes back what a sequence holds of tokens after its computed ones, which it has just been rewound to."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Takes back everything a sequence holds, on the device and in host memory."""
        ...

    def num_reserved_slots(self) -> int:
        """Token slots that are kept for sequences, whether or not they hold a token."""
        ...

    def num_stored_tokens(self, sequences: Iterable[Sequence], own_lens_s: I32) -> int:
        """Tokens in those slots, one that several sequences share counted once.

        Args:
            sequences: all that hold blocks, but for those whose last block is theirs alone:
            own_lens_s: the computed tokens of each of these.
        """
        ...

    def can_ever_fit(self, group: Group) -> bool:
        """The group could run to its end, were it alone."""
        ...

    def use(self) -> MemoryUse: ...

    def marks(self) -> MemoryMarks:
        """What is known of blocks besides the tables of sequences: a copy, for who watches."""
        ...

    def take_ops(self) -> MemoryOps:
        """The moves decided since the last call, for the device to make before the step."""
        ...

    def check(self, groups: Iterable[Group]) -> None:
        """Raises InternalError when a block is lost, shared by mistake, or free and in use."""
        ...
