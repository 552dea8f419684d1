"""Alignment of the beam searches of several requests into the same steps, independent of their arrival.

A beam search continues when the host has seen the samples of all its beams, so with overlap it runs in every second
step. Searches whose prompts ran one step apart would alternate forever, in twice the number of steps:

    steps     1  2  3  4  5  6           1  2  3  4  5  6
    a         x     x     x              x        x     x        b is ready for step 3 ... and waits for a, once,
    b            x     x     x              x     x     x        if step 3 would hold only b

A step that holds anything else runs anyway, with every search that is ready.
"""

from __future__ import annotations

from collections.abc import Mapping

from jpaged.engine.kv.interface import Shares
from jpaged.engine.sequence import Group


def draw_with_the_next(wanted: Mapping[Group, Shares]) -> bool:
    """Return True if only decoding beams are ready and other beams become ready after the in-flight step.

    After that step nothing is in flight, so no beam waits twice in a row.

    Args:
        wanted: the tokens that the sequences of each running group have to compute.
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
    """Return True if a group's beams, whose tokens are in flight, need more tokens after these."""
    sampling = group.request.sampling
    return bool(sampling.beam_width) and group.live[0].num_output_tokens < sampling.max_tokens
