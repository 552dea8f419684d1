"""Scheduler: chooses the rows of the next step, their tokens, and the groups to preempt.

    running  [ g1  g2  g3 ]   in the policy's order; every decoding row gets its token first, prompts share the rest
                       ^      of max_num_batched_tokens; when blocks run out, the last group is preempted
    swapped  [ g4 ]           resumed first, in the policy's order; while one is out, no new group is admitted
    waiting  [ g5  g6 ... ]   admitted if the whole prompt finds free blocks; a group that is to be recomputed waits
                              here at its place by arrival

The order is first come, first served; policies.py has others. The scheduler allocates blocks from the memory and knows
no arrays, no device and no text.

Alignment of the beam searches of several requests into the same steps, independent of their arrival.

A beam search continues when the host has seen the samples of all its beams, so with overlap it runs in every second
step. Searches whose prompts ran one step apart would alternate forever, in twice the number of steps:

    steps     1  2  3  4  5  6           1  2  3  4  5  6
    a         x     x     x              x        x     x        b is ready for step 3 ... and waits for a, once,
    b            x     x     x              x     x     x        if step 3 would hold only b

A step that holds anything else runs anyway, with every search that is ready.

Preemption modes: a preempted group's blocks are swapped to host memory, or its tokens are recomputed.

    swap        blocks out and back in        2 * blocks * bytes / copy bandwidth
    recompute   tokens as one prefill         tokens / prefill rate

"auto" takes the cheaper of the two for each group, by the rates measured when the device started.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, takewhile

import numpy as np

from jpaged.config import PreemptionMode, SchedulerOptions
from jpaged.engine.executor import BEYOND_TOKENS, DeviceRates, Geometry
from jpaged.engine.kv_cache.interface import KVCacheManager, Shares
from jpaged.engine.lora import LoRASlots
from jpaged.engine.scheduler.decode_batch import LongRopeRecompute, PersistentDecodeBatch, commit_full_blocks
from jpaged.engine.scheduler.multi_step import MultiStepPolicy, PrefillBudget, choose_bound_s
from jpaged.engine.scheduler.output import ScheduledRow, SchedulerOutput, padded_for_ranks
from jpaged.engine.sequence import Sequence, SequenceGroup, Status, has_unknown_tokens
from jpaged.engine.speculative.drafts import DraftRows, DraftTokens, RoundRows


class SchedulingPolicy:
    """Order in which waiting groups are admitted and running groups are preempted.

    The default is first come, first served. A policy knows groups and the service they received; it holds no queue.
    """

    def first_waiting(self, waiting: Collection[SequenceGroup]) -> SequenceGroup:
        """Return the next group to admit; `waiting` is not empty and in order of arrival."""
        return next(iter(waiting))

    def running_key(self, group: SequenceGroup) -> tuple[int, ...]:
        """Return the sort key of a running group: groups are served in this order, and preempted from its end."""
        return (group.arrival,)

    def can_preempt(self, running: SequenceGroup, waiting: SequenceGroup) -> bool:
        """Return True if the running group may be preempted to admit the waiting one."""
        return False

    def preemptible_for(self, waiting: SequenceGroup, running: list[SequenceGroup]) -> Iterator[SequenceGroup]:
        """Yield the running groups that may be preempted for a waiting one, from the end of their order."""
        return takewhile(lambda group: self.can_preempt(group, waiting), reversed(running))

    def arrived(self, group: SequenceGroup, waiting: Collection[SequenceGroup]) -> None:
        """Record a group that starts to wait; `waiting` are the waiting groups."""

    def served(self, group: SequenceGroup, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Record the tokens that a group was served."""

    def decoded(self, groups: Iterable[SequenceGroup]) -> None:
        """Record one output token for each group, as `served` does; a group may occur several times."""


