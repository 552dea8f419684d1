"""Faults of policy: who runs, who has to leave, who comes next; and of what is done with a step."""

from __future__ import annotations

from tests.mutation.planting import Fault

LIVES = ("test_lives.py",)
PACE = ("scheduling/test_pace.py",)
COHORTS = ("scheduling/test_cohorts.py",)
SCHEDULER = ("scheduling/test_scheduler.py",)
POLICIES = ("scheduling/test_policies.py",)

POLICY_FAULTS = (
    Fault(
        "a copy is made after the write",
        "loop.py",
        "        for moves in schedule.ops.batches():\n            self._executor.move_blocks(moves)\n"
        "        if not schedule.num_rows:\n            return None\n"
        "        inputs = build_step_inputs(schedule, geometry)\n",
        "        if schedule.rows:\n"
        "            inputs = build_step_inputs(schedule, geometry)\n"
        "            self._executor.forward(inputs)\n"
        "        for moves in schedule.ops.batches():\n            self._executor.move_blocks(moves)\n"
        "        if not schedule.num_rows:\n            return None\n",
        ("kv/test_sharing.py",),
    ),
    Fault(
        "moves wait for a step that has rows",
        "loop.py",
        "        for moves in schedule.ops.batches():\n            self._executor.move_blocks(moves)\n"
        "        if not schedule.num_rows:\n            return None\n",
        "        if not schedule.num_rows:\n            return None\n"
        "        for moves in schedule.ops.batches():\n            self._executor.move_blocks(moves)\n",
        ("kv/test_swap.py",),
    ),
    Fault(
        "beams are ranked when some of them have sampled",
        "scheduling/scheduler.py",
        "num_short = int(bool(group.request.sampling.beam_width) and _num_tokens(wanted) > budget)",
        "num_short = 0",
        ("output/test_beam.py",),
    ),
    Fault(
        "a prompt beside streams takes all that is left",
        "scheduling/scheduler.py",
        "budget = self.pace.within(budget, context_lens, queues.running, prefilling)",
        "self.pace.within(budget, context_lens, queues.running, prefilling)",
        PACE,
    ),
    Fault(
        "a prompt with nobody who reads along beside it is bounded",
        "scheduling/pace.py",
        "if not any(group.is_streamed and group not in prefilling for group in running):",
        "if False:",
        PACE,
    ),
    Fault(
        "a slow step counts at once",
        "scheduling/pace.py",
        "[len(shares) - 1 - len(shares) // _ONE_IN]",
        "[-1]",
        PACE,
    ),
    Fault(
        "what was seen long ago is never forgotten",
        "scheduling/pace.py",
        "            del self._seen[known]\n",
        "            pass\n",
        PACE,
    ),
    Fault(
        "a prompt's context takes no time",
        "scheduling/pace.py",
        "num_tokens * (start + (num_tokens + 1) / 2)",
        "num_tokens",
        PACE,
    ),
    Fault(
        "a bound that cannot be kept keeps prompts out",
        "scheduling/pace.py",
        "if LEAST_TOKENS <= size < budget",
        "if size < budget",
        PACE,
    ),
    Fault(
        "beams that wait for beams keep out who could run",
        "scheduling/scheduler.py",
        "if not is_early or self._entering(self._num_outstanding_blocks()) is not None:",
        "if not is_early:",
        COHORTS,
    ),
    Fault(
        "beams wait for those that end",
        "scheduling/cohorts.py",
        " and group.live[0].num_output_tokens < sampling.max_tokens",
        "",
        COHORTS,
    ),
    Fault(
        "beams wait where others run",
        "scheduling/cohorts.py",
        "            return False\n        else:",
        "            continue\n        else:",
        COHORTS,
    ),
    Fault(
        "the salt has no part in the keys of several samples",
        "sequence.py",
        "root_key(sampling.cache_salt, request.cache_tenant) if",
        'root_key(sampling.cache_salt if num_sequences == 1 else "", request.cache_tenant) if',
        ("kv/test_prefixes.py",),
    ),
    Fault(
        "the salt has no part in the keys of beams",
        "sequence.py",
        "root_key(sampling.cache_salt, request.cache_tenant) if",
        'root_key("" if sampling.beam_width else sampling.cache_salt, request.cache_tenant) if',
        ("kv/test_prefixes.py",),
    ),
    Fault(
        "the next in order makes room and not the last",
        "scheduling/scheduler.py",
        "                self._preempt(running[-1], schedule)",
        "                self._preempt(running[min(running.index(group) + 1, len(running) - 1)], schedule)",
        SCHEDULER,
    ),
    Fault(
        "the first in order makes room for an urgent one",
        "scheduling/scheduler.py",
        "            self._preempt(queues.running[-1], schedule)\n\n    def _share",
        "            self._preempt(queues.running[0], schedule)\n\n    def _share",
        SCHEDULER,
    ),
    Fault(
        "a preempted group keeps its rows",
        "scheduling/scheduler.py",
        "        self.running.remove(group)\n        self.num_rows -= group.num_rows\n",
        "        self.running.remove(group)\n",
        LIVES,
    ),
    Fault(
        "a static batch is open",
        "scheduling/scheduler.py",
        "is_batch_open = not self._is_static or not queues.running",
        "is_batch_open = True",
        SCHEDULER,
    ),
    Fault(
        "a shared block costs a swap for each holder",
        "scheduling/preemption.py",
        "{block_id for sequence in group.live for block_id in sequence.kv.table.block_ids()}",
        "[block_id for sequence in group.live for block_id in sequence.kv.table.block_ids()]",
        SCHEDULER,
    ),
    Fault(
        "what running groups were promised is given away",
        "scheduling/scheduler.py",
        "sum(self._memory.num_outstanding_blocks(group) for group in growing)",
        "0",
        SCHEDULER,
    ),
    Fault(
        "what the last to be admitted was promised is given away",
        "scheduling/scheduler.py",
        "            outstanding += self._memory.num_outstanding_blocks(group)\n",
        "",
        SCHEDULER,
    ),
    Fault(
        "there is no low-water mark",
        "scheduling/scheduler.py",
        "max(1, memory.num_blocks // 100)",
        "0",
        SCHEDULER,
    ),
    Fault(
        "a swapped group comes before an earlier one that is computed again",
        "scheduling/scheduler.py",
        "return waiting if is_earlier or self._policy",
        "return waiting if self._policy",
        SCHEDULER,
    ),
    Fault(
        "a swapped group comes before an urgent one",
        "scheduling/scheduler.py",
        "return waiting if is_earlier or self._policy.yields_to(swapped, waiting) else swapped",
        "return waiting if is_earlier else swapped",
        SCHEDULER,
    ),
    Fault(
        "who leaves a static batch keeps what its ended samples held",
        "scheduling/scheduler.py",
        "            if not sequence.is_live:  # of a static batch\n                self._memory.release(sequence)\n",
        "            pass\n",
        SCHEDULER,
    ),
    Fault(
        "an urgent one counts on what others were promised",
        "scheduling/scheduler.py",
        "if self._has_room(group, self._num_outstanding_blocks()):\n                return\n            self",
        "if self._has_room(group, 0):\n                return\n            self",
        SCHEDULER,
    ),
    Fault(
        "a step lets somebody in for whom another had to leave",
        "scheduling/scheduler.py",
        "if len(schedule.preempted) == num_yielded:",
        "if True:",
        SCHEDULER,
    ),
    Fault(
        "beams that left do not share their prompt again",
        "sequence.py",
        "        if self.status is Status.WAITING:  # it was preempted meanwhile, and runs its prompt first\n"
        "            self.starts_over()\n",
        "",
        ("output/test_beam.py",),
    ),
    Fault(
        "those who were overtaken too often are still ranked",
        "scheduling/policies.py",
        "return (not is_late, 0 if is_late else group.request.sampling.priority, group.arrival)",
        "return (not is_late, group.request.sampling.priority, group.arrival)",
        POLICIES,
    ),
    Fault(
        "the row that moves up keeps the blocks of the one that left",
        "scheduling/rows.py",
        "            self._block_tables_sm,\n            self._sampling",
        "            self._sampling",
        LIVES,
    ),
    Fault(
        "a row is not told of its new block",
        "scheduling/scheduler.py",
        "            self.rows.grown(sequence)\n",
        "",
        LIVES,
    ),
    Fault(
        "a row stays whose last token is in flight",
        "scheduling/scheduler.py",
        "        for sequence in self.rows.spent():\n            self.rows.leave(sequence)\n",
        "",
        ("scheduling/test_rows.py",),
    ),
    Fault(
        "rows decode whether or not there are blocks",
        "scheduling/scheduler.py",
        "        if not self._memory.can_grow([*((sequence, 1) for sequence in due), *chain",
        "        if not self._memory.can_grow([*chain",
        LIVES,
    ),
    Fault(
        "the row of a sequence that was preempted stays",
        "scheduling/scheduler.py",
        "            self.rows.leave(sequence)\n            if not sequence.is_live:",
        "            if not sequence.is_live:",
        LIVES,
    ),
    Fault(
        "a row that may not end yet is left to itself",
        "scheduling/scheduler.py",
        "        and row.output_index + 1 >= sampling.min_tokens\n",
        "",
        ("scheduling/test_rows.py",),
    ),
    Fault(
        "who waits counts on blocks that rows are about to take",
        "scheduling/scheduler.py",
        "        growing.update(self.rows.group_of(sequence) for sequence in self.rows.due())",
        "        growing.update([])",
        ("scheduling/test_rows.py",),
    ),
    Fault(
        "a block that a row has filled is not found",
        "scheduling/scheduler.py",
        "            for sequence in due:\n                prefixes.register_full_blocks(sequence)\n",
        "            pass\n",
        ("scheduling/test_rows.py",),
    ),
    Fault(
        "a token that ends a sequence is not looked for where there is no text",
        "output/processor.py",
        "may_end = np.isin(token_ids, self._ending_ids.any) | sampled.are_last",
        "may_end = np.array(sampled.are_last)",
        ("output/test_processor.py",),
    ),
    Fault(
        "beams count as one row to the router",
        "data_parallel/routing.py",
        "num_rows = sampling.beam_width or sampling.num_samples",
        "num_rows = sampling.num_samples",
        ("data_parallel/test_routing.py",),
    ),
    Fault(
        "samples count to the router with one of their outputs",
        "data_parallel/routing.py",
        "num_rows * sampling.max_tokens",
        "sampling.max_tokens",
        ("data_parallel/test_routing.py",),
    ),
    Fault(
        "a sequence of just min_tokens may not end",
        "output/processor.py",
        "if self._num_tokens < self._sampling.min_tokens:",
        "if self._num_tokens <= self._sampling.min_tokens:",
        ("output/test_processor.py",),
    ),
    Fault(
        "one full replica is a full house",
        "data_parallel/engine.py",
        "all(engine.is_full",
        "any(engine.is_full",
        ("data_parallel/test_engine.py",),
    ),
    Fault(
        "the least likely of several are returned",
        "output/processor.py",
        "key=lambda sequence: -sequence.cumulative_logprob",
        "key=lambda sequence: sequence.cumulative_logprob",
        LIVES,
    ),
    Fault(
        "a prefix is pinned that has lost its blocks",
        "kv/pinned.py",
        "if not group.has_prompt_blocks:",
        "if group.status is None:",
        ("kv/test_pinned.py",),
    ),
    Fault(
        "a sample that ends while its static batch is out keeps its blocks",
        "scheduling/scheduler.py",
        " or group.status is not Status.RUNNING:",
        ":",
        SCHEDULER,
    ),
    Fault(
        "an urgent one makes room in a static batch",
        "scheduling/scheduler.py",
        "while queues.running and not self._is_static:",
        "while queues.running:",
        SCHEDULER,
    ),
    Fault(
        "groups are let in without tokens for them",
        "scheduling/scheduler.py",
        "while budget > 0 and is_batch_open:",
        "while is_batch_open:",
        SCHEDULER,
    ),
    Fault(
        "who is computed again is charged again",
        "scheduling/scheduler.py",
        "        for other in self.queues.waiting:\n            if other.arrival",
        "        if group.num_preemptions:\n"
        "            self._policy.served(group, len(group.request.prompt_token_ids), 0)\n"
        "        for other in self.queues.waiting:\n"
        "            if other.arrival",
        POLICIES,
    ),
    Fault(
        "a tenant that comes back was served nothing",
        "scheduling/policies.py",
        "self._served[tenant] = max(self._counter(tenant), floor)",
        "self._served[tenant] = floor",
        POLICIES,
    ),
    Fault(
        "those who were served most are forgotten",
        "scheduling/policies.py",
        "by_counter[:-MAX_TENANTS]",
        "by_counter[MAX_TENANTS:]",
        POLICIES,
    ),
    Fault(
        "who was forgotten begins at nothing",
        "scheduling/policies.py",
        "self._forgotten = max(self._forgotten, self._served.pop(tenant))",
        "self._served.pop(tenant)",
        POLICIES,
    ),
    Fault(
        "who waits is forgotten",
        "scheduling/policies.py",
        " if tenant not in waiting]",
        "]",
        POLICIES,
    ),
    Fault(
        "more are kept than beams are wide",
        "output/beam.py",
        "        del self._finished[self._width :]\n",
        "",
        ("output/test_beam.py",),
    ),
    Fault(
        "a length penalty without bounds ranks last",
        "output/beam.py",
        "        return -0.0\n",
        "        return -math.inf\n",
        ("output/test_beam.py",),
    ),
)
