"""Blocks for which a draft model has KV. It computes missing KV late, before its next proposals.

    block     1     2     3     4
    model   [====][====][====][==  ]     the model's keys
    draft   [====][    ][====][    ]     2 and 4 are stale and are recomputed before the next rounds
              seen  not   seen  not

A block is seen if the draft's pool has the keys of every token whose keys the model's block has.
"""

from __future__ import annotations

import numpy as np

from jpaged.engine.executor import I32, BlockMoves, Geometry, Move, StepInputs


class SeenBlocks:
    """Tracker of the blocks that a draft model shares. Called only by the engine thread."""

    def __init__(self, geometry: Geometry) -> None:
        self._block_size = geometry.block_size
        self._group = geometry.windows.index(None)
        self._are_seen = np.zeros(geometry.num_blocks + 1, np.bool_)

    def move(self, moves: BlockMoves) -> None:
        """Record block moves: copies happen in the draft's pool too; swapped-in blocks have no draft KV."""
        if moves.move is Move.COPY:
            self._are_seen[moves.destinations] = self._are_seen[moves.sources]
        elif moves.move is Move.SWAP_IN:
            self._are_seen[moves.destinations] = False

    def write(self, inputs: StepInputs, num_steps: int) -> None:
        """Record that the model writes keys without the draft model, in num_steps steps."""
        if num_steps == 1:
            self._are_seen[inputs.slots_gt[self._group, : inputs.num_tokens] // self._block_size] = False
            return
        starts = inputs.positions_t[: inputs.num_rows]
        for ids_m, begin, end in zip(*self._written(inputs, starts + num_steps), strict=True):
            self._are_seen[ids_m[begin:end]] = False

    def see(self, inputs: StepInputs, num_left_r: I32) -> I32:
        """Record that rounds begin, in which row r writes up to num_left_r[r] keys after the missing ones are computed.

        Returns:
            [R] the first token of each row without draft KV, from which it must be computed; the row's next token if
            all KV is there.
        """
        num_rows, block_size = inputs.num_rows, self._block_size
        starts = inputs.positions_t[:num_rows]
        firsts = starts.copy()
        rows = zip(*self._written(inputs, starts + num_left_r[:num_rows]), strict=True)
        for row, (ids_m, _, end) in enumerate(rows):
            num_blocks = -(-int(starts[row]) // block_size)
            unseen = np.flatnonzero(~self._are_seen[ids_m[:num_blocks]])
            if len(unseen):
                firsts[row] = unseen[0] * block_size
            self._are_seen[ids_m[:end]] = True
        return firsts

    def _written(self, inputs: StepInputs, ends: I32) -> tuple[I32, list[int], list[int]]:
        """Return the block tables of rows, and the table range written from each row's token to its end."""
        begins = inputs.positions_t[: inputs.num_rows] // self._block_size
        lasts = (ends - 1) // self._block_size
        return inputs.block_tables_gsm[self._group, : inputs.num_rows], begins.tolist(), (lasts + 1).tolist()
