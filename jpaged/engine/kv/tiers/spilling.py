"""Background writes of prefixes to disk.

    due ──> staging block, or the cached block in host memory ──> written by a thread ──> in the store's index

A key is due when its block enters the prefix cache, and again when it leaves the device. So disk follows memory with a
small delay, and a killed process loses little. The tier limits how many bytes a step starts to write.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from jpaged.blockstore.store import BlockStore
from jpaged.engine.executor import HostBlocks
from jpaged.engine.kv.blocks import BlockTable, Key
from jpaged.engine.kv.prefix_cache import PrefixCache
from jpaged.engine.kv.tiers.host import HostTier
from jpaged.engine.kv.tiers.staging import Staging
from jpaged.errors import InternalError

_MAX_LOOKS = 256
"""Maximum number of keys examined per step: most may be on disk, or evicted."""


@dataclass(slots=True, eq=False)
class _Spill:
    """Write of one block.

    Attributes:
        held: pinned cached block in host memory; None if the block is copied to the staging block `home`.
        since: `num_dispatched` when the copy was decided.
        is_wanted: False cancels the write; set by the engine thread, read by the writer thread.
    """

    key: Key
    home: int
    held: BlockTable | None
    since: int
    is_wanted: bool = True
    written: Future[bool] | None = None


class Spilling:
    """Writer of due blocks. Only the engine thread calls it.

    Args:
        max_due: maximum number of waiting keys; beyond it the oldest, which is evicted soonest, is dropped.
        threads: executor with one thread, which writes.
        written: called with each written key.
    """

    def __init__(
        self,
        store: BlockStore,
        blocks: HostBlocks,
        host: HostTier,
        staging: Staging,
        max_due: int,
        threads: Executor,
        written: Callable[[Key], None],
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._host = host
        self._staging = staging
        self._max_due = max_due
        self._threads = threads
        self._written = written
        self._due: OrderedDict[Key, None] = OrderedDict()
        self._landing: deque[_Spill] = deque()
        self._writing: deque[_Spill] = deque()
        self._under_way: dict[Key, _Spill] = {}

    @property
    def is_busy(self) -> bool:
        """Return True if keys are due or being written."""
        return bool(self._due or self._under_way)

    @property
    def under_way(self) -> list[Future[bool]]:
        """Return the pending calls of the writer thread."""
        return [spill.written for spill in self._writing if spill.written is not None]

    def note(self, key: Key) -> None:
        """Mark a key as due, unless it is on disk or being written."""
        if key in self._due or key in self._under_way or key in self._store:
            return
        self._due[key] = None
        if len(self._due) > self._max_due:
            self._due.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Prevent a key from being written to disk, even if its write has started."""
        self._due.pop(key, None)
        if key in self._under_way:
            self._under_way[key].is_wanted = False

    def forget_all(self) -> None:
        """Prevent all pending keys from being written."""
        self._due.clear()
        for spill in self._under_way.values():
            spill.is_wanted = False

    def advance(self, max_blocks: int, cache: PrefixCache) -> int:
        """Finish completed writes, start writes of copied blocks, and begin up to max_blocks more; return that count.

        Args:
            cache: index of the device blocks.
        """
        while self._writing and (written := self._writing[0].written) is not None and written.done():
            written.result()  # an error of the thread is an error of the engine
            self._written(self._writing[0].key)
            self._end(self._writing.popleft())
        while self._landing and self._host.is_settled([self._landing[0].home], self._landing[0].since):
            spill = self._landing.popleft()
            if spill.is_wanted:
                spill.written = self._threads.submit(self._write, spill)
                self._writing.append(spill)
            else:
                self._end(spill)
        return sum(self._begin(key, cache) for key in self._next(max_blocks))

    def _next(self, max_blocks: int) -> Iterable[Key]:
        """Yield due keys in order, up to max_blocks begun ones and while staging blocks are free."""
        num_begun = len(self._under_way)
        for _ in range(min(_MAX_LOOKS, len(self._due))):
            if len(self._under_way) - num_begun >= max_blocks or self._host_is_full:
                return
            yield self._due.popitem(last=False)[0]

    @property
    def _host_is_full(self) -> bool:
        """Return True if the number of pending writes has reached the number of staging blocks."""
        return len(self._under_way) >= self._staging.num_blocks

    def _begin(self, key: Key, cache: PrefixCache) -> bool:
        """Begin to write a key; return False if it is on disk by now or evicted, or no staging block is free."""
        if key in self._store:
            return False
        since, block_id = self._host.num_dispatched, cache.find(key)
        if key in self._host:
            held = self._host.hold([key])
            spill = _Spill(key, held.block_id(0), held, since)
        elif block_id is None:
            return False
        elif (home := self._staging.take()) is None:
            self._due[key] = None
            self._due.move_to_end(key, last=False)
            return False
        else:
            self._host.copy_out(block_id, home)
            spill = _Spill(key, home, None, since)
        self._under_way[key] = spill
        self._landing.append(spill)
        return True

    def _end(self, spill: _Spill) -> None:
        del self._under_way[spill.key]
        if spill.held is None:
            self._staging.give_back(spill.home)
        else:
            self._host.let_go(spill.held)

    def _write(self, spill: _Spill) -> bool:
        """Write a block; runs on the writer thread."""
        if not spill.is_wanted:
            return False
        return self._store.write(spill.key, self._blocks.view(spill.home), lambda: spill.is_wanted)

    def check(self) -> None:
        """Check the bookkeeping of writes.

        Raises:
            InternalError: a block that is being written is lost, or free.
        """
        if len(self._landing) + len(self._writing) != len(self._under_way):
            raise InternalError(
                f"{len(self._landing)} blocks being copied and {len(self._writing)} being written are not "
                f"{len(self._under_way)}"
            )
        self._staging.check(spill.home for spill in self._under_way.values() if spill.held is None)
