"""Data of one step: the block moves before it, its inputs and its outputs.

Aux outputs of a step beyond its samples: log-probabilities of given tokens or of all, or hidden states.

    prompt      t0  t1  t2  t3  t4        the log-probability of t2 is computed from the hidden state of t1
    hidden      h0  h1  h2  h3  h4        of the S sampled rows first, then of num_told requested prompt tokens

A forward leaves both on the device. An aux call reads a bounded number of them, so that no array is as long as a prompt
and as wide as the vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jpaged.engine.executor.shapes import F32, I32, Bool
from jpaged.errors import InternalError
from jpaged.types import PositionLogprobs, TokenLogprob

MAX_NUM_STEPS = 16
"""Maximum number of decode steps in one dispatch."""

MAX_NUM_ROUNDS = 16
"""Maximum number of draft-model rounds in one dispatch."""

NULL_BLOCK = 0
"""Padding rows and padding tokens write here; nothing reads it. Usable blocks are 1 to num_blocks."""


class Move(enum.Enum):
    """Direction of a block move: within the pool, out to host memory, or back in."""

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

    A device gets the fields in this order. The suffixes of the names are their shapes.

    Attributes:
        token_ids_t: input tokens; ignored where is_prev_sampled_t.
        is_prev_sampled_t: the token is what the previous dispatched step sampled for row prev_sampled_rows_t, and the
            host has not seen it.
        prev_sampled_rows_t: a row of the previous step; 0 where not used.
        positions_t: position of each token in its sequence.
        rope_lens_t: max(position + 1, prompt length), for position embeddings that depend on the sequence's length.
        slots_gt: slot for the token's keys and values in each KV group: block * block_size + offset; slot 0 of the null
            block for padding.
        adapters_t: adapter slot of each token; 0 is none.
        sample_tokens_s: index in the packed axis of each row's last token, from which its next is sampled.
        query_starts_s1: [S + 1]; rows beyond num_rows are empty.
        kv_lens_s: tokens of each row's context, including those of this step; 0 beyond num_rows.
        block_tables_gsm: block ids of each KV group; the null block beyond a row's context, and outside the window of
            all the row's queries.
        told_tokens_q: indices in the packed axis of the tokens with aux outputs; 0 where not used.
        num_rows: rows in use.
        kv_begins_s: tokens that a row shares with the rest of the run; their block tables start with the same blocks.
        run_starts_s1: [S + 1]; run g is the rows run_starts[g] to run_starts[g + 1]. num_rows beyond num_runs.
        num_runs: runs in use, which cover the rows in use; 0 if no two rows share a prefix.
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
        """Yield the inputs of the next `num_steps - 1` steps of rows with one token each, sampled by the step before.

        The block tables already contain every block that these steps write to.
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
        """Number of (query, key) pairs that attention computes, over all rows, in one head of one layer."""
        return num_pairs(self.query_starts_s1[: self.num_rows + 1], self.kv_lens_s[: self.num_rows])


