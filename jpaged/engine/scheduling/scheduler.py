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
from collections.abc import Collection, Iterable, Iterator

from jpaged.config import Policy, SchedulerOptions
from jpaged.engine.executor import DeviceRates, Geometry
from jpaged.engine.kv.interface import KVMemory, Shares
from jpaged.engine.scheduling.cohorts import draw_with_the_next
from jpaged.engine.scheduling.pace import Pace
from jpaged.engine.scheduling.preemption import Preemption
from jpaged.engine.scheduling.schedule import Schedule
from jpaged.engine.sequence import Group, Sequence, Status

MAX_OVERTAKES = 256
PROMPT_TOKEN_WEIGHT = 1
OUTPUT_TOKEN_WEIGHT = 2
MAX_TENANTS = 4096
"""Tenants whose counters are kept at least: callers choose the names, so their number has no bound."""


class SchedulingPolicy:
    """Who comes first: the order in which waiting groups are admitted, and in which running ones yield.

    First come, first served, where a policy does not say otherwise. It knows groups and what they were served; it holds
    no queue.
    """

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        """The next to be admitted; `waiting` is not empty and in order of arrival."""
        return next(iter(waiting))

    def running_key(self, group: Group) -> tuple[int, ...]:
        """Running groups are served in this order, and preempted from its end."""
        return (group.arrival,)

    def yields_to(self, running: Group, waiting: Group) -> bool:
        """A running group is preempted to admit a waiting one."""
        return False

    def arrived(self, group: Group, waiting: Collection[Group]) -> None:
        """Notes a group that waits from now on, beside these."""

    def served(self, group: Group, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Notes the tokens that a group was given."""


class ByPriority(SchedulingPolicy):
    """Lower numbers first, then first come.

    A waiting request takes the place of a running one with a higher number. Nobody starves: who was overtaken
    MAX_OVERTAKES times is served as if its number were the lowest.
    """

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        return min(waiting, key=self.running_key)

    def running_key(self, group: Group) -> tuple[int, ...]:
        is_late = group.num_overtaken >= MAX_OVERTAKES
        return (not is_late, 0 if is_late else group.request.sampling.priority, group.arrival)

    def yields_to(self, running: Group, waiting: Group) -> bool:
        return self.running_key(running)[:2] > self.running_key(waiting)[:2]


class FairByTenant(SchedulingPolicy):
    """The tenant that was served least goes first.

    It is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., 2024): a prompt token
    counts 1, a generated one 2; a tenant that comes back after a pause begins at the lowest counter of those who
    waited, so idleness saves nothing up. Of MAX_TENANTS that were served most the counters are kept; the others begin
    at the highest of theirs.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._forgotten = 0

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        return min(waiting, key=lambda group: (self._counter(group.request.tenant), group.arrival))

    def arrived(self, group: Group, waiting: Collection[Group]) -> None:
        tenant = group.request.tenant
        others = {other.request.tenant for other in waiting if other is not group}
        if tenant not in others:
            highest = max(self._served.values(), default=self._forgotten)
            floor = min((self._counter(other) for other in others), default=highest)
            self._served[tenant] = max(self._counter(tenant), floor)
        if len(self._served) > 2 * MAX_TENANTS:
            self._forget(others | {tenant})

    def served(self, group: Group, num_prompt_tokens: int, num_output_tokens: int) -> None:
        weighted = PROMPT_TOKEN_WEIGHT * num_prompt_tokens + OUTPUT_TOKEN_WEIGHT * num_output_tokens
        tenant = group.request.tenant
        self._served[tenant] = self._counter(tenant) + weighted

    def _counter(self, tenant: str) -> int:
        return self._served.get(tenant, self._forgotten)

    def _forget(self, waiting: set[str]) -> None:
        """Leaves those who wait, and those who were served most."""
        by_counter = sorted(self._served, key=lambda tenant: self._served[tenant])
        leaving = [tenant for tenant in by_counter[:-MAX_TENANTS] if tenant not in waiting]
        for tenant in leaving:
            self._forgotten = max(self._forgotten, self._served.pop(tenant))


POLICIES: dict[Policy, type[SchedulingPolicy]] = {
    "fcfs": SchedulingPolicy,
    "priority": ByPriority,
    "fair": FairByTenant,
}


