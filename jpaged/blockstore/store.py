"""Thread-safe persistent store from key to block on disk, limited in size.

A disk error turns the store off: it is logged once, and no block is found any more.

An index leads from key to slot. Each slot is known, coming, free, or loose: forgotten, but still read or written.

    known    least recently used ...... newest      a read moves a key to the end; eviction starts at the front
    coming   keys that are being written            a key forgotten in the meantime is loose, and not entered
    free     empty slots without readers

Callers of the index must have locked the store.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jpaged.blockstore.folder import StoreFolder, block_files, discard, file_name
from jpaged.blockstore.segment import Damaged, Form, Segment, SlotHeader
from jpaged.errors import InternalError, InvalidArgument


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


logger = logging.getLogger(__name__)

_SEGMENT_BYTES, _MIN_SEGMENTS, _MAX_SEGMENTS = 256 << 20, 8, 256
"""File size limits: files are created and removed whole, so each limit has several, but not too many to keep open."""
_LEAST_BYTES = 1 << 15
"""Minimum file size; a smaller file would consist mostly of its header."""


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Counters of a store since it was opened; bytes are of contents, seconds are summed over threads.

    Attributes:
        num_dropped: blocks dropped because their hash did not match.
        num_evicted: blocks evicted for others.
        num_failures: disk errors.
    """

    num_blocks: int = 0
    num_read: int = 0
    num_written: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    num_dropped: int = 0
    num_evicted: int = 0
    num_failures: int = 0


@dataclass(slots=True)
class _SegmentFiles:
    """Files of an identity: existing ones, and new ones while there is room."""

    folder: StoreFolder
    path: Path
    form: Form
    opened: list[Segment] = field(default_factory=list)
    is_full: bool = False

    def open_all(self) -> None:
        """Open existing files; remove those that are damaged or beyond the limit."""
        total = 0
        for path in block_files(self.path):
            try:
                segment = Segment.open(path, self.form.identity, self.form.bytes_per_block)
            except Damaged as damage:
                discard(path, str(damage))
                continue
            except OSError as error:
                logger.warning("disk offload: cannot open %s, which is left unchanged: %s", path, error)
                continue
            if total + segment.form.num_bytes > self.folder.max_bytes:
                segment.close()
                discard(path, "the limit was lowered")
                continue
            total += segment.form.num_bytes
            self.opened.append(segment)

    def grow(self) -> Segment | None:
        """Create one more file; return None if the limit or the disk has no room.

        Raises:
            OSError: the disk failed.
        """
        if self.is_full or not self.folder.make_room(self.form.num_bytes, self.path):
            return None
        taken = {path.name for path in block_files(self.path)}
        name = next(name for number in range(1 << 20) if (name := file_name(number)) not in taken)
        try:
            segment = Segment.create(self.path / name, self.form)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.opened:
                raise
            self.is_full = True
            logger.warning("disk offload: %s is full: the limit is %d files", self.path, len(self.opened))
            return None
        self.opened.append(segment)
        return segment


