"""Free blocks in lots: those of one class and about one cost that were freed in one span of time, the oldest first.

    span       0          1          2
    class 0    [ 9 4 ]    [ 7 ]      [ 3 5 6 ]
    class 7    [ 1 ]      .          [ 2 8 ]

All of a lot are worth about the same, so that it is lots that are ranked. Spans grow with age: sixteen of one length,
eight of twice that, eight of four times, and so on. A block that others follow is passed over until they have gone, for
nobody could use them without it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

LotKey = tuple[int, int, int]
"""Class, cost level and first span."""

_FINE_SPANS_BITS = 4
"""Spans of the first length are fewer than two to the power of this."""
_MOST_MOVED = 4096
"""So many places are moved at most, some milliseconds, when old lots are put together; the next time goes on."""
_MOST_LOTS = 256
"""So many, and twice as many as hold anything, are kept before the empty ones are dropped."""


@dataclass(slots=True, eq=False)
class Lot:
    """Free places that are worth the same.

    Attributes:
        kind, cost, span: class, cost level, first span.
        places: place -> when it was freed; the oldest first.
        passed: the same of those that were passed over.
        ripe: (when, place) of those of `passed` that nobody follows any more; some may be elsewhere by now.
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
        """The oldest place that was not passed over, or that is ripe; None where there is none."""
        while self.ripe and self.passed.get(self.ripe[0][1]) != self.ripe[0][0]:
            heapq.heappop(self.ripe)
        first = next(iter(self.places.items()), None)
        if self.ripe and (first is None or self.ripe[0][0] < first[1]):
            return self.ripe[0][1]
        return None if first is None else first[0]

    def pass_over(self, place: int) -> None:
        """Leaves a place for later, which others follow."""
        if place in self.places:
            self.passed[place] = self.places.pop(place)
        else:
            heapq.heappop(self.ripe)

    def ripen(self, place: int) -> None:
        """Nobody follows a place any more; nothing happens where it was not passed over."""
        if place in self.passed:
            heapq.heappush(self.ripe, (self.passed[place], place))

    def take_in(self, younger: Lot, most: int) -> tuple[list[int], int]:
        """Moves places of a lot of later spans here, in so many acts at most; returns them, and how many acts are left.

        What is left of that lot is as it was. The oldest go first, then those that are ripe, then the others.
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
    """Which places are free, by lot.

    Args:
        span: how many blocks are freed in the shortest span.
    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._lots: dict[LotKey, Lot] = {}
        self._lot_of: dict[int, Lot] = {}
        self._most = _MOST_LOTS

    def __iter__(self) -> Iterator[Lot]:
        return iter(self._lots.values())

    def begin_of(self, lot: Lot) -> int:
        """When the first span of a lot began."""
        return lot.span * self._span

    def lot_of(self, place: int) -> Lot | None:
        """Where a free place is; None of one that is not free."""
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
        """Drops empty lots, and puts old ones together: of a class and cost there are about eight for each doubling.

        Of a lot for which it would take too long at once a part stays on its own until the next time.
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
            if lot:  # no other has this key: of its class and cost those that came before it are of earlier spans
                self._lots[lot.kind, lot.cost, lot.span] = lot

    def _drop_empty(self, now_span: int) -> None:
        """Drops lots to which nothing can be added any more, now and then: nobody settles them where nothing goes."""
        if len(self._lots) > self._most:
            self._lots = {key: lot for key, lot in self._lots.items() if lot or lot.span == now_span}
            self._most = _MOST_LOTS + 2 * len(self._lots)
