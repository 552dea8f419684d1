"""One step: what is moved before it, what goes in, what comes out."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jpaged.engine.executor.shapes import F32, I32, Bool
from jpaged.errors import InternalError
from jpaged.types import PositionLogprobs, TokenLogprob

MAX_NUM_STEPS = 16
"""Decode steps of one dispatch at most."""

MAX_NUM_ROUNDS = 16
"""Rounds of proposals in one dispatch at most."""

NULL_BLOCK = 0
"""Padding rows and padding tokens write here; nothing reads it. Usable blocks are 1 to num_blocks."""


class Move(enum.Enum):
    """Where a block's content goes: within the pool, out to host memory, or back in."""

    COPY = "copy"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Moves of one kind that may run as one: no destination is a source of another.

    Block ids are the pool's (1 to num_blocks) or, on the host's side of a swap, host block ids (1 to num_host_blocks).
    """

    move: Move
    sources: list[int]
    destinations: list[int]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, padded. Row i owns tokens query_starts[i] to query_starts[i + 1] of the packed axis.

    A device gets the fields in this order, in the shapes that end their names.

    Attributes:
        token_ids_t: input tokens; ignored where is_prev_sampled_t.
        is_prev_sampled_t: the token is what the previous dispatched step sampled for row prev_sampled_rows_t, and the
            host has not seen it.
        prev_sampled_rows_t: a row of the previous step; 0 where not used.
        positions_t: position of each token in its sequence.
        rope_lens_t: max(position + 1, prompt length), for position embeddings that depend on the sequence's length.
        slots_gt: where the token's keys and values go in each KV group: block * block_size + offset; slot 0 of the null
            block for padding.
        adapters_t: adapter slot of each token; 0 is none.
        sample_tokens_s: place in the packed axis of each row's last token, from which its next is sampled.
        query_starts_s1: [S + 1]; rows beyond num_rows are empty.
        kv_lens_s: tokens of each row's context, those of this step included; 0 beyond num_rows.
        block_tables_gsm: block ids of each KV group; the null block beyond a row's context, and where no query of the
            row sees as far back.
        told_tokens_q: places in the packed axis of the tokens of which more is asked; 0 where not used.
        num_rows: rows in use.
        kv_begins_s: tokens that a row shares with the other rows of its run; their block tables begin alike.
        run_starts_s1: [S + 1]; run g is the rows run_starts[g] to run_starts[g + 1]. num_rows beyond num_runs.
        num_runs: runs in use, which cover the rows in use; 0 where no two rows read anything together.
        num_tokens: tokens in use.
    """

    token_ids_t: I32
    is_prev_sampled_t: Bool
    prev_sampled_rows_t: I32
    positions_t: I32
    rope_lens_t: I32
    slots_gt: I32
    adapters_t: I32
    sample_tokens_s: I32
    query_starts_s1: I32
    kv_lens_s: I32
    block_tables_gsm: I32
    told_tokens_q: I32
    num_rows: int
    kv_begins_s: I32
    run_starts_s1: I32
    num_runs: int
    num_tokens: int

    def further(self, num_steps: int, block_size: int) -> Iterator[StepInputs]:
        """The next steps, so many with this one, of rows that have one token each: it is what the step before sampled.

        Every block that they write to is in the tables.
        """
        num_rows, ahead_k1 = self.num_rows, np.arange(1, num_steps, dtype=np.int32)[:, None]
        rows, is_used_t = np.arange(num_rows), np.arange(len(self.positions_t)) < num_rows
        positions_kt = self.positions_t + ahead_k1 * is_used_t
        rope_lens_kt = np.maximum(self.rope_lens_t, positions_kt + 1)
        kv_lens_ks = self.kv_lens_s + ahead_k1 * (np.arange(len(self.kv_lens_s)) < num_rows)
        positions_kr = positions_kt[:, :num_rows]
        slots_gkt = np.zeros((len(self.slots_gt), *positions_kt.shape), np.int32)
        slots_gkt[:, :, :num_rows] = self.block_tables_gsm[:, rows, positions_kr // block_size] * block_size
        slots_gkt[:, :, :num_rows] += positions_kr % block_size
        prev_rows_t = np.zeros_like(self.prev_sampled_rows_t)
        prev_rows_t[:num_rows] = rows
        for i in range(num_steps - 1):
            yield replace(
                self,
                is_prev_sampled_t=is_used_t,
                prev_sampled_rows_t=prev_rows_t,
                positions_t=positions_kt[i],
                rope_lens_t=rope_lens_kt[i],
                slots_gt=np.ascontiguousarray(slots_gkt[:, i]),
                kv_lens_s=kv_lens_ks[i],
            )

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that attention looks at, over all rows, in one head of one layer."""
        return num_pairs(self.query_starts_s1[: self.num_rows + 1], self.kv_lens_s[: self.num_rows])


def num_pairs(query_starts: I32, kv_lens: I32) -> int:
    """Pairs of a query and a key, where the queries of each row are the last of its context."""
    query_lens = np.diff(query_starts).astype(np.int64)
    return int(np.dot(query_lens, kv_lens) - np.dot(query_lens, query_lens - 1) // 2)


@dataclass(frozen=True, slots=True)
class Speculated:
    """How the rows of a dispatch with proposals came to their tokens.

    Attributes:
        num_tokens_r: tokens of each row; what it has in `StepOutputs` behind them means nothing.
        num_proposed_nr: [rounds, R] proposals that a row had the room to accept; 0 where it had ended before.
        num_accepted_nr: [rounds, R] those of them that were drawn, also behind an ending token.
        num_rounds: rounds that were run.
    """

    num_tokens_r: I32
    num_proposed_nr: I32
    num_accepted_nr: I32
    num_rounds: int


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one dispatch sampled, n tokens a row in their order, in host memory.

    Attributes:
        token_ids_rn: the sampled tokens.
        is_sound_rn: False where a token means nothing: the logits hold NaN or plus infinity, or nothing is left to
            sample.
        logprobs_rn: their log-probabilities under the model's own distribution (before temperature and truncation);
            None of Detail.TOKENS.
        ranks_rn: 1 for the likeliest token; None of Detail.TOKENS.
        top_ids_rnk: the likeliest tokens in order; None unless of Detail.TOP_LOGPROBS.
        top_logprobs_rnk: theirs.
        speculated: of a dispatch with proposals, whose rows have different numbers of tokens; None of any other.
    """

    token_ids_rn: I32
    is_sound_rn: Bool
    logprobs_rn: F32 | None = None
    ranks_rn: I32 | None = None
    top_ids_rnk: I32 | None = None
    top_logprobs_rnk: F32 | None = None
    speculated: Speculated | None = None

    def at(self, place: int) -> StepOutputs:
        """What one step of a dispatch without log-probabilities sampled."""
        only = slice(place, place + 1)
        return StepOutputs(self.token_ids_rn[:, only], self.is_sound_rn[:, only])

    def token(self, row: int, place: int = 0) -> int:
        """The token that a row sampled in a place."""
        return self.token_ids_rn.item(row, place)

    def logprob(self, row: int, place: int = 0) -> float:
        """Its log-probability.

        Raises:
            InternalError: the step told of none.
        """
        if self.logprobs_rn is None:
            raise InternalError("log-probabilities are wanted of a step that told of none")
        return self.logprobs_rn.item(row, place)

    def position(self, row: int, num_top: int, place: int = 0) -> PositionLogprobs:
        """The token at `place` with its rank, and the num_top likeliest in order, where the step reported them.

        Raises:
            InternalError: the step told of no log-probabilities.
        """
        rank = None if self.ranks_rn is None else self.ranks_rn.item(row, place)
        chosen = TokenLogprob(self.token(row, place), self.logprob(row, place), rank)
        if not num_top or self.top_ids_rnk is None or self.top_logprobs_rnk is None:
            return PositionLogprobs(chosen)
        ids, values = self.top_ids_rnk[row, place, :num_top], self.top_logprobs_rnk[row, place, :num_top]
        pairs = enumerate(zip(ids.tolist(), values.tolist(), strict=True), start=1)
        return PositionLogprobs(chosen, tuple(TokenLogprob(token_id, value, rank) for rank, (token_id, value) in pairs))
