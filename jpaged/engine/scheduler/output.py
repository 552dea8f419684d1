"""The scheduler's decision for one step: rows and block moves, and their conversion to padded numpy arrays.

Parts of a step: rows, their drafts, runs of rows that share a prefix; and the rows that sampled.

Aux outputs of a step are computed from its hidden states in addition to the samples:

positions    of a prompt, each once, in chunks of at most the positions per step that the device has room for
samples      log-probabilities of given token ids, or of more tokens than a sample reports
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import (
    BANNED_WIDTH,
    BEYOND_TOKENS,
    F32,
    I32,
    Bool,
    Detail,
    Geometry,
    SamplingInputs,
    StepInputs,
    random_columns,
    row_lists,
)
from jpaged.engine.executor.aux_io import NO_ID, AuxInputs, AuxKind
from jpaged.engine.kv_cache.blocks import BlockCopyPlan
from jpaged.engine.scheduler.decode_batch import DecodeBatch, StepKind
from jpaged.engine.scheduler.logits_processors import LogitsProcessorState, ProcessedRow
from jpaged.engine.sequence import Sequence, SequenceGroup, Status
from jpaged.structured import GrammarState
from jpaged.types import POOLINGS, PromptEmbeds


@dataclass(slots=True)
class ScheduledRow:
    """A sequence's part in a step: its tokens start to start + num_tokens go through the model.

    A sequence that has just been forked has a row without tokens: its first token is sampled from the leader's row.

    Attributes:
        samples_token: the step samples the sequence's next token in this row.
        sample_row: the row whose last token the sample reads; differs from the row itself only for a fresh fork.
        prev_sampled_row: the row of the previous step that sampled the last input token, which is in flight. None if
            the host knows it.
        output_index: index of the sampled output token; 0 is the first.
        logprob_positions: prompt positions with aux outputs.
        proposed: the draft token that is the input; the row's sample counts only if that token is accepted.
        grammar: grammar state after the draft token; None without a grammar.
        is_usable: a token sampled after the draft token may be accepted.
    """

    group: SequenceGroup
    sequence: Sequence
    start: int
    num_tokens: int
    samples_token: bool
    sample_row: int
    prev_sampled_row: int | None
    output_index: int
    logprob_positions: range = range(0)
    proposed: int | None = None
    grammar: GrammarState | None = None
    is_usable: bool = True

    def samples_for_nobody(self) -> None:
        """Mark the next token as known, so that the sample is discarded."""
        self.samples_token = False

    def cannot_sample(self) -> None:
        """Mark that no token is allowed after the draft token."""
        self.is_usable = False


@dataclass(slots=True)
class ScheduledDraft:
    """Draft tokens after the row of a sequence, each in a separate row; see `drafts.py`.

    Attributes:
        row_index: index of the sequence's row, in the order of addition.
        rows: indices of the draft rows.
        num_accepted: number of accepted draft tokens, once the step's results are processed.
    """

    group: SequenceGroup
    sequence: Sequence
    row_index: int
    token_ids: list[int]
    rows: range
    num_accepted: int = 0

    def set_num_accepted(self, num_accepted: int) -> None:
        """Set the number of accepted draft tokens."""
        self.num_accepted = num_accepted


@dataclass(slots=True)
class SampledRows:
    """Columns of the rows that sampled a token.

    Attributes:
        rows: device rows.
        are_last: the sequence reaches max_tokens with this token.
    """

    rows: list[int] = field(default_factory=list)
    groups: list[SequenceGroup] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    are_last: list[bool] = field(default_factory=list)

    def add(self, row_index: int, row: ScheduledRow) -> None:
        """Add a row with its index."""
        self.rows.append(row_index)
        self.groups.append(row.group)
        self.sequences.append(row.sequence)
        self.are_last.append(row.output_index + 1 >= row.group.request.sampling.max_num_tokens)

    def move(self, new_row_indices: dict[int, int]) -> None:
        """Map the rows to their places on the device."""
        self.rows = [new_row_indices[row_index] for row_index in self.rows]

    @property
    def has_grammars(self) -> bool:
        """True if the text of a row follows a grammar."""
        return any(sequence.grammar is not None for sequence in self.sequences)

    def by_group(self) -> dict[SequenceGroup, dict[Sequence, int]]:
        """Return the row of each sequence of each group."""
        rows: dict[SequenceGroup, dict[Sequence, int]] = {}
        for row, group, sequence in zip(self.rows, self.groups, self.sequences, strict=True):
            rows.setdefault(group, {})[sequence] = row
        return rows


@dataclass(slots=True)
class SharedPrefixGroup:
    """Run of neighboring rows that read the first tokens of their contexts together.

    Attributes:
        num_rows: rows of the run.
        num_tokens: tokens of the full blocks that all their tables start with; 0 if the rows share nothing.
    """

    num_rows: int
    num_tokens: int

    def add_row(self) -> None:
        """Extend the run by the next row."""
        self.num_rows += 1


@dataclass(slots=True)
class SchedulerOutput:
    """The rows to dispatch, and the groups admitted and preempted for them.

    Attributes:
        decodes: the rows of the persistent decode batch, which come first: one token each.
        rows: the other rows, in the order in which they were added.
        order: for each device row its index in the order of addition; empty if the orders are equal.
        runs: runs of rows, covering all rows in device order; empty if no two rows share a prefix.
        drafts: draft tokens, in rows after the others; the host waits for the results of such a step.
    """

    decodes: DecodeBatch = field(default_factory=DecodeBatch)
    rows: list[ScheduledRow] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    runs: list[SharedPrefixGroup] = field(default_factory=list)
    ops: BlockCopyPlan = field(default_factory=BlockCopyPlan)
    num_tokens: int = 0
    admitted: list[SequenceGroup] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    num_recomputed_tokens: int = 0
    drafts: list[ScheduledDraft] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows of both kinds."""
        return len(self.decodes) + len(self.rows)

    @property
    def num_steps(self) -> int:
        """Decode steps of the dispatch: 1 unless all rows decode."""
        return self.decodes.num_steps

    @property
    def has_aux_outputs(self) -> bool:
        """True if a row needs more than its sample: outputs of prompt positions, or more log-probabilities."""
        return any(row.logprob_positions or row.group.request.sampling.needs_extra_logprobs for row in self.rows)

    @property
    def has_grammars(self) -> bool:
        """True if the text of a row follows a grammar."""
        return bool(self.decodes.has_grammar_s.any()) or any(row.sequence.grammar is not None for row in self.rows)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequence of each row, in the order of addition."""
        return [*self.decodes.sequences, *(row.sequence for row in self.rows)]

    def decode(self, decodes: DecodeBatch) -> None:
        """Set the rows of the persistent decode batch, which come first."""
        self.decodes = decodes

    def add_row(
        self, group: SequenceGroup, sequence: Sequence, num_tokens: int, *, sample_row: int | None = None
    ) -> ScheduledRow:
        """Add the next tokens of a sequence, and advance it past the step.

        Args:
            sample_row: row whose last token the sample reads; None for the row itself.
        """
        row_index, start = self.num_rows, sequence.num_computed_tokens
        samples_token = start + num_tokens == sequence.num_tokens
        is_fed_back = num_tokens > 0 and samples_token and sequence.num_in_flight_tokens > 0
        row = ScheduledRow(
            group=group,
            sequence=sequence,
            start=start,
            num_tokens=num_tokens,
            samples_token=samples_token,
            sample_row=row_index if sample_row is None else sample_row,
            prev_sampled_row=sequence.in_flight_row if is_fed_back else None,
            output_index=sequence.num_output_tokens,
            logprob_positions=sequence.take_logprob_positions(start, start + num_tokens),
        )
        self.rows.append(row)
        sequence.dispatched(num_tokens, row_index, samples_token=samples_token)
        return row

    def add_draft(
        self,
        group: SequenceGroup,
        sequence: Sequence,
        row_index: int,
        token_ids: list[int],
        states: list[GrammarState | None],
    ) -> None:
        """Add a row for each draft token, with the grammar state after it; the sequence is not changed."""
        start, first = sequence.num_computed_tokens, self.num_rows
        for number, (token_id, state) in enumerate(zip(token_ids, states, strict=True)):
            row = ScheduledRow(
                group=group,
                sequence=sequence,
                start=start + number,
                num_tokens=1,
                samples_token=True,
                sample_row=first + number,
                prev_sampled_row=None,
                output_index=start + number + 1 - sequence.num_prompt_tokens,
                proposed=token_id,
                grammar=state,
            )
            self.rows.append(row)
        self.drafts.append(ScheduledDraft(group, sequence, row_index, token_ids, range(first, first + len(token_ids))))
        self.num_tokens += len(token_ids)

    def place_drafts(self) -> None:
        """Move drafts next to the rows of their sequences, which recurrent layers continue."""
        rows_of_drafts = {draft.row_index: draft.rows for draft in self.drafts}
        num_before = self.num_rows - sum(map(len, rows_of_drafts.values()))
        order = [one for row in range(num_before) for one in (row, *rows_of_drafts.get(row, ()))]
        if order != list(range(len(order))):
            self.reorder(order)

    def rerun(self, group: SequenceGroup, sequence: Sequence, start: int, num_tokens: int) -> None:
        """Add a row that computes tokens again; the sequence is not changed."""
        row = ScheduledRow(
            group=group,
            sequence=sequence,
            start=start,
            num_tokens=num_tokens,
            samples_token=False,
            sample_row=self.num_rows,
            prev_sampled_row=None,
            output_index=0,
        )
        self.rows.append(row)

    def recomputes(self, num_tokens: int) -> None:
        """Count tokens that are recomputed: of a preempted group, or of one past its LongRoPE length."""
        self.num_recomputed_tokens += num_tokens

    def close(self) -> None:
        """Complete the rows; only those of drafts may follow."""
        self.num_tokens = len(self.decodes) + sum(row.num_tokens for row in self.rows)

    def move_first(self, ops: BlockCopyPlan) -> None:
        """Set the block moves that run before the rows."""
        self.ops = ops

    def share(self, runs: list[SharedPrefixGroup]) -> None:
        """Set the runs of neighboring rows that read a common prefix together."""
        self.runs = runs

    def reorder(self, order: list[int]) -> None:
        """Reorder the rows on the device: `order[new] = index of addition`."""
        self.order = order
        num_decodes = len(self.decodes)
        for new, row_index in enumerate(order):
            if row_index < num_decodes:
                self.decodes.sequences[row_index].moved_to_row(new)
            elif (row := self.rows[row_index - num_decodes]).samples_token and row.proposed is None:
                row.sequence.moved_to_row(new)

    @property
    def device_rows(self) -> list[int]:
        """The device row of each row, in the order of addition."""
        return np.argsort(self.order).tolist() if self.order else list(range(self.num_rows))

    def entered(self, row_index: int) -> ScheduledRow:
        """Return the row added at an index that is not in the persistent decode batch."""
        return self.rows[row_index - len(self.decodes)]

    def num_usable(self, draft: ScheduledDraft) -> int:
        """Return how many of a draft's tokens may be accepted: those before the first one that allows no next token."""
        rows = map(self.entered, draft.rows)
        return next((number for number, row in enumerate(rows) if not row.is_usable), len(draft.rows))

    def know_token(self, row_index: int) -> None:
        """Mark the next token of a row as known, so that the row's sample is discarded."""
        if row_index < len(self.decodes):
            self.decodes.known.add(row_index)
        else:
            self.entered(row_index).samples_for_nobody()

    def row_at(self, row: int, step: int = 0) -> ScheduledRow:
        """Return the row at a device index, in one of the steps of the dispatch."""
        row_index, decodes = self.order[row] if self.order else row, self.decodes
        if row_index >= len(decodes):
            return self.rows[row_index - len(decodes)]
        start = decodes.starts_s.item(row_index) + step
        return ScheduledRow(
            group=decodes.groups[row_index],
            sequence=decodes.sequences[row_index],
            start=start,
            num_tokens=1,
            samples_token=row_index not in decodes.known,
            sample_row=row_index,
            prev_sampled_row=decodes.prev_rows[row_index] if decodes.prev_rows else None,
            output_index=start + 1 - decodes.prompt_lens_s.item(row_index),
        )

    def live_tokens(self, step: int = 0) -> tuple[SampledRows, SampledRows]:
        """Return the rows that sampled a token and have not ended since: plain sequences, and beams to choose from.

        Args:
            step: index in the dispatch.
        """
        decodes, is_last_step = self.decodes, step + 1 == self.num_steps
        live = [row_index for row_index, one in enumerate(decodes.sequences) if one.status is not Status.FINISHED]
        if decodes.known:
            live = [row_index for row_index in live if row_index not in decodes.known]
        groups, sequences = [*decodes.groups], [*decodes.sequences]
        are_last = decodes.are_last_s.tolist() if is_last_step else [False] * len(decodes)
        if len(live) < len(decodes):
            groups = [groups[row_index] for row_index in live]
            sequences = [sequences[row_index] for row_index in live]
            are_last = [are_last[row_index] for row_index in live]
        tokens, beams = SampledRows(live, groups, sequences, are_last), SampledRows()
        for row_index, row in enumerate(self.rows, len(decodes)):
            if row.samples_token and row.sequence.is_live and row.proposed is None:
                (beams if row.group.request.sampling.beam_width else tokens).add(row_index, row)
        if self.order:
            new_row_indices = {row_index: new for new, row_index in enumerate(self.order)}
            tokens.move(new_row_indices)
            beams.move(new_row_indices)
        return tokens, beams

    def aux_tokens(self) -> Iterator[tuple[int, ScheduledRow, int]]:
        """Yield each prompt token with aux outputs in device order: device row, row, and position."""
        for row in range(self.num_rows) if any(row.logprob_positions for row in self.rows) else ():
            one = self.row_at(row)
            yield from ((row, one, position) for position in one.logprob_positions)

    @property
    def num_tokens_shared(self) -> int:
        """Context tokens that are not read again, because another row of the run has read them."""
        return sum((run.num_rows - 1) * run.num_tokens for run in self.runs)


