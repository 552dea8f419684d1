"""Beams of several requests draw in the same steps, whenever these arrived.

Beams go on when the host has seen what all of them sampled, so under overlap they run in every second step. Those whose
prompts lay a step apart would alternate for ever, in twice as many steps:

    steps     1  2  3  4  5  6           1  2  3  4  5  6
    a         x     x     x              x        x     x        b is ready for step 3 ... and waits for a, once,
    b            x     x     x              x     x     x        where step 3 would hold nothing but b

A step that holds anything else runs anyway, and takes along whoever is ready.
"""

from __future__ import annotations

from collections.abc import Mapping

from jpaged.engine.kv.interface import Shares
from jpaged.engine.sequence import Group


def draw_with_the_next(wanted: Mapping[Group, Shares]) -> bool:
    """Nothing is wanted but tokens for beams that decode, and others will be ready when the last step is collected.

    Then nothing is in flight, so nobody waits twice in a row.

    Args:
        wanted: what the sequences of each running group have to compute.
    """
    is_ready = is_due = False
    for group, shares in wanted.items():
        if not shares:
            is_due = is_due or _goes_on(group)
        elif not group.request.sampling.beam_width or any(num_tokens > 1 for _, num_tokens in shares):
            return False
        else:
            is_ready = True
    return is_ready and is_due


def _goes_on(group: Group) -> bool:
    """Beams whose tokens are in flight will want more, unless those are their last."""
    sampling = group.request.sampling
    return bool(sampling.beam_width) and group.live[0].num_output_tokens < sampling.max_tokens
