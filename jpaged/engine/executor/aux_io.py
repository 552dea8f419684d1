"""Inputs and outputs of an aux call: log-probabilities of chosen tokens, or hidden states.

R  rows of a call, padded to a bucket        K  AUX_IDS, the token ids of a row
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from jpaged.engine.executor.io import F32, I32, Bool
from jpaged.errors import InternalError
from jpaged.types import MAX_LOGPROB_TOKEN_IDS, TokenLogprob

AUX_IDS = 1 + MAX_LOGPROB_TOKEN_IDS
"""Maximum token ids per hidden state with log-probabilities: the next token, and those a request names (K)."""
NO_ID = 0
"""Padding of token ids."""


class AuxKind(enum.IntEnum):
    """Kind of an aux output."""

    LOGPROBS = 0
    """The log-probabilities of some tokens, and of the likeliest ones."""
    ALL_LOGPROBS = 1
    """The log-probabilities of all tokens of the vocabulary."""
    HIDDEN = 2
    """The hidden state itself, after the model's final norm."""


@dataclass(frozen=True, slots=True)
class AuxInputs:
    """Rows of one aux call, padded.

    Attributes:
        places_r: indices of the hidden states that the step's forward leaves; 0 in padding.
        ids_rk: `[R, AUX_IDS]`, the requested tokens; NO_ID in padding.
        num_rows: rows in use.
    """

    kind: AuxKind
    places_r: I32
    ids_rk: I32
    num_rows: int

    @classmethod
    def padded(cls, kind: AuxKind, places: list[int], ids: list[list[int]], size: int) -> AuxInputs:
        """Return the inputs of at most `size` rows."""
        places_r, ids_rk = np.zeros(size, np.int32), np.full((size, AUX_IDS), NO_ID, np.int32)
        places_r[: len(places)] = places
        for row, of_row in enumerate(ids):
            ids_rk[row, : len(of_row)] = of_row
        return cls(kind, places_r, ids_rk, len(places))

    @classmethod
    def of_words(cls, kind: AuxKind, words: I32, num_rows: int) -> AuxInputs:
        """Return the inputs from packed words, the inverse of `words`."""
        rows = words.reshape(-1, 1 + AUX_IDS)
        return cls(kind, rows[:, 0], rows[:, 1:], num_rows)

    @property
    def words(self) -> I32:
        """The inputs packed for a program: `[R, 1 + AUX_IDS]`, row after row."""
        return np.concatenate([self.places_r[:, None], self.ids_rk], axis=1).reshape(-1)


@dataclass(frozen=True, slots=True)
class AuxOutputs:
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
            if not num_top:
                return ()
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


@dataclass(frozen=True, slots=True)
class Truncation:
    """Temperature and truncation of a request's distributions; see `jpaged.device.sampling`, which samples from them.

    The fields are those of `SamplingParams`.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def is_neutral(self) -> bool:
        """True if tokens are sampled from the model's distribution."""
        return (self.temperature, self.top_k <= 0, self.top_p, self.min_p) == (1.0, True, 1.0, 0.0)

    def compute_logprob(self, logprobs_v: F32, token_id: int) -> float:
        """Return the log-probability of a sampled token after temperature and truncation; 0 if greedy.

        Rounding may order the last tokens that are kept in another way than on the device. The sampled token is kept.
        """
        if self.temperature == 0:
            return 0.0
        scaled_v = logprobs_v.astype(np.float64) / self.temperature
        scaled_v -= scaled_v.max()
        floor = np.log(self.min_p) if self.min_p > 0 else -np.inf
        if 0 < self.top_k < len(scaled_v):
            floor = max(floor, np.partition(scaled_v, -self.top_k)[-self.top_k])
        if self.top_p < 1:
            kept = np.sort(scaled_v[scaled_v >= floor])[::-1]
            shares = np.cumsum(np.exp(kept))
            floor = kept[min(np.searchsorted(shares, self.top_p * shares[-1]), len(kept) - 1)]
        sampled = scaled_v[token_id]
        return float(sampled - np.log(np.exp(scaled_v[scaled_v >= min(floor, sampled)]).sum()))


def compute_entropy(logprobs_v: F32) -> float:
    """Return the entropy of a distribution in nats."""
    logprobs = logprobs_v[np.isfinite(logprobs_v)].astype(np.float64)
    return float(-(np.exp(logprobs) * logprobs).sum()) + 0.0
