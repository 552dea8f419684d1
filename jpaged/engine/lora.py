"""LoRA slots of the device. Running groups hold the slot of the adapter that they use.

    slot      1      2      3     ...  max_loras
    holds     sql    chat   old   .
    held by   2      1      0     0              groups

A group takes a slot when it starts to run, whether it was waiting or swapped out, and releases it when it stops
running. A new adapter overwrites the slot that has been unused for the longest time. The executor loads an adapter
before the first step that uses it and after the steps that used the slot's former adapter, because the device runs in
dispatch order.

The matrices of an adapter in no slot may have left host memory. The next waiting group then waits until a thread has
read the files again; running groups continue:

    group is next ──fetch──> reading ──done──> group takes a slot
                                └────failed──> group ends with the error
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import islice

from jpaged.engine.sequence import SequenceGroup
from jpaged.errors import InternalError
from jpaged.types import Adapter, LoadedAdapter


class LoRASlots:
    """LoRA slot allocation, for the scheduler alone. A group without an adapter has slot 0 and needs no allocation."""

    def __init__(self, max_loras: int) -> None:
        self._num_slots = max_loras
        self._free: dict[int, None] = dict.fromkeys(range(1, max_loras + 1))  # the next slot to overwrite comes first
        # Load numbers instead of the adapters: an unloaded adapter leaves host memory with its last request.
        self._loaded: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._num_users: Counter[int] = Counter()
        self._to_load: dict[int, Adapter] = {}
        self._fetch: tuple[LoadedAdapter, Future[Adapter]] | None = None

    @property
    def is_fetching(self) -> bool:
        """True while a waiting group's adapter is read into host memory."""
        return self._fetch is not None and not self._fetch[1].done()

    def must_fetch(self, group: SequenceGroup) -> bool:
        """Return True until the adapter of the next waiting group is in a slot or in host memory.

        Starts to read the adapter if it is in neither. Stays True if the read fails: see `pop_fetch_error`.
        """
        adapter = group.request.adapter
        if adapter is None or adapter.number in self._slots:
            self._fetch = None
            return False
        if self._fetch is None or self._fetch[0] is not adapter:
            self._fetch = adapter, adapter.fetch()
        fetched = self._fetch[1]
        return not fetched.done() or fetched.exception() is not None

    @property
    def has_fetch_error(self) -> bool:
        """True if the last read has failed, until `pop_fetch_error`."""
        return self._fetch is not None and self._fetch[1].done() and self._fetch[1].exception() is not None

    def pop_fetch_error(self, group: SequenceGroup | None) -> BaseException | None:
        """Return and forget the error of the last read; None if it was not for this group, or has not failed."""
        if self._fetch is None or not self.has_fetch_error:
            return None
        (adapter, fetched), self._fetch = self._fetch, None
        return None if group is None or group.request.adapter is not adapter else fetched.exception()

    def can_take(self, adapter: LoadedAdapter) -> bool:
        """Return True if the adapter is in a slot, or a slot is free."""
        return adapter.number in self._slots or bool(self._free)

    def leaving_for(self, waiting: SequenceGroup, yielding: Iterator[SequenceGroup]) -> list[SequenceGroup]:
        """Return the running groups to preempt next so that a waiting group can be admitted.

        `yielding` are the groups that may be preempted for it, in order. If the waiting group needs no new slot, the
        result is the first of them. Otherwise it is all holders of the slot that becomes free first, or an empty list
        if no slot would become free: without a slot, preempted blocks would be of no use.
        """
        adapter, holders = waiting.request.adapter, defaultdict[int, list[SequenceGroup]](list)
        if adapter is None or self.can_take(adapter):
            return list(islice(yielding, 1))
        for group in yielding:
            slot = group.adapter_slot
            holders[slot].append(group)
            if slot and len(holders[slot]) == self._num_users[slot]:
                return holders[slot]
        return []

    def take(self, group: SequenceGroup, adapter: LoadedAdapter) -> None:
        """Assign the adapter's slot to a group; schedule a load if the adapter is in no slot.

        `must_fetch` must have returned False for the group.
        """
        slot = self._slots.get(adapter.number)
        if slot is None:
            slot = self._put(adapter)
        self._free.pop(slot, None)
        self._num_users[slot] += 1
        group.set_lora_slot(slot)

    def give_back(self, group: SequenceGroup) -> None:
        """Release the slot of a group that has stopped running."""
        slot = group.adapter_slot
        self._num_users[slot] -= 1
        if not self._num_users[slot]:
            self._free[slot] = None
        group.set_lora_slot(0)

    def pop_pending_loads(self) -> dict[int, Adapter]:
        """Return and clear the matrices that the device must load before the next step, by slot."""
        loads, self._to_load = self._to_load, {}
        return loads

    def forget(self) -> None:
        """Count all slots as empty, after the device has lost their contents; no group may hold one."""
        self._free = dict.fromkeys(range(1, self._num_slots + 1))
        self._loaded.clear()
        self._slots.clear()
        self._to_load.clear()

    def check(self, running: Iterable[SequenceGroup]) -> None:
        """Raise InternalError unless the running groups hold exactly the slots of their adapters."""
        held = Counter(group.adapter_slot for group in running if group.adapter_slot)
        if held != +self._num_users:
            raise InternalError(
                f"adapter slots are held by {dict(held)} groups, but {dict(+self._num_users)} were counted"
            )
        if set(self._free) & set(held) or len(self._free) + len(held) != self._num_slots:
            raise InternalError(f"adapter slots {list(held)} are held, but {list(self._free)} are free")
        for group in running:
            number, loaded = group.request.adapter_number, self._loaded.get(group.adapter_slot, 0)
            if number != loaded:
                raise InternalError(
                    f"a group with adapter load {number} has slot {group.adapter_slot}, which has load {loaded}"
                )

    def _put(self, adapter: LoadedAdapter) -> int:
        if self._fetch is None or self._fetch[0] is not adapter:
            self._fetch = adapter, adapter.fetch()
        matrices, self._fetch = self._fetch[1].result(timeout=0), None
        slot = next(iter(self._free))
        former = self._loaded.get(slot)
        if former is not None:
            del self._slots[former]
        self._loaded[slot], self._slots[adapter.number] = adapter.number, slot
        self._to_load[slot] = matrices
        return slot
