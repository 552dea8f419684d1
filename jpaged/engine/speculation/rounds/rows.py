"""Rows that decode, entered for rounds of a draft model."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.engine.executor import Geometry
from jpaged.engine.kv.interface import KVMemory
from jpaged.engine.scheduling.policies import SchedulingPolicy
from jpaged.engine.scheduling.queues import Queues
from jpaged.engine.scheduling.rows import DecodingRows, settle
from jpaged.engine.scheduling.schedule import Schedule


@dataclass(frozen=True, slots=True)
class RoundRows:
    """Enters rows for rounds, for one scheduler. What they take in vain `DraftRows.ran` gives back."""

    memory: KVMemory
    rows: DecodingRows
    geometry: Geometry
    policy: SchedulingPolicy

    def may_run(self, queues: Queues, *, has_room: bool) -> bool:
        """Whether every running group decodes, and nobody waits who finds a row.

        Args:
            has_room: there are rows for others.
        """
        rows, ahead = self.rows, self.rows.ahead
        if not rows or ahead.go_singly or ahead.are_bound or (has_room and queues.num_waiting):
            return False
        return rows.settled.issuperset(queues.running)

    def enter(self, schedule: Schedule, num_rounds: int) -> bool:
        """Enters every row for rounds, as many as find blocks for all that may be accepted.

        Nobody leaves for them. False, and nothing is entered, where not even one round finds them.
        """
        num_in_round = self.geometry.num_speculative_tokens + 1
        while self.rows and num_rounds and not self.memory.can_grow(self.rows.left(num_rounds * num_in_round)):
            num_rounds //= 2
        if not self.rows or not num_rounds:
            return False
        shares = self.rows.left(num_rounds * num_in_round)
        for sequence, num_tokens in shares:
            settle(sequence, self.memory)
            self.memory.grow(sequence, num_tokens)
            self.rows.grown(sequence)
        schedule.decode(self.rows.take(rounds=(num_rounds, [num_tokens for _, num_tokens in shares])))
        self.policy.decoded(schedule.decodes.groups)
        return True
