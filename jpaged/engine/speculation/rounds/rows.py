"""Decode rows scheduled for rounds of a draft model."""

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
    """Schedules rows for rounds, for one scheduler. `DraftRows.ran` releases unused blocks."""

    memory: KVMemory
    rows: DecodingRows
    geometry: Geometry
    policy: SchedulingPolicy

    def may_run(self, queues: Queues, *, has_room: bool) -> bool:
        """Return True if every running group decodes, and no waiting group could be admitted.

        Args:
            has_room: there are free rows.
        """
        rows, ahead = self.rows, self.rows.ahead
        if not rows or ahead.go_singly or ahead.are_bound or (has_room and queues.num_waiting):
            return False
        return rows.settled.issuperset(queues.running)

    def enter(self, schedule: Schedule, num_rounds: int) -> bool:
        """Schedule every row for num_rounds rounds, halved until blocks for all tokens they may accept are free.

        No group is preempted. Returns False, and schedules nothing, if blocks for one round are lacking.
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
