"""Which adapter is in which slot of the device. A slot is held by the running groups that use what is in it.

    slot      1      2      3     ...  max_loras
    holds     sql    chat   old   .
    held by   2      1      0     0              groups

A group takes a slot when it begins to run, whether it waited or was swapped out, and gives it back when it no longer
runs. Of those that nobody holds the one that was held longest ago is overwritten: the executor loads an adapter before
the step that uses it and behind those that used what was there, since it runs in the order of dispatch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from jpaged.engine.sequence import Group
from jpaged.errors import InternalError
from jpaged.types import LoadedAdapter


class AdapterSlots:
    """Gives slots to groups, for the scheduler alone; a group without an adapter has slot 0 and needs none."""

    def __init__(self, max_loras: int) -> None:
        self._num_slots = max_loras
        self._free: dict[int, None] = dict.fromkeys(range(1, max_loras + 1))  # the one that is overwritten next first
        # Numbers of loads, and not the adapters: what is unloaded leaves host memory with its last request.
        self._loaded: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._num_users: Counter[int] = Counter()
        self._to_load: dict[int, LoadedAdapter] = {}

    def can_take(self, adapter: LoadedAdapter) -> bool:
        """Whether there is a slot with the adapter, or one that nobody holds."""
        return adapter.number in self._slots or bool(self._free)

    def leaving_for(self, waiting: Group, yielding: Iterator[Group]) -> list[Group]:
        """The next to be preempted for a group that finds no room, of those that yield to it, in their order.

        It is the first of them, but where a slot is lacking all who hold the one that comes free first, and nobody
        where none would: without it whatever else came free would be of no use.
        """
        adapter, holders = waiting.request.adapter, defaultdict[int, list[Group]](list)
        if adapter is None or self.can_take(adapter):
            return list(islice(yielding, 1))
        for group in yielding:
            slot = group.adapter_slot
            holders[slot].append(group)
            if slot and len(holders[slot]) == self._num_users[slot]:
                return holders[slot]
        return []

    def take(self, group: Group, adapter: LoadedAdapter) -> None:
        """Gives a group the slot of its adapter, which is loaded if it is in none."""
        slot = self._slots.get(adapter.number)
        if slot is None:
            slot = self._put(adapter)
        self._free.pop(slot, None)
        self._num_users[slot] += 1
        group.uses_slot(slot)

    def give_back(self, group: Group) -> None:
        """Takes back what a group that ran has held."""
        slot = group.adapter_slot
        self._num_users[slot] -= 1
        if not self._num_users[slot]:
            self._free[slot] = None
        group.uses_slot(0)

    def take_loads(self) -> dict[int, LoadedAdapter]:
        """What the device has to load, by slot, before the next step; each is told once."""
        loads, self._to_load = self._to_load, {}
        return loads

    def check(self, running: Iterable[Group]) -> None:
        """Raises InternalError where a slot is held by others than the running groups of its adapter."""
        held = Counter(group.adapter_slot for group in running if group.adapter_slot)
        if held != +self._num_users:
            raise InternalError(f"adapter slots are held by {dict(held)} groups, counted were {dict(+self._num_users)}")
        if set(self._free) & set(held) or len(self._free) + len(held) != self._num_slots:
            raise InternalError(f"adapter slots {list(held)} are held, free are {list(self._free)}")
        for group in running:
            number, loaded = group.request.adapter_number, self._loaded.get(group.adapter_slot, 0)
            if number != loaded:
                raise InternalError(f"a group of load {number} has slot {group.adapter_slot}, which has {loaded}")

    def _put(self, adapter: LoadedAdapter) -> int:
        slot = next(iter(self._free))
        former = self._loaded.get(slot)
        if former is not None:
            del self._slots[former]
        self._loaded[slot], self._slots[adapter.number] = adapter.number, slot
        self._to_load[slot] = adapter
        return slot
