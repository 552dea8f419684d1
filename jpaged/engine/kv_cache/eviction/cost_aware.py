"""Cost-aware eviction: a block's worth is the rate at which slots of similar blocks save seconds.

    worth = rate(class, age) * seconds to get it back

    class    how often it was seen, whether several conversations share it, and how many blocks of the same owner are
             needed again; the rate of each class is learned
    seconds  to compute it, which grows with its index in the prompt; or to load it from the tier below, if that
             stores it

Free blocks are stored in buckets of about the same worth (`CandidateBuckets`). Buckets are ranked once in a while.
Until the next ranking, blocks are evicted from the bucket with the least worth, oldest first, then from the next
bucket.

Cost of getting an evicted block back: recompute its tokens, or load it from the tier below.

    recompute(i) = B * seconds a token of a large step + pair_s * B * (i * B + B / 2)    attention grows with the index
    fetch        = bytes of a block / transfer rate

The rates are those measured on the device at startup (`DeviceRates`).

Buckets of free blocks: blocks of one class and similar cost that were freed in one time span, the oldest first.

    span       0          1          2
    class 0    [ 9 4 ]    [ 7 ]      [ 3 5 6 ]
    class 7    [ 1 ]      .          [ 2 8 ]

The blocks of a bucket are worth about the same, so the policy ranks buckets. Spans grow with age: sixteen of one
length, eight of twice that, eight of four times, and so on. A block that has cached children is passed over until they
are evicted, because the children are unusable without it.

Reuse probability of blocks, learned by class and by time since their last reference.

    lives      from being freed to being hit again, or to the time when the key is no longer remembered
    p(c, b)    of the blocks of class c that reached age b, the share that was hit within it
    rate(c, a) max over how long they are kept of      hits until then / slots * time until then

The rate is the Gittins index of an item that pays out once and may be given up at any time. It ranks blocks by the hits
that a slot yields per unit of time, whether they are hit at any age or only after a while. Ages count freed blocks, so
an idle server forgets nothing. Evicted blocks are remembered by their keys for a while; otherwise only
cached blocks could prove their worth. Beckmann et al., "LHD", NSDI 2018, also ranks by hits per slot and time.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import DeviceRates
from jpaged.engine.kv_cache.eviction.free_list import BlockHash, CachedBlock


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Costs in seconds.

    Attributes:
        first_s: compute the first block of a prompt.
        further_s: added for each block before it.
        fetch_s: load a block from the tier below.
    """

    first_s: float
    further_s: float
    fetch_s: float

    @classmethod
    def of(cls, rates: DeviceRates, block_size: int, bytes_per_block: int) -> BlockCosts:
        num_tokens, seconds = rates.forward_s[-1]
        return cls(
            first_s=block_size * (seconds / num_tokens + rates.pair_s * block_size / 2),
            further_s=rates.pair_s * block_size**2,
            fetch_s=bytes_per_block / rates.swap_in_bytes_per_s,
        )

    def recompute_s(self, index: int) -> float:
        """Return the seconds to compute the block at `index` of a prompt."""
        return self.first_s + index * self.further_s


BucketKey = tuple[int, int, int]
"""Class, cost level and first span."""

_FINE_SPANS_BITS = 4
"""There are fewer than two to the power of this spans of the first length."""
_MOST_MOVED = 4096
"""Maximum number of slots moved when old buckets are merged (some milliseconds); the next call continues."""
_MAX_BUCKETS = 256
"""Empty buckets are dropped when there are more than this plus twice the number of buckets kept last time."""