def num_pairs(query_starts: I32, kv_lens: I32) -> int:
    """Return the number of (query, key) pairs, if the queries of each row come last in the context."""
    query_lens = np.diff(query_starts).astype(np.int64)
    return int(np.dot(query_lens, kv_lens) - np.dot(query_lens, query_lens - 1) // 2)


@dataclass(frozen=True, slots=True)
class Speculated:
    """Counts of a speculative dispatch.

    Attributes:
        num_tokens_r: valid tokens of each row in `StepOutputs`; later ones are undefined.
        num_proposed_nr: [rounds, R] draft tokens that a row could have accepted; 0 if it had ended before.
        num_accepted_nr: [rounds, R] draft tokens that were accepted, including those after an ending token.
        num_rounds: rounds that were run.
    """

    num_tokens_r: I32
    num_proposed_nr: I32
    num_accepted_nr: I32
    num_rounds: int


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Samples of one dispatch in host memory, n tokens per row in order.

    Attributes:
        token_ids_rn: the sampled tokens.
        is_sound_rn: False if a token is undefined: the logits hold NaN or plus infinity, or no token is left to sample.
        logprobs_rn: their log-probabilities under the model's distribution (before temperature and truncation); None
            for Detail.TOKENS.
        ranks_rn: 1 for the likeliest token; None for Detail.TOKENS.
        top_ids_rnk: the likeliest tokens in order; None unless Detail.TOP_LOGPROBS.
        top_logprobs_rnk: their log-probabilities.
        speculated: counts of a speculative dispatch, whose rows have different numbers of tokens; otherwise None.
    """

    token_ids_rn: I32
    is_sound_rn: Bool
    logprobs_rn: F32 | None = None
    ranks_rn: I32 | None = None
    top_ids_rnk: I32 | None = None
    top_logprobs_rnk: F32 | None = None
    speculated: Speculated | None = None

    def at(self, place: int) -> StepOutputs:
        """Return the outputs of one step of a dispatch without log-probabilities."""
        only = slice(place, place + 1)
        return StepOutputs(self.token_ids_rn[:, only], self.is_sound_rn[:, only])

    def token(self, row: int, place: int = 0) -> int:
        """Return the token that a row sampled at an index."""
        return self.token_ids_rn.item(row, place)

    def logprob(self, row: int, place: int = 0) -> float:
        """Return the log-probability of that token.

        Raises:
            InternalError: the step computed no log-probabilities.
        """
        if self.logprobs_rn is None:
            raise InternalError("the step has no log-probabilities")
        return self.logprobs_rn.item(row, place)

    def position(self, row: int, num_top: int, place: int = 0) -> PositionLogprobs:
        """Return the token at `place` with its rank, and the num_top likeliest in order, if the step reported them.

        Raises:
            InternalError: the step computed no log-probabilities.
        """
        rank = None if self.ranks_rn is None else self.ranks_rn.item(row, place)
        chosen = TokenLogprob(self.token(row, place), self.logprob(row, place), rank)
        if not num_top or self.top_ids_rnk is None or self.top_logprobs_rnk is None:
            return PositionLogprobs(chosen)
        ids, values = self.top_ids_rnk[row, place, :num_top], self.top_logprobs_rnk[row, place, :num_top]
        pairs = enumerate(zip(ids.tolist(), values.tolist(), strict=True), start=1)
        return PositionLogprobs(chosen, tuple(TokenLogprob(token_id, value, rank) for rank, (token_id, value) in pairs))


TELL_IDS = 33
"""Maximum token ids per hidden state with log-probabilities: the next token, and those a request names (K)."""
NO_ID = 0
"""Padding of token ids."""


class Tell(enum.IntEnum):
    """Kind of an aux output."""

    LOGPROBS = 0
    """The log-probabilities of some tokens, and of the likeliest ones."""
    ALL_LOGPROBS = 1
    """The log-probabilities of all tokens of the vocabulary."""
    HIDDEN = 2
    """The hidden state itself, after the model's final norm."""


@dataclass(frozen=True, slots=True)
class TellInputs:
    """Rows of one aux call, padded.

    Attributes:
        places_r: indices of the hidden states that the step's forward leaves; 0 in padding.
        ids_rk: `[R, TELL_IDS]`, the requested tokens; NO_ID in padding.
        num_rows: rows in use.
    """

    tell: Tell
    places_r: I32
    ids_rk: I32
    num_rows: int

    @classmethod
    def padded(cls, tell: Tell, places: list[int], ids: list[list[int]], size: int) -> TellInputs:
        """Return the inputs of at most `size` rows."""
        places_r, ids_rk = np.zeros(size, np.int32), np.full((size, TELL_IDS), NO_ID, np.int32)
        places_r[: len(places)] = places
        for row, of_row in enumerate(ids):
            ids_rk[row, : len(of_row)] = of_row
        return cls(tell, places_r, ids_rk, len(places))

    @classmethod
    def of_words(cls, tell: Tell, words: I32, num_rows: int) -> TellInputs:
        """Return the inputs from packed words, the inverse of `words`."""
        rows = words.reshape(-1, 1 + TELL_IDS)
        return cls(tell, rows[:, 0], rows[:, 1:], num_rows)

    @property
    def words(self) -> I32:
        """The inputs packed for a program: `[R, 1 + TELL_IDS]`, row after row."""
        return np.concatenate([self.places_r[:, None], self.ids_rk], axis=1).reshape(-1)


@dataclass(frozen=True, slots=True)
class ToldOutputs:
    """Aux outputs in host memory; fields that the kind does not have are None.

    Attributes:
        is_sound_r: False if logits hold NaN or plus infinity.
        ranks_r: rank of the first id: 1 for the likeliest token.
        logprobs_rk: log-probabilities of the ids.
        top_ids_rk, top_logprobs_rk: the likeliest tokens in order.
        all_logprobs_rv: log-probability of every token.
        hidden_re: float32.
    """

    is_sound_r: Bool | None = None
    ranks_r: I32 | None = None
    logprobs_rk: F32 | None = None
    top_ids_rk: I32 | None = None
    top_logprobs_rk: F32 | None = None
    all_logprobs_rv: F32 | None = None
    hidden_re: F32 | None = None

    def top(self, row: int, num_top: int) -> tuple[TokenLogprob, ...]:
        """Return the likeliest tokens of a row; all of them for -1."""
        if self.all_logprobs_rv is not None:
            values = self.all_logprobs_rv[row]
            ids = np.argsort(-values, kind="stable")[: len(values) if num_top < 0 else num_top].astype(np.int32)
            values = values[ids]
        elif self.top_ids_rk is not None and self.top_logprobs_rk is not None:
            ids, values = self.top_ids_rk[row, :num_top], self.top_logprobs_rk[row, :num_top]
        else:
            raise InternalError("aux outputs of hidden states have no top log-probabilities")
        pairs = enumerate(zip(ids.tolist(), values.tolist(), strict=True), start=1)
        return tuple(TokenLogprob(token_id, value, rank) for rank, (token_id, value) in pairs)

    def chosen(self, row: int, token_id: int) -> TokenLogprob:
        """Return the log-probability and rank of a row's first id, which is token_id."""
        if self.all_logprobs_rv is not None:
            values = self.all_logprobs_rv[row]
            value = values.item(token_id)
            return TokenLogprob(token_id, value, 1 + int((values > value).sum()))
        if self.logprobs_rk is None or self.ranks_r is None:
            raise InternalError("aux outputs of hidden states have no log-probabilities")
        return TokenLogprob(token_id, self.logprobs_rk.item(row, 0), self.ranks_r.item(row))
