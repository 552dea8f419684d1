"""Rounds of a draft model on the device, instead of several decode steps.

number of rounds ──> the scheduler allocates blocks ──> begin ──> speculate[R], n rounds ──> observe(results)
     │ 0
     └──────────────> begin_plain: steps without the draft model; it computes their tokens before its next proposals
"""

from __future__ import annotations

from collections.abc import Iterator

from jpaged.config import SpeculativeOptions
from jpaged.engine.executor import I32, BlockMoves, Detail, Geometry, Speculated, StepInputs
from jpaged.engine.scheduling.schedule import Schedule, build_step_inputs
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.speculation.rounds.rule import RoundRule
from jpaged.engine.speculation.rounds.seen_blocks import SeenBlocks


class Rounds:
    """Controller of rounds, which run if all rows decode. Called only by the engine thread.

    The draft model lacks KV of tokens that only the model ran, and computes it before the next rounds.

    Args:
        num_speculative_tokens: draft tokens per row and round.
        follows: the draft model runs after each step of the model, so its KV is always complete: an EAGLE head.
    """

    def __init__(
        self, rule: RoundRule, geometry: Geometry, num_speculative_tokens: int, *, follows: bool = False
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._follows = follows
        self._rule = rule
        self._geometry = geometry
        self._seen = SeenBlocks(geometry)

    @classmethod
    def of(cls, options: SpeculativeOptions, geometry: Geometry) -> Rounds:
        """Create the rounds that the options select."""
        rule, follows = RoundRule(options.disable_by_batch_size), options.method == "eagle3"
        return cls(rule, geometry, geometry.num_speculative_tokens, follows=follows)

    def wanted(self, scheduler: Scheduler, geometry: Geometry) -> int:
        """Return the number of rounds of the next dispatch, possibly 0.

        Args:
            geometry: with the bucket sizes compiled so far.
        """
        self._geometry = geometry
        has_room, num_rows = scheduler.queues.num_rows < scheduler.max_num_seqs, len(scheduler.rows)
        size = geometry.buckets.num_speculate_rows(num_rows) if num_rows else None
        if size is None or not scheduler.rounds.may_run(scheduler.queues, has_room=has_room):
            return 0
        longest_s = scheduler.lookahead.longest_s(may_end=scheduler.rows.ahead.may_end, has_room=has_room)
        return self._rule.num_rounds(num_rows, size, longest_s)

    def move(self, moves: BlockMoves) -> None:
        """Record that blocks are moved."""
        self._seen.move(moves)

    def begin_plain(self, inputs: StepInputs, num_steps: int) -> None:
        """Record that the model runs a step or several without the draft model."""
        self._seen.write(inputs, num_steps)

    def begin(self, schedule: Schedule, inputs: StepInputs, num_left_r: I32) -> Iterator[StepInputs]:
        """Yield the prefill steps that the draft model must run before rounds, to complete its KV."""
        if self._follows:
            return
        step, room = Schedule(), self._geometry.max_num_batched_tokens
        decodes, ends = schedule.decodes, inputs.positions_t.tolist()
        begins = self._seen.see(inputs, num_left_r).tolist()
        for sequence, group, begin, end in zip(decodes.sequences, decodes.groups, begins, ends, strict=False):
            first = begin
            while first < end:
                count = min(room, end - first)
                step.rerun(group, sequence, first, count)
                first, room = first + count, room - count
                if not room:
                    step.close()
                    yield build_step_inputs(step, self._geometry)
                    step, room = Schedule(), self._geometry.max_num_batched_tokens
        if step.rows:
            step.close()
            yield build_step_inputs(step, self._geometry)

    def observe(self, schedule: Schedule, speculated: Speculated | None, seconds: float) -> None:
        """Record the results of a dispatch, and its duration.

        Args:
            speculated: result of a dispatch with rounds; None for a plain one.
        """
        decodes = schedule.decodes
        size = self._geometry.buckets.num_speculate_rows(len(decodes)) if decodes and not schedule.rows else None
        if size is None:
            return
        if speculated is None:
            if decodes.detail is Detail.TOKENS and not decodes.are_bound_s.any():  # rows that are eligible for rounds
                self._rule.took_plain(size, seconds / decodes.num_steps)
            return
        num_rounds = max(1, speculated.num_rounds)
        tokens = float(speculated.num_tokens_r[: len(decodes)].sum()) / (len(decodes) * num_rounds)
        self._rule.took(size, tokens, seconds / num_rounds)