@dataclass(slots=True, eq=False)
class CandidateBucket:
    """Bucket of free slots that are worth the same.

    Attributes:
        kind, cost, span: class, cost level, first span.
        slots: slot -> time at which it was freed; the oldest first.
        passed: the same for slots that were passed over.
        ripe: (time, slot) of slots in `passed` whose last child was evicted; some may have left the bucket since.
    """

    kind: int
    cost: int
    span: int
    slots: OrderedDict[int, int] = field(default_factory=OrderedDict)
    passed: OrderedDict[int, int] = field(default_factory=OrderedDict)
    ripe: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.slots) + len(self.passed)

    def add(self, slot: int, freed_at: int) -> None:
        self.slots[slot] = freed_at

    def remove(self, slot: int) -> None:
        if slot in self.slots:
            del self.slots[slot]
        else:
            del self.passed[slot]

    def oldest(self) -> int | None:
        """Return the oldest slot that was not passed over or is ripe, or None."""
        while self.ripe and self.passed.get(self.ripe[0][1]) != self.ripe[0][0]:
            heapq.heappop(self.ripe)
        first = next(iter(self.slots.items()), None)
        if self.ripe and (first is None or self.ripe[0][0] < first[1]):
            return self.ripe[0][1]
        return None if first is None else first[0]

    def pass_over(self, slot: int) -> None:
        """Defer a slot whose block has cached children."""
        if slot in self.slots:
            self.passed[slot] = self.slots.pop(slot)
        else:
            heapq.heappop(self.ripe)

    def mark_leaf(self, slot: int) -> None:
        """Mark a slot as ripe because its last child was evicted; no-op if it was not passed over."""
        if slot in self.passed:
            heapq.heappush(self.ripe, (self.passed[slot], slot))

    def merge(self, younger: CandidateBucket, most: int) -> tuple[list[int], int]:
        """Move slots from a bucket of later spans to this one, in at most `most` operations.

        The oldest slots move first, then the ripe ones, then the others. The rest of the other bucket is unchanged.

        Returns:
            the moved slots, and the number of operations left.
        """
        moved: list[int] = []
        while younger.slots and most:
            slot, freed_at = younger.slots.popitem(last=False)
            self.slots[slot] = freed_at
            moved.append(slot)
            most -= 1
        while younger.ripe and most:
            freed_at, slot = heapq.heappop(younger.ripe)
            if younger.passed.get(slot) == freed_at:
                self.passed[slot] = younger.passed.pop(slot)
                heapq.heappush(self.ripe, (freed_at, slot))
                moved.append(slot)
            most -= 1
        while younger.passed and most:
            slot, freed_at = younger.passed.popitem(last=False)
            self.passed[slot] = freed_at
            moved.append(slot)
            most -= 1
        return moved, most