class BlockStore:
    """Blocks of one identity on disk, as a `jpaged.engine.kv_cache.connector.ConnectorStore`. Any thread may call.

    Args:
        path: folder, which is locked until every user has closed the store.
        identity: 32 bytes that identify all that a block depends on; blocks of others are not found.
        max_bytes: maximum size of all files in the folder, those of other identities included.

    Raises:
        InvalidArgument: the folder cannot be used, or not one block fits; names `kv_disk_dir` or `kv_disk_space`.
    """

    def __init__(self, path: Path, identity: bytes, bytes_per_block: int, max_bytes: int) -> None:
        form = _form(identity, bytes_per_block, max_bytes)
        self.bytes_per_block = bytes_per_block
        self._folder = StoreFolder(path, max_bytes)
        try:
            self._segments = _SegmentFiles(self._folder, self._folder.of_identity(identity), form)
        except InvalidArgument:
            self._folder.close()
            raise
        self._lock = threading.RLock()
        self._growing = threading.Lock()
        self._slots = Slots()
        self._num_users = 1
        self._is_on = True
        self._counts = StoreCounts()
        self._listeners: list[Callable[[bytes | None], None]] = []
        begin_s = time.monotonic()
        self._segments.open_all()
        self._clock = _find_all(self._segments.opened, self._slots)
        if self._slots.known:
            seconds, num_found = time.monotonic() - begin_s, len(self._slots.known)
            logger.info("disk offload: found %d blocks in %s in %.3f s", num_found, self._segments.path, seconds)

    def lookup(self, key: bytes) -> bool:
        """Return True if the key is known at this moment; takes no lock."""
        return self._is_on and key in self._slots.known

    def refresh(self, search: Callable[[Callable[[bytes], bool]], object], keys: Sequence[bytes] = ()) -> None:
        """Do nothing: the index has every key of the folder, which no other process writes."""

    @property
    def is_on(self) -> bool:
        """Return False after a disk error."""
        return self._is_on

    @property
    def max_batch(self) -> int:
        """Return 1: threads that read one block each are faster than one that reads several."""
        return 1

    @property
    def counts(self) -> StoreCounts:
        """Return a snapshot of the counters."""
        with self._lock:
            return replace(self._counts, num_blocks=len(self._slots.known) * self._is_on)

    def save(self, key: bytes, contents: memoryview, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Store a block; evict the least recently used one if there is no room.

        Args:
            contents: `[bytes_per_block]`; must not change during the call.
            is_wanted: called last; False cancels the write. `remove` finds the block afterwards.

        Returns:
            whether it was stored; False if it already was, was forgotten in the meantime, or the disk failed.
        """
        begin_s = time.monotonic()
        try:
            slot = self._slot_for(key)
            if slot is None:
                return False
            slot.segment.write(slot.number, contents)
            digest = slot.segment.form.digest(key, contents)
            with self._lock:
                return self._enter(key, slot, digest, is_wanted(), time.monotonic() - begin_s)
        except OSError as error:
            self._turn_off(error)
            return False

    def load(self, key: bytes, into: memoryview) -> bool:
        """Read a block and verify its hash; an invalid block is dropped. Return True if it is valid.

        Args:
            into: `[bytes_per_block]`; its contents are undefined if the result is False.
        """
        begin_s = time.monotonic()
        with self._lock:
            slot = self._slots.begin_read(key) if self._is_on else None
        if slot is None:
            return False
        try:
            slot.segment.read(slot.number, into)
            is_sound = slot.segment.form.digest(key, into) == slot.digest
            return self._was_read(key, slot, is_sound, time.monotonic() - begin_s)
        except OSError as error:
            self._turn_off(error)
            return False
        finally:
            with self._lock:
                self._slots.end_read(slot)

    def load_all(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[bool]:
        """Read several blocks, as `load`."""
        return [self.load(key, one) for key, one in zip(keys, into, strict=True)]

    def save_all(self, blocks: Sequence[tuple[bytes, memoryview, Callable[[], bool]]]) -> Sequence[bool]:
        """Store several blocks, as `save`."""
        return [self.save(*block) for block in blocks]

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record that the known ones of these keys were used elsewhere just now."""
        for key in keys:
            with self._lock:  # locked per key, so that a long prompt does not block other threads
                slot = self._slots.known.get(key)
                if slot is None or not self._is_on:
                    continue
                self._clock += 1
                self._slots.known.move_to_end(key)
                try:
                    slot.segment.touch(slot.number, self._clock)
                except OSError as error:
                    self._turn_off(error)

    def remove(self, key: bytes) -> None:
        """Remove a key, and prevent a pending write of it from being entered."""
        with self._lock:
            self._remove(key)

    def reset(self) -> int:
        """Forget every key; return the number of known ones."""
        with self._lock:
            if not self._is_on:
                return 0
            gone = [*self._slots.known]
            num_known = self._slots.remove_all()
            for listener in self._listeners:
                for key in gone:
                    listener(key)
            try:
                for segment in self._segments.opened:
                    segment.clear_all()
            except OSError as error:
                self._turn_off(error)
            return num_known

    def add_removal_listener(self, listener: Callable[[bytes | None], None]) -> None:
        """Register a callback for each key that is removed, on any thread; a disk error only changes `is_on`.

        The callback runs with the store's lock taken, and may only use `lookup`.
        """
        with self._lock:
            self._listeners.append(listener)

    def share(self) -> BlockStore:
        """Return this store for one more user, who must close it too."""
        with self._lock:
            self._num_users += 1
        return self

    def close(self) -> None:
        """End one user's use; the last one closes the files and the folder. No call may be pending."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            self._is_on = False
            if self._counts.num_dropped:
                logger.warning("disk offload: dropped %d damaged blocks in all", self._counts.num_dropped)
            for segment in self._segments.opened:
                segment.close()
            self._folder.close()

    def check(self) -> None:
        """Check the number of slots in O(1).

        Raises:
            InternalError: slots are lost.
        """
        with self._lock:
            if self._is_on:
                self._slots.check()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _slot_for(self, key: bytes) -> Slot | None:
        """Return a slot to write a key's contents into; None if the key is known, or every slot is in use."""
        while True:
            with self._lock:
                if not self._is_on or self._slots.is_taken(key):
                    return None
                if (slot := self._slots.claim(key)) is not None:
                    return slot
            if not self._grow() and not self._evict():
                return None

    def _grow(self) -> bool:
        """Create one more file, unless another thread just did; return False if there is no room."""
        with self._growing:
            if self._slots.free:
                return True
            segment = self._segments.grow()
            if segment is None:
                return False
            with self._lock:
                for number in reversed(range(segment.form.num_slots)):
                    self._slots.add(Slot(segment, number))
            return True

    def _evict(self) -> bool:
        """Free the slot of the first key in eviction order; return False if all are being read."""
        with self._lock:
            if self._slots.free:
                return True
            key = next(self._slots.victims(), None)
            if key is None:
                return False
            self._remove(key)
            self._counts = replace(self._counts, num_evicted=self._counts.num_evicted + 1)
            return True

    def _enter(self, key: bytes, slot: Slot, digest: bytes, is_wanted: bool, seconds: float) -> bool:
        """Make a written block known, unless it was forgotten in the meantime."""
        if not self._is_on or not self._slots.came(key, slot, digest if is_wanted else None):
            return False
        self._clock += 1
        slot.segment.publish(slot.number, SlotHeader(key, digest, self._clock))
        counts = self._counts
        self._counts = replace(
            counts,
            num_written=counts.num_written + 1,
            written_bytes=counts.written_bytes + self.bytes_per_block,
            write_s=counts.write_s + seconds,
        )
        return True

    def _was_read(self, key: bytes, slot: Slot, is_sound: bool, seconds: float) -> bool:
        """Count a read; a valid block becomes the newest, an invalid one is dropped."""
        with self._lock:
            is_still = self._is_on and self._slots.known.get(key) is slot
            if is_still and is_sound:
                self.touch([key])
            elif is_still:
                if not self._counts.num_dropped:
                    problem = "disk offload: dropped a damaged block of %s; further ones are only counted"
                    logger.warning(problem, slot.segment.path)
                self._counts = replace(self._counts, num_dropped=self._counts.num_dropped + 1)
                self._remove(key)
            counts = self._counts
            self._counts = replace(
                counts,
                num_read=counts.num_read + is_sound,
                read_bytes=counts.read_bytes + is_sound * self.bytes_per_block,
                read_s=counts.read_s + seconds,
            )
            return is_sound

    def _remove(self, key: bytes) -> None:
        """Forget a known or coming key, in memory and on disk."""
        slot = self._slots.remove(key)
        for listener in self._listeners if slot is not None else ():
            listener(key)
        try:
            if slot is not None and self._is_on:
                slot.segment.clear(slot.number)
        except OSError as error:
            self._turn_off(error)

    def _turn_off(self, error: OSError) -> None:
        with self._lock:
            if self._is_on:
                logger.error("disk offload is now off: %s: %s", self._segments.path, error)
            self._is_on = False
            self._counts = replace(self._counts, num_failures=self._counts.num_failures + 1)


def _find_all(segments: Iterable[Segment], slots: Slots) -> int:
    """Read the tables of all files into the index; return the highest use counter.

    If two slots have one key, the newer one stays.
    """
    found: list[tuple[SlotHeader, Slot]] = []
    for segment in segments:
        for number, header in segment.headers():
            if header is None:
                slots.add(Slot(segment, number))
            else:
                found.append((header, Slot(segment, number, header.digest)))
    found.sort(key=lambda one: one[0].used)
    for header, slot in found:
        if (older := slots.remove(header.key)) is not None:
            older.segment.clear(older.number)
        slots.add(slot, header.key)
    return found[-1][0].used if found else 0


def _form(identity: bytes, bytes_per_block: int, max_bytes: int) -> Form:
    """Return the file format: several files within the limit; one slot each if blocks are large."""
    wanted = min(max(_SEGMENT_BYTES, max_bytes // _MAX_SEGMENTS), max_bytes // _MIN_SEGMENTS)
    wanted = max(wanted, min(_LEAST_BYTES, max_bytes))
    form = Form(identity, bytes_per_block, 1)
    if form.num_bytes > max_bytes:
        raise InvalidArgument(
            "kv_disk_space",
            f"{max_bytes} bytes; a block has {bytes_per_block} bytes, and with its file {form.num_bytes}",
        )
    num_slots = max(1, wanted // bytes_per_block)
    while num_slots > 1 and replace(form, num_slots=num_slots).num_bytes > wanted:
        num_slots -= max(1, num_slots // 64)
    return replace(form, num_slots=max(1, num_slots))
