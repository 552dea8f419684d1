"""Asynchronous loads of prefixes from disk, while their groups wait and others run.

    places    [0][1][2][3][4][5][6][7]      missing blocks of the prompt that disk has
    reads      in  in  done .. .. ..        many concurrent reads, into staging blocks
    device    [a ][b ]                      cached and free, as after a request that computed them

Valid blocks are copied to the device in order, limited per step so that running groups are not delayed. A group resumes
when all its blocks are loaded, when a read fails, or when it has waited as long as computing would have taken. It then
hits the loaded blocks and computes the rest. A group whose first missing block is being loaded for another group waits
for that group first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import islice

from jpaged.blockstore.store import BlockStore
from jpaged.engine.executor import DeviceRates, HostBlocks
from jpaged.engine.kv.blocks import Key
from jpaged.engine.kv.tiers.bringing import Bringing, Place
from jpaged.engine.kv.tiers.staging import Staging
from jpaged.engine.sequence import Group
from jpaged.errors import InternalError

_FIRST_BYTES_PER_S = 200e6
_LATENCY_S = 0.002
"""Assumed rate and latency of a disk before there are measurements."""
_BELIEF = 1.02
"""Factor on the estimated disk rate for each group that does not wait, so that a slow disk is tried again."""
_LEAST_WAIT_S = 0.05
"""Minimum wait: shorter ones are within the wake-up time of threads."""
_NUM_AT_ONCE = 16
"""Maximum number of groups processed per step; others wait for these."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """Load for one group.

    Attributes:
        homes, reads: of the first places: the staging block of each, and whether its read was valid.
        num_in: number of places that are finished.
        is_over: nothing more is inserted; only pending reads are awaited.
        began_s: time of the first step that processed it; None before that.
        until_s: deadline at which the group resumes in any case.
    """

    group: Group
    places: list[Place]
    longest_s: float
    behind: _Fetch | None = None
    homes: list[int] = field(default_factory=list)
    reads: list[Future[bool]] = field(default_factory=list)
    num_in: int = 0
    is_over: bool = False
    has_gone_on: bool = False
    began_s: float | None = None
    until_s: float = 0.0

    @property
    def is_done(self) -> bool:
        """Return True if the group need not wait any more."""
        return self.is_over or (self.behind is None and self.num_in == len(self.places))

    @property
    def is_empty(self) -> bool:
        """Return True if no read is pending."""
        return self.is_done and self.num_in == len(self.reads)


class Fetching:
    """Loader of the blocks that waiting groups need. Only the engine thread calls it, except `is_worth`.

    Args:
        threads: executor with one thread per concurrent read.
        count: called with the number of loaded tokens, and whether a group resumed before its load completed.
        came: called with each key that was loaded.
    """

    def __init__(
        self,
        store: BlockStore,
        blocks: HostBlocks,
        staging: Staging,
        rates: DeviceRates,
        block_size: int,
        threads: Executor,
        count: Callable[[int, bool], None],
        came: Callable[[Key], None],
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._staging = staging
        self._rates = rates
        self._block_size = block_size
        self._threads = threads
        self._count = count
        self._came = came
        self._bytes_per_s = _FIRST_BYTES_PER_S
        self._fetches: dict[Group, _Fetch] = {}
        self._wanting: dict[Key, dict[_Fetch, None]] = {}  # fetches that wait for a key; none is empty
        self._leftover: list[_Fetch] = []

    @property
    def is_busy(self) -> bool:
        """Return True if a group waits, or reads for a group that no longer waits are pending."""
        return bool(self._fetches or self._leftover)

    @property
    def under_way(self) -> list[Future[bool]]:
        """Return the reads whose results are not processed."""
        return [read for fetch in self._all() for read in fetch.reads[fetch.num_in :]]

    def block_s(self, key: Key) -> float | None:
        """Return the seconds to read a block at the measured rate; None if disk does not store it."""
        return self._blocks.bytes_per_block / self._bytes_per_s if key in self._store else None

    def is_worth(self, begin: int, end: int, num_blocks: int) -> bool:
        """Return True if reading num_blocks is faster than computing blocks `begin` to `end`. Any thread may ask."""
        read_s = _LATENCY_S + num_blocks * self._blocks.bytes_per_block / self._bytes_per_s
        return self._compute_s(begin, end) > read_s

    def begin(self, group: Group, bringing: Bringing) -> bool:
        """Start to load a group's prompt; return False if disk has nothing that is faster than computing."""
        places = bringing.missing(group, self._store.__contains__)
        if not places:
            return False
        begin, end = places[0].index, places[-1].index + 1
        if not self.is_worth(begin, end, len(places)):
            self._bytes_per_s = min(self._bytes_per_s * _BELIEF, max(self._bytes_per_s, _FIRST_BYTES_PER_S))
            return False
        first = places[0].key
        behind = next((other for other in self._wanting.get(first, ()) if other.places[0].key == first), None)
        self._fetches[group] = fetch = _Fetch(group, places, max(self._compute_s(begin, end), _LEAST_WAIT_S), behind)
        self._want(fetch)
        return True

    def leave(self, group: Group) -> None:
        """Stop loading for a group that has ended."""
        fetch = self._fetches.pop(group, None)
        if fetch is not None:
            self._want_no_more(fetch)
            fetch.is_over = fetch.has_gone_on = True
            self._leftover.append(fetch)

    def forget(self, key: Key | None) -> None:
        """Prevent pending loads from inserting a key; None stands for any key."""
        for fetch in self._fetches.values() if key is None else self._wanting.get(key, ()):
            fetch.is_over = True

    def advance(self, now_s: float, max_bytes: int, bringing: Bringing) -> list[Group]:
        """Insert loaded blocks, up to max_bytes, and start further reads; return the groups that resume now."""
        going_on = []
        for fetch in self._leftover:
            self._clear(fetch)
        self._leftover = [fetch for fetch in self._leftover if not fetch.is_empty]
        for fetch in list(islice(self._fetches.values(), _NUM_AT_ONCE)):
            if fetch.behind is not None:
                if not fetch.behind.has_gone_on:
                    continue
                self._want_no_more(fetch)
                fetch.behind, fetch.places = None, bringing.missing(fetch.group, self._store.__contains__)
                self._want(fetch)
            if fetch.began_s is None:
                fetch.began_s, fetch.until_s = now_s, now_s + fetch.longest_s
            max_bytes -= self._bring_in(fetch, max_bytes, bringing)
            self._read_on(fetch)
            if now_s > fetch.until_s:
                fetch.is_over = True
            if fetch.is_done:
                self._end(fetch, now_s)
                going_on.append(fetch.group)
        return going_on

    def _want(self, fetch: _Fetch) -> None:
        for place in fetch.places:
            self._wanting.setdefault(place.key, {})[fetch] = None

    def _want_no_more(self, fetch: _Fetch) -> None:
        for place in fetch.places:
            wanting = self._wanting[place.key]
            del wanting[fetch]
            if not wanting:
                del self._wanting[place.key]

    def _end(self, fetch: _Fetch, now_s: float) -> None:
        fetch.has_gone_on = True
        del self._fetches[fetch.group]
        self._want_no_more(fetch)
        self._leftover.append(fetch)
        self._count(0, fetch.is_over)
        if fetch.began_s is not None and now_s > fetch.began_s:
            seen = fetch.num_in * self._blocks.bytes_per_block / (now_s - fetch.began_s)
            self._bytes_per_s = (self._bytes_per_s + seen) / 2

    def _bring_in(self, fetch: _Fetch, max_bytes: int, bringing: Bringing) -> int:
        """Insert loaded blocks in order; return the number of bytes moved."""
        num_bytes = 0
        while not fetch.is_over and num_bytes < max_bytes and fetch.num_in < len(fetch.reads):
            read = fetch.reads[fetch.num_in]
            if not read.done():
                break
            place, home = fetch.places[fetch.num_in], fetch.homes[fetch.num_in]
            if read.result() and bringing.bring_in(fetch.group, place, home):
                num_bytes += self._blocks.bytes_per_block
                self._came(place.key)
                self._count(0 if place.kv_group else self._block_size, False)
            else:
                fetch.is_over = True
            self._staging.give_back(home)
            fetch.num_in += 1
        return num_bytes

    def _read_on(self, fetch: _Fetch) -> None:
        while not fetch.is_over and len(fetch.reads) < len(fetch.places):
            home = self._staging.take()
            if home is None:
                return
            key = fetch.places[len(fetch.reads)].key
            fetch.homes.append(home)
            fetch.reads.append(self._threads.submit(self._store.read, key, self._blocks.view(home)))

    def _clear(self, fetch: _Fetch) -> None:
        """Return the staging blocks of finished reads that no group waits for."""
        while fetch.num_in < len(fetch.reads) and fetch.reads[fetch.num_in].done():
            fetch.reads[fetch.num_in].result()
            self._staging.give_back(fetch.homes[fetch.num_in])
            fetch.num_in += 1

    def check(self) -> None:
        """Check the bookkeeping of reads.

        Raises:
            InternalError: a block that is read into is free, or the waiting fetches of a key are wrong.
        """
        wanted = {(place.key, fetch) for fetch in self._fetches.values() for place in fetch.places}
        if wanted != {(key, fetch) for key, wanting in self._wanting.items() for fetch in wanting}:
            raise InternalError(
                f"{len(wanted)} blocks are pending, which do not match those of {len(self._wanting)} keys"
            )
        self._staging.check(home for fetch in self._all() for home in fetch.homes[fetch.num_in :])

    def _all(self) -> Iterator[_Fetch]:
        yield from self._fetches.values()
        yield from self._leftover

    def _compute_s(self, begin: int, end: int) -> float:
        """Return the seconds to compute the tokens of these blocks of a prompt."""
        begin, end = begin * self._block_size, end * self._block_size
        size, seconds = self._rates.forward_s[-1]
        return (end - begin) * seconds / size + self._rates.pair_s * (end**2 - begin**2) / 2