class Queues:
    """Every unfinished group, by status. Each method moves a group and sets its status.

    Attributes:
        pending_fetch: groups that wait outside the queue while their prefix is loaded from disk; others overtake them.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.waiting: dict[SequenceGroup, None] = {}  # in order of arrival
        self.pending_fetch: dict[SequenceGroup, None] = {}
        self.running: list[SequenceGroup] = []  # in the policy's order
        self.swapped: list[SequenceGroup] = []
        # Running groups that have ended; in a static batch they keep rows and blocks until the whole batch has ended.
        self.ended: list[SequenceGroup] = []
        self.num_rows = 0
        self._policy = policy

    @property
    def num_waiting(self) -> int:
        """Number of groups that wait for rows or blocks, with the swapped ones."""
        return len(self.waiting) + len(self.swapped)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    @property
    def holders(self) -> Iterable[SequenceGroup]:
        """Every group that holds blocks on the device."""
        return [*self.running, *self.ended]

    def groups(self) -> Iterator[SequenceGroup]:
        yield from self.holders
        yield from self.swapped
        yield from self.waiting
        yield from self.pending_fetch

    def next_group(self) -> SequenceGroup | None:
        """Return the next group: a swapped one, or a waiting one that comes before it.

        A waiting group comes before if it may preempt the swapped one, or was preempted itself and is earlier in the
        order.
        """
        waiting = self._policy.first_waiting(self.waiting) if self.waiting else None
        if not self.swapped:
            return waiting
        swapped = min(self.swapped, key=self._policy.running_key)
        if waiting is None:
            return swapped
        is_earlier = waiting.num_preemptions and self._policy.running_key(waiting) < self._policy.running_key(swapped)
        return waiting if is_earlier or self._policy.can_preempt(swapped, waiting) else swapped

    def has_next_within(self, max_num_rows: int) -> bool:
        """Return True if there is a next group and its rows fit into max_num_rows; blocks are not checked."""
        if self.num_rows >= max_num_rows:  # a full batch needs no search of the queue
            return False
        group = self.next_group()
        return group is not None and self.num_rows + group.num_rows <= max_num_rows

    def add(self, group: SequenceGroup) -> None:
        self._policy.arrived(group, self.waiting)
        self.waiting[group] = None

    def add_pending_fetch(self, group: SequenceGroup) -> None:
        """Keep a group that has just arrived out of the queue until `release_pending`."""
        self.pending_fetch[group] = None

    def release_pending(self, groups: Iterable[SequenceGroup]) -> None:
        """Move held groups to the waiting queue, each at its place by arrival."""
        for group in groups:
            del self.pending_fetch[group]
            self._policy.arrived(group, self.waiting)
            self._insert(group)

    def run(self, group: SequenceGroup) -> None:
        """Start a waiting or swapped group and reserve its rows."""
        if group.status is Status.SWAPPED:
            self.swapped.remove(group)
        else:
            del self.waiting[group]
        group.move_to(Status.RUNNING)
        insort(self.running, group, key=self._policy.running_key)
        self.num_rows += group.num_rows

    def stop_running(self, group: SequenceGroup) -> None:
        """Remove a running group and free its rows; `put_back` or `add_swapped` follows."""
        self.running.remove(group)
        self.num_rows -= group.num_rows

    def add_swapped(self, group: SequenceGroup) -> None:
        """Add a group that was swapped out."""
        group.move_to(Status.SWAPPED)
        self.swapped.append(group)

    def stop_swapped(self, group: SequenceGroup) -> None:
        """Remove a swapped group; `put_back` follows."""
        self.swapped.remove(group)

    def put_back(self, group: SequenceGroup) -> None:
        """Return a preempted group to the waiting queue, at its place by arrival."""
        group.move_to(Status.WAITING)
        self._insert(group)

    def _insert(self, group: SequenceGroup) -> None:
        later = [other for other in self.waiting if other.arrival > group.arrival]
        self.waiting[group] = None
        for other in later:
            del self.waiting[other]
            self.waiting[other] = None

    def end(self, group: SequenceGroup) -> bool:
        """Finish a group in any state. Return True if it was running; it is then kept until `remove_ended`."""
        was_running = group.status is Status.RUNNING
        if was_running:
            self.running.remove(group)
            self.ended.append(group)
        elif group.status is Status.SWAPPED:
            self.swapped.remove(group)
        elif group in self.pending_fetch:
            del self.pending_fetch[group]
        else:
            del self.waiting[group]
        group.move_to(Status.FINISHED)
        return was_running

    def remove_ended(self) -> list[SequenceGroup]:
        """Remove and return the running groups that have ended, and free their rows."""
        ended, self.ended = self.ended, []
        self.num_rows -= sum(group.num_rows for group in ended)
        return ended


def should_wait_for_other_beams(pending: Mapping[SequenceGroup, Shares]) -> bool:
    """Return True if only decoding beams are ready and other beams become ready after the in-flight step.

    After that step nothing is in flight, so no beam waits twice in a row.

    Args:
        pending: the tokens that the sequences of each running group have to compute.
    """
    is_ready = is_due = False
    for group, shares in pending.items():
        if not shares:
            is_due = is_due or _continues(group)
        elif not group.request.sampling.beam_width or any(num_tokens > 1 for _, num_tokens in shares):
            return False
        else:
            is_ready = True
    return is_ready and is_due


def _continues(group: SequenceGroup) -> bool:
    """Return True if a group's beams, whose tokens are in flight, need more tokens after these."""
    sampling = group.request.sampling
    return bool(sampling.beam_width) and group.live[0].num_output_tokens < sampling.max_num_tokens


