"""Index from key to slot. Each slot is known, coming, free, or loose: forgotten, but still read or written.

    known    least recently used ...... newest      a read moves a key to the end; eviction starts at the front
    coming   keys that are being written            a key forgotten in the meantime is loose, and not entered
    free     empty slots without readers

The caller must have locked the store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from jpaged.blockstore.segment import Segment
from jpaged.errors import InternalError


@dataclass(slots=True, eq=False)
class Slot:
    """Slot of a file.

    Attributes:
        digest: hash of the contents.
    """

    segment: Segment
    number: int
    digest: bytes = b""
    num_readers: int = 0
    is_loose: bool = False


class Slots:
    """All slots of a store.

    Attributes:
        known: key -> slot, in order of use. Any thread may read; written only here.
        free: slots that can be claimed.
    """

    def __init__(self) -> None:
        self.known: OrderedDict[bytes, Slot] = OrderedDict()
        self.free: list[Slot] = []
        self._coming: dict[bytes, Slot] = {}
        self._num_slots = self._num_loose = 0

    def add(self, slot: Slot, key: bytes | None = None) -> None:
        """Add a slot: free, or with a key, which becomes the newest."""
        self._num_slots += 1
        if key is None:
            self.free.append(slot)
        else:
            self.known[key] = slot

    def claim(self, key: bytes) -> Slot | None:
        """Claim a free slot for a key to be written; None if there is none, or the key is known or coming."""
        if not self.free or self.is_taken(key):
            return None
        slot = self._coming[key] = self.free.pop()
        return slot

    def is_taken(self, key: bytes) -> bool:
        """Return True if the key is known or coming."""
        return key in self.known or key in self._coming

    def came(self, key: bytes, slot: Slot, digest: bytes | None) -> bool:
        """Finish a claim after its slot was written; return True if the key is known from now on.

        Args:
            digest: hash of the contents; None if the write was cancelled.
        """
        if slot.is_loose:
            self._let_go(slot)
            return False
        del self._coming[key]
        if digest is None:
            self.free.append(slot)
            return False
        slot.digest = digest
        self.known[key] = slot
        return True

    def remove(self, key: bytes) -> Slot | None:
        """Forget a key; return its slot if it was known."""
        slot = self.known.pop(key, None)
        if slot is not None:
            self._loosen(slot)
            if not slot.num_readers:
                self._let_go(slot)
        elif (coming := self._coming.pop(key, None)) is not None:
            self._loosen(coming)
        return slot

    def remove_all(self) -> int:
        """Forget every key; return the number of known ones."""
        num_known = len(self.known)
        for key in [*self.known, *self._coming]:
            self.remove(key)
        return num_known

    def begin_read(self, key: bytes) -> Slot | None:
        """Return the slot of a known key, or None, and protect it from reuse until `end_read`."""
        slot = self.known.get(key)
        if slot is not None:
            slot.num_readers += 1
        return slot

    def end_read(self, slot: Slot) -> None:
        """Remove one reader."""
        slot.num_readers -= 1
        if slot.is_loose and not slot.num_readers:
            self._let_go(slot)

    def victims(self) -> Iterator[bytes]:
        """Return the known keys in eviction order: least recently used first, without those being read."""
        return (key for key, slot in self.known.items() if not slot.num_readers)

    def check(self) -> None:
        """Check the number of slots in O(1).

        Raises:
            InternalError: slots are lost.
        """
        found = len(self.known), len(self._coming), len(self.free), self._num_loose
        if sum(found) != self._num_slots:
            raise InternalError(f"{found} known, pending, free and loose slots are not {self._num_slots}")

    def _loosen(self, slot: Slot) -> None:
        slot.is_loose = True
        self._num_loose += 1

    def _let_go(self, slot: Slot) -> None:
        slot.is_loose = False
        self._num_loose -= 1
        self.free.append(slot)
