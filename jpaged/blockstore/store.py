"""Key -> block on disk: written and read by any thread, bounded, and there again in the next life.

    index    least recently used ...... newest      a read moves a key to the end; whoever needs a slot takes the first
    coming   keys that are being written            what is forgotten meanwhile is not entered
    free     slots in which nothing is, and that nobody reads

A disk that fails turns the store off: it finds nothing any more, and says so once.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from jpaged.blockstore.folder import StoreFolder, block_files, discard, file_name
from jpaged.blockstore.segment import Damaged, Form, Header, Segment
from jpaged.errors import InternalError, InvalidArgument

logger = logging.getLogger(__name__)

_SEGMENT_BYTES, _MIN_SEGMENTS, _MAX_SEGMENTS = 256 << 20, 8, 256
"""Files are made and removed whole: there are several however low the limit is, and not too many to hold open."""


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What a store did since it was opened; bytes are of contents, seconds are of all threads together.

    Attributes:
        num_dropped: blocks that were not what their hash says, and are gone.
        num_evicted: blocks that others took the place of.
        num_failures: errors of the disk.
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


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot; it is known, coming, free, or nobody's until the last has read it."""

    segment: Segment
    number: int
    digest: bytes = b""
    num_readers: int = 0
    is_known: bool = False


@dataclass(slots=True)
class _Segments:
    """The files of an identity: those that were left, and others while there is room."""

    folder: StoreFolder
    path: Path
    form: Form
    opened: list[Segment] = field(default_factory=list)
    is_full: bool = False

    def open_all(self) -> None:
        """Opens what was left; what is damaged, or beyond the limit, goes."""
        total = 0
        for path in block_files(self.path):
            try:
                segment = Segment.open(path, self.form.identity, self.form.bytes_per_block)
            except Damaged as damage:
                discard(path, str(damage))
                continue
            except OSError as error:
                logger.warning("blocks on disk: %s cannot be opened, and is left alone: %s", path, error)
                continue
            if total + segment.form.num_bytes > self.folder.max_bytes:
                segment.close()
                discard(path, "the limit is lower than it was")
                continue
            total += segment.form.num_bytes
            self.opened.append(segment)

    def grow(self) -> Segment | None:
        """One file more; None where the limit or the disk allows none.

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
            logger.warning("blocks on disk: %s is full: no more than %d files are kept", self.path, len(self.opened))
            return None
        self.opened.append(segment)
        return segment


class BlockStore:
    """The blocks of one identity. Any thread may call, and several may at once.

    Args:
        path: the folder; it is locked until every user has closed the store.
        identity: 32 bytes: what the bytes of a block depend on; blocks of another are not found.
        max_bytes: of all files in the folder, those of other identities included.

    Raises:
        InvalidArgument: the folder cannot be used, or not one block fits; names `kv_disk_dir` or `kv_disk_space`.
    """

    def __init__(self, path: Path, identity: bytes, bytes_per_block: int, max_bytes: int) -> None:
        form = _form(identity, bytes_per_block, max_bytes)
        self.bytes_per_block = bytes_per_block
        self._folder = StoreFolder(path, max_bytes)
        try:
            self._segments = _Segments(self._folder, self._folder.of_identity(identity), form)
        except InvalidArgument:
            self._folder.close()
            raise
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._index: OrderedDict[bytes, _Slot] = OrderedDict()
        self._coming: dict[bytes, _Slot] = {}
        self._free: list[_Slot] = []
        self._num_slots = self._num_loose = self._clock = 0
        self._num_users = 1
        self._is_on = True
        self._counts = StoreCounts()
        begin_s = time.monotonic()
        self._segments.open_all()
        self._find_all()
        if self._index:
            seconds = time.monotonic() - begin_s
            logger.info("blocks on disk: %d found in %s in %.3f s", len(self._index), self._segments.path, seconds)

    def __contains__(self, key: bytes) -> bool:
        """What the next moment holds, nobody knows; it takes no lock."""
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def is_on(self) -> bool:
        """The disk has not failed."""
        return self._is_on

    @property
    def counts(self) -> StoreCounts:
        """A snapshot."""
        with self._lock:
            return replace(self._counts, num_blocks=len(self._index))

    def write(self, key: bytes, contents: memoryview, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Keeps a block, in place of the one used longest ago where there is no room.

        Args:
            contents: `[bytes_per_block]`; nobody writes to it meanwhile.
            is_wanted: asked at the last moment, behind which `forget` finds it.

        Returns:
            whether it is kept from now on; not where it is already, was forgotten meanwhile, or the disk failed.
        """
        if key in self._index or not self._is_on:
            return False
        begin_s = time.monotonic()
        try:
            slot = self._slot_for(key)
            if slot is None:
                return False
            slot.segment.write(slot.number, contents)
            slot.digest = slot.segment.form.digest(key, contents)
            return self._enter(key, slot, is_wanted, time.monotonic() - begin_s)
        except OSError as error:
            self._fail(error)
            return False

    def read(self, key: bytes, into: memoryview) -> bool:
        """Reads a block and holds it to its hash; what does not pass is dropped.

        Args:
            into: `[bytes_per_block]`; what is in it where the answer is False does not matter.
        """
        begin_s = time.monotonic()
        with self._lock:
            slot = self._index.get(key)
            if slot is None:
                return False
            slot.num_readers += 1
        is_sound, failure = False, None
        try:
            slot.segment.read(slot.number, into)
            is_sound = slot.segment.form.digest(key, into) == slot.digest
        except OSError as error:
            failure = error
        with self._lock:
            slot.num_readers -= 1
            if not slot.is_known and not slot.num_readers and self._is_on:
                self._loose_is_free(slot)
        if failure is not None:
            self._fail(failure)
            return False
        return self._was_read(key, slot, is_sound, time.monotonic() - begin_s)

    def forget(self, key: bytes) -> None:
        """Sees to it that a key is not found, and what is being written under it is not entered."""
        with self._lock:
            self._num_loose += self._coming.pop(key, None) is not None
            self._remove(key)

    def reset(self) -> int:
        """Forgets every key; the number of those that were found."""
        with self._lock:
            num_known = len(self._index)
            self._num_loose += len(self._coming)
            self._coming.clear()
            for key in list(self._index):
                self._remove(key, is_cleared=False)
            try:
                for segment in self._segments.opened if self._is_on else ():
                    segment.clear_all()
            except OSError as error:
                self._turn_off(error)
            return num_known

    def share(self) -> BlockStore:
        """This store for one user more, who closes it too."""
        with self._lock:
            self._num_users += 1
        return self

    def close(self) -> None:
        """Ends one user's use; with the last one's the folder is free. Nothing may be under way."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            self._is_on = False
            self._index.clear()
            for segment in self._segments.opened:
                segment.close()
            self._folder.close()

    def check(self) -> None:
        """Raises InternalError when slots are lost; counts alone, at once."""
        with self._lock:
            found = len(self._index), len(self._coming), len(self._free), self._num_loose
            if self._is_on and sum(found) != self._num_slots:
                raise InternalError(f"{found} slots known, coming, free and loose are not {self._num_slots}")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _find_all(self) -> None:
        """Reads the tables of all files: what is in which slot. Of two with one key the newer stays."""
        found: list[tuple[Header, _Slot]] = []
        for segment in self._segments.opened:
            for number, header in segment.headers():
                slot = _Slot(segment, number)
                self._num_slots += 1
                if header is None:
                    self._free.append(slot)
                else:
                    slot.digest = header.digest
                    found.append((header, slot))
        found.sort(key=lambda one: one[0].used)
        for header, slot in found:
            self._clock = max(self._clock, header.used)
            if header.key in self._index:
                self._remove(header.key)
            slot.is_known = True
            self._index[header.key] = slot

    def _slot_for(self, key: bytes) -> _Slot | None:
        """A slot to write a key's contents into; None where it is known, or every slot is in use."""
        while True:
            with self._lock:
                if not self._is_on or key in self._index or key in self._coming:
                    return None
                if self._free:
                    slot = self._free.pop()
                    self._coming[key] = slot
                    return slot
            if not self._grow() and not self._evict():
                return None

    def _grow(self) -> bool:
        """Makes one file more, unless somebody else just has; False where there can be none."""
        with self._growing:
            if self._free:
                return True
            segment = self._segments.grow()
            if segment is None:
                return False
            slots = [_Slot(segment, number) for number in reversed(range(segment.form.num_slots))]
            with self._lock:
                self._num_slots += len(slots)
                self._free += slots
            return True

    def _evict(self) -> bool:
        """Frees a slot of the keys that are worth least; False where each is being read."""
        with self._lock:
            if self._free:
                return True
            key = next(self._victims(), None)
            if key is None:
                return False
            self._remove(key)
            self._counts = replace(self._counts, num_evicted=self._counts.num_evicted + 1)
            return True

    def _victims(self) -> Iterator[bytes]:
        """Keys in the order in which they may go: here the one used longest ago first."""
        return (key for key, slot in self._index.items() if not slot.num_readers)

    def _enter(self, key: bytes, slot: _Slot, is_wanted: Callable[[], bool], seconds: float) -> bool:
        """Makes a written block known, unless it was forgotten meanwhile."""
        with self._lock:
            if not self._is_on:
                return False
            if self._coming.get(key) is not slot:
                self._loose_is_free(slot)
                return False
            if not is_wanted():
                self._free.append(self._coming.pop(key))
                return False
            self._clock += 1
            slot.segment.publish(slot.number, Header(key, slot.digest, self._clock))
            del self._coming[key]
            slot.is_known = True
            self._index[key] = slot
            counts = self._counts
            self._counts = replace(
                counts,
                num_written=counts.num_written + 1,
                written_bytes=counts.written_bytes + self.bytes_per_block,
                write_s=counts.write_s + seconds,
            )
            return True

    def _was_read(self, key: bytes, slot: _Slot, is_sound: bool, seconds: float) -> bool:
        """Counts a read; what is sound becomes the newest, what is not is gone."""
        with self._lock:
            is_still = self._index.get(key) is slot
            if is_still and is_sound:
                self._touch(key, slot)
            elif is_still:
                logger.warning("blocks on disk: a block of %s is damaged, and dropped", slot.segment.path)
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

    def _touch(self, key: bytes, slot: _Slot) -> None:
        self._clock += 1
        self._index.move_to_end(key)
        try:
            slot.segment.touch(slot.number, self._clock)
        except OSError as error:
            self._turn_off(error)

    def _remove(self, key: bytes, *, is_cleared: bool = True) -> None:
        """Makes a key unknown, if it is known; its slot is free when nobody reads it any more."""
        slot = self._index.pop(key, None)
        if slot is None:
            return
        slot.is_known = False
        self._num_loose += 1
        if not slot.num_readers:
            self._loose_is_free(slot)
        try:
            if is_cleared:
                slot.segment.clear(slot.number)
        except OSError as error:
            self._turn_off(error)

    def _loose_is_free(self, slot: _Slot) -> None:
        self._num_loose -= 1
        self._free.append(slot)

    def _fail(self, error: OSError) -> None:
        with self._lock:
            self._turn_off(error)

    def _turn_off(self, error: OSError) -> None:
        if self._is_on:
            logger.error("blocks on disk are off from now on: %s: %s", self._segments.path, error)
        self._is_on = False
        self._index.clear()
        self._counts = replace(self._counts, num_failures=self._counts.num_failures + 1)


def _form(identity: bytes, bytes_per_block: int, max_bytes: int) -> Form:
    """Files of a size that the limit has several of; one slot each where blocks are large."""
    wanted = min(max(_SEGMENT_BYTES, max_bytes // _MAX_SEGMENTS), max_bytes // _MIN_SEGMENTS)
    form = Form(identity, bytes_per_block, 1)
    if form.num_bytes > max_bytes:
        raise InvalidArgument(
            "kv_disk_space", f"{max_bytes} bytes; a block has {bytes_per_block}, with its file {form.num_bytes}"
        )
    num_slots = max(1, wanted // bytes_per_block)
    while num_slots > 1 and replace(form, num_slots=num_slots).num_bytes > wanted:
        num_slots -= max(1, num_slots // 64)
    return replace(form, num_slots=max(1, num_slots))