@dataclass(frozen=True, slots=True)
class Preemption:
    """Chooses between swap and recompute. The memory decides if host memory has room for a swap."""

    mode: PreemptionMode
    bytes_per_block: int
    rates: DeviceRates

    def prefers_swap(self, group: SequenceGroup) -> bool:
        """Return True if the group should be swapped, given room in host memory; otherwise it is recomputed."""
        if self.mode == "auto":
            return self.swap_s(group) < self.recompute_s(group)
        return self.mode == "swap"

    def swap_s(self, group: SequenceGroup) -> float:
        """Return the seconds to move a group's blocks out and back in."""
        blocks = {block_id for sequence in group.live for block_id in sequence.kv.block_ids()}
        num_bytes = len(blocks) * self.bytes_per_block
        return num_bytes / self.rates.swap_out_bytes_per_s + num_bytes / self.rates.swap_in_bytes_per_s

    def recompute_s(self, group: SequenceGroup) -> float:
        """Return the seconds to recompute a group: the prompt once, and the output of each sequence."""
        live = group.live
        num_tokens = live[0].num_prompt_tokens + sum(sequence.num_output_tokens for sequence in live)
        return num_tokens / self.rates.prefill_tokens_per_s


class RankLimits:
    """Rows and tokens that each rank of data-parallel attention may have in a step.

    Without ranks, and for the only one, there is no limit but the step's.

    Attributes:
        left: tokens of the step that are left for each rank.

    Args:
        running: the running groups.
    """

    def __init__(self, geometry: Geometry, running: list[SequenceGroup], max_num_batched_tokens: int) -> None:
        self._geometry = geometry
        self._running = running
        self._most = max_num_batched_tokens if geometry.dp_size == 1 else geometry.max_num_batched_tokens_of_rank
        self.reset()

    def reset(self) -> None:
        """Count no token of the next step yet."""
        self.left = [self._most] * self._geometry.dp_size

    def begin_step(self, rows: PersistentDecodeBatch) -> None:
        """Start a step in which the rows of the decode batch get a token each."""
        num_ranks = self._geometry.dp_size
        if num_ranks > 1:
            ranks_s = (rows.first_blocks_s - 1) // self._geometry.num_blocks_of_rank
            self.left = [self._most - count for count in np.bincount(ranks_s, minlength=num_ranks).tolist()]

    def within(self, budget: int, group: SequenceGroup) -> int:
        """Return the tokens of a budget that a group may have."""
        return budget if self._geometry.dp_size == 1 else min(budget, self.left[group.rank])

    def take(self, group: SequenceGroup, num_tokens: int) -> None:
        """Count tokens that a group gets."""
        if self._geometry.dp_size > 1:
            self.left[group.rank] -= num_tokens

    def open_ranks(self, num_rows: int) -> list[int]:
        """Return the ranks with free rows for a group of `num_rows`, and at least a token for each."""
        of_ranks = [0] * self._geometry.dp_size
        for group in self._running:
            of_ranks[group.rank] += group.num_rows
        most = self._geometry.max_num_seqs_of_rank - num_rows
        return [rank for rank, rows in enumerate(of_ranks) if rows <= most and self.left[rank] >= num_rows]


