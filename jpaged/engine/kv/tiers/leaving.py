"""Export of a prefix to another server: found in both tiers, pinned, and staged in host memory a few blocks per step.

    found    [d0][d1][h2][d3] | [d4][h5][d6]      d on the device, h in host memory; all are pinned from here on
    staged   [h .. h .. h .. h] settled           device blocks are copied to reserved host blocks
    read     bytes, on the reader's thread        a part is released after it was read

Parts are staged in sequence, one per step, whether or not they are read. Device blocks are therefore pinned for one
step per part, and a slow reader does not extend that. Requests that need these blocks wait for no more than these
steps. An export next to others is truncated if more than half of the pool would be pinned.
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
"""Maximum copied to host memory per step, next to the step's rows."""
HURRIED = 4
"""Factor on that for a prompt that a client waits for, on a server that only computes prompts."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Memory tiers that exports and imports use. Only the engine thread writes.

    Attributes:
        limit: returns the number of device blocks that requests and pins may use.
        ask: posts a callable to the engine thread, to run between two steps.
        disk: tier whose blocks are loaded to host memory before an export; None without one.
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
        """Return the maximum number of blocks moved per step."""
        return max(1, min(MAX_STAGED_BLOCKS, MAX_STAGED_BYTES // self.blocks.bytes_per_block))

    @property
    def num_free_to_leave(self) -> int:
        """Return the device blocks that another export may pin: all for the only one, else half the pool in total."""
        num_held, limit = self.held.num_blocks, self.limit()
        return max(0, limit // 2 - num_held) if num_held else limit

    def num_known(self, chain: Chain) -> int:
        """Return the length of the longest cached prefix. Any thread may ask."""
        return num_usable(chain.keys, self.reaches, self.prefixes.has_prefix)

    def num_findable(self, chain: Chain) -> int:
        """Return the same, with disk blocks included if loading is faster than computing. Any thread may ask."""
        num_blocks, away = self.on_disk(chain, 0)
        if self.disk is None or not away or self.disk.is_worth(away[0].index, away[-1].index + 1, len(away)):
            return num_blocks
        return self.num_known(chain)

    def on_disk(self, chain: Chain, num_skipped: int) -> tuple[int, tuple[Place, ...]]:
        """Return the length of the longest prefix here or on disk, and its disk-only blocks. Any thread may ask."""
        disk, has_prefix = self.disk, self.prefixes.has_prefix
        if disk is None:
            return self.num_known(chain), ()
        num_blocks = num_usable(chain.keys, self.reaches, lambda key: has_prefix(key) or key in disk)
        away = [place for place in self.places(chain, num_blocks, num_skipped) if not self.has(chain, place)]
        return num_blocks, tuple(place for place in away if chain.key(place) in disk)

    def has(self, chain: Chain, place: Place) -> bool:
        """Return True if a block is on the device or in host memory. Any thread may ask."""
        return self.prefixes.has_prefix(chain.key(place))

    def places(self, chain: Chain, num_blocks: int, num_skipped: int) -> tuple[Place, ...]:
        """Return the blocks visible after num_blocks blocks or after one fewer: a prompt's last token always runs."""
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
        at_device: pinned device blocks, until they are staged.
        kept, staged: host blocks that were already cached there, and those reserved as copy targets.
        homes: host block of each place.
        is_there: done when the bytes may be read.
    """

    places: tuple[Place, ...]
    at_device: BlockTable | None
    kept: BlockTable | None
    staged: BlockTable | None
    homes: list[int]
    is_there: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.is_there.set_running_or_notify_cancel()  # waiters cannot cancel it


class Leaving:
    """Export of a prefix, which pins blocks while they are read. Created on the engine thread, read by any other.

    Attributes:
        chain: identity of the prefix.
        num_found: full blocks of the prompt that are cached here.
        num_blocks: exported ones of these; fewer if host memory has no room for the rest.
        places: exported blocks, parents first.

    Args:
        num_skipped: leading blocks that are not exported.
        is_hurried: more blocks are staged per step: see `HURRIED`.
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
        """Return the number of parts, which are read in sequence."""
        return len(self._parts)

    def places_of(self, part: int) -> Sequence[Place]:
        """Return the blocks of a part."""
        return self._parts[part].places

    def when_there(self, part: int) -> Future[None]:
        """Return a future that is done when the part may be read."""
        return self._parts[part].is_there

    def read(self, part: int, take: Callable[[Place, memoryview], None]) -> None:
        """Pass the bytes of each block of a part to `take`, then release the part. Call it on a thread that may block.

        Raises:
            Cancelled: the export was closed.
            InternalError: the part is not staged.
        """
        one = self._parts[part]
        with self._lock:
            if self._is_closed:
                raise Cancelled("the outgoing prefix was canceled")
            if not one.is_there.done():
                raise InternalError(f"part {part} of {len(self._parts)} is read before it is ready")
            for place, home in zip(one.places, one.homes, strict=True):
                take(place, self._tiers.blocks.view(home))
        self._tiers.ask(lambda: self._let_go(one))

    def close(self) -> None:
        """Release everything that is still pinned; waits for a reader of a part. Any thread may call it, repeatedly."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._tiers.ask(self._let_all_go)

    # --- on the engine thread ---------------------------------------------------------------------------------------

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
        for part in parts:  # after all host blocks are pinned, because reserving evicts
            assert part.at_device is not None
            part.staged = host.reserve(part.at_device.num_blocks)
            free = iter(part.staged.block_ids())
            part.homes = [home or next(free) for home in part.homes]
        return parts

    def _stage(self) -> None:
        """Start to stage the next part, which is ready once no copy to its host blocks is pending."""
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
        if part.at_device is None:  # it was closed in the meantime
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
                part.is_there.set_exception(Cancelled("the outgoing prefix was canceled"))


def _that_fit(tiers: Tiers, chain: Chain, num_blocks: int, num_skipped: int) -> tuple[int, tuple[Place, ...]]:
    """Return the longest prefix, up to num_blocks, whose device blocks may be pinned and staged; and its places."""
    host, num_kv_groups = tiers.host, len(tiers.reaches)
    while True:
        places = tuple(place for place in tiers.places(chain, num_blocks, num_skipped) if tiers.has(chain, place))
        keys = [chain.key(place) for place in places]
        kept = host.hold([key for key in keys if key in host])  # pinned blocks are no room for the others
        num_away = len(keys) - kept.num_blocks
        num_short = num_away - min(host.pool.num_free, tiers.num_free_to_leave)
        host.let_go(kept)
        if num_short <= 0:
            return num_blocks, places
        fewer = max(0, num_blocks - max(1, num_short // num_kv_groups))
        num_blocks = tiers.num_known(Chain(chain.root, chain.token_ids, chain.keys[:fewer]))
