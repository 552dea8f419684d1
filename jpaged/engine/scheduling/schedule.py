"""One step, decided: its rows, what has to be moved before they run, and the padded numpy arrays that they become."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import Detail, Geometry, SamplingInputs, StepInputs, random_columns, row_lists
from jpaged.engine.kv.blocks import MemoryOps
from jpaged.engine.sequence import Group, Sequence


@dataclass(slots=True)
class ScheduledRow:
    """A sequence's part in a step: tokens start to start + num_tokens of it go through the model.

    A sequence that has just been forked has a row of no tokens: its first token comes of what its leader computed.

    Attributes:
        samples_token: the step samples the sequence's next token in this row.
        sample_row: the row whose last token the sample reads; the row itself, but for a fresh fork.
        prev_sampled_row: the last input token is in flight: it is what the step before sampled in this row. None when
            the host knows it.
        output_index: which output token of the sequence is sampled; 0 is the first.
    """

    group: Group
    sequence: Sequence
    start: int
    num_tokens: int
    samples_token: bool
    sample_row: int
    prev_sampled_row: int | None
    output_index: int


@dataclass(slots=True)
class SharedPrefixGroup:
    """Neighbouring rows that read the first tokens of their contexts together.

    Attributes:
        num_rows: of the run.
        num_tokens: full blocks that begin every one of their tables; 0 where rows share nothing.
    """

    num_rows: int
    num_tokens: int

    def add_row(self) -> None:
        """The next row reads with these."""
        self.num_rows += 1


@dataclass(slots=True)
class Schedule:
    """What to dispatch, and who left for it.

    Attributes:
        runs: cover the rows in their order; none where no two rows read anything together.
    """

    rows: list[ScheduledRow] = field(default_factory=list)
    runs: list[SharedPrefixGroup] = field(default_factory=list)
    ops: MemoryOps = field(default_factory=MemoryOps)
    num_tokens: int = 0
    admitted: list[Group] = field(default_factory=list)
    preempted: list[Group] = field(default_factory=list)
    num_recomputed_tokens: int = 0

    def add_row(
        self, group: Group, sequence: Sequence, num_tokens: int, *, sample_row: int | None = None
    ) -> ScheduledRow:
        """Enters the next tokens of a sequence, and advances it past the step.

        Args:
            sample_row: where the last token is that is sampled from; None is the row itself.
        """
        place, start = len(self.rows), sequence.num_computed_tokens
        samples_token = start + num_tokens == sequence.num_tokens
        is_fed_back = num_tokens > 0 and samples_token and sequence.num_in_flight_tokens > 0
        row = ScheduledRow(
            group=group,
            sequence=sequence,
            start=start,
            num_tokens=num_tokens,
            samples_token=samples_token,
            sample_row=place if sample_row is None else sample_row,
            prev_sampled_row=sequence.in_flight_row if is_fed_back else None,
            output_index=sequence.num_output_tokens,
        )
        self.rows.append(row)
        sequence.dispatched(num_tokens, place, samples_token=samples_token)
        return row

    def recomputes(self, num_tokens: int) -> None:
        """Counts tokens of a preempted group that run again."""
        self.num_recomputed_tokens += num_tokens

    def close(self, ops: MemoryOps) -> None:
        """Every row is there; these moves come before them."""
        self.ops = ops
        self.num_tokens = sum(row.num_tokens for row in self.rows)

    def reorder(self, order: list[int]) -> None:
        """Puts the rows in another order, `order[new] = old`, and corrects what names them by place."""
        self.rows = [self.rows[old] for old in order]
        new_places = {old: new for new, old in enumerate(order)}
        for row in self.rows:
            row.sample_row = new_places[row.sample_row]
            if row.samples_token:
                row.sequence.moved_to_row(new_places[row.sequence.in_flight_row])

    @property
    def num_tokens_shared(self) -> int:
        """Tokens of context that are not read again, because another row of a run has read them."""
        return sum((run.num_rows - 1) * run.num_tokens for run in self.runs)


_KNOWN = -1


def build_step_inputs(schedule: Schedule, geometry: Geometry) -> StepInputs:
    """Packs the rows of a schedule in their order; every field is described at `StepInputs`.

        rows      r0 (3 tokens)   r1 (1)   r2 (4)            then empty rows up to max_num_seqs
        tokens    a0 a1 a2        b7       c0 c1 c2 c3  0 0  packed, padded to a bucket
        slots     block * block_size + offset of each; the null block's slot 0 for padding
        starts    0  3  4  8 8 8 ...

    Values are gathered in lists and written a column at a time: one write into an array costs as much as ten into a
    list.
    """
    rows, block_size, max_rows = schedule.rows, geometry.block_size, geometry.max_num_seqs
    num_rows, num_tokens = len(rows), schedule.num_tokens
    num_padded = geometry.buckets.num_tokens(num_tokens)
    starts, lens = _column([row.start for row in rows]), _column([row.num_tokens for row in rows])
    ends = np.cumsum(lens, dtype=np.int32)
    block_tables_sm = np.zeros((max_rows, geometry.max_blocks_per_seq), np.int32)
    np.stack([row.sequence.kv.table.ids_m for row in rows], out=block_tables_sm[:num_rows])

    rows_t = np.repeat(np.arange(num_rows), lens)
    positions_t = np.arange(num_tokens, dtype=np.int32) + (starts + lens - ends)[rows_t]
    prompt_lens = _column([row.sequence.num_prompt_tokens for row in rows])
    blocks_t = block_tables_sm[rows_t, positions_t // block_size]

    prev_rows = _column([_KNOWN if row.prev_sampled_row is None else row.prev_sampled_row for row in rows])
    is_prev_sampled = prev_rows != _KNOWN
    prev_rows_t = _padded([], num_padded, _KNOWN)
    prev_rows_t[ends[is_prev_sampled] - 1] = prev_rows[is_prev_sampled]

    query_starts_s1 = _padded(ends - lens, max_rows + 1, num_tokens)
    last_tokens_s = np.maximum(query_starts_s1[1:] - 1, 0)
    kv_begins_s, run_starts_s1 = _runs(schedule, max_rows)
    sample_rows = _column([row.sample_row for row in rows])
    return StepInputs(
        token_ids_t=_padded(_known_tokens(rows), num_padded),
        is_prev_sampled_t=prev_rows_t != _KNOWN,
        prev_sampled_rows_t=np.maximum(prev_rows_t, 0),
        positions_t=_padded(positions_t, num_padded),
        rope_lens_t=_padded(np.maximum(positions_t + 1, prompt_lens[rows_t]), num_padded, 1),
        slots_t=_padded(blocks_t * block_size + positions_t % block_size, num_padded),
        query_starts_s1=query_starts_s1,
        kv_lens_s=_padded(starts + lens, max_rows),
        block_tables_sm=block_tables_sm,
        kv_begins_s=kv_begins_s,
        run_starts_s1=run_starts_s1,
        sample_tokens_s=np.concatenate([last_tokens_s[sample_rows], last_tokens_s[num_rows:]]),
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_runs=len(schedule.runs),
    )


def build_sampling_inputs(schedule: Schedule, geometry: Geometry, eos_token_ids: frozenset[int]) -> SamplingInputs:
    """How the rows of a schedule are sampled, in their order."""
    sampled = [(i, row, row.group.request.sampling) for i, row in enumerate(schedule.rows) if row.samples_token]
    detail = max((Detail.of(params) for _, _, params in sampled), default=Detail.TOKENS)
    inputs = SamplingInputs.neutral(geometry.buckets.num_rows(len(schedule.rows)), detail=detail)
    for i, row, params in sampled:
        if lists := row_lists(params, eos_token_ids, row.output_index):
            inputs.fill_lists(i, lists)
    if random := [one for one in sampled if not one[2].is_greedy]:
        places, random_rows, params_r = zip(*random, strict=True)
        indices = [row.sequence.index for row in random_rows]
        positions = [row.start + row.num_tokens for row in random_rows]
        inputs.fill_columns(places, random_columns(params_r, indices, positions))
    return inputs


def _runs(schedule: Schedule, max_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What each row shares with its run, and where the runs begin."""
    kv_begins_s = np.zeros(max_rows, np.int32)
    run_starts_s1 = np.full(max_rows + 1, len(schedule.rows), np.int32)
    begin = 0
    for i, run in enumerate(schedule.runs):
        run_starts_s1[i] = begin
        kv_begins_s[begin : begin + run.num_rows] = run.num_tokens
        begin += run.num_rows
    return kv_begins_s, run_starts_s1


def _known_tokens(rows: list[ScheduledRow]) -> list[int]:
    """The packed tokens, 0 where one is in flight."""
    token_ids: list[int] = []
    for row in rows:
        known, stop = row.sequence.token_ids, row.start + row.num_tokens
        if row.num_tokens == 1 and stop <= len(known):
            token_ids.append(known[row.start])
        else:
            token_ids += known[row.start : stop]
            token_ids += [0] * (stop - max(row.start, len(known)))
    return token_ids


def _column(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def _padded(values: list[int] | NDArray[np.int32], size: int, fill: int = 0) -> NDArray[np.int32]:
    array = np.full(size, fill, np.int32)
    array[: len(values)] = values
    return array
