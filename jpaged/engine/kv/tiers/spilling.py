"""Prefixes on their way to disk, in the background.

    due ──> a block that passes it through, or its own in host memory ──> written by a thread ──> known on disk

A key is due when its block is known to the prefix cache, and again when it leaves the device: so disk has what memory
has, a little later, and who is killed loses a little. How many bytes a step begins with is the tier's to say.
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
"""Keys that a step looks at: most may be on disk, or gone."""


@dataclass(slots=True, eq=False)
class _Spill:
    """A block on its way.

    Attributes:
        held: the block in host memory, where it is kept there; None where it passes through `home`.
        since: when the move to it was decided.
        is_wanted: written by the engine's thread, read by the one that writes.
    """

    key: Key
    home: int
    held: BlockTable | None
    since: int
    is_wanted: bool = True
    written: Future[bool] | None = None


class Spilling:
    """Writes what is due. The engine's thread alone calls.

    Args:
        max_due: keys that wait at most; beyond, the oldest, which is gone soonest, is given up.
        threads: one, which writes.
        written: told which keys were.
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
        """Something is due, or on its way."""
        return bool(self._due or self._under_way)

    @property
    def under_way(self) -> list[Future[bool]]:
        """What the thread that writes has to do."""
        return [spill.written for spill in self._writing if spill.written is not None]

    def note(self, key: Key) -> None:
        """A key is due, unless it is on disk or on its way."""
        if key in self._due or key in self._under_way or key in self._store:
            return
        self._due[key] = None
        if len(self._due) > self._max_due:
            self._due.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Sees to it that a key does not come to be on disk, whatever is on its way."""
        self._due.pop(key, None)
        if key in self._under_way:
            self._under_way[key].is_wanted = False

    def forget_all(self) -> None:
        """The same of all keys."""
        self._due.clear()
        for spill in self._under_way.values():
            spill.is_wanted = False

    def advance(self, max_blocks: int, cache: PrefixCache) -> int:
        """Takes back what is written, has written what has landed, and begins with so many more; how many it began.

        Args:
            cache: what the device has.
        """
        while self._writing and (written := self._writing[0].written) is not None and written.done():
            written.result()  # an error of the thread is one of the engine
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
        """Keys that are due, in their order, while blocks are there that they may pass through."""
        num_begun = len(self._under_way)
        for _ in range(min(_MAX_LOOKS, len(self._due))):
            if len(self._under_way) - num_begun >= max_blocks or self._host_is_full:
                return
            yield self._due.popitem(last=False)[0]

    @property
    def _host_is_full(self) -> bool:
        """No more blocks of host memory are held for writing than may pass through."""
        return len(self._under_way) >= self._staging.num_blocks

    def _begin(self, key: Key, cache: PrefixCache) -> bool:
        """Begins with a key; False where it is on disk by now, or gone."""
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
        """Writes a block; on a thread of its own."""
        if not spill.is_wanted:
            return False
        return self._store.write(spill.key, self._blocks.view(spill.home), lambda: spill.is_wanted)

    def check(self) -> None:
        """Raises InternalError where a block that travels is nobody's, or free."""
        if len(self._landing) + len(self._writing) != len(self._under_way):
            raise InternalError(
                f"{len(self._landing)} blocks land and {len(self._writing)} are written: not {len(self._under_way)}"
            )
        self._staging.check(spill.home for spill in self._under_way.values() if spill.held is None)
