"""A prefix that leaves for another server: found in both tiers, held, and brought to host memory a few blocks a step.

    found    [d0][d1][h2][d3] | [d4][h5][d6]      d on the device, h in host memory; all are held from here on
    staged   [h .. h .. h .. h] settled           what was on the device is swapped out to blocks that were reserved
    read     bytes, on a thread of whoever reads  a part is let go of when it was read

Parts are staged one after the other, one in a step, whether they are read or not: the device's blocks are held for as
many steps as there are parts, and no reader makes that longer. Requests that want them wait for those steps, and for
nobody else. What leaves beside others leaves in part where more than half of the pool would be held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from jpaged.engine.executor import HostBlocks
from jpaged.engine.kv.blocks import BlockTable
from jpaged.engine.kv.prefix_cache import num_usable
from jpaged.engine.kv.prefixes import Held, Prefixes
from jpaged.engine.kv.tiers.chain import Chain, Place
from jpaged.engine.kv.tiers.disk import DiskTier
from jpaged.engine.kv.tiers.host import HostTier
from jpaged.engine.reach import Reach
from jpaged.errors import Cancelled, InternalError

MAX_STAGED_BYTES, MAX_STAGED_BLOCKS = 4 << 20, 64
"""What is copied out in one step at most, beside the step's rows."""
HURRIED = 4
"""How many times as much of a prompt that somebody waits for, on a server whose rows are prompts."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where prefixes are: what leaves and what arrives work on. The engine's thread alone writes.

    Attributes:
        limit: blocks of the device that requests and pins may have.
        ask: has something done on the engine's thread, between two steps.
        disk: whose blocks come to host memory before they leave; None where there is none.
    """

    prefixes: Prefixes
    held: Held
    host: HostTier
    blocks: HostBlocks
    reaches: tuple[Reach, ...]
    limit: Callable[[], int]
    ask: Callable[[Callable[[], None]], None]
    disk: DiskTier | None = None

    @property
    def num_blocks_at_once(self) -> int:
        """Blocks that are moved in one step at most."""
        return max(1, min(MAX_STAGED_BLOCKS, MAX_STAGED_BYTES // self.blocks.bytes_per_block))

    @property
    def num_free_to_leave(self) -> int:
        """Blocks of the device that may be held for another prefix: half of the pool for all, or the whole for one."""
        num_held, limit = self.held.num_blocks, self.limit()
        return max(0, limit // 2 - num_held) if num_held else limit

    def num_known(self, chain: Chain) -> int:
        """Blocks of the longest prefix that a request would find. Any thread may ask."""
        return num_usable(chain.keys, self.reaches, self.prefixes.has_prefix)

    def num_findable(self, chain: Chain) -> int:
        """The same, with what comes from disk sooner than it is computed. Any thread may ask."""
        num_blocks, away = self.on_disk(chain, 0)
        if self.disk is None or not away or self.disk.is_worth(away[0].index, away[-1].index + 1, len(away)):
            return num_blocks
        return self.num_known(chain)

    def on_disk(self, chain: Chain, num_skipped: int) -> tuple[int, tuple[Place, ...]]:
        """Blocks of the longest prefix that is here or on disk, and which are on disk alone. Any thread may ask."""
        disk, has_prefix = self.disk, self.prefixes.has_prefix
        if disk is None:
            return self.num_known(chain), ()
        num_blocks = num_usable(chain.keys, self.reaches, lambda key: has_prefix(key) or key in disk)
        away = [place for place in self.places(chain, num_blocks, num_skipped) if not self.has(chain, place)]
        return num_blocks, tuple(place for place in away if chain.key(place) in disk)

    def has(self, chain: Chain, place: Place) -> bool:
        """A block is here. Any thread may ask."""
        return self.prefixes.has_prefix(chain.key(place))

    def places(self, chain: Chain, num_blocks: int, num_skipped: int) -> tuple[Place, ...]:
        """Blocks that are seen from behind so many, and from behind one fewer: a prompt's last token always runs."""
        places = []
        for kv_group, reach in enumerate(self.reaches):
            before = reach.first_block(max(0, num_blocks - 1))
            kept = reach.places(before, num_blocks)
            places += [Place(index, kv_group) for index in kept if index >= num_skipped]
        return tuple(sorted(places))


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks that are staged and read together.

    Attributes:
        at_device: those of places that are on the device, until they are staged.
        kept, staged: those in host memory: that were there, and that are copied to.
        homes: the host block of each place.
        is_there: set when their bytes may be read.
    """

    places: tuple[Place, ...]
    at_device: BlockTable | None
    kept: BlockTable | None
    staged: BlockTable | None
    homes: list[int]
    is_there: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.is_there.set_running_or_notify_cancel()  # nobody who waits for it can cancel it


class Leaving:
    """Blocks that are held while they are read. Made on the engine's thread; any other reads.

    Attributes:
        chain: what it is called.
        num_found: full blocks of the prompt that are known here.
        num_blocks: those of them that leave: fewer where host memory has no room for the rest.
        places: which blocks, parents first.

    Args:
        num_skipped: leading blocks that stay.
        is_hurried: more of it is staged in a step: see `HURRIED`.
    """

    def __init__(self, tiers: Tiers, chain: Chain, num_skipped: int, is_hurried: bool = False) -> None:
        self.chain = chain
        self._tiers = tiers
        self._num_at_once = tiers.num_blocks_at_once * (HURRIED if is_hurried else 1)
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_found = tiers.num_known(chain)
        self.num_blocks, self.places = _that_fit(tiers, chain, self.num_found, num_skipped)
        self._parts = self._hold(chain)
        self._num_staged = 0
        self._stage()

    @property
    def num_parts(self) -> int:
        """Parts that are read one after the other."""
        return len(self._parts)

    def places_of(self, part: int) -> Sequence[Place]:
        """The blocks of a part."""
        return self._parts[part].places

    def when_there(self, part: int) -> Future[None]:
        """Done when a part may be read."""
        return self._parts[part].is_there

    def read(self, part: int, take: Callable[[Place, memoryview], None]) -> None:
        """Shows the bytes of each block of a part, which is let go of behind it; on a thread that may take its time.

        Raises:
            Cancelled: it was closed.
            InternalError: the part is not there.
        """
        one = self._parts[part]
        with self._lock:
            if self._is_closed:
                raise Cancelled("the prefix that leaves was given up")
            if not one.is_there.done():
                raise InternalError(f"part {part} of {len(self._parts)} is read before it is there")
            for place, home in zip(one.places, one.homes, strict=True):
                take(place, self._tiers.blocks.view(home))
        self._tiers.ask(lambda: self._let_go(one))

    def close(self) -> None:
        """Lets go of everything that is still held; any thread may, and again. Waits for who reads a part."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._tiers.ask(self._let_all_go)

    # --- on the engine's thread -------------------------------------------------------------------------------------

    def _hold(self, chain: Chain) -> list[_Part]:
        host, size = self._tiers.host, self._num_at_once
        parts = []
        for start in range(0, len(self.places), size):
            places = self.places[start : start + size]
            here = [place for place in places if chain.key(place) in host]
            away = [place for place in places if chain.key(place) not in host]
            kept = host.hold([chain.key(place) for place in here])
            parts.append(_Part(places, self._tiers.held.hold([chain.key(place) for place in away]), kept, None, []))
            homes = dict(zip(here, kept.block_ids(), strict=True))
            parts[-1].homes = [homes.get(place, 0) for place in places]
        for part in parts:  # when all that is in host memory is held: to reserve is to evict
            assert part.at_device is not None
            part.staged = host.reserve(part.at_device.num_blocks)
            free = iter(part.staged.block_ids())
            part.homes = [home or next(free) for home in part.homes]
        return parts

    def _stage(self) -> None:
        """Begins with the next part, which is there when nothing is under way to its host blocks."""
        if self._num_staged == len(self._parts):
            return
        part = self._parts[self._num_staged]
        assert part.at_device is not None
        assert part.staged is not None
        for source, home in zip(part.at_device.block_ids(), part.staged.block_ids(), strict=True):
            self._tiers.host.copy_out(source, home)
        homes = BlockTable(len(part.homes))
        homes.extend(part.homes)
        self._tiers.host.when_settled(homes, lambda: self._staged(part))

    def _staged(self, part: _Part) -> None:
        if part.at_device is None:  # it was closed meanwhile
            return
        self._tiers.held.let_go(part.at_device)
        part.at_device = None
        self._num_staged += 1
        part.is_there.set_result(None)
        self._stage()

    def _let_go(self, part: _Part) -> None:
        if part.at_device is not None:
            self._tiers.held.let_go(part.at_device)
        for table in (part.kept, part.staged):
            if table is not None:
                self._tiers.host.let_go(table)
        part.at_device = part.kept = part.staged = None

    def _let_all_go(self) -> None:
        for part in self._parts:
            self._let_go(part)
            if not part.is_there.done():
                part.is_there.set_exception(Cancelled("the prefix that leaves was given up"))


def _that_fit(tiers: Tiers, chain: Chain, num_blocks: int, num_skipped: int) -> tuple[int, tuple[Place, ...]]:
    """The longest prefix of so many blocks whose blocks of the device may be held and find room; and its places."""
    host, num_kv_groups = tiers.host, len(tiers.reaches)
    while True:
        places = tuple(place for place in tiers.places(chain, num_blocks, num_skipped) if tiers.has(chain, place))
        keys = [chain.key(place) for place in places]
        kept = host.hold([key for key in keys if key in host])  # which is no room for the others
        num_away = len(keys) - kept.num_blocks
        num_short = num_away - min(host.pool.num_free, tiers.num_free_to_leave)
        host.let_go(kept)
        if num_short <= 0:
            return num_blocks, places
        fewer = max(0, num_blocks - max(1, num_short // num_kv_groups))
        num_blocks = tiers.num_known(Chain(chain.root, chain.token_ids, chain.keys[:fewer]))