class Queues:
    """Every group that has not been forgotten, by its status. Each verb moves a group and sets its status."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.waiting: dict[Group, None] = {}  # in order of arrival
        self.running: list[Group] = []  # in the policy's order
        self.swapped: list[Group] = []
        # Running groups that have ended; in a static batch they keep rows and blocks until all of it has.
        self.ended: list[Group] = []
        self.num_rows = 0
        self._policy = policy

    @property
    def num_waiting(self) -> int:
        """Groups that wait for rows or blocks, wherever they are."""
        return len(self.waiting) + len(self.swapped)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    @property
    def holders(self) -> Iterable[Group]:
        """Every group that holds blocks on the device."""
        return [*self.running, *self.ended]

    def groups(self) -> Iterator[Group]:
        yield from self.holders
        yield from self.swapped
        yield from self.waiting

    def next_group(self) -> Group | None:
        """The next group: a swapped one, or a waiting one that was preempted and comes earlier or that it yields to."""
        waiting = self._policy.first_waiting(self.waiting) if self.waiting else None
        if not self.swapped:
            return waiting
        swapped = min(self.swapped, key=self._policy.running_key)
        if waiting is None:
            return swapped
        is_earlier = waiting.num_preemptions and self._policy.running_key(waiting) < self._policy.running_key(swapped)
        return waiting if is_earlier or self._policy.yields_to(swapped, waiting) else swapped

    def add(self, group: Group) -> None:
        self._policy.arrived(group, self.waiting)
        self.waiting[group] = None

    def run(self, group: Group) -> None:
        """A waiting or swapped group gets its rows."""
        if group.status is Status.SWAPPED:
            self.swapped.remove(group)
        else:
            del self.waiting[group]
        group.move_to(Status.RUNNING)
        insort(self.running, group, key=self._policy.running_key)
        self.num_rows += group.num_rows

    def stop_running(self, group: Group) -> None:
        """A running group loses its rows; `put_back` or `put_aside` follows."""
        self.running.remove(group)
        self.num_rows -= group.num_rows

    def put_aside(self, group: Group) -> None:
        """A group that ran is in host memory now."""
        group.move_to(Status.SWAPPED)
        self.swapped.append(group)

    def put_back(self, group: Group) -> None:
        """A group that ran waits again, in its place by arrival."""
        group.move_to(Status.WAITING)
        later = [other for other in self.waiting if other.arrival > group.arrival]
        self.waiting[group] = None
        for other in later:
            del self.waiting[other]
            self.waiting[other] = None

    def end(self, group: Group) -> bool:
        """Ends a group in whatever state it is; True when it ran, and is kept until `forget_ended`."""
        was_running = group.status is Status.RUNNING
        if was_running:
            self.running.remove(group)
            self.ended.append(group)
        elif group.status is Status.SWAPPED:
            self.swapped.remove(group)
        else:
            del self.waiting[group]
        group.move_to(Status.FINISHED)
        return was_running

    def forget_ended(self) -> list[Group]:
        """Running groups that have ended lose their rows."""
        ended, self.ended = self.ended, []
        self.num_rows -= sum(group.num_rows for group in ended)
        return ended


class Scheduler:
    """Decides each step, and is the only one that asks for blocks.

    Attributes:
        max_num_seqs: rows of a step.
        pace: bounds what prompts add to the steps of streams, and is told of each step; None without a bound.
    """

    def __init__(self, memory: KVMemory, options: SchedulerOptions, geometry: Geometry, rates: DeviceRates) -> None:
        self.max_num_seqs = min(options.max_num_seqs or geometry.max_num_seqs, geometry.max_num_seqs)
        most = geometry.max_num_batched_tokens
        self._max_num_batched_tokens = min(options.max_num_batched_tokens or most, most)
        self._is_static = options.batching == "static"  # as request-level servers do
        self._memory = memory
        self._policy = POLICIES[options.policy]()
        self._preemption = Preemption(options.preemption_mode, geometry.bytes_per_block, rates)
        bound_s = options.max_inter_token_latency
        self.pace = Pace(bound_s, rates, geometry.buckets) if bound_s else None
        self.queues = Queues(self._policy)
        # Room that growing rows find without preempting, kept free by admission while others run.
        self._num_spare_blocks = max(1, memory.num_blocks // 100)

    def schedule(self) -> Schedule:
        """Decides the next step and enters it into the sequences: what it returns must be dispatched."""
        schedule = Schedule()
        self._make_way(schedule)
        num_yielded = len(schedule.preempted)
        parts, budget = self._share_tokens()
        is_early = len(parts) > 1 and draw_with_the_next(parts)
        if not is_early or self._entering(self._num_outstanding_blocks()) is not None:
            self._grow_running(parts, schedule)
            if len(schedule.preempted) == num_yielded:  # nobody had to leave for want of blocks
                self._resume_and_admit(budget, schedule)
        schedule.close(self._memory.take_ops())
        return schedule

    def finish(self, group: Group) -> None:
        """Ends a group in whatever state it is; its blocks are free at once (steps run in order of dispatch)."""
        if not self.queues.end(group):
            self._release(group)
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
        if not self._is_static or not self.queues.running:
            for ended in self.queues.forget_ended():
                self._release(ended)

    def _release(self, group: Group) -> None:
        for sequence in group.sequences:
            self._memory.release(sequence)

    # --- a step's parts ---------------------------------------------------------------------------------------------

    def _make_way(self, schedule: Schedule) -> None:
        """Preempts running groups, from the end of the order, for one that they yield to and that finds no room."""
        queues = self.queues
        while queues.running and not self._is_static:
            group = queues.next_group()
            if group is None or not self._policy.yields_to(queues.running[-1], group):
                return
            if self._has_room(group, self._num_outstanding_blocks()):
                return
            self._preempt(queues.running[-1], schedule)

    def _share_tokens(self) -> tuple[dict[Group, Shares], int]:
        """Tokens for the sequences of each running group in this step, and how many are left for others."""
        parts: dict[Group, Shares] = {}
        prefilling = []
        budget = self._max_num_batched_tokens
        for group in self.queues.running:
            wanted = parts[group] = self._wanted(group)
            if _num_tokens(wanted) > len(wanted):
                prefilling.append(group)
            else:
                budget -= len(wanted)
        if self.pace is not None and len(prefilling) < len(parts) and (prefilling or self.queues.num_waiting):
            budget = self.pace.within(budget, parts, prefilling)
        for group in prefilling:
            parts[group] = _within(budget, group, parts[group])
            budget -= _num_tokens(parts[group])
        return parts, budget

    def _wanted(self, group: Group) -> Shares:
        """Every token that waits to go through the model, of the sequences that may run."""
        wanted, prefixes = [], self._memory.prefixes
        for sequence in group.runnable:
            if prefixes is not None:
                prefixes.register_full_blocks(sequence)
            num_tokens = _num_to_run(group, sequence)
            if num_tokens:
                wanted.append((sequence, num_tokens))
        return wanted

    def _grow_running(self, parts: dict[Group, Shares], schedule: Schedule) -> None:
        """Finds blocks for every running row, in the policy's order, by preempting from its end."""
        position, running = 0, self.queues.running
        while position < len(running):
            group = running[position]
            while not self._memory.can_grow(parts[group]) and len(running) > position:
                self._preempt(running[-1], schedule)
            if len(running) > position:
                self._enter(group, parts[group], schedule)
            position += 1

    def _resume_and_admit(self, budget: int, schedule: Schedule) -> None:
        """Brings groups back and admits new ones while rows, tokens and blocks are there."""
        queues = self.queues
        if not queues.num_waiting:
            return
        is_batch_open = not self._is_static or not queues.running
        # With every row taken blocks are not the question, and a full queue need not cost a step anything.
        outstanding = self._num_outstanding_blocks() if queues.num_rows < self.max_num_seqs else 0
        while budget > 0 and is_batch_open:
            group = self._entering(outstanding)
            if group is None:
                return
            if group.status is Status.SWAPPED:
                assert self._memory.swapping is not None
                self.queues.run(group)
                self._memory.swapping.swap_in(group)
            else:
                self._admit(group, schedule)
            parts = _within(budget, group, self._wanted(group))
            budget -= _num_tokens(parts)
            self._enter(group, parts, schedule)
            outstanding += self._memory.num_outstanding_blocks(group)

    def _entering(self, outstanding: int) -> Group | None:
        """The next group to run, if it may now: not without rows and blocks, nor while its prefix is computed."""
        group, prefixes = self.queues.next_group(), self._memory.prefixes
        if group is None or not self._has_room(group, outstanding):
            return None
        is_new = group.status is not Status.SWAPPED
        if is_new and prefixes is not None and prefixes.is_being_computed(group, self.queues.running):
            return None
        return group

    def _num_outstanding_blocks(self) -> int:
        """Blocks that running groups will still take for tokens that they have."""
        return sum(self._memory.num_outstanding_blocks(group) for group in self.queues.running)

    def _has_room(self, group: Group, outstanding: int) -> bool:
        """Rows and blocks for all of a group that is not running, besides those that running groups will take."""
        if self.queues.num_rows + group.num_rows > self.max_num_seqs:
            return False
        spare = outstanding + (self._num_spare_blocks if self.queues.running else 0)
        if group.status is Status.SWAPPED and self._memory.swapping is not None:
            return self._memory.swapping.can_swap_in(group, spare)
        return self._memory.can_admit(group, spare)

    def _admit(self, group: Group, schedule: Schedule) -> None:
        self.queues.run(group)
        num_cached = self._memory.admit(group)
        if group.admitted(num_cached):
            self._policy.served(group, len(group.request.prompt_token_ids), 0)
        else:
            num_tokens = group.live[0].num_prompt_tokens + sum(s.num_output_tokens for s in group.live)
            schedule.recomputes(num_tokens - num_cached)
        for other in self.queues.waiting:
            if other.arrival > group.arrival:
                break
            other.overtaken()
        schedule.admitted.append(group)

    def _preempt(self, group: Group, schedule: Schedule) -> None:
        """Takes a running group's blocks: to host memory, or to be computed again."""
        swapping = self._memory.swapping
        schedule.preempted.append(group)
        self.queues.stop_running(group)
        group.preempted()
        self._release_ended()
        for sequence in group.sequences:
            if not sequence.is_live:  # of a static batch
                self._memory.release(sequence)
        if swapping is not None and self._preemption.prefers_swap(group) and swapping.can_swap_out(group):
            swapping.swap_out(group)
            self.queues.put_aside(group)
            return
        for sequence in group.live:
            self._memory.release(sequence)
        group.starts_over()
        self.queues.put_back(group)

    # --- rows -------------------------------------------------------------------------------------------------------

    def _enter(self, group: Group, parts: Shares, schedule: Schedule) -> None:
        """Gives a group's sequences their blocks and rows, and advances them past the step."""
        for sequence, num_tokens in parts:
            self._memory.grow(sequence, num_tokens)
            if schedule.add_row(group, sequence, num_tokens).samples_token:
                self._policy.served(group, 0, 1)
        if not group.is_forked and group.live[0].num_computed_tokens == group.live[0].num_prompt_tokens:
            self._fork(group, schedule)

    def _fork(self, group: Group, schedule: Schedule) -> None:
        """The prompt is computed: the others share it and sample their first token from the leader's row."""
        leader, *others = group.live
        leader_row = len(schedule.rows) - 1
        group.forked()
        for sequence in others:
            self._memory.fork(leader, sequence)
            if sequence.num_output_tokens == 0:
                schedule.add_row(group, sequence, 0, sample_row=leader_row)
                self._policy.served(group, 0, 1)


def _num_to_run(group: Group, sequence: Sequence) -> int:
    """Tokens of a sequence that wait to go through the model."""
    sampling = group.request.sampling
    if sampling.beam_width and sequence.num_in_flight_tokens:
        return 0  # which beams go on is decided when all of them have been seen
    if not group.is_forked:
        return sequence.num_prompt_tokens - sequence.num_computed_tokens
    if sequence.num_output_tokens >= sampling.max_tokens:
        return 0  # its last token is in flight
    return sequence.num_uncomputed_tokens


def _within(budget: int, group: Group, wanted: Shares) -> Shares:
    """Cuts what a group wants to the tokens that are left."""
    # Beams are ranked together, so they sample in one step: where they cannot, each stops short of its last token.
    num_short = int(bool(group.request.sampling.beam_width) and _num_tokens(wanted) > budget)
    parts = []
    for sequence, num_tokens in wanted:
        share = min(num_tokens - num_short, budget)
        if share:
            parts.append((sequence, share))
            budget -= share
    return parts


def _num_tokens(parts: Shares) -> int:
    total = 0
    for _, num_tokens in parts:
        total += num_tokens
    return total
