"""Verification of draft tokens: a step accepts those that equal the sampled tokens.

    drafts           a  b  c  d            a step runs the last token and its drafts, and samples after each of them
    sampled       a  b  x  .  .
                  └ accepted: 2    tokens: a b x         the sample after the last accepted draft is a token as well

A sample depends on seed, position and the tokens before it. After an accepted draft token these are the same as in
plain decoding, and so is the sample. The samples after a rejected draft token are dropped. There is no resampling or
weighting: distribution and tokens are those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InternalError

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Verified:
    """New tokens of the rows of a step.

    Attributes:
        num_accepted: number of accepted draft tokens of each row, those after an ending token included.
        token_ids: accepted draft tokens of each row and the next sample, up to and including an ending token.
    """

    num_accepted: list[int]
    token_ids: list[list[int]]


def verify(
    proposals_rk: I32, num_proposals_r: I32, drawn_rn: I32, ending_token_ids: Sequence[frozenset[int]]
) -> Verified:
    """Compare the draft tokens of each row with the sampled tokens.

    Args:
        proposals_rk: [R, k] draft tokens of each row, padded.
        num_proposals_r: [R] number of draft tokens of each row, 0 to k.
        drawn_rn: [R, k + 1] samples after the last token of each row and after each draft token.
        ending_token_ids: token ids that end each row; empty if none does yet.

    Raises:
        InternalError: the shapes do not match.
    """
    num_rows, width = proposals_rk.shape
    if drawn_rn.shape != (num_rows, width + 1) or num_proposals_r.shape != (num_rows,):
        raise InternalError(
            f"proposals of shape {proposals_rk.shape} have {num_proposals_r.shape} counts and {drawn_rn.shape} draws"
        )
    if len(ending_token_ids) != num_rows or (
        num_rows and not 0 <= num_proposals_r.min() <= num_proposals_r.max() <= width
    ):
        raise InternalError(
            f"{num_rows} rows of at most {width} proposals have {len(ending_token_ids)} sets of ending ids and "
            f"{num_proposals_r.tolist()} proposals"
        )
    is_drawn_rk = (proposals_rk == drawn_rn[:, :width]) & (np.arange(width) < num_proposals_r[:, None])
    num_accepted = np.logical_and.accumulate(is_drawn_rk, axis=1).sum(axis=1).tolist()
    token_ids = [
        _up_to_end(drawn[: count + 1], ending)
        for drawn, count, ending in zip(drawn_rn.tolist(), num_accepted, ending_token_ids, strict=True)
    ]
    return Verified(num_accepted, token_ids)


def _up_to_end(token_ids: list[int], ending: frozenset[int]) -> list[int]:
    """Return the tokens up to and including the first that ends the row."""
    if ending.isdisjoint(token_ids):
        return token_ids
    return token_ids[: next(place for place, token_id in enumerate(token_ids, start=1) if token_id in ending)]
