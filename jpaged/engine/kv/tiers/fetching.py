"""Prefixes on their way back from disk, while their groups wait and others run.

    places    [0][1][2][3][4][5][6][7]      of the prompt, which no memory has and disk does
    reads      in  in  done .. .. ..        many under way at once, into blocks that pass them through
    device    [a ][b ]                      cached and free, as if somebody had computed them and gone

What is read and right is brought to the device in order, no more of it in a step than running streams bear. A group
goes on when all of its places are there, when one of them is not on disk after all, or when waiting has taken as long
as computing would have: it finds what came by then, and computes the rest. One whose beginning is being fetched for
another waits for that.
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
"""What a disk is taken for until it has shown what it does."""
_BELIEF = 1.02
"""So much quicker a disk is taken to be with each group that does not wait for it: a slow one is tried again."""
_LEAST_WAIT_S = 0.05
"""Shorter waits are within what threads take to be woken."""
_NUM_AT_ONCE = 16
"""Groups that are attended to in a step; others wait for these."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """What comes back for one group.

    Attributes:
        homes, reads: of the first places: the block that each passes through, and whether it was right.
        num_in: places that are dealt with.
        is_over: nothing more is brought in; what is under way is waited for alone.
        began_s: when somebody first looked whether it can begin; None before that.
        until_s: when the group goes on in any case.
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
        """The group need not wait any more."""
        return self.is_over or (self.behind is None and self.num_in == len(self.places))

    @property
    def is_empty(self) -> bool:
        """Nothing is under way."""
        return self.is_done and self.num_in == len(self.reads)


class Fetching:
    """Reads what waiting groups need. The engine's thread alone calls.

    Args:
        threads: as many as reads are to be under way.
        count: told how many tokens came back, and whether a group went on without all of its own.
        came: told which keys came back.
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
        self._wanting: dict[Key, dict[_Fetch, None]] = {}  # who waits for a key; none is empty
        self._leftover: list[_Fetch] = []

    @property
    def is_busy(self) -> bool:
        """Somebody waits, or reads are under way for somebody who does not any more."""
        return bool(self._fetches or self._leftover)

    @property
    def under_way(self) -> list[Future[bool]]:
        """Reads that are not dealt with."""
        return [read for fetch in self._all() for read in fetch.reads[fetch.num_in :]]

    def block_s(self, key: Key) -> float | None:
        """Seconds that reading a block takes, as far as was seen; None where disk has it not."""
        return self._blocks.bytes_per_block / self._bytes_per_s if key in self._store else None

    def is_worth(self, begin: int, end: int, num_blocks: int) -> bool:
        """So many blocks are read sooner than those from `begin` to `end` are computed. Any thread may ask."""
        read_s = _LATENCY_S + num_blocks * self._blocks.bytes_per_block / self._bytes_per_s
        return self._compute_s(begin, end) > read_s

    def begin(self, group: Group, bringing: Bringing) -> bool:
        """Begins to fetch what disk has of a group's prompt; False where it has nothing that is worth it."""
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
        """A group has ended, which need not be fetched for any more."""
        fetch = self._fetches.pop(group, None)
        if fetch is not None:
            self._want_no_more(fetch)
            fetch.is_over = fetch.has_gone_on = True
            self._leftover.append(fetch)

    def forget(self, key: Key | None) -> None:
        """Sees to it that a key is not brought in by what is under way; None is any key."""
        for fetch in self._fetches.values() if key is None else self._wanting.get(key, ()):
            fetch.is_over = True

    def advance(self, now_s: float, max_bytes: int, bringing: Bringing) -> list[Group]:
        """Brings in what is read, up to so many bytes, and reads on; the groups that go on now."""
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
        """Brings in what is read, in order; the bytes that were moved."""
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
        """Gives back the blocks of reads that nobody waits for."""
        while fetch.num_in < len(fetch.reads) and fetch.reads[fetch.num_in].done():
            fetch.reads[fetch.num_in].result()
            self._staging.give_back(fetch.homes[fetch.num_in])
            fetch.num_in += 1

    def check(self) -> None:
        """Raises InternalError where a block is free that is read into, or it is not known who waits for one."""
        wanted = {(place.key, fetch) for fetch in self._fetches.values() for place in fetch.places}
        if wanted != {(key, fetch) for key, wanting in self._wanting.items() for fetch in wanting}:
            raise InternalError(f"{len(wanted)} blocks are waited for, and not those of {len(self._wanting)} keys")
        self._staging.check(home for fetch in self._all() for home in fetch.homes[fetch.num_in :])

    def _all(self) -> Iterator[_Fetch]:
        yield from self._fetches.values()
        yield from self._leftover

    def _compute_s(self, begin: int, end: int) -> float:
        """Seconds to compute the tokens of these blocks of a prompt."""
        begin, end = begin * self._block_size, end * self._block_size
        size, seconds = self._rates.forward_s[-1]
        return (end - begin) * seconds / size + self._rates.pair_s * (end**2 - begin**2) / 2