class Scheduler:
    """Decides each step. No other class allocates blocks for rows.

    Attributes:
        max_num_seqs: maximum rows of a step.
        prefill_budget: limits prefill tokens for the latency of streams, and observes each step; None without a bound.
        is_in_order: groups are admitted in the order of arrival.
        rows: the persistent decode batch.
        multi_step_policy: chooses the number of steps of a dispatch, and observes each dispatch.
        drafts: adds rows for draft tokens.
        rounds: adds decoding rows for draft-model rounds.
        adapters: LoRA slots of running groups.
        on_preempt: called with a running group before it loses its blocks.

    Args:
        policy: the one that `options` name.
        eos_token_ids: EOS tokens of the model.
        outgrown_len: tokens beyond which all keys of a sequence are recomputed (LongRoPE); None for never.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        policy: SchedulingPolicy,
        options: SchedulerOptions,
        geometry: Geometry,
        rates: DeviceRates,
        eos_token_ids: frozenset[int] = frozenset(),
        outgrown_len: int | None = None,
    ) -> None:
        self.max_num_seqs = min(options.max_num_seqs or geometry.max_num_seqs, geometry.max_num_seqs)
        most = geometry.max_num_batched_tokens
        self._max_num_batched_tokens = min(options.max_num_batched_tokens or most, most)
        self._max_prompt_tokens = options.long_prefill_token_threshold or most
        self._is_static = options.batching == "static"  # as request-level servers do
        self.on_preempt: list[Callable[[SequenceGroup], None]] = []
        self._memory = memory
        self._policy = policy
        self._preemption = Preemption(options.preemption_mode, geometry.bytes_per_block, rates)
        bound_s = options.max_inter_token_latency
        if bound_s is None:
            bound_s = choose_bound_s(rates)
        has_bound = bool(bound_s) and not geometry.is_encoder  # its rows get one step each
        self.prefill_budget = PrefillBudget(bound_s, rates, geometry.buckets) if has_bound else None
        self.is_in_order = options.policy == "fcfs"
        self.queues = Queues(self._policy)
        self.multi_step_policy = MultiStepPolicy(
            options.num_scheduler_steps, bound_s, rates, geometry, has_overlap=options.overlap is not False
        )
        self._ranks = RankLimits(geometry, self.queues.running, self._max_num_batched_tokens)
        self._geometry = geometry
        long_rope = None if outgrown_len is None else LongRopeRecompute(memory, outgrown_len)
        self.rows = PersistentDecodeBatch(geometry, long_rope, eos_token_ids)
        self.drafts = DraftRows(memory, self.rows, geometry, self._policy)
        self.rounds = RoundRows(memory, self.rows, geometry, self._policy)
        self._has_adapters = geometry.max_loras > 0
        self.adapters = LoRASlots(geometry.max_loras)

    def schedule(self, proposals: DraftTokens | None = None, num_rounds: int = 0) -> SchedulerOutput:
        """Decide the next step and advance the sequences: the returned schedule must be dispatched.

        Args:
            proposals: draft tokens of decoding sequences that have no token in flight.
            num_rounds: draft-model rounds, if all rows decode and no token is in flight.
        """
        schedule = SchedulerOutput()
        spent = self.rows.finished()
        for sequence in spent:
            self.rows.remove(sequence)
        if self.rows.long_rope is not None:
            schedule.recomputes(self.rows.long_rope.begin_again(self.queues.running))
        self._preempt_for_priority(schedule)
        num_yielded = len(schedule.preempted)
        parts, budget = self._share_tokens()
        is_early = not self.rows and len(parts) > 1 and should_wait_for_other_beams(parts)
        if not is_early or self._next_admissible(self._num_outstanding_blocks()) is not None:
            queues = self.queues
            is_joined = queues.num_waiting > 0 and (bool(spent) or queues.has_next_within(self.max_num_seqs))
            is_alone = not (
                is_joined or proposals is not None or any(parts.values()) or self.rows.multi_step_limits.go_singly
            )
            has_rounds = is_alone and num_rounds > 0 and self.rounds.enter(schedule, num_rounds)
            if not has_rounds and not self._decode(parts, schedule, is_alone=is_alone):
                # Some group must be preempted: schedule every row individually.
                self.rows.clear()
                parts, budget = self._share_tokens()
            self._grow_running(parts, schedule)
            # Admit only if no group was preempted for blocks and there is one step: both change which group is next.
            if len(schedule.preempted) == num_yielded and schedule.num_steps == 1 and not has_rounds:
                self._resume_and_admit(budget, schedule)
        schedule.close()
        if not self._is_static:  # in a static batch, ended sequences keep their blocks
            self.rows.add([(row.group, row.sequence) for row in schedule.rows if _decodes(row)])
        if proposals is not None:
            self.drafts.add(schedule, proposals)
        schedule.move_first(self._memory.take_ops())
        return schedule

    def truncate_steps(self, schedule: SchedulerOutput, num_steps: int) -> None:
        """Record how many steps of a schedule that may be cut short were executed."""
        self._policy.decoded(schedule.decodes.groups * (num_steps - 1))
        if num_steps < schedule.num_steps:
            self.rows.go_back(schedule.num_steps - num_steps)
            schedule.decodes.cut_short(num_steps)

    def finish(self, group: SequenceGroup) -> None:
        """Finish a group in any state; its blocks are free at once (steps run in order of dispatch)."""
        was_running = self.queues.end(group)
        if group.adapter_slot:
            self.adapters.give_back(group)
        for sequence in group.sequences:
            self.rows.remove(sequence)
        if group.has_logits_processors:
            self.rows.logits_processors.discard(group)
        if not was_running:
            _release(group, self._memory)
        self._release_ended()

    def finish_sequence(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Finish one sequence of a group whose other sequences continue."""
        sequence.move_to(Status.FINISHED)
        self.rows.remove(sequence)
        if group.has_logits_processors:
            self.rows.logits_processors.slots.give_back(sequence)
        if not self._is_static or group.status is not Status.RUNNING:
            self._memory.release(sequence)

    def finish_beam(self, sequence: Sequence) -> None:
        """Finish a pruned beam; its blocks are freed even in a static batch, because other beams replace it."""
        sequence.move_to(Status.FINISHED)
        self._memory.release(sequence)

    def preempt_all(self, *, keeps_swapped: bool = True) -> None:
        """Preempt all running groups for recompute, because the pool will lose its contents.

        Args:
            keeps_swapped: the blocks of swapped groups stay valid; otherwise these groups are recomputed, too.
        """
        schedule = SchedulerOutput()
        for group in reversed(tuple(self.queues.running)):
            self._preempt(group, schedule, may_swap=False)
        for group in () if keeps_swapped else tuple(self.queues.swapped):
            self.queues.stop_swapped(group)
            self._recompute(group)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """Return a new sequence that shares all blocks with its parent."""
        child = parent.branch(index)
        self._memory.fork(parent, child)
        return child

    def _release_ended(self) -> None:
        """Free the blocks of ended groups: at once, or with the last group of their static batch."""
        if not self._is_static or not self.queues.running:
            for ended in self.queues.remove_ended():
                _release(ended, self._memory)

    # --- a step's parts ---------------------------------------------------------------------------------------------

    def _preempt_for_priority(self, schedule: SchedulerOutput) -> None:
        """Preempt running groups, from the end of the order, if the next group outranks them and finds no room."""
        queues = self.queues
        self._ranks.reset()  # of the previous step no token is left
        while queues.running and not self._is_static:
            group = queues.next_group()
            if group is None or not self._policy.can_preempt(queues.running[-1], group):
                return
            if self._must_fetch(group):
                return
            if self._has_room(group, self._num_outstanding_blocks()):
                return
            leaving = self.adapters.leaving_for(group, self._policy.preemptible_for(group, queues.running))
            if not leaving:
                return
            for each in leaving:
                self._preempt(each, schedule)

    def _share_tokens(self) -> tuple[dict[SequenceGroup, Shares], int]:
        """Return the tokens for running sequences outside the decode batch, and the budget left for other groups."""
        self.rows.prompt_logprob_budget.begin_step()
        self._ranks.begin_step(self.rows)
        parts, prefilling = dict[SequenceGroup, Shares](), list[SequenceGroup]()
        budget = self._max_num_batched_tokens - len(self.rows)
        for group in [group for group in self.queues.running if group not in self.rows.fully_batched_groups]:
            pending = parts[group] = _pending_shares(group, self.rows, self._memory)
            if _num_tokens(pending) > len(pending):
                prefilling.append(group)
            else:
                budget -= len(pending)
                self._ranks.take(group, len(pending))
        queues = self.queues
        has_prompts = bool(prefilling) or (queues.num_waiting > 0 and queues.num_rows < self.max_num_seqs)
        if self.prefill_budget is not None and has_prompts and len(prefilling) < len(queues.running):
            others = [sequence for group in parts.keys() - prefilling for sequence, _ in parts[group]]
            context_lens = [*(self.rows.lens_s + 1).tolist(), *(sequence.num_tokens for sequence in others)]
            least = min(budget, self._geometry.image_tokens)
            budget = max(least, self.prefill_budget.within(budget, context_lens, queues.running, prefilling))
        for group in prefilling:
            parts[group] = self._within(budget, group, parts[group])
            budget -= _num_tokens(parts[group])
            self._ranks.take(group, _num_tokens(parts[group]))
        return parts, budget

    def _within(self, budget: int, group: SequenceGroup, pending: Shares) -> Shares:
        """Cap the tokens of a group to its part of the budget; end a chunk of a prompt where a state is stored.

        If the tokens of an image see each other, a chunk contains all of them or none.
        """
        parts = _within(self._limited(budget, group), group, pending)
        embeds = group.request.embeds
        if embeds is not None and self._geometry.image_tokens:
            starts = [(sequence, sequence.num_computed_tokens, num_tokens) for sequence, num_tokens in parts]
            ends = [(one, embeds.end_outside(start, start + num_tokens) - start) for one, start, num_tokens in starts]
            parts = [(one, num_tokens) for one, num_tokens in ends if num_tokens]
        prefixes = self._memory.prefixes
        if prefixes is None or prefixes.states is None or len(parts) > 1:
            return parts
        return [(sequence, prefixes.within_checkpoints(sequence, num_tokens)) for sequence, num_tokens in parts]

    def _limited(self, budget: int, group: SequenceGroup) -> int:
        """Return the tokens that a group may have in a step: its rows always sample together."""
        most = max(self._max_prompt_tokens, group.num_rows, self._geometry.image_tokens)
        return min(self._ranks.within(budget, group), most)

    def _decode(self, parts: dict[SequenceGroup, Shares], schedule: SchedulerOutput, *, is_alone: bool) -> bool:
        """Schedule the decode batch. Return False, without changes, if its rows and the others do not all find blocks.

        With `is_alone` it may schedule several steps: no other rows run, all rows need tokens only, and no group can
        join.
        """
        ahead, num_steps = self.rows.multi_step_limits, 1
        if is_alone:
            num_steps = self.multi_step_policy.num_steps(
                self._num_padded_rows,
                min(ahead.least_left, self._num_steps_to_checkpoint),
                may_end=ahead.may_end,
                has_room=self.queues.num_rows < self.max_num_seqs,
                are_bound=ahead.are_bound,
            )
        due = changed = self.rows.needing_blocks(num_steps)
        for sequence in due:
            commit_full_blocks(sequence, self._memory)
        if num_steps > 1 and not self._memory.can_grow([(sequence, num_steps) for sequence in due]):
            num_steps, due = 1, self.rows.needing_blocks()
        grown = [(sequence, num_steps) for sequence in due]
        if not self._memory.can_grow([*grown, *chain.from_iterable(parts.values())]):
            return False
        for sequence in due:
            self._memory.grow(sequence, num_steps)
        for sequence in changed:
            self.rows.grown(sequence)
        has_program = is_alone and self.multi_step_policy.has_program(self._num_padded_rows)
        decodes = self.rows.take(num_steps, is_alone=has_program)
        if self.queues.num_rows < self.max_num_seqs and self.multi_step_policy.is_interruptible:
            decodes.set_interruptible()
        schedule.decode(decodes)
        self._policy.decoded(decodes.groups * (1 if decodes.may_be_cut_short else num_steps))
        return True

    @property
    def _num_steps_to_checkpoint(self) -> int:
        """Steps until the first decoding row reaches a multiple of the interval between states that are stored."""
        prefixes, interval = self._memory.prefixes, self._geometry.state_checkpoint_interval
        if prefixes is None or prefixes.states is None or not self.rows:
            return BEYOND_TOKENS
        return int((interval - self.rows.lens_s % interval).min())

    @property
    def _num_padded_rows(self) -> int:
        """Rows that the program of several steps has at least."""
        num_rows = len(self.rows)
        return padded_for_ranks(self._geometry, num_rows, self.rows.first_blocks_s, np.ones(num_rows, np.int32))

    def _grow_running(self, parts: dict[SequenceGroup, Shares], schedule: SchedulerOutput) -> None:
        """Allocate blocks for every running row, in the policy's order; preempt from its end."""
        running = self.queues.running
        for group, shares in parts.items():
            while group.status is Status.RUNNING and not self._memory.can_grow(shares):
                self._preempt(next(each for each in reversed(running) if each.rank == group.rank), schedule)
            if group.status is Status.RUNNING:
                self._enter(group, shares, schedule)

    def _resume_and_admit(self, budget: int, schedule: SchedulerOutput) -> None:
        """Resume swapped groups and admit new ones while rows, tokens and blocks are available."""
        queues = self.queues
        if not queues.num_waiting:
            return
        is_batch_open = not self._is_static or not queues.running
        # If every row is taken, blocks do not matter, and a full batch costs the step nothing.
        outstanding = (
            self._num_outstanding_blocks() if queues.num_rows < self.max_num_seqs else [0] * self._geometry.dp_size
        )
        while budget > 0 and is_batch_open:
            group = self._next_admissible(outstanding)
            if group is None:
                return
            if self._geometry.is_encoder and len(group.request.prompt_token_ids) > budget:
                return  # its tokens see each other, so they are computed in one step
            prefetcher = self._memory.prefetcher if queues.running and group.status is not Status.SWAPPED else None
            if prefetcher is not None and prefetcher.brings(group):
                return
            if group.request.adapter is not None:
                self.adapters.take(group, group.request.adapter)
            if group.status is Status.SWAPPED:
                assert self._memory.swapping is not None
                self.queues.run(group)
                self._memory.swapping.swap_in(group)
            else:
                self._admit(group, schedule)
                self._stop_for_next(group)
            parts = self._within(budget, group, _pending_shares(group, self.rows, self._memory))
            budget -= _num_tokens(parts)
            self._ranks.take(group, _num_tokens(parts))
            self._enter(group, parts, schedule)
            outstanding[group.rank] += self._memory.num_outstanding_blocks(group)

    def _stop_for_next(self, group: SequenceGroup) -> None:
        """Let the prefill of an admitted group stop where the next group continues differently, to store a state."""
        prefixes, following = self._memory.prefixes, self.queues.next_group()
        if prefixes is not None and prefixes.states is not None and following is not None:
            prefixes.is_prefix_in_flight(following, [group])

    @property
    def is_fetching_adapter(self) -> bool:
        """True while a waiting group's adapter is read into host memory."""
        return self._has_adapters and self.adapters.is_fetching

    def _must_fetch(self, group: SequenceGroup) -> bool:
        return group.request.adapter is not None and self.adapters.must_fetch(group)

    def _next_admissible(self, outstanding: list[int]) -> SequenceGroup | None:
        """Return the next group if it can run now: room is free, its adapter is read, no group computes its prefix."""
        group, prefixes = self.queues.next_group(), self._memory.prefixes
        if group is None or self._must_fetch(group) or not self._has_room(group, outstanding):
            return None
        if has_unknown_tokens(group):
            return None
        is_new = group.status is not Status.SWAPPED
        if is_new and prefixes is not None and prefixes.is_prefix_in_flight(group, self.queues.running):
            return None
        return group

    def _num_outstanding_blocks(self) -> list[int]:
        """Return the number of blocks that running groups still need for tokens that they have, by rank."""
        settled = self.rows.fully_batched_groups
        growing = {group for group in self.queues.running if group not in settled}
        growing.update(
            self.rows.get_group(sequence) for sequence in self.rows.needing_blocks()
        )  # the other batched rows need none
        found = [0] * self._geometry.dp_size
        for group in growing:
            found[group.rank] += self._memory.num_outstanding_blocks(group)
        return found

    def _has_room(self, group: SequenceGroup, outstanding: list[int]) -> bool:
        """Return True if rows, blocks and an adapter slot are free for a whole group, beyond running groups' needs."""
        if self.queues.num_rows + group.num_rows > self.max_num_seqs:
            return False
        if group.request.adapter is not None and not self.adapters.can_take(group.request.adapter):
            return False
        # While others run, keep blocks free so that growing rows need no preemption.
        least = max(1, self._memory.limit // len(outstanding) // 100) if self.queues.running else 0
        spare = [num_blocks + least for num_blocks in outstanding]
        if group.status is Status.SWAPPED and self._memory.swapping is not None:
            return self._memory.swapping.can_swap_in(group, spare[0])
        if self._memory.placement is not None:
            return self._memory.placement.place(group, self._ranks.open_ranks(group.num_rows), spare)
        return self._memory.can_admit(group, spare[0])

    def _admit(self, group: SequenceGroup, schedule: SchedulerOutput) -> None:
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
            other.count_overtaken()
        schedule.admitted.append(group)

    def _preempt(self, group: SequenceGroup, schedule: SchedulerOutput, *, may_swap: bool = True) -> None:
        """Preempt a running group: swap its blocks to host memory, or free them for recompute."""
        swapping = self._memory.swapping if may_swap else None
        for observe in self.on_preempt:
            observe(group)
        schedule.preempted.append(group)
        self.queues.stop_running(group)
        if group.adapter_slot:
            self.adapters.give_back(group)
        group.preempted()
        self._release_ended()
        for sequence in group.sequences:
            self.rows.remove(sequence)
            if not sequence.is_live:  # of a static batch
                self._memory.release(sequence)
        if group.has_logits_processors:
            self.rows.logits_processors.give_back(group)
        for sequence in group.live:
            commit_full_blocks(sequence, self._memory)  # blocks outside its windows would never find room again
        if swapping is not None and self._preemption.prefers_swap(group) and swapping.can_swap_out(group):
            swapping.swap_out(group)
            self.queues.add_swapped(group)
            return
        self._recompute(group)

    def _recompute(self, group: SequenceGroup) -> None:
        """Free the blocks of a preempted group, and let it wait."""
        for sequence in group.live:
            self._memory.release(sequence)
        group.reset_for_recompute()
        self.queues.put_back(group)

    # --- rows -------------------------------------------------------------------------------------------------------

    def _enter(self, group: SequenceGroup, parts: Shares, schedule: SchedulerOutput) -> None:
        """Allocate blocks and rows for a group's sequences, and advance them past the step."""
        for sequence, num_tokens in parts:
            self._memory.grow(sequence, num_tokens)
            if schedule.add_row(group, sequence, num_tokens).samples_token:
                self._policy.served(group, 0, 1)
        if not group.is_forked and group.live[0].num_computed_tokens == group.live[0].num_prompt_tokens:
            self._fork(group, schedule)

    def _fork(self, group: SequenceGroup, schedule: SchedulerOutput) -> None:
        """Fork the other sequences from the leader, whose prompt is computed; they sample from the leader's row."""
        leader, *others = group.live
        leader_row = schedule.num_rows - 1
        group.forked()
        for sequence in others:
            self._memory.fork(leader, sequence)
            if sequence.num_output_tokens == 0:
                schedule.add_row(group, sequence, 0, sample_row=leader_row)
                self._policy.served(group, 0, 1)


def _release(group: SequenceGroup, memory: KVCacheManager) -> None:
    for sequence in group.sequences:
        memory.release(sequence)


def _pending_shares(group: SequenceGroup, rows: PersistentDecodeBatch, memory: KVCacheManager) -> Shares:
    """Return the pending tokens of the runnable sequences that are not in the decode batch."""
    pending = []
    for sequence in group.runnable:
        if sequence in rows:
            continue
        commit_full_blocks(sequence, memory)
        num_tokens = rows.prompt_logprob_budget.within(sequence, _num_to_run(group, sequence))
        if rows.long_rope is not None:
            num_tokens = min(num_tokens, rows.long_rope.num_left(sequence))
        if num_tokens:
            pending.append((sequence, num_tokens))
    return pending


def _decodes(row: ScheduledRow) -> bool:
    """Return True if the row can enter the decode batch: it gains one token at every step until it ends.

    Its last block is not shared, because it has just been written; its full blocks are in the prefix cache.
    """
    sequence, sampling = row.sequence, row.group.request.sampling
    return (
        row.samples_token
        and row.num_tokens == 1
        and row.start >= sequence.num_prompt_tokens
        and not row.group.needs_row_scheduling
        and row.output_index + 1 >= sampling.min_tokens
        and sequence.num_output_tokens < sampling.max_num_tokens
    )


def _num_to_run(group: SequenceGroup, sequence: Sequence) -> int:
    """Return the number of tokens of a sequence that wait to go through the model."""
    sampling = group.request.sampling
    if sampling.beam_width and sequence.num_in_flight_tokens:
        return 0  # the surviving beams are chosen when all samples are collected
    if not group.is_forked:
        return sequence.num_prompt_tokens - sequence.num_computed_tokens
    if sequence.num_output_tokens >= sampling.max_num_tokens:
        return 0  # its last token is in flight
    return sequence.num_uncomputed_tokens


def _within(budget: int, group: SequenceGroup, pending: Shares) -> Shares:
    """Cap the tokens of a group to the remaining budget."""
    # Beams are ranked together, so they sample in one step: if they cannot, each stops one token short.
    num_short = int(bool(group.request.sampling.beam_width) and _num_tokens(pending) > budget)
    parts = []
    for sequence, num_tokens in pending:
        share = min(num_tokens - num_short, budget)
        if share:
            parts.append((sequence, share))
            budget -= share
    return parts


def _num_tokens(parts: Shares) -> int:
    return sum([num_tokens for _, num_tokens in parts])
