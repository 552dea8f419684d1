"""Which replica a request goes to: the rules of the router (`jpaged.client.routing`) over arrays, for many replicas.

    random        any that is ready
    least-load    the one with the fewest requests in flight
    prefix        the one that has most of the prompt; of several the least busy
    prefix+load   the same among those that are not ahead of the others

    ahead         more in flight than the least busy, by half of the mean or by SLACK, whichever is more

What the rules know is what a router knows: which requests it has sent where and has not seen end, and which beginnings
it has sent where (`beginnings.py`). Nothing of it is asked of a replica.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rule = Literal["random", "least-load", "prefix", "prefix+load"]
RULES: tuple[Rule, ...] = ("random", "least-load", "prefix", "prefix+load")

SLACK = 2
SHARE_AHEAD = 0.5
"""What a replica may have more in flight than the least busy one: this share of the mean, or SLACK."""


def choose(
    rule: Rule,
    busy_p: NDArray[np.int64],
    matched_p: NDArray[np.int64] | None,
    draw: float,
) -> int:
    """The place of the replica that a request goes to.

    Args:
        busy_p: requests in flight at each replica that takes some; at least one replica.
        matched_p: tokens of the prompt that each has been sent before; None where the rule does not ask.
        draw: at random from 0 to 1, 1 left out: what `random` goes by, and who is first of equals.
    """
    count = len(busy_p)
    if rule == "random":
        return int(draw * count)
    if rule == "least-load" or matched_p is None:
        return _any_of(np.flatnonzero(busy_p == busy_p.min()), draw)
    if rule == "prefix+load":
        least = int(busy_p.min())
        is_ahead_p = busy_p > least + max(SLACK, SHARE_AHEAD * float(busy_p.mean()))
        matched_p = np.where(is_ahead_p, -1, matched_p)
    holders = np.flatnonzero(matched_p == matched_p.max())
    busy = busy_p[holders]
    return _any_of(holders[busy == busy.min()], draw)


def _any_of(places: NDArray[np.int64], draw: float) -> int:
    return int(places[int(draw * len(places))])
