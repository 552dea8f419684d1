"""Cost-aware eviction: a block's worth is the rate at which slots of similar blocks save seconds.

    worth = rate(class, age) * seconds to get it back

    class    how often it was seen, whether several conversations share it, and how many blocks of the same owner are
             needed again; `reuse.py` learns the rate of each class
    seconds  to compute it, which grows with its index in the prompt; or to load it from the tier below, if that
             stores it (`costs.py`)

Free blocks are stored in buckets of about the same worth (`lots.py`). Buckets are ranked once in a while. Until the
next ranking, blocks are evicted from the bucket with the least worth, oldest first, then from the next bucket.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.engine.kv.eviction.costs import BlockCosts
from jpaged.engine.kv.eviction.lots import Lot, Lots
from jpaged.engine.kv.eviction.policy import Entry, Key
from jpaged.engine.kv.eviction.reuse import NUM_AGES, Reuse

_SPANS_PER_POOL = 8
_AGE_UNITS_PER_POOL = 32
_RANKS_PER_POOL = 64
_LESSONS_PER_POOL = 2
_SEEN = (2, 4)
"""Times seen at which a block enters the next class; seen once is the first class."""
_SHARES = (0.15, 0.5)
"""Shares of an owner's blocks needed again, at which a block enters the next class."""
_FEW_BLOCKS = 32
"""Owners with fewer ended lives than this are in the middle class."""
_MAX_OWNERS = 1024
_FADE = 0.8
_COST_STEP = 1.5
_LEAST_COST, _MOST_COST = -16, 7
"""Bounds of cost levels, each dearer by a factor of _COST_STEP; computing the first block of a prompt is level 0."""
_FIRST_GUESS = 0.05
"""Prior share of blocks seen once that are hit at any age; it doubles with each class of times seen."""
PRIORS = tuple(_FIRST_GUESS * 2**seen for seen in range(len(_SEEN) + 1) for _ in range(2 * (len(_SHARES) + 1)))
"""Prior of each class; classes are numbered by times seen, then by whether a block is shared, then by owner."""


@dataclass(slots=True, eq=False)
class _Block:
    """Statistics of a block, cached or evicted.

    Attributes:
        seen: requests that computed or hit it.
        is_shared: a request continued from it differently than the one before.
        kind: its class when it was last freed.
        freed_at: time of that, in blocks freed since the start; None before, and after a hit.
    """

    entry: Entry
    seen: int
    is_shared: bool = False
    kind: int = 0
    freed_at: int | None = None


