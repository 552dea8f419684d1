"""Which slot has which key: each slot is known, coming, free, or loose, which is nobody's until the last has read it.

    known    least recently used ...... newest      a read moves a key to the end; who needs a slot takes from the first
    coming   keys that are being written            what is forgotten meanwhile is loose, and not entered
    free     slots in which nothing is, and that nobody reads

Who calls holds the store's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from jpaged.blockstore.segment import Segment
from jpaged.errors import InternalError


@dataclass(slots=True, eq=False)
class Slot:
    """A place in a file.

    Attributes:
        digest: the hash of what is in it.
    """

    segment: Segment
    number: int
    digest: bytes = b""
    num_readers: int = 0
    is_loose: bool = False


class Slots:
    """All slots of a store.

    Attributes:
        known: what is found, in order of use. Any thread may look; written here alone.
        free: what can be claimed.
    """

    def __init__(self) -> None:
        self.known: OrderedDict[bytes, Slot] = OrderedDict()
        self.free: list[Slot] = []
        self._coming: dict[bytes, Slot] = {}
        self._num_slots = self._num_loose = 0

    def add(self, slot: Slot, key: bytes | None = None) -> None:
        """A slot more: free, or with a key, which becomes the newest."""
        self._num_slots += 1
        if key is None:
            self.free.append(slot)
        else:
            self.known[key] = slot

    def claim(self, key: bytes) -> Slot | None:
        """A free slot for a key that is to come; None where there is none, or the key is known or coming."""
        if not self.free or self.is_taken(key):
            return None
        slot = self._coming[key] = self.free.pop()
        return slot

    def is_taken(self, key: bytes) -> bool:
        """The key is known or coming."""
        return key in self.known or key in self._coming

    def came(self, key: bytes, slot: Slot, digest: bytes | None) -> bool:
        """What was claimed is written; whether it is known from now on, which it is not where it was forgotten.

        Args:
            digest: the hash of what is in it; None where nobody wants it any more.
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
        """Forgets a key; the slot that it had when it was known."""
        slot = self.known.pop(key, None)
        if slot is not None:
            self._loosen(slot)
            if not slot.num_readers:
                self._let_go(slot)
        elif (coming := self._coming.pop(key, None)) is not None:
            self._loosen(coming)
        return slot

    def remove_all(self) -> int:
        """Forgets every key; the number of those that were known."""
        num_known = len(self.known)
        for key in [*self.known, *self._coming]:
            self.remove(key)
        return num_known

    def begin_read(self, key: bytes) -> Slot | None:
        """The slot of a known key, which nobody else gets until `end_read`."""
        slot = self.known.get(key)
        if slot is not None:
            slot.num_readers += 1
        return slot

    def end_read(self, slot: Slot) -> None:
        """One reader less."""
        slot.num_readers -= 1
        if slot.is_loose and not slot.num_readers:
            self._let_go(slot)

    def victims(self) -> Iterator[bytes]:
        """Known keys in the order in which they may go: here the one used longest ago first."""
        return (key for key, slot in self.known.items() if not slot.num_readers)

    def check(self) -> None:
        """Raises InternalError when slots are lost; counts alone, at once."""
        found = len(self.known), len(self._coming), len(self.free), self._num_loose
        if sum(found) != self._num_slots:
            raise InternalError(f"{found} slots known, coming, free and loose are not {self._num_slots}")

    def _loosen(self, slot: Slot) -> None:
        slot.is_loose = True
        self._num_loose += 1

    def _let_go(self, slot: Slot) -> None:
        slot.is_loose = False
        self._num_loose -= 1
        self.free.append(slot)
