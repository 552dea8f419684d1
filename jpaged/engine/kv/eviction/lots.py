"""Buckets of free blocks: blocks of one class and similar cost that were freed in one time span, the oldest first.

    span       0          1          2
    class 0    [ 9 4 ]    [ 7 ]      [ 3 5 6 ]
    class 7    [ 1 ]      .          [ 2 8 ]

The blocks of a bucket are worth about the same, so the policy ranks buckets. Spans grow with age: sixteen of one
length, eight of twice that, eight of four times, and so on. A block that has cached children is passed over until they
are evicted, because the children are unusable without it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

LotKey = tuple[int, int, int]
"""Class, cost level and first span."""

_FINE_SPANS_BITS = 4
"""There are fewer than two to the power of this spans of the first length."""
_MOST_MOVED = 4096
"""Maximum number of slots moved when old buckets are merged (some milliseconds); the next call continues."""
_MOST_LOTS = 256
"""Empty buckets are dropped when there are more than this plus twice the number of buckets kept last time."""


@dataclass(slots=True, eq=False)
class Lot:
    """Bucket of free slots that are worth the same.

    Attributes:
        kind, cost, span: class, cost level, first span.
        places: slot -> time at which it was freed; the oldest first.
        passed: the same for slots that were passed over.
        ripe: (time, slot) of slots in `passed` whose last child was evicted; some may have left the bucket since.
    """

    kind: int
    cost: int
    span: int
    places: OrderedDict[int, int] = field(default_factory=OrderedDict)
    passed: OrderedDict[int, int] = field(default_factory=OrderedDict)
    ripe: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.places) + len(self.passed)

    def add(self, place: int, freed_at: int) -> None:
        self.places[place] = freed_at

    def remove(self, place: int) -> None:
        if place in self.places:
            del self.places[place]
        else:
            del self.passed[place]

    def oldest(self) -> int | None:
        """Return the oldest slot that was not passed over or is ripe, or None."""
        while self.ripe and self.passed.get(self.ripe[0][1]) != self.ripe[0][0]:
            heapq.heappop(self.ripe)
        first = next(iter(self.places.items()), None)
        if self.ripe and (first is None or self.ripe[0][0] < first[1]):
            return self.ripe[0][1]
        return None if first is None else first[0]

    def pass_over(self, place: int) -> None:
        """Defer a slot whose block has cached children."""
        if place in self.places:
            self.passed[place] = self.places.pop(place)
        else:
            heapq.heappop(self.ripe)

    def ripen(self, place: int) -> None:
        """Mark a slot as ripe because its last child was evicted; no-op if it was not passed over."""
        if place in self.passed:
            heapq.heappush(self.ripe, (self.passed[place], place))

    def take_in(self, younger: Lot, most: int) -> tuple[list[int], int]:
        """Move slots from a bucket of later spans to this one, in at most `most` operations.

        The oldest slots move first, then the ripe ones, then the others. The rest of the other bucket is unchanged.

        Returns:
            the moved slots, and the number of operations left.
        """
        moved: list[int] = []
        while younger.places and most:
            place, freed_at = younger.places.popitem(last=False)
            self.places[place] = freed_at
            moved.append(place)
            most -= 1
        while younger.ripe and most:
            freed_at, place = heapq.heappop(younger.ripe)
            if younger.passed.get(place) == freed_at:
                self.passed[place] = younger.passed.pop(place)
                heapq.heappush(self.ripe, (freed_at, place))
                moved.append(place)
            most -= 1
        while younger.passed and most:
            place, freed_at = younger.passed.popitem(last=False)
            self.passed[place] = freed_at
            moved.append(place)
            most -= 1
        return moved, most


class Lots:
    """Free slots by bucket.

    Args:
        span: number of blocks freed in the shortest span.
    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._lots: dict[LotKey, Lot] = {}
        self._lot_of: dict[int, Lot] = {}
        self._most = _MOST_LOTS

    def __iter__(self) -> Iterator[Lot]:
        return iter(self._lots.values())

    def begin_of(self, lot: Lot) -> int:
        """Return the time at which the first span of a bucket began."""
        return lot.span * self._span

    def lot_of(self, place: int) -> Lot | None:
        """Return the bucket of a free slot, or None if the slot is not free."""
        return self._lot_of.get(place)

    def add(self, place: int, kind: int, cost: int, freed_at: int) -> None:
        key = kind, cost, freed_at // self._span
        lot = self._lots.get(key)
        if lot is None:
            self._drop_empty(key[2])
            lot = self._lots[key] = Lot(*key)
        lot.add(place, freed_at)
        self._lot_of[place] = lot

    def remove(self, place: int) -> None:
        self._lot_of.pop(place).remove(place)

    def settle(self, now: int) -> None:
        """Drop empty buckets and merge old ones; a class and cost keeps about eight buckets per doubling of age.

        A bucket that takes too long to merge at once stays separate in part until the next call.
        """
        now_span, old, self._lots = now // self._span, self._lots, {}
        num_left = _MOST_MOVED
        for lot in sorted((lot for lot in old.values() if lot), key=lambda lot: lot.span):
            coarse = max(0, (now_span - lot.span).bit_length() - _FINE_SPANS_BITS)
            span = lot.span >> coarse << coarse
            older = self._lots.get((lot.kind, lot.cost, span))
            if older is None:
                lot.span = span
            else:
                moved, num_left = older.take_in(lot, num_left)
                self._lot_of.update(dict.fromkeys(moved, older))
            if lot:  # no other bucket has this key: earlier ones of this class and cost have earlier spans
                self._lots[lot.kind, lot.cost, lot.span] = lot

    def _drop_empty(self, now_span: int) -> None:
        """Drop empty buckets of past spans now and then: `settle` does not run while nothing is evicted."""
        if len(self._lots) > self._most:
            self._lots = {key: lot for key, lot in self._lots.items() if lot or lot.span == now_span}
            self._most = _MOST_LOTS + 2 * len(self._lots)
