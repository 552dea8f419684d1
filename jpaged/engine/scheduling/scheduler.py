"""Who runs in the next step, on how many tokens, and who has to make room.

    running  [ g1  g2  g3 ]   in the policy's order; every decoding row gets its token first, prompts share what is left
                       ^      of max_num_batched_tokens; when blocks run out the last of the order is preempted
    swapped  [ g4 ]           comes back first, by the policy's order; while one is out no new group is admitted
    waiting  [ g5  g6 ... ]   admitted while the whole prompt finds free blocks; a group that is to be recomputed waits
                              here in its place by arrival

Policy only: it asks the memory for blocks and knows no arrays, no device and no text.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from jpaged.config import SchedulerOptions
from jpaged.engine.executor import DeviceRates, Geometry
from jpaged.engine.kv.interface import KVMemory, Shares
from jpaged.engine.scheduling.policies import make_policy
from jpaged.engine.scheduling.preemption import Preemption, PreemptionMode
from jpaged.engine.scheduling.schedule import Schedule, ScheduledRow
from jpaged.engine.sequence import Group, Sequence, Status


class Scheduler:
    """Owns the queues, and is the only one that asks for blocks.

    Attributes:
        max_num_seqs: rows of a step.
    """

    def __init__(self, memory: KVMemory, options: SchedulerOptions, geometry: Geometry, rates: DeviceRates) -> None:
        self._memory = memory
        self._order = make_policy(options.policy)
        self._preemption = Preemption(options.preemption_mode, geometry.bytes_per_block, rates)
        self.max_num_seqs = min(options.max_num_seqs or geometry.max_num_seqs, geometry.max_num_seqs)
        self._max_num_batched_tokens = options.max_num_batched_tokens or geometry.max_num_batched_tokens
        self._is_static = options.batching == "static"  # as request-level servers do
        self._waiting: dict[Group, None] = {}
        self._running: list[Group] = []
        self._swapped: list[Group] = []
        # Running groups that have ended; in a static batch they keep rows and blocks until all of it has.
        self._ended: list[Group] = []
        self._num_rows = 0
        # Room that growing rows find without preempting, kept free by admission while others run.
        self._num_spare_blocks = max(1, memory.num_blocks // 100)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._swapped)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._swapped)

    @property
    def num_swapped(self) -> int:
        return len(self._swapped)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def holders(self) -> Iterable[Group]:
        """Every group that holds blocks on the device."""
        return [*self._running, *self._ended]

    def groups(self) -> Iterator[Group]:
        """Every group that is not forgotten."""
        yield from self.holders
        yield from self._swapped
        yield from self._waiting

    def add(self, group: Group) -> None:
        """Takes a new group."""
        self._order.arrived(group, self._waiting)
        self._waiting[group] = None

    def schedule(self) -> Schedule:
        """Decides the next step and enters it into the sequences: what it returns must be dispatched."""
        schedule = Schedule()
        self._make_way(schedule)
        num_yielded = schedule.num_preempted
        parts, budget = self._share_tokens()
        self._grow_running(parts, schedule)
        if schedule.num_preempted == num_yielded:  # nobody had to leave for want of blocks
            self._resume_and_admit(budget, schedule)
        schedule.ops = self._memory.take_ops()
        schedule.num_tokens = sum(row.num_tokens for row in schedule.rows)
        return schedule

    def finish(self, group: Group) -> None:
        """Ends a group in whatever state it is; its blocks are free at once (steps run in order of dispatch)."""
        match group.status:
            case Status.RUNNING:
                self._running.remove(group)
                self._ended.append(group)
            case Status.SWAPPED:
                self._swapped.remove(group)
                self._release(group)
            case _:
                del self._waiting[group]
                self._release(group)
        group.move_to(Status.FINISHED)
        self._release_ended()

    def finish_sequence(self, group: Group, sequence: Sequence) -> None:
        """Ends one sequence of a group whose others go on."""
        sequence.move_to(Status.FINISHED)
        if not self._is_static or group.status is not Status.RUNNING:
            self._memory.release(sequence)

    def drop_beam(self, sequence: Sequence) -> None:
        """Ends a beam that leaves its group; in a static batch as well, others of the group take its place."""
        sequence.move_to(Status.FINISHED)
        self._memory.release(sequence)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A new sequence that shares everything with its parent."""
        child = parent.branch(index)
        self._memory.fork(parent, child)
        return child

    def _release_ended(self) -> None:
        """Gives back what ended groups kept: at once, or with the last of their static batch."""
        if not self._is_static or not self._running:
            for ended in self._ended:
                self._num_rows -= ended.num_rows
                self._release(ended)
            self._ended.clear()

    def _release(self, group: Group) -> None:
        for sequence in group.sequences:
            self._memory.release(sequence)

    # --- a step's parts ---------------------------------------------------------------------------------------------

    def _make_way(self, schedule: Schedule) -> None:
        """Preempts running groups, from the end of the order, for one that they yield to and that finds no room."""
        while self._running and not self._is_static:
            group = self._next_group()
            if group is None or not self._order.yields_to(self._running[-1], group):
                return
            if self._has_room(group, self._num_outstanding_blocks()):
                return
            self._preempt(self._running[-1], schedule)

    def _share_tokens(self) -> tuple[dict[Group, Shares], int]:
        """Tokens for the sequences of each running group in this step, and how many are left for others."""
        parts: dict[Group, Shares] = {}
        prefilling = []
        budget = self._max_num_batched_tokens
        for group in self._running:
            wanted = parts[group] = self._wanted(group)
            if all(num_tokens == 1 for _, num_tokens in wanted):
                budget -= len(wanted)
            else:
                prefilling.append(group)
        for group in prefilling:
            parts[group] = _within(budget, group, parts[group])
            budget -= _num_tokens(parts[group])
        return parts, budget

    def _wanted(self, group: Group) -> Shares:
        """Every token that waits to go through the model, of the sequences that may run."""
        wanted = []
        for sequence in group.runnable:
            self._memory.register_full_blocks(sequence)
            num_tokens = self._num_to_run(group, sequence)
            if num_tokens:
                wanted.append((sequence, num_tokens))
        return wanted

    def _num_to_run(self, group: Group, sequence: Sequence) -> int:
        """Tokens of a sequence that wait to go through the model."""
        sampling = group.request.sampling
        if sampling.beam_width and sequence.num_in_flight_tokens:
            return 0  # which beams go on is decided when all of them have been seen
        if not group.is_forked:
            return sequence.num_prompt_tokens - sequence.num_computed_tokens
        if sequence.num_output_tokens >= sampling.max_tokens:
            return 0  # its last token is in flight
        return sequence.num_uncomputed_tokens

    def _grow_running(self, parts: dict[Group, Shares], schedule: Schedule) -> None:
        """Finds blocks for every running row, in the policy's order, by preempting from its end."""
        position = 0
        while position < len(self._running):
            group = self._running[position]
            while not self._memory.can_grow(parts[group]) and len(self._running) > position:
                self._preempt(self._running[-1], schedule)
            if len(self._running) > position:
                self._enter(group, parts[group], schedule)
            position += 1

    def _resume_and_admit(self, budget: int, schedule: Schedule) -> None:
        """Brings groups back and admits new ones while rows, tokens and blocks are there."""
        if not self._waiting and not self._swapped:
            return
        is_batch_open = not self._is_static or not self._running
        # With every row taken blocks are not the question, and a full queue need not cost a step anything.
        promised = self._num_outstanding_blocks() if self._num_rows < self.max_num_seqs else 0
        while budget > 0 and is_batch_open:
            group = self._next_group()
            if group is None:
                return
            if not self._has_room(group, promised):
                return
            if group.status is Status.SWAPPED:
                self._swap_in(group, schedule)
            elif self._memory.is_being_computed(group, self._running):
                return
            else:
                self._admit(group, schedule)
            parts = _within(budget, group, self._wanted(group))
            budget -= _num_tokens(parts)
            self._enter(group, parts, schedule)
            promised += self._memory.num_outstanding_blocks(group)

    def _next_group(self) -> Group | None:
        """Who comes next: one that is swapped out, but for a waiting one that left before it or that it yields to."""
        waiting = self._order.first_waiting(self._waiting) if self._waiting else None
        if not self._swapped:
            return waiting
        swapped = min(self._swapped, key=self._order.running_key)
        if waiting is None:
            return swapped
        is_earlier = waiting.num_preemptions and self._order.running_key(waiting) < self._order.running_key(swapped)
        return waiting if is_earlier or self._order.yields_to(swapped, waiting) else swapped

    def _num_outstanding_blocks(self) -> int:
        """Blocks that running groups will still take for tokens that they have."""
        return sum(self._memory.num_outstanding_blocks(group) for group in self._running)

    def _has_room(self, group: Group, promised: int) -> bool:
        """Rows and blocks for all of a group that is not running, besides what running groups were promised."""
        if self._num_rows + group.num_rows > self.max_num_seqs:
            return False
        spare = promised + (self._num_spare_blocks if self._running else 0)
        if group.status is Status.SWAPPED:
            return self._memory.can_swap_in(group, spare)
        return self._memory.can_admit(group, spare)

    def _admit(self, group: Group, schedule: Schedule) -> None:
        del self._waiting[group]
        group.move_to(Status.RUNNING)
        num_cached = self._memory.admit(group)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = num_cached
            self._order.served(group, len(group.request.prompt_token_ids), 0)
        else:
            num_tokens = group.live[0].num_prompt_tokens + sum(s.num_output_tokens for s in group.live)
            schedule.num_recomputed_tokens += num_tokens - num_cached
        for other in self._waiting:
            if other.arrival > group.arrival:
                break
            other.num_overtaken += 1
        self._take_place(group)
        schedule.admitted.append(group)

    def _swap_in(self, group: Group, schedule: Schedule) -> None:
        self._swapped.remove(group)
        group.move_to(Status.RUNNING)
        self._memory.swap_in(group)
        self._take_place(group)
        schedule.swapped_in.append(group)

    def _take_place(self, group: Group) -> None:
        insort(self._running, group, key=self._order.running_key)
        self._num_rows += group.num_rows

    def _preempt(self, group: Group, schedule: Schedule) -> None:
        """Takes a running group's blocks: to host memory, or to be computed again."""
        self._running.remove(group)
        self._num_rows -= group.num_rows
        group.num_preemptions += 1
        self._release_ended()
        for sequence in group.sequences:
            if not sequence.is_live:  # of a static batch
                self._memory.release(sequence)
        if self._preemption.choose(group) is PreemptionMode.SWAP and self._memory.can_swap_out(group):
            self._memory.swap_out(group)
            group.move_to(Status.SWAPPED)
            self._swapped.append(group)
            schedule.swapped_out.append(group)
            return
        for sequence in group.live:
            self._memory.release(sequence)
        group.is_forked = len(group.live) == 1
        group.move_to(Status.WAITING)
        later = [other for other in self._waiting if other.arrival > group.arrival]
        self._waiting[group] = None
        for other in later:  # keeps the queue in order of arrival
            del self._waiting[other]
            self._waiting[other] = None
        schedule.recomputed.append(group)

    # --- rows -------------------------------------------------------------------------------------------------------

    def _enter(self, group: Group, parts: Shares, schedule: Schedule) -> None:
        """Gives a group's sequences their blocks and rows, and advances them past the step."""
        for sequence, num_tokens in parts:
            self._memory.grow(sequence, num_tokens)
            self._add_row(group, sequence, num_tokens, schedule)
        if not group.is_forked and group.live[0].num_computed_tokens == group.live[0].num_prompt_tokens:
            self._fork(group, schedule)

    def _fork(self, group: Group, schedule: Schedule) -> None:
        """The prompt is computed: the others share it and sample their first token from the leader's row."""
        leader, *others = group.live
        leader_row = len(schedule.rows) - 1
        group.is_forked = True
        for sequence in others:
            self._memory.fork(leader, sequence)
            if sequence.num_output_tokens == 0:
                self._add_row(group, sequence, 0, schedule, sample_row=leader_row)

    def _add_row(
        self, group: Group, sequence: Sequence, num_tokens: int, schedule: Schedule, *, sample_row: int | None = None
    ) -> None:
        row = len(schedule.rows)
        start = sequence.num_computed_tokens
        samples_token = start + num_tokens == sequence.num_tokens
        is_fed_back = num_tokens > 0 and samples_token and sequence.num_in_flight_tokens > 0
        schedule.rows.append(
            ScheduledRow(
                group=group,
                sequence=sequence,
                start=start,
                num_tokens=num_tokens,
                samples_token=samples_token,
                sample_row=row if sample_row is None else sample_row,
                prev_sampled_row=sequence.in_flight_row if is_fed_back else None,
                output_index=sequence.num_output_tokens,
            )
        )
        sequence.num_computed_tokens = start + num_tokens
        if samples_token:
            sequence.num_in_flight_tokens += 1
            sequence.in_flight_row = row
            self._order.served(group, 0, 1)


def _within(budget: int, group: Group, wanted: Shares) -> Shares:
    """As much of what a group wants as there are tokens left."""
    parts = []
    for sequence, num_tokens in wanted:
        share = min(num_tokens, budget)
        if share:
            parts.append((sequence, share))
            budget -= share
    if group.request.sampling.beam_width and parts != wanted:
        # Beams are ranked together, so they sample in one step: who would be first stops short of its last token.
        parts = [(sequence, min(share, dict(wanted)[sequence] - 1)) for sequence, share in parts]
        parts = [(sequence, share) for sequence, share in parts if share]
    return parts


def _num_tokens(parts: Shares) -> int:
    return sum(num_tokens for _, num_tokens in parts)
