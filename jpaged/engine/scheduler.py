"""Who runs in the next step, on how many tokens, and who has to make room.

    running  [ g1  g2  g3 ]   in order of arrival; every decoding row gets its token first, prompts share what is left
                       ^      of max_num_batched_tokens; when blocks run out the latest arrival is preempted
    waiting  [ g4  g5 ... ]   admitted from the left, while the whole prompt finds free blocks; a preempted group goes
              ^               back to the left, so nobody overtakes it

Policy only: it allocates through the block pool and knows no arrays, no device and no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from jpaged.engine.block_pool import BlockPool, BlockTable
from jpaged.engine.sequence import Group, Sequence, Status


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A sequence's part in a step: tokens start to start + num_tokens of it go through the model.

    Attributes:
        draws_token: the last of them is the sequence's last, so the step draws the next one.
        fed_back_row: the last input token is in flight: it is what the step before drew in this row. None when the
            host knows it.
        output_index: which output token of the sequence is drawn; 0 is the first.
    """

    group: Group
    sequence: Sequence
    start: int
    num_tokens: int
    draws_token: bool
    fed_back_row: int | None
    output_index: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step, decided: the rows in order, and who was preempted for it."""

    rows: list[ScheduledRow]
    num_tokens: int
    preempted: list[Group]


class Scheduler:
    """Owns the waiting queue and the running list, and is the only one that allocates blocks."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Group] = deque()
        self._running: list[Group] = []
        # Room that growing rows find without preempting, kept free by admission while others run.
        self._watermark_blocks = max(1, pool.num_blocks // 100)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, group: Group) -> None:
        """Takes a new group at the end of the queue."""
        self._waiting.append(group)

    def schedule(self) -> Schedule:
        """Decides the next step and enters it into the sequences: what it returns must be dispatched."""
        rows: list[ScheduledRow] = []
        shares, budget = self._share_tokens()
        preempted = self._grow_running(shares, rows)
        if not preempted:
            self._admit(budget, rows)
        return Schedule(rows=rows, num_tokens=sum(row.num_tokens for row in rows), preempted=preempted)

    def finish(self, group: Group) -> None:
        """Ends a group in whatever state it is; its blocks are free at once (steps run in order of dispatch)."""
        was_running = group.sequences[0].status is Status.RUNNING
        for sequence in group.sequences:
            if sequence.status is not Status.FINISHED:
                sequence.move_to(Status.FINISHED)
                self._pool.release(sequence.block_table)
        if was_running:
            self._running.remove(group)
        else:
            self._waiting.remove(group)

    def block_tables(self) -> Iterator[BlockTable]:
        """Every table that may hold blocks, for the pool's invariant."""
        for group in (*self._running, *self._waiting):
            for sequence in group.sequences:
                yield sequence.block_table

    def num_stored_tokens(self) -> int:
        """Tokens whose keys and values lie in the pool."""
        return sum(sequence.num_computed_tokens for group in self._running for sequence in group.sequences)

    def _share_tokens(self) -> tuple[dict[Sequence, int], int]:
        """Tokens for each running sequence in this step, and how many are left for new ones."""
        shares: dict[Sequence, int] = {}
        budget = self._max_num_batched_tokens
        prefilling = []
        for group in self._running:
            for sequence in group.sequences:
                if sequence.num_output_tokens >= group.request.sampling.max_tokens:
                    continue  # its last token is in flight
                if sequence.num_uncomputed_tokens == 1:
                    shares[sequence] = 1
                    budget -= 1
                else:
                    prefilling.append(sequence)
        for sequence in prefilling:
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if num_tokens:
                shares[sequence] = num_tokens
                budget -= num_tokens
        return shares, budget

    def _grow_running(self, shares: dict[Sequence, int], rows: list[ScheduledRow]) -> list[Group]:
        """Finds blocks for every running row, the earliest arrival first, by preempting the latest."""
        preempted: list[Group] = []
        position = 0
        while position < len(self._running):
            group = self._running[position]
            missing = sum(
                self._pool.num_missing(sequence.block_table, sequence.num_computed_tokens + shares[sequence])
                for sequence in group.sequences
                if sequence in shares
            )
            while not self._pool.can_allocate(missing) and len(self._running) > position:
                preempted.append(self._preempt_last())
            if len(self._running) > position:
                for sequence in group.sequences:
                    if sequence in shares:
                        rows.append(self._enter(group, sequence, shares[sequence], len(rows)))
            position += 1
        return preempted

    def _admit(self, budget: int, rows: list[ScheduledRow]) -> None:
        """Moves waiting groups to running while rows, tokens and blocks for their whole prompts are there."""
        promised = sum(
            self._pool.num_missing(sequence.block_table, sequence.num_tokens)
            for group in self._running
            for sequence in group.sequences
        )
        num_sequences = sum(len(group.sequences) for group in self._running)
        while self._waiting and budget > 0:
            group = self._waiting[0]
            num_sequences += len(group.sequences)
            watermark = self._watermark_blocks if self._running else 0
            needed = sum(self._pool.num_blocks_for(sequence.num_tokens) for sequence in group.sequences)
            has_room = self._pool.can_allocate(promised + needed + watermark)
            if num_sequences > self._max_num_seqs or not has_room:
                return
            self._running.append(self._waiting.popleft())
            for sequence in group.sequences:
                sequence.move_to(Status.RUNNING)
                num_tokens = min(sequence.num_tokens, budget)
                budget -= num_tokens
                if num_tokens:
                    rows.append(self._enter(group, sequence, num_tokens, len(rows)))
                promised += self._pool.num_missing(sequence.block_table, sequence.num_tokens)

    def _preempt_last(self) -> Group:
        """Recompute: the latest group gives its blocks back and will replay its tokens as one prompt."""
        group = self._running.pop()
        for sequence in group.sequences:
            sequence.move_to(Status.WAITING)
            self._pool.release(sequence.block_table)
            sequence.num_computed_tokens = 0
        group.num_preemptions += 1
        self._waiting.appendleft(group)
        return group

    def _enter(self, group: Group, sequence: Sequence, num_tokens: int, row: int) -> ScheduledRow:
        """Allocates the row's blocks and advances the sequence past the step."""
        start = sequence.num_computed_tokens
        missing = self._pool.num_missing(sequence.block_table, start + num_tokens)
        if missing:
            sequence.block_table.extend(self._pool.allocate(missing))
        draws_token = start + num_tokens == sequence.num_tokens
        is_fed_back = draws_token and sequence.num_in_flight_tokens > 0
        scheduled = ScheduledRow(
            group=group,
            sequence=sequence,
            start=start,
            num_tokens=num_tokens,
            draws_token=draws_token,
            fed_back_row=sequence.in_flight_row if is_fed_back else None,
            output_index=sequence.num_output_tokens,
        )
        sequence.num_computed_tokens = start + num_tokens
        if draws_token:
            sequence.num_in_flight_tokens += 1
            sequence.in_flight_row = row
        return scheduled
