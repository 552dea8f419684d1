r"""Cascade attention: finds rows of a step with the same first blocks, and selects runs that read them once.

    tables     r0 [ 4 5 6 | 9 ]   r1 [ 4 5 6 | 7 ]   r2 [ 8 ]   r3 [ 4 5 2 ]

    by their first blocks          4 5          r0 r1 r3 share two blocks, r0 and r1 three: one level is chosen, the
                                  /   \         one that saves most; it becomes a run of neighboring rows
                                 6     2
                                / \    r3
                              r0   r1

Forked samples, beams and prompt prefixes found in the prefix cache all share blocks this way. The search compares
physical blocks, so it needs no other information. It considers only blocks that were full before the step, because no
row writes to those. It compares only the tables of the first KV group, whose blocks stay while the windows of other
groups move: if two rows share a block there, the corresponding blocks of the other groups hold the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import NULL_BLOCK, Geometry
from jpaged.engine.executor.io import CascadeCosts
from jpaged.engine.scheduler.output import SchedulerOutput, SharedPrefixGroup
from jpaged.engine.sequence import Sequence

_WINDOW_MOVES = 64
"""Tokens by which rows may grow before the visible part of a prefix in their windows is evaluated again."""

RowIndices = list[int]
"""Places of rows in the schedule, ascending."""


@dataclass(frozen=True, slots=True)
class _Node:
    """Tree node: rows that share their first `num_tokens` tokens.

    Attributes:
        leaves: rows that share no more with any other row.
        children: subsets that share more.
        plans: the best plan for each number of tokens that the rows may share at an ancestor.
    """

    num_tokens: int
    leaves: RowIndices
    children: list[_Node]
    plans: dict[int, _Plan] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Runs as (rows, shared tokens), their gain, and the rows that are in no run."""

    runs: list[tuple[RowIndices, int]]
    gain: float
    rest: RowIndices


class CascadePlanner:
    """Moves rows that share a prefix next to each other, and enters the runs into the schedule.

    A step without shared prefixes costs a check of one block per row. The result for a step of decoding rows stays
    valid for later steps with the same rows, because each row writes only to blocks that it does not share.
    """

    def __init__(self) -> None:
        self._found: _Found | None = None

    def share(self, schedule: SchedulerOutput, geometry: Geometry) -> None:
        """Order the rows of a schedule (two or more) and set its runs, if that saves time."""
        costs, sequences = geometry.cascade, schedule.decodes.sequences
        # Rounds read row by row, and with recurrent state drafts stay next to the rows of their sequences.
        if costs is None or schedule.decodes.num_rounds or (schedule.drafts and geometry.state_bytes):
            return
        width = min(costs.tile_queries, geometry.buckets.num_tokens(schedule.num_tokens))
        found = None if schedule.rows else self._found
        if found is not None and found.holds(schedule, width):
            schedule.share(found.runs)
            if found.order:
                schedule.reorder(found.order)
            return
        _share_prefixes(schedule, costs, geometry.block_size, width)
        end = int(schedule.decodes.starts_s.max()) + _WINDOW_MOVES if costs.windows and sequences else None
        self._found = None if schedule.rows else _Found(sequences, width, end, schedule.order, schedule.runs)


@dataclass(frozen=True, slots=True)
class _Found:
    """The result for a step of decoding rows, and the inputs that it depends on.

    Attributes:
        end: the position up to which it is valid, because windows move out of prefixes as rows grow.
    """

    sequences: list[Sequence]
    width: int
    end: int | None
    order: list[int]
    runs: list[SharedPrefixGroup]

    def holds(self, schedule: SchedulerOutput, width: int) -> bool:
        """Return True if the search would give the same result."""
        if self.sequences != schedule.decodes.sequences or self.width != width:
            return False
        return self.end is None or int(schedule.decodes.starts_s.max()) <= self.end


def _share_prefixes(schedule: SchedulerOutput, costs: CascadeCosts, block_size: int, width: int) -> None:
    alike = _rows_by_prefix(schedule, costs.granule_tokens, block_size)
    if not alike:
        return
    finder = _Finder(schedule, costs, width, block_size)
    plans = [finder.best(finder.tree(row_indices, 0), 0) for row_indices in alike]
    chosen = [run for plan in plans for run in plan.runs]
    if sum(plan.gain for plan in plans) > costs.step_tokens:
        _arrange(schedule, chosen)


def _rows_by_prefix(schedule: SchedulerOutput, granule_tokens: int, block_size: int) -> list[RowIndices]:
    """Return indices of rows that may share a granule: those whose first granule ends with the same block."""
    decodes, last = schedule.decodes, granule_tokens // block_size - 1
    where = np.flatnonzero(decodes.starts_s >= granule_tokens)
    block_ids = decodes.block_tables_gsm[0, where, last].tolist() if len(where) else []
    all_row_indices = where.tolist()
    for row_index, row in enumerate(schedule.rows, len(decodes)):
        if row.start >= granule_tokens and row.num_tokens:
            block_ids.append(row.sequence.kv.tables[0].block_id(last))
            all_row_indices.append(row_index)
    if len(set(block_ids)) == len(block_ids):
        return []
    row_indices: dict[int, RowIndices] = {}
    for row_index, block_id in zip(all_row_indices, block_ids, strict=True):
        if block_id != NULL_BLOCK:  # with sliding windows in all layers, the first granule may have been freed
            row_indices.setdefault(block_id, []).append(row_index)
    return [found for found in row_indices.values() if len(found) > 1]


