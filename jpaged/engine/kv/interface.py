"""What the scheduler asks of KV memory, whatever the policy behind it. Owned by the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from jpaged.engine.kv.prefix_cache import Key
from jpaged.engine.kv.transfers import MemoryOps
from jpaged.engine.sequence import Group, Sequence

Shares = list[tuple[Sequence, int]]
"""Sequences of one group, each with the tokens that it computes in this step."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A count of blocks: free + cached + referenced is num_blocks. Cached ones are free and still hold a prefix."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_host_blocks: int = 0
    num_host_referenced: int = 0


class KVMemory(Protocol):
    """Blocks for sequences: who gets them, who shares them, where they are."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def can_admit(self, group: Group, num_spare_blocks: int) -> bool:
        """The whole prompt of a waiting group (and what it drew before) finds blocks, and so many are left free."""
        ...

    def admit(self, group: Group) -> int:
        """Gives a waiting group what is already known of its prompt; the number of tokens that need not run."""
        ...

    def num_outstanding_blocks(self, group: Group) -> int:
        """Blocks that a running group will still take for tokens that it has already."""
        ...

    def can_grow(self, shares: Shares) -> bool:
        """So many more tokens of a group's sequences can be written, on copies where blocks are shared."""
        ...

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes the slots of the next num_tokens the sequence's own: copies a shared block, adds new ones."""
        ...

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives the child everything that the parent has computed, shared."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Takes back everything a sequence holds, on the device and in host memory."""
        ...

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Notes the blocks that the sequence has filled since the last time."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Sees to it that nobody finds the sequence's prefix any more, nor what it fills from here on."""
        ...

    def can_swap_out(self, group: Group) -> bool: ...

    def swap_out(self, group: Group) -> None: ...

    def can_swap_in(self, group: Group, num_spare_blocks: int) -> bool: ...

    def swap_in(self, group: Group) -> None: ...

    def is_being_computed(self, group: Group, running: Iterable[Group]) -> bool:
        """A running group is about to compute the next block of this waiting group's prompt: it is worth waiting."""
        ...

    def num_reserved_slots(self) -> int:
        """Token slots that are kept for sequences, whether or not they hold a token."""
        ...

    def num_stored_tokens(self, holders: Iterable[Group]) -> int:
        """Tokens in those slots, one that several sequences share counted once; of all groups that hold blocks."""
        ...

    def has_prefix(self, key: Key) -> bool:
        """A block with this key of the prefix cache is here. Any thread may ask; the answer may be out of date."""
        ...

    def num_cacheable_blocks(self, num_prompt_tokens: int) -> int:
        """Full blocks of a prompt that may be cached. Any thread may ask."""
        ...

    def can_ever_fit(self, group: Group) -> bool:
        """The group could run to its end, were it alone."""
        ...

    def use(self) -> MemoryUse: ...

    def take_ops(self) -> MemoryOps:
        """The moves decided since the last call, for the device to make before the step."""
        ...

    def check(self, groups: Iterable[Group]) -> None:
        """Raises InternalError when a block is lost, shared by mistake, or free and in use."""
        ...
