"""Which proposals a step accepts: those that it would have drawn in any case.

    proposals        a  b  c  d            a step runs the last token and its proposals, and draws behind each of them
    drawn         a  b  x  .  .
                  └ accepted: 2    tokens: a b x         the draw behind the last accepted one is a token as well

A draw depends on seed, position and the tokens before it. Behind an accepted proposal the tokens before it are those of
plain decoding, and so is the draw; behind one that was not drawn it means nothing, and is dropped. Nothing is sampled
again and nothing is weighed: distribution and tokens are those of plain decoding.
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
    """What the rows of a step go on with.

    Attributes:
        num_accepted: proposals of each row that were drawn, also behind an ending token.
        token_ids: of each row the accepted proposals and the draw behind them, up to an ending token, itself included.
    """

    num_accepted: list[int]
    token_ids: list[list[int]]


def verify(
    proposals_rk: I32, num_proposals_r: I32, drawn_rn: I32, ending_token_ids: Sequence[frozenset[int]]
) -> Verified:
    """Compares the proposals of each row with what was drawn.

    Args:
        proposals_rk: [R, k] the proposals of each row; what stands behind its own is not read.
        num_proposals_r: [R] how many it has, 0 to k.
        drawn_rn: [R, k + 1] the draw behind its last token and behind each of its proposals.
        ending_token_ids: of each row the ids that end it; empty where none does yet.

    Raises:
        InternalError: the shapes do not belong together.
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
    """The tokens up to the first that ends the row, itself included."""
    if ending.isdisjoint(token_ids):
        return token_ids
    return token_ids[: next(place for place, token_id in enumerate(token_ids, start=1) if token_id in ending)]
