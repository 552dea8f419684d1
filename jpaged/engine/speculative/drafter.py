"""Draft tokens of the rows of a step: mediates between the proposer and the adaptation."""

from __future__ import annotations

from jpaged.config import SpeculativeOptions
from jpaged.engine.executor import DeviceRates, Geometry, StepOutputs
from jpaged.engine.observers import StepObservers, StepTiming
from jpaged.engine.scheduler.output import SchedulerOutput
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequence import Sequence, SequenceGroup
from jpaged.engine.speculative.controller import AdaptiveSpeculation, StepCosts
from jpaged.engine.speculative.drafts import DraftTokens, decoding_rows, takes_drafts
from jpaged.engine.speculative.ngram import NgramProposer, Proposer
from jpaged.engine.speculative.suffix import SuffixProposer
from jpaged.errors import InternalError

_ROW_S = 1e-5
"""Proposer time per row, by benchmarks/results/speculation.json: 7 to 12 us without a result, 35 with one."""
_HOST_S = 2e-4
"""Host time per step that cannot overlap if the next step waits for results."""


class SpecDecodeController:
    """Controller of the host proposer. Called only by the engine thread.

    The proposer receives a sequence before its first draft, and when the sequence ends.
    """

    def __init__(self, proposer: Proposer, adaptation: AdaptiveSpeculation, num_speculative_tokens: int) -> None:
        self._proposer = proposer
        self._adaptation = adaptation
        self._most = num_speculative_tokens
        self._keys: dict[Sequence, int] = {}
        self._num_reported: dict[Sequence, int] = {}
        self._num_begun = 0
        self._num_quiet = 0  # consecutive steps without proposals, up to now

    @classmethod
    def of(cls, options: SpeculativeOptions, rates: DeviceRates, geometry: Geometry) -> SpecDecodeController:
        """Create the drafting that the options select."""
        costs = StepCosts.of(rates, geometry.buckets, host_s=_HOST_S, row_s=_ROW_S)
        most = options.num_speculative_tokens
        adaptation = AdaptiveSpeculation(most, costs, options.disable_by_batch_size)
        return cls(make_proposer(options), adaptation, most)

    def observe(self, observers: StepObservers) -> None:
        """Add the callbacks of this controller."""
        observers.on_results.append(self.on_results)
        observers.on_request_finished.append(self._remove)

    def limit(self, scheduler: Scheduler, geometry: Geometry) -> int:
        """Return the number of draft tokens for each row of the next step; with 0 it need not wait for results."""
        running = scheduler.queues.running
        rows = [group for group in running if group.is_forked]
        num_rows = sum(len(group.sequences) for group in rows)
        num_prefilling = sum(max(0, group.sequences[0].num_uncomputed_tokens - 1) for group in running)
        limit = self._adaptation.limit(num_rows, num_prefilling)
        self._num_quiet = 0 if limit else self._num_quiet + 1
        return limit

    def propose(self, scheduler: Scheduler, limit: int) -> tuple[DraftTokens | None, int]:
        """Return draft tokens for sequences of running groups, or None; and 0 rounds of a draft model.

        No token of these groups may be in flight.
        """
        groups, found = scheduler.queues.running, {}
        for group in groups:
            if not group.is_forked or not takes_drafts(group):
                continue
            for sequence in group.live:
                if sequence.num_uncomputed_tokens == 1 and (token_ids := self._ask(sequence, limit)):
                    found[sequence] = token_ids
        if not found:
            decoding = [sequence for group in groups if group.is_forked for sequence in group.live]
            self._choose(decoding, [0] * len(decoding), 0)
            return None, 0
        return DraftTokens(found, self._choose), 0

    def on_results(self, schedule: SchedulerOutput, outputs: StepOutputs, timing: StepTiming) -> None:
        """Record the accepted tokens of a dispatch, and its duration."""
        decodes, seconds = schedule.decodes, timing.seconds
        if not schedule.drafts:
            if self._num_quiet > 1 and decodes.sequences and not schedule.rows:
                self._adaptation.took_plain(len(decodes), 0, seconds / decodes.num_steps)
            return
        num_run = {draft.sequence: len(draft.token_ids) for draft in schedule.drafts}
        found = {draft.sequence: draft.num_accepted for draft in schedule.drafts}
        decoding = [one.sequence for one in decoding_rows(schedule)]
        self._adaptation.observe(
            [self._key(sequence) for sequence in decoding],
            [num_run.get(sequence, 0) for sequence in decoding],
            [found.get(sequence, 0) for sequence in decoding],
            seconds,
            schedule.num_tokens - len(decoding) - sum(num_run.values()),
        )

    def _remove(self, group: SequenceGroup) -> None:
        """Drop a request that has ended; the proposer may keep its output for requests that share it."""
        for sequence in group.sequences:
            if not group.request.sampling.beam_width:
                self._proposer.remove(self._pass_tokens(sequence))
            if (key := self._keys.pop(sequence, None)) is not None:
                self._adaptation.remove(key)
            self._num_reported.pop(sequence, None)

    def _pass_tokens(self, sequence: Sequence) -> int:
        """Pass the new tokens of a sequence to the proposer; return the sequence's key."""
        key, num_prompt = self._key(sequence), sequence.num_prompt_tokens
        num_told = self._num_reported.get(sequence)
        if num_told is None:
            self._proposer.begin(key, sequence.token_ids[:num_prompt], sequence.kv.root)
            num_told = num_prompt
        if num_told < len(sequence.token_ids):
            self._proposer.extend(key, sequence.token_ids[num_told:])
        self._num_reported[sequence] = len(sequence.token_ids)
        return key

    def _ask(self, sequence: Sequence, limit: int) -> list[int]:
        return self._proposer.propose(self._pass_tokens(sequence), limit)

    def _choose(self, sequences: list[Sequence], num_available: list[int], num_other_tokens: int) -> list[int]:
        return self._adaptation.choose([self._key(one) for one in sequences], num_available, num_other_tokens)

    def _key(self, sequence: Sequence) -> int:
        key = self._keys.get(sequence)
        if key is None:
            key = self._keys[sequence] = self._num_begun
            self._num_begun += 1
        return key


def make_proposer(options: SpeculativeOptions) -> Proposer:
    """Create the proposer of a method that runs on the host.

    Raises:
        InternalError: the method runs on the device.
    """
    if options.method == "ngram":
        return NgramProposer.of(options)
    if options.method == "suffix":
        return SuffixProposer.of(options)
    raise InternalError(f"{options.method} proposes on the device, not on the host")