class Worth:
    """Implementation of `jpaged.engine.kv.eviction.policy.EvictionPolicy`.

    A decision is O(1), except that all buckets are ranked again after every 64th of the slots. The policy remembers up
    to num_places evicted blocks.

    Args:
        num_places: slots of the tier.
        fetch_s: returns the seconds to load a key from the tiers below, or None if none stores it; None without such
        tiers.
    """

    def __init__(
        self, num_places: int, costs: BlockCosts, fetch_s: Callable[[Key], float | None] | None = None
    ) -> None:
        self._num_places = num_places
        self._costs = costs
        self._fetch_s = fetch_s
        self._blocks: dict[int, _Block] = {}
        self._places: dict[Key, int] = {}
        self._num_followers: dict[Key, int] = {}  # blocks of the tier whose parent has the key
        self._gone: OrderedDict[Key, _Block] = OrderedDict()
        self._owners: OrderedDict[Key, list[float]] = OrderedDict()  # [needed again, not needed]
        self._lots = Lots(max(1, num_places // _SPANS_PER_POOL))
        self._ranking: list[Lot] = []  # the bucket with the least worth is last
        self._num_until_ranked = 0
        self._now = 0
        self._learns_at = num_places
        unit = max(1.0, num_places / _AGE_UNITS_PER_POOL)
        self._reuse = Reuse(PRIORS, unit, prior_blocks=max(4.0, unit))

    def enter(self, place: int, entry: Entry) -> None:
        block = _Block(entry, entry.times_seen)
        gone = self._gone.pop(entry.key, None)
        if gone is not None:
            self._was_needed(gone)
            block.seen, block.is_shared = max(block.seen, gone.seen + 1), gone.is_shared
        self._blocks[place] = block
        self._places[entry.key] = place
        if entry.parent is not None:
            self._num_followers[entry.parent] = self._num_followers.get(entry.parent, 0) + 1

    def found(self, places: Sequence[int]) -> None:
        blocks = [self._blocks[place] for place in places]
        # Children of the chain's last block are not what this request continues with.
        inner = {block.entry.parent for block in blocks}
        is_shared = any(block.entry.key in self._num_followers and block.entry.key not in inner for block in blocks)
        for block in blocks:
            block.seen += 1
            block.is_shared |= is_shared
            if block.freed_at is not None:
                self._was_needed(block)
                block.freed_at = None

    def times_seen(self, place: int) -> int:
        return self._blocks[place].seen

    def freed(self, place: int) -> None:
        block = self._blocks[place]
        block.kind, block.freed_at = self._kind(block), self._now
        self._lots.add(place, block.kind, self._cost_level(block.entry), self._now)
        self._now += 1

    def taken(self, place: int) -> None:
        self._lots.remove(place)

    def victim(self) -> int:
        if self._num_until_ranked <= 0:
            self._rank()
        place = self._oldest_of_least()
        if place is None:
            self._rank()
            place = self._oldest_of_least()
        if place is None:  # every candidate has children that are in use
            place = next(iter(next(lot for lot in self._lots if lot).passed))
        self._num_until_ranked -= 1
        self._lots.remove(place)
        return place

    def left(self, place: int, *, is_evicted: bool) -> Entry:
        block = self._blocks.pop(place)
        entry = block.entry
        del self._places[entry.key]
        if entry.parent is not None:
            self._leave_parent(entry.parent)
        if is_evicted and block.freed_at is not None:
            self._gone[entry.key] = block
            if len(self._gone) > self._num_places:
                self._was_not_needed(self._gone.popitem(last=False)[1])
        return entry.seen(block.seen)

    def choices(self) -> set[int]:
        return {place for lot in self._lots for place in (*lot.places, *lot.passed)}

    # --- inside -----------------------------------------------------------------------------------------------------

    def _leave_parent(self, parent: Key) -> None:
        num_followers = self._num_followers.pop(parent) - 1
        if num_followers:
            self._num_followers[parent] = num_followers
            return
        place = self._places.get(parent)
        if place is not None and (lot := self._lots.lot_of(place)) is not None:
            lot.ripen(place)

    def _was_needed(self, block: _Block) -> None:
        assert block.freed_at is not None
        self._reuse.found(block.kind, self._reuse.age(self._now - block.freed_at))
        self._count(block.entry.owner, 0)

    def _was_not_needed(self, block: _Block) -> None:
        assert block.freed_at is not None
        self._reuse.ended(block.kind, self._reuse.age(self._now - block.freed_at))
        self._count(block.entry.owner, 1)

    def _count(self, owner: Key, which: int) -> None:
        counts = self._owners.get(owner)
        if counts is None:
            counts = self._owners[owner] = [0.0, 0.0]
            if len(self._owners) > _MAX_OWNERS:
                self._owners.popitem(last=False)
        else:
            self._owners.move_to_end(owner)
        counts[which] += 1

    def _kind(self, block: _Block) -> int:
        needed, not_needed = self._owners.get(block.entry.owner, (0.0, 0.0))
        num_ended = needed + not_needed
        share = _SHARES[0] if num_ended < _FEW_BLOCKS else needed / num_ended
        of_owner = (share >= _SHARES[0]) + (share >= _SHARES[1])
        of_seen = (block.seen >= _SEEN[0]) + (block.seen >= _SEEN[1])
        return (of_seen * 2 + block.is_shared) * (len(_SHARES) + 1) + of_owner

    def _cost_level(self, entry: Entry) -> int:
        seconds = self._costs.recompute_s(entry.index)
        if self._fetch_s is not None and (fetch_s := self._fetch_s(entry.key)) is not None:
            seconds = min(seconds, fetch_s)
        level = math.floor(math.log(seconds / self._costs.first_s, _COST_STEP))
        return min(max(level, _LEAST_COST), _MOST_COST)

    def _seconds(self, level: int) -> float:
        """Return the seconds that a cost level stands for."""
        return self._costs.first_s * _COST_STEP ** (level + 0.5)

    def _oldest_of_least(self) -> int | None:
        """Return the oldest block without children in the lowest-ranked bucket that has one, or None."""
        while self._ranking:
            lot = self._ranking[-1]
            while (place := lot.oldest()) is not None:
                if self._blocks[place].entry.key not in self._num_followers:
                    return place
                lot.pass_over(place)
            self._ranking.pop()
        return None

    def _rank(self) -> None:
        """Sort buckets by the worth of their blocks; first recompute the rates if it is time."""
        self._lots.settle(self._now)
        ages = {lot: self._reuse.age(max(0, self._now - self._lots.begin_of(lot))) for lot in self._lots}
        if self._now >= self._learns_at:
            self._learn(ages)
        rates, seconds = self._reuse.rates, {cost: self._seconds(cost) for cost in {lot.cost for lot in ages}}
        worths = [
            (rates[lot.kind][age] * seconds[lot.cost], lot.span, lot.kind, lot.cost, lot) for lot, age in ages.items()
        ]
        self._ranking = [lot for *_, lot in sorted(worths, key=lambda worth: worth[:4], reverse=True)]
        self._num_until_ranked = max(8, self._num_places // _RANKS_PER_POOL)

    def _learn(self, ages: dict[Lot, int]) -> None:
        alive_ca = np.zeros((len(PRIORS), NUM_AGES))
        for lot, age in ages.items():
            alive_ca[lot.kind, age] += len(lot)
        self._reuse.learn(alive_ca)
        for counts in self._owners.values():
            counts[:] = [_FADE * count for count in counts]
        self._learns_at = self._now + max(1, self._num_places // _LESSONS_PER_POOL)
