"""Policies of eviction on plain lists: every question is answered by looking at everything that happened."""

from __future__ import annotations

import dataclasses
from itertools import groupby

import numpy as np

from jpaged.engine.kv_cache.eviction import cost_aware
from jpaged.engine.kv_cache.eviction.cost_aware import NUM_AGES, Reuse


class Slow:
    """What all have in common: entries and times seen by place, and the free places in the order in which they came."""

    def __init__(self):
        self.entries, self.seen, self.free = {}, {}, []

    def on_insert(self, slot, entry):
        self.entries[slot], self.seen[slot] = entry, entry.times_seen

    def on_hit(self, slots):
        for slot in slots:
            self.seen[slot] += 1

    def on_free(self, slot):
        self.free.append(slot)

    def on_acquire(self, slot):
        self.free.remove(slot)

    def on_remove(self, slot, *, is_evicted):
        return dataclasses.replace(self.entries.pop(slot), times_seen=self.seen.pop(slot))

    def candidates(self):
        return set(self.free)

    def is_leaf(self, slot):
        """No block that is kept follows it."""
        return all(entry.parent != self.entries[slot].key for entry in self.entries.values())


class SlowLfu(Slow):
    def victims(self):
        return [min(self.free, key=self.seen.__getitem__)]


class SlowTwoQueues(Slow):
    def __init__(self, num_slots):
        super().__init__()
        self.num_slots, self.gone = num_slots, []

    def on_insert(self, slot, entry):
        super().on_insert(slot, entry)
        for key, seen in self.gone:
            if key == entry.key:
                self.seen[slot] = max(entry.times_seen, seen + 1)
        self.gone = [one for one in self.gone if one[0] != entry.key]

    def victims(self):
        once = [slot for slot in self.free if self.seen[slot] == 1]
        again = [slot for slot in self.free if self.seen[slot] > 1]
        return (once if once and (len(once) > max(1, self.num_slots // 10) or not again) else again)[:1]

    def on_remove(self, slot, *, is_evicted):
        entry = super().on_remove(slot, is_evicted=is_evicted)
        if is_evicted:
            self.gone = [*self.gone, (entry.key, entry.times_seen)][-self.num_slots :]
        return entry


class SlowWorth(Slow):
    """Ranks all free places whenever it is asked, by the buckets that `CostAwareEviction` had at the last ranking."""

    def __init__(self, num_slots, costs, fetch_s):
        super().__init__()
        self.num_slots, self.costs, self.fetch_s = num_slots, costs, fetch_s
        self.span = max(1, num_slots // 8)
        self.shared, self.kinds, self.freed_at, self.buckets = {}, {}, {}, {}
        self.gone, self.owners, self.now, self.learns_at = [], {}, 0, num_slots
        self.ranking, self.num_until_ranked = [], 0
        unit = max(1.0, num_slots / 32)
        self.reuse = Reuse(cost_aware.PRIORS, unit, max(4.0, unit))

    def on_insert(self, slot, entry):
        super().on_insert(slot, entry)
        self.shared[slot] = False
        for old in [one for one in self.gone if one["key"] == entry.key]:
            self.gone.remove(old)
            self.ended(old, 0)
            self.seen[slot], self.shared[slot] = max(entry.times_seen, old["seen"] + 1), old["shared"]

    def on_hit(self, slots):
        super().on_hit(slots)
        parents = [self.entries[slot].parent for slot in slots]
        ends = [slot for slot in slots if self.entries[slot].key not in parents]
        is_shared = not all(map(self.is_leaf, ends))
        for slot in slots:
            self.shared[slot] = self.shared[slot] or is_shared
            if slot in self.freed_at:
                self.ended(self.life(slot), 0)
                del self.freed_at[slot]

    def life(self, slot):
        """What is known of a block that was free and is not found again so far."""
        entry = self.entries[slot]
        known = {"key": entry.key, "owner": entry.owner, "seen": self.seen[slot], "shared": self.shared[slot]}
        return known | {"kind": self.kinds[slot], "freed_at": self.freed_at[slot]}

    def ended(self, life, which):
        (self.reuse.ended if which else self.reuse.found)(life["kind"], self.reuse.age(self.now - life["freed_at"]))
        self.owners.setdefault(life["owner"], [0.0, 0.0])[which] += 1

    def on_free(self, slot):
        super().on_free(slot)
        entry, counts = self.entries[slot], self.owners.get(self.entries[slot].owner, [0.0, 0.0])
        share = 0.15 if sum(counts) < 32 else counts[0] / sum(counts)
        seen = [n for n in (2, 4) if self.seen[slot] >= n]
        self.kinds[slot] = (2 * len(seen) + self.shared[slot]) * 3 + (share >= 0.15) + (share >= 0.5)
        cost = -16
        fetch_s, seconds = self.fetch_s(entry.key), self.costs.recompute_s(entry.index)
        if fetch_s is not None:
            seconds = min(seconds, fetch_s)
        while cost < 7 and self.costs.first_s * 1.5 ** (cost + 1) <= seconds:
            cost += 1
        self.buckets[slot] = (self.kinds[slot], cost, self.now // self.span)
        self.freed_at[slot] = self.now
        self.now += 1

    def victims(self):
        if self.num_until_ranked <= 0:
            self.rank()
        self.num_until_ranked -= 1
        found = self.of_ranking()
        if not found:
            self.rank()
            self.num_until_ranked -= 1
            found = self.of_ranking()
        return found or list(self.free)

    def of_ranking(self):
        while self.ranking:
            leaves = [slot for slot in self.free if self.buckets[slot] == self.ranking[0] and self.is_leaf(slot)]
            if leaves:
                return [min(leaves, key=self.freed_at.__getitem__)]
            self.ranking = self.ranking[1:]
        return []

    def rank(self):
        for slot in self.free:
            kind, cost, span = self.buckets[slot]
            length = 1
            while self.now // self.span - span >= 16 * length:
                length *= 2
            self.buckets[slot] = kind, cost, span // length * length
        by_bucket = sorted(self.buckets[slot] for slot in self.free)
        sizes = {bucket: len(list(in_bucket)) for bucket, in_bucket in groupby(by_bucket)}
        ages = {bucket: self.reuse.age(self.now - bucket[2] * self.span) for bucket in sizes}
        if self.now >= self.learns_at:
            alive = np.zeros((len(cost_aware.PRIORS), NUM_AGES))
            for bucket, size in sizes.items():
                alive[bucket[0], ages[bucket]] += size
            self.reuse.learn(alive)
            self.owners = {owner: [0.8 * n for n in counts] for owner, counts in self.owners.items()}
            self.learns_at = self.now + max(1, self.num_slots // 2)

        def rank_of(bucket):
            kind, cost, span = bucket
            seconds = self.costs.first_s * 1.5 ** (cost + 0.5)
            return self.reuse.rates[kind][ages[bucket]] * seconds, span, kind, cost

        self.ranking = sorted(sizes, key=rank_of)
        self.num_until_ranked = max(8, self.num_slots // 64)

    def on_remove(self, slot, *, is_evicted):
        life = self.life(slot) if is_evicted and slot in self.freed_at else None
        entry = super().on_remove(slot, is_evicted=is_evicted)
        self.shared.pop(slot)
        self.freed_at.pop(slot, None)
        if life is not None:
            self.gone.append(life)
            if len(self.gone) > self.num_slots:
                self.ended(self.gone.pop(0), 1)
        return entry