class _Finder:
    """Builds the tree of common blocks, granule by granule, and chooses one level of it for each row."""

    def __init__(self, schedule: SchedulerOutput, costs: CascadeCosts, width: int, block_size: int) -> None:
        rows = schedule.rows
        self._sequences = schedule.sequences
        self._starts = [*schedule.decodes.starts_s.tolist(), *(row.start for row in rows)]
        self._lens = [*[1] * len(schedule.decodes), *(row.num_tokens for row in rows)]
        self._costs = costs
        self._width = width
        self._only_decodes = all(row.num_tokens == 1 for row in rows)
        self._granule_blocks = costs.granule_tokens // block_size

    def tree(self, row_indices: RowIndices, depth: int) -> _Node:
        """Return the tree of rows that have at least `depth` granules in common."""
        fulls = [self._starts[row_index] // self._costs.granule_tokens for row_index in row_indices]
        tables = self._tables(row_indices, max(fulls))
        depth = self._common_granules(tables, depth, min(fulls))
        begin, end = depth * self._granule_blocks, (depth + 1) * self._granule_blocks
        leaves = []
        alike: dict[bytes, RowIndices] = {}
        for row_index, full, table_m in zip(row_indices, fulls, tables, strict=True):
            if full == depth:
                leaves.append(row_index)
            else:
                alike.setdefault(table_m[begin:end].tobytes(), []).append(row_index)
        leaves += [found[0] for found in alike.values() if len(found) == 1]
        children = [self.tree(found, depth + 1) for found in alike.values() if len(found) > 1]
        return _Node(depth * self._costs.granule_tokens, leaves, children)

    def best(self, node: _Node, num_tokens: int) -> _Plan:
        """Return the plan that saves most if each row outside its runs may join a run that shares num_tokens.

        If a node has its own run, the rows below choose between that run and deeper ones; otherwise they may join one
        of an ancestor.
        """
        if num_tokens not in node.plans:
            node.plans[num_tokens] = self._choose(node, num_tokens)
        return node.plans[num_tokens]

    def _choose(self, node: _Node, num_tokens: int) -> _Plan:
        with_run = self._gather(node, node.num_tokens)
        run = sorted(with_run.rest), node.num_tokens
        with_run = _Plan([*with_run.runs, run], with_run.gain + self._gain(*run), [])
        without = self._gather(node, num_tokens)
        if len(run[0]) > 1 and with_run.gain > without.gain + self._alone(without.rest) * self._seen(
            without.rest, num_tokens
        ):
            return with_run
        return without

    def _gather(self, node: _Node, num_tokens: int) -> _Plan:
        plans = [self.best(child, num_tokens) for child in node.children]
        rest = [*node.leaves, *(row_index for plan in plans for row_index in plan.rest)]
        return _Plan([run for plan in plans for run in plan.runs], sum(plan.gain for plan in plans), rest)

    def _tables(self, row_indices: RowIndices, num_granules: int) -> NDArray[np.int32]:
        end = num_granules * self._granule_blocks
        return np.stack([self._sequences[row_index].kv.ids_gm[0, :end] for row_index in row_indices])

    def _common_granules(self, tables: NDArray[np.int32], depth: int, limit: int) -> int:
        """Return the number of granules that all tables share, at least `depth` (already known) and at most `limit`."""
        begin = depth * self._granule_blocks
        differ = np.flatnonzero((tables[:, begin:] != tables[0, begin:]).any(axis=0))
        common = (begin + int(differ[0])) // self._granule_blocks if len(differ) else limit
        return min(common, limit)

    def _gain(self, row_indices: RowIndices, num_tokens: int) -> float:
        """Return the gain of reading num_tokens tokens together; see `CascadeCosts`."""
        num_queries = (
            len(row_indices) if self._only_decodes else sum(self._lens[row_index] for row_index in row_indices)
        )
        together = self._costs.tile_cost(num_queries, self._width)
        saved = (self._alone(row_indices) - together) * self._seen(row_indices, num_tokens)
        return saved - num_queries * self._costs.query_tokens

    def _seen(self, row_indices: RowIndices, num_tokens: int) -> float:
        """Return how many of num_tokens tokens are read together."""
        if not self._costs.windows or not row_indices:
            return num_tokens
        return self._costs.seen_tokens(
            num_tokens, max(self._starts[row_index] + self._lens[row_index] for row_index in row_indices)
        )

    def _alone(self, row_indices: RowIndices) -> float:
        """Return the cost of a token if each row reads it separately."""
        if self._only_decodes:
            return float(len(row_indices))
        return sum(self._costs.tile_cost(self._lens[row_index], self._width) for row_index in row_indices)


def _arrange(schedule: SchedulerOutput, chosen: list[tuple[RowIndices, int]]) -> None:
    """Move the rows of a run to its first row; the others keep their order, in runs that share nothing."""
    runs_at = {row_indices[0]: (row_indices, num_tokens) for row_indices, num_tokens in chosen}
    taken = {row_index for row_indices, _ in chosen for row_index in row_indices}
    order: list[int] = []
    for row_index in range(schedule.num_rows):
        if row_index in runs_at:
            row_indices, num_tokens = runs_at[row_index]
            schedule.runs.append(SharedPrefixGroup(len(row_indices), num_tokens))
            order += row_indices
        elif row_index not in taken:
            order.append(row_index)
            if schedule.runs and not schedule.runs[-1].num_tokens:
                schedule.runs[-1].add_row()
            else:
                schedule.runs.append(SharedPrefixGroup(1, 0))
    if order != list(range(len(order))):
        schedule.reorder(order)