_KNOWN = -1


def build_step_inputs(schedule: SchedulerOutput, geometry: Geometry) -> StepInputs:
    """Pack the rows of a schedule in device order; the fields are described at `StepInputs`.

        rows      r0 (3 tokens)   r1 (1)   r2 (4)            then empty rows up to max_num_seqs
        tokens    a0 a1 a2        b7       c0 c1 c2 c3  0 0  packed, padded to a bucket
        slots     block * block_size + offset of each, in each KV group; the null block's slot 0 for padding
        starts    0  3  4  8 8 8 ...

    Decoding rows are columns already. The values of the other rows are gathered in lists and written one column at a
    time: one write into an array costs as much time as ten into a list.
    """
    block_size, max_rows = geometry.block_size, geometry.max_num_seqs
    num_rows, num_tokens = schedule.num_rows, schedule.num_tokens
    columns = _columns(schedule)
    starts, lens = columns.starts, columns.lens
    ends = np.cumsum(lens, dtype=np.int32)
    block_tables_gsm = _block_tables(schedule, geometry)
    num_at_least = padded_for_ranks(geometry, num_tokens, block_tables_gsm[0, :num_rows, 0], lens)
    num_padded = _num_padded_rows(schedule, geometry) or geometry.buckets.num_tokens(num_at_least)

    rows_t = np.repeat(np.arange(num_rows), lens)
    positions_t = np.arange(num_tokens, dtype=np.int32) + (starts + lens - ends)[rows_t]
    slots_gt = np.zeros((len(block_tables_gsm), num_padded), np.int32)
    blocks_gt = block_tables_gsm[:, rows_t, positions_t // block_size]
    slots_gt[:, :num_tokens] = blocks_gt * block_size + positions_t % block_size

    is_prev_sampled = columns.prev_rows != _KNOWN
    prev_rows_t = _padded([], num_padded, _KNOWN)
    prev_rows_t[ends[is_prev_sampled] - 1] = columns.prev_rows[is_prev_sampled]

    query_starts_s1 = _padded(ends - lens, max_rows + 1, num_tokens)
    last_tokens_s = np.maximum(query_starts_s1[1:] - 1, 0)
    kv_begins_s, run_starts_s1 = _runs(schedule, max_rows)
    state_sources_s, state_slots_s, is_draft_s = _state_slots(schedule, max_rows)
    poolings_s, pair_starts_s = _poolings(schedule, max_rows) if geometry.is_encoder else (None, None)
    is_embed_t = np.zeros(num_padded, np.bool_) if geometry.embed_width else None
    return StepInputs(
        token_ids_t=_padded(_known_tokens(schedule), num_padded),
        is_prev_sampled_t=prev_rows_t != _KNOWN,
        prev_sampled_rows_t=np.maximum(prev_rows_t, 0),
        positions_t=_padded(positions_t, num_padded),
        rope_lens_t=_padded(np.maximum(positions_t + 1, columns.rope_lens[rows_t]), num_padded, 1),
        slots_gt=slots_gt,
        aux_tokens_q=_aux_tokens(schedule, geometry, ends - lens),
        adapters_t=_adapters(schedule, geometry, rows_t, num_padded),
        query_starts_s1=query_starts_s1,
        kv_lens_s=_padded(starts + lens, max_rows),
        block_tables_gsm=block_tables_gsm,
        kv_begins_s=kv_begins_s,
        run_starts_s1=run_starts_s1,
        sample_tokens_s=np.concatenate([last_tokens_s[columns.sample_rows], last_tokens_s[num_rows:]]),
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_runs=len(schedule.runs),
        state_sources_s=state_sources_s,
        state_slots_s=state_slots_s,
        is_draft_s=is_draft_s != 0,
        draft_slots_sk=_draft_slots(schedule, geometry),
        poolings_s=poolings_s,
        pair_starts_s=pair_starts_s,
        is_embed_t=is_embed_t,
        rope_shifts_3t=_rope_shifts(schedule, ends - lens, num_padded) if geometry.has_rope_shifts else None,
        embeds_te=None if is_embed_t is None else _fill_embeds(schedule, ends - lens, is_embed_t, geometry.embed_width),
    )


def build_ending_ids(schedule: SchedulerOutput, num_padded: int) -> I32:
    """Return the stop token ids of each row of a dispatch of several steps or rounds, for `Executor.decode`."""
    ending_ids_rx = np.full((num_padded, BANNED_WIDTH), BEYOND_TOKENS, np.int32)
    ending_ids_sx = schedule.decodes.ending_ids_sx
    ending_ids_rx[: schedule.num_rows] = ending_ids_sx[schedule.order] if schedule.order else ending_ids_sx
    return ending_ids_rx


def build_num_left(schedule: SchedulerOutput, num_padded: int) -> I32:
    """Return the number of tokens that each row may sample in rounds, for `Executor.speculate`."""
    return _padded(schedule.decodes.num_left_s, num_padded)


def build_sampling_inputs(
    schedule: SchedulerOutput,
    geometry: Geometry,
    eos_token_ids: frozenset[int],
    logits_processors: LogitsProcessorState,
) -> SamplingInputs:
    """Return the sampling parameters of the rows of a schedule, in device order."""
    decodes, num_rows = schedule.decodes, schedule.num_rows
    sampled = [
        (i, row, row.group.request.sampling) for i, row in enumerate(schedule.rows, len(decodes)) if row.samples_token
    ]
    detail = max((Detail.of(params) for _, _, params in sampled), default=Detail.TOKENS)
    num_padded = _num_padded_rows(schedule, geometry) or geometry.buckets.num_rows(num_rows)
    inputs = SamplingInputs.neutral(num_padded, detail=max(detail, decodes.detail))
    inputs.rows_r[: len(decodes)] = decodes.sampling_s
    inputs.rows_r["positions_r"][: len(decodes)] = np.where(decodes.is_random_s, decodes.starts_s + 1, 0)
    for i, row, params in sampled:
        if lists := row_lists(params, eos_token_ids, row.output_index):
            inputs.fill_lists(i, lists)
    if random := [one for one in sampled if not one[2].is_greedy]:
        row_indices, random_rows, params_r = zip(*random, strict=True)
        indices = [row.sequence.index for row in random_rows]
        positions = [row.start + row.num_tokens for row in random_rows]
        inputs.fill_columns(row_indices, random_columns(params_r, indices, positions))
    inputs.rows_r["is_padding_r"][num_rows:] = 1
    if schedule.order:
        inputs.rows_r[:num_rows] = inputs.rows_r[schedule.order]
    edited = [(i, row) for i, row, _ in sampled if row.group.has_logits_processors]
    has_masks = bool(decodes.has_grammar_s.any())
    if not edited and not has_masks:
        return inputs
    rows = [ProcessedRow(i, row.group, row.sequence, row.prev_sampled_row is None) for i, row in edited]
    edits = logits_processors.inputs(rows, num_padded, has_masks=has_masks)
    return dataclasses.replace(inputs, edits=edits.reordered(schedule.order) if schedule.order else edits)


def _num_padded_rows(schedule: SchedulerOutput, geometry: Geometry) -> int | None:
    """Return the padded rows of a multi-step or draft-model program; None for a dispatch of single steps."""
    buckets = geometry.buckets
    if schedule.decodes.num_rounds:
        return buckets.num_speculate_rows(schedule.num_rows)
    is_one_program = schedule.decodes.kind in (StepKind.MULTI_STEP, StepKind.MASKED_MULTI_STEP)
    if not is_one_program:
        return None
    decodes = schedule.decodes
    num_rows, first_blocks_s = len(decodes), decodes.block_tables_gsm[0, :, 0]
    return buckets.num_decode_rows(padded_for_ranks(geometry, num_rows, first_blocks_s, np.ones(num_rows, np.int32)))


def padded_for_ranks(geometry: Geometry, size: int, first_blocks_s: I32, lens_s: I32) -> int:
    """Return the size that a step needs at least, so that the tokens of each rank fit into an equal part of it.

    Args:
        size: rows or tokens of the step.
        first_blocks_s: the first block of each row.
        lens_s: the tokens of each row.
    """
    if geometry.dp_size == 1:
        return size
    ranks_s = (first_blocks_s - 1) // geometry.num_blocks_of_rank
    return geometry.dp_size * int(np.bincount(ranks_s, lens_s).max(initial=0))


class _Columns(NamedTuple):
    """Columns of all rows, in device order; `prev_rows` is _KNOWN if the host knows the input."""

    starts: I32
    lens: I32
    rope_lens: I32
    prev_rows: I32
    sample_rows: I32


def _columns(schedule: SchedulerOutput) -> _Columns:
    decodes, rows, num_decodes = schedule.decodes, schedule.rows, len(schedule.decodes)
    columns = _Columns(
        _column(decodes.starts_s, [row.start for row in rows]),
        _column(np.ones(num_decodes, np.int32), [row.num_tokens for row in rows]),
        _column(decodes.prompt_lens_s, [row.sequence.rope_len for row in rows]),  # decoding rows are longer than both
        _column(
            decodes.prev_rows or np.full(num_decodes, _KNOWN, np.int32),
            [_KNOWN if row.prev_sampled_row is None else row.prev_sampled_row for row in rows],
        ),
        _column(np.arange(num_decodes, dtype=np.int32), [row.sample_row for row in rows]),
    )
    if not schedule.order:
        return columns
    new_row_indices = np.argsort(schedule.order).astype(np.int32)
    ordered = _Columns(*(column[schedule.order] for column in columns))
    return ordered._replace(sample_rows=new_row_indices[ordered.sample_rows])


def _aux_tokens(schedule: SchedulerOutput, geometry: Geometry, starts: I32) -> I32:
    """Return the packed indices of the tokens with aux outputs, in the order of `SchedulerOutput.aux_tokens`."""
    row_indices = [starts.item(row) + position - one.start for row, one, position in schedule.aux_tokens()]
    return _padded(row_indices, geometry.num_aux)


def _adapters(schedule: SchedulerOutput, geometry: Geometry, rows_t: NDArray[np.int64], num_padded: int) -> I32:
    """Return the adapter slot of each token, given the row of each token."""
    adapters_t = np.zeros(num_padded, np.int32)
    if geometry.max_loras:
        slots = _column(schedule.decodes.adapters_s, [row.group.adapter_slot for row in schedule.rows])
        slots = slots[schedule.order] if schedule.order else slots
        adapters_t[: len(rows_t)] = slots[rows_t]
    return adapters_t


def _block_tables(schedule: SchedulerOutput, geometry: Geometry) -> I32:
    decodes, num_rows = schedule.decodes, schedule.num_rows
    shape = len(geometry.windows), geometry.max_num_seqs, geometry.max_blocks_per_seq
    block_tables_gsm = np.zeros(shape, np.int32)
    if len(decodes):
        block_tables_gsm[:, : len(decodes)] = decodes.block_tables_gsm
    for row_index, row in enumerate(schedule.rows, len(decodes)):
        block_tables_gsm[:, row_index] = row.sequence.kv.ids_gm
    if schedule.order:
        block_tables_gsm[:, :num_rows] = block_tables_gsm[:, schedule.order]
    return block_tables_gsm


def _state_slots(schedule: SchedulerOutput, max_rows: int) -> tuple[I32, I32, I32]:
    """Return the slots that each row reads and writes, and 1 for each row of a draft token.

    A fresh fork computes nothing, and so has none.
    """
    handles = [row.sequence.kv if row.num_tokens else None for row in schedule.rows]
    sources = [0 if kv is None else kv.state_source for kv in handles]
    slots = [0 if kv is None else kv.state_slot for kv in handles]
    decodes = schedule.decodes
    columns = [_column(decodes.state_sources_s, sources), _column(decodes.state_slots_s, slots)]
    columns.append(np.zeros(len(columns[0]), np.int32))
    for draft in schedule.drafts:
        rows, kv = slice(draft.rows.start, draft.rows.stop), draft.sequence.kv
        for column, values in zip(columns, (columns[0][draft.row_index], kv.draft_slots or 0, 1), strict=True):
            column[rows] = values
    if schedule.order:
        columns = [column[schedule.order] for column in columns]
    sources_s, slots_s, is_draft_s = (_padded(column, max_rows) for column in columns)
    return sources_s, slots_s, is_draft_s


def _draft_slots(schedule: SchedulerOutput, geometry: Geometry) -> I32 | None:
    """Return the slots for the states after the draft tokens of rounds; None for other dispatches."""
    if not geometry.state_bytes or not schedule.decodes.num_rounds:
        return None
    slots_sk = np.zeros((geometry.max_num_seqs, geometry.num_speculative_tokens), np.int32)
    for row, sequence in enumerate(schedule.decodes.sequences):
        slots_sk[row, : len(sequence.kv.draft_slots)] = sequence.kv.draft_slots
    return slots_sk


def _poolings(schedule: SchedulerOutput, max_rows: int) -> tuple[I32, I32]:
    """Return the pooling of each row as an index in `POOLINGS`, and where a second text starts."""
    requests = [row.group.request for row in schedule.rows]
    poolings = [POOLINGS.index(request.pooling or "last") for request in requests]
    lengths = [len(request.prompt_token_ids) for request in requests]
    starts = [
        length if request.pair_start is None else request.pair_start
        for request, length in zip(requests, lengths, strict=True)
    ]
    if schedule.order:
        poolings, starts = ([column[row] for row in schedule.order] for column in (poolings, starts))
    return _padded(poolings, max_rows), _padded(starts, max_rows)


def rope_shifts(embeds: PromptEmbeds, start: int, stop: int) -> I32:
    """Return what to subtract from positions `start` to `stop` for rotary embedding: `[3, tokens]`.

    The three are for time, row and column, as in Qwen2-VL (Wang et al. 2024).
    """
    found, shift = np.zeros((3, stop - start), np.int32), 0
    for span in embeds.spans:
        if span.rope_grid is None:
            continue
        rows, columns = span.rope_grid
        places = np.arange(rows * columns)
        shifts = shift + places - np.stack([np.zeros_like(places), places // columns, places % columns])
        shift += rows * columns - max(rows, columns)
        begin, end = max(span.start, start), min(span.stop, stop)
        if begin < end:
            found[:, begin - start : end - start] = shifts[:, begin - span.start : end - span.start]
        found[:, max(0, span.stop - start) :] = shift
    return found


def _rope_shifts(schedule: SchedulerOutput, starts: I32, num_padded: int) -> I32:
    """Return the shifts of positions of a step; those of padding are 0.

    Args:
        starts: packed index of the first token of each row, in device order.
    """
    shifts_3t, decodes = np.zeros((3, num_padded), np.int32), schedule.decodes
    for new, row_index in enumerate(schedule.order or range(schedule.num_rows)):
        begin = starts.item(new)
        if row_index < len(decodes):
            if (embeds := decodes.groups[row_index].request.embeds) is not None:
                shifts_3t[:, begin] = embeds.rope_shift
            continue
        row = schedule.rows[row_index - len(decodes)]
        if (embeds := row.group.request.embeds) is not None:
            stop = row.start + row.num_tokens
            shifts_3t[:, begin : begin + row.num_tokens] = rope_shifts(embeds, row.start, stop)
    return shifts_3t


def _fill_embeds(schedule: SchedulerOutput, starts: I32, is_embed_t: Bool, width: int) -> F32 | None:
    """Return the input embeddings of a step, and mark their tokens; None if there are none.

    Args:
        starts: packed index of the first token of each row, in device order.
    """
    if all(row.group.request.embeds is None for row in schedule.rows):
        return None
    embeds_te, num_decodes = np.zeros((len(is_embed_t), width), np.float32), len(schedule.decodes)
    for new, row_index in enumerate(schedule.order or range(schedule.num_rows)):
        if row_index < num_decodes:
            continue
        row = schedule.rows[row_index - num_decodes]
        if (embeds := row.group.request.embeds) is None:
            continue
        for position, values_te in embeds.iter_rows(row.start, row.start + row.num_tokens):
            begin = starts.item(new) + position - row.start
            is_embed_t[begin : begin + len(values_te)] = True
            embeds_te[begin : begin + len(values_te)] = values_te
    return embeds_te if is_embed_t.any() else None


def _runs(schedule: SchedulerOutput, max_rows: int) -> tuple[I32, I32]:
    """Return the tokens that each row shares with its run, and the starts of the runs."""
    kv_begins_s = np.zeros(max_rows, np.int32)
    run_starts_s1 = np.full(max_rows + 1, schedule.num_rows, np.int32)
    begin = 0
    for i, run in enumerate(schedule.runs):
        run_starts_s1[i] = begin
        kv_begins_s[begin : begin + run.num_rows] = run.num_tokens
        begin += run.num_rows
    return kv_begins_s, run_starts_s1


def _known_tokens(schedule: SchedulerOutput) -> list[int]:
    """Return the packed tokens, with 0 for a token in flight."""
    token_ids = schedule.decodes.token_ids or [0] * len(schedule.decodes)
    if not schedule.order:
        return [*token_ids, *(token_id for row in schedule.rows for token_id in _tokens(row))]
    parts = [*([token_id] for token_id in token_ids), *(_tokens(row) for row in schedule.rows)]
    return [token_id for row_index in schedule.order for token_id in parts[row_index]]


def _tokens(row: ScheduledRow) -> list[int]:
    if row.proposed is not None:
        return [row.proposed]
    known, stop = row.sequence.token_ids, row.start + row.num_tokens
    return known[row.start : stop] + [0] * (stop - max(row.start, len(known)))


def _column(decodes: I32 | list[int], others: list[int]) -> I32:
    if not others:
        return np.asarray(decodes, np.int32)
    return np.concatenate([np.asarray(decodes, np.int32), np.array(others, np.int32)])


def _padded(values: list[int] | I32, size: int, fill: int = 0) -> I32:
    array = np.full(size, fill, np.int32)
    array[: len(values)] = values
    return array


AUX_SIZES = {AuxKind.LOGPROBS: 64, AuxKind.ALL_LOGPROBS: 8, AuxKind.HIDDEN: 64}
"""Rows of one aux call."""


class AuxRequest(NamedTuple):
    """A hidden state from which an aux output is requested.

    Attributes:
        position: position of a prompt token; None for the token that the row samples from.
        row: the device row of a sample; 0 for a prompt token.
    """

    group: SequenceGroup
    sequence: Sequence
    position: int | None
    row: int


@dataclass(frozen=True, slots=True)
class StepAux:
    """One aux call of a step, and the origin of each row."""

    inputs: AuxInputs
    requests: list[AuxRequest]


def build_aux_inputs(schedule: SchedulerOutput, geometry: Geometry) -> list[StepAux]:
    """Return every aux call of a step, each with a bounded number of rows."""
    requests: dict[AuxKind, list[tuple[int, list[int], AuxRequest]]] = {}
    first = geometry.buckets.rows[-1]
    for number, (row_index, row, position) in enumerate(schedule.aux_tokens()):
        is_pooled = row.group.request.is_encoded and row.group.request.is_pooled_on_device
        place = row_index if is_pooled else first + number
        following = row.sequence.token_ids[position + 1 : position + 2]
        one = AuxRequest(row.group, row.sequence, position, 0)
        requests.setdefault(_build_prompt_aux(row.group), []).append((place, following, one))
    needs_aux = any(row.group.request.sampling.needs_extra_logprobs for row in schedule.rows)
    for row_index in range(schedule.num_rows) if needs_aux else ():
        row = schedule.row_at(row_index)
        sampling = row.group.request.sampling
        if row.samples_token and sampling.needs_extra_logprobs:
            needs_all = sampling.sampling_logprobs or not sampling.logprob_token_ids
            kind = AuxKind.ALL_LOGPROBS if needs_all else AuxKind.LOGPROBS
            ids = [NO_ID, *sampling.logprob_token_ids]
            requests.setdefault(kind, []).append((row_index, ids, AuxRequest(row.group, row.sequence, None, row_index)))
    return [part for kind, rows in requests.items() for part in _parts(kind, rows)]


def _build_prompt_aux(group: SequenceGroup) -> AuxKind:
    request = group.request
    if request.pooling is not None:
        return AuxKind.HIDDEN
    sampling = request.sampling
    # The samples of such a request come from the same program: the same logits have the same bits.
    needs_all = sampling.sampling_logprobs or sampling.wants_full_vocab(sampling.prompt_logprobs)
    return AuxKind.ALL_LOGPROBS if needs_all else AuxKind.LOGPROBS


def _parts(kind: AuxKind, rows: list[tuple[int, list[int], AuxRequest]]) -> Iterator[StepAux]:
    size = AUX_SIZES[kind]
    for begin in range(0, len(rows), size):
        row_indices, ids, requests = zip(*rows[begin : begin + size], strict=True)
        yield StepAux(AuxInputs.padded(kind, list(row_indices), list(ids), size), list(requests))