class CandidateBuckets:
    """Free slots by bucket.

    Args:
        span: number of blocks freed in the shortest span.
    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._buckets: dict[BucketKey, CandidateBucket] = {}
        self._bucket_by_slot: dict[int, CandidateBucket] = {}
        self._most = _MAX_BUCKETS

    def __iter__(self) -> Iterator[CandidateBucket]:
        return iter(self._buckets.values())

    def get_begin(self, bucket: CandidateBucket) -> int:
        """Return the time at which the first span of a bucket began."""
        return bucket.span * self._span

    def get_bucket(self, slot: int) -> CandidateBucket | None:
        """Return the bucket of a free slot, or None if the slot is not free."""
        return self._bucket_by_slot.get(slot)

    def add(self, slot: int, kind: int, cost: int, freed_at: int) -> None:
        key = kind, cost, freed_at // self._span
        bucket = self._buckets.get(key)
        if bucket is None:
            self._drop_empty(key[2])
            bucket = self._buckets[key] = CandidateBucket(*key)
        bucket.add(slot, freed_at)
        self._bucket_by_slot[slot] = bucket

    def remove(self, slot: int) -> None:
        self._bucket_by_slot.pop(slot).remove(slot)

    def settle(self, now: int) -> None:
        """Drop empty buckets and merge old ones; a class and cost keeps about eight buckets per doubling of age.

        A bucket that takes too long to merge at once stays separate in part until the next call.
        """
        now_span, old, self._buckets = now // self._span, self._buckets, {}
        num_left = _MOST_MOVED
        for bucket in sorted((bucket for bucket in old.values() if bucket), key=lambda bucket: bucket.span):
            coarse = max(0, (now_span - bucket.span).bit_length() - _FINE_SPANS_BITS)
            span = bucket.span >> coarse << coarse
            older = self._buckets.get((bucket.kind, bucket.cost, span))
            if older is None:
                bucket.span = span
            else:
                moved, num_left = older.merge(bucket, num_left)
                self._bucket_by_slot.update(dict.fromkeys(moved, older))
            if bucket:  # no other bucket has this key: earlier ones of this class and cost have earlier spans
                self._buckets[bucket.kind, bucket.cost, bucket.span] = bucket

    def _drop_empty(self, now_span: int) -> None:
        """Drop empty buckets of past spans now and then: `commit_full_blocks` does not run while nothing is evicted."""
        if len(self._buckets) > self._most:
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if bucket or bucket.span == now_span}
            self._most = _MAX_BUCKETS + 2 * len(self._buckets)


F64 = NDArray[np.float64]

NUM_AGES = 24
_STEPS_PER_OCTAVE = 2
_REUSE_FADE = 0.95
"""Factor by which older counts are discounted each time the rates are recomputed."""


class Reuse:
    """Statistics of the ends of lives, and the reuse rates computed from them.

    Attributes:
        rates: [C][A] hits per slot and unit of further age, from each age on.

    Args:
        priors: of each class, the share assumed to be hit at any age before there is data.
        unit: number of freed blocks in the first age; every second age doubles the length.
        prior_blocks: weight of the prior of each class, in blocks.
    """

    def __init__(self, priors: Sequence[float], unit: float, prior_blocks: float) -> None:
        num_classes = len(priors)
        self._unit = unit
        self._prior_blocks = prior_blocks
        self._prior_found_c1: F64 = prior_blocks * np.array(priors)[:, None]
        self._found_ca: F64 = np.zeros((num_classes, NUM_AGES))
        self._ended_ca: F64 = np.zeros((num_classes, NUM_AGES))
        edges = 2.0 ** (np.arange(NUM_AGES + 1) / _STEPS_PER_OCTAVE) - 1
        self._widths_a: F64 = np.diff(edges)
        self.rates: list[list[float]] = []
        self.learn(np.zeros((num_classes, NUM_AGES)))

    def age(self, num_freed: int) -> int:
        """Return the age of a block after num_freed other blocks were freed."""
        # 2 log2(1 + x) from the exponent of a number: off by at most one step
        scaled = int((1 + num_freed / self._unit) ** _STEPS_PER_OCTAVE)
        return min(scaled.bit_length() - 1, NUM_AGES - 1)

    def found(self, kind: int, age: int) -> None:
        self._found_ca[kind, age] += 1

    def ended(self, kind: int, age: int) -> None:
        self._ended_ca[kind, age] += 1

    def learn(self, alive_ca: F64) -> None:
        """Recompute the rates.

        Args:
            alive_ca: [C, A] free blocks by class and age, whose lives have not ended.
        """
        ends_ca = self._found_ca + self._ended_ca + alive_ca
        later_ca = np.cumsum(ends_ca[:, ::-1], axis=1)[:, ::-1] - ends_ca
        at_risk_ca = later_ca + self._found_ca + 0.5 * (self._ended_ca + alive_ca)
        p_ca = (self._found_ca + self._prior_found_c1) / (at_risk_ca + self._prior_blocks)
        rates_ca = np.zeros_like(p_ca)
        for age in range(NUM_AGES):
            missed = np.cumprod(1 - p_ca[:, age:], axis=1)
            reached = np.concatenate([np.ones((len(missed), 1)), missed[:, :-1]], axis=1)
            kept = np.cumsum(self._widths_a[age:] * (reached + missed) / 2, axis=1)
            rates_ca[:, age] = np.max((1 - missed) / kept, axis=1)
        self.rates = rates_ca.tolist()
        self._found_ca *= _REUSE_FADE
        self._ended_ca *= _REUSE_FADE


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
class _BlockStats:
    """Statistics of a block, cached or evicted.

    Attributes:
        seen: requests that computed or hit it.
        is_shared: a request continued from it differently than the one before.
        kind: its class when it was last freed.
        freed_at: time of that, in blocks freed since the start; None before, and after a hit.
    """

    entry: CachedBlock
    seen: int
    is_shared: bool = False
    kind: int = 0
    freed_at: int | None = None


class CostAwareEviction:
    """Implementation of `jpaged.engine.kv_cache.eviction.free_list.EvictionPolicy`.

    A decision is O(1), except that all buckets are ranked again after every 64th of the slots. The policy remembers up
    to num_places evicted blocks.

    Args:
        num_slots: slots of the tier.
        fetch_s: returns the seconds to load a key from the tiers below, or None if none stores it; None without such
        tiers.
    """

    def __init__(
        self, num_slots: int, costs: BlockCosts, fetch_s: Callable[[BlockHash], float | None] | None = None
    ) -> None:
        self._num_slots = num_slots
        self._costs = costs
        self._fetch_s = fetch_s
        self._blocks: dict[int, _BlockStats] = {}
        self._slots: dict[BlockHash, int] = {}
        self._num_followers: dict[BlockHash, int] = {}  # blocks of the tier whose parent has the key
        self._gone: OrderedDict[BlockHash, _BlockStats] = OrderedDict()
        self._owners: OrderedDict[BlockHash, list[float]] = OrderedDict()  # [needed again, not needed]
        self._buckets = CandidateBuckets(max(1, num_slots // _SPANS_PER_POOL))
        self._ranking: list[CandidateBucket] = []  # the bucket with the least worth is last
        self._num_until_ranked = 0
        self._now = 0
        self._learns_at = num_slots
        unit = max(1.0, num_slots / _AGE_UNITS_PER_POOL)
        self._reuse = Reuse(PRIORS, unit, prior_blocks=max(4.0, unit))

    def on_insert(self, slot: int, entry: CachedBlock) -> None:
        block = _BlockStats(entry, entry.times_seen)
        gone = self._gone.pop(entry.key, None)
        if gone is not None:
            self._was_needed(gone)
            block.seen, block.is_shared = max(block.seen, gone.seen + 1), gone.is_shared
        self._blocks[slot] = block
        self._slots[entry.key] = slot
        if entry.parent is not None:
            self._num_followers[entry.parent] = self._num_followers.get(entry.parent, 0) + 1

    def on_hit(self, slots: Sequence[int]) -> None:
        blocks = [self._blocks[slot] for slot in slots]
        # Children of the chain's last block are not what this request continues with.
        inner = {block.entry.parent for block in blocks}
        is_shared = any(block.entry.key in self._num_followers and block.entry.key not in inner for block in blocks)
        for block in blocks:
            block.seen += 1
            block.is_shared |= is_shared
            if block.freed_at is not None:
                self._was_needed(block)
                block.freed_at = None

    def times_seen(self, slot: int) -> int:
        return self._blocks[slot].seen

    def on_free(self, slot: int) -> None:
        block = self._blocks[slot]
        block.kind, block.freed_at = self._kind(block), self._now
        self._buckets.add(slot, block.kind, self._cost_level(block.entry), self._now)
        self._now += 1

    def on_acquire(self, slot: int) -> None:
        self._buckets.remove(slot)

    def victim(self) -> int:
        if self._num_until_ranked <= 0:
            self._rank()
        slot = self._oldest_of_least()
        if slot is None:
            self._rank()
            slot = self._oldest_of_least()
        if slot is None:  # every candidate has children that are in use
            slot = next(iter(next(bucket for bucket in self._buckets if bucket).passed))
        self._num_until_ranked -= 1
        self._buckets.remove(slot)
        return slot

    def on_remove(self, slot: int, *, is_evicted: bool) -> CachedBlock:
        block = self._blocks.pop(slot)
        entry = block.entry
        del self._slots[entry.key]
        if entry.parent is not None:
            self._leave_parent(entry.parent)
        if is_evicted and block.freed_at is not None:
            self._gone[entry.key] = block
            if len(self._gone) > self._num_slots:
                self._was_not_needed(self._gone.popitem(last=False)[1])
        return entry.seen(block.seen)

    def candidates(self) -> set[int]:
        return {slot for bucket in self._buckets for slot in (*bucket.slots, *bucket.passed)}

    # --- inside -----------------------------------------------------------------------------------------------------

    def _leave_parent(self, parent: BlockHash) -> None:
        num_followers = self._num_followers.pop(parent) - 1
        if num_followers:
            self._num_followers[parent] = num_followers
            return
        slot = self._slots.get(parent)
        if slot is not None and (bucket := self._buckets.get_bucket(slot)) is not None:
            bucket.mark_leaf(slot)

    def _was_needed(self, block: _BlockStats) -> None:
        assert block.freed_at is not None
        self._reuse.found(block.kind, self._reuse.age(self._now - block.freed_at))
        self._count(block.entry.owner, 0)

    def _was_not_needed(self, block: _BlockStats) -> None:
        assert block.freed_at is not None
        self._reuse.ended(block.kind, self._reuse.age(self._now - block.freed_at))
        self._count(block.entry.owner, 1)

    def _count(self, owner: BlockHash, which: int) -> None:
        counts = self._owners.get(owner)
        if counts is None:
            counts = self._owners[owner] = [0.0, 0.0]
            if len(self._owners) > _MAX_OWNERS:
                self._owners.popitem(last=False)
        else:
            self._owners.move_to_end(owner)
        counts[which] += 1

    def _kind(self, block: _BlockStats) -> int:
        needed, not_needed = self._owners.get(block.entry.owner, (0.0, 0.0))
        num_ended = needed + not_needed
        share = _SHARES[0] if num_ended < _FEW_BLOCKS else needed / num_ended
        of_owner = (share >= _SHARES[0]) + (share >= _SHARES[1])
        of_seen = (block.seen >= _SEEN[0]) + (block.seen >= _SEEN[1])
        return (of_seen * 2 + block.is_shared) * (len(_SHARES) + 1) + of_owner

    def _cost_level(self, entry: CachedBlock) -> int:
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
            bucket = self._ranking[-1]
            while (slot := bucket.oldest()) is not None:
                if self._blocks[slot].entry.key not in self._num_followers:
                    return slot
                bucket.pass_over(slot)
            self._ranking.pop()
        return None

    def _rank(self) -> None:
        """Sort buckets by the worth of their blocks; first recompute the rates if it is time."""
        self._buckets.settle(self._now)
        ages = {
            bucket: self._reuse.age(max(0, self._now - self._buckets.get_begin(bucket))) for bucket in self._buckets
        }
        if self._now >= self._learns_at:
            self._learn(ages)
        rates, seconds = self._reuse.rates, {cost: self._seconds(cost) for cost in {bucket.cost for bucket in ages}}
        worths = [
            (rates[bucket.kind][age] * seconds[bucket.cost], bucket.span, bucket.kind, bucket.cost, bucket)
            for bucket, age in ages.items()
        ]
        self._ranking = [bucket for *_, bucket in sorted(worths, key=lambda worth: worth[:4], reverse=True)]
        self._num_until_ranked = max(8, self._num_slots // _RANKS_PER_POOL)

    def _learn(self, ages: dict[CandidateBucket, int]) -> None:
        alive_ca = np.zeros((len(PRIORS), NUM_AGES))
        for bucket, age in ages.items():
            alive_ca[bucket.kind, age] += len(bucket)
        self._reuse.learn(alive_ca)
        for counts in self._owners.values():
            counts[:] = [_FADE * count for count in counts]
        self._learns_at = self._now + max(1, self._num_slots // _LESSONS_PER_POOL)
