"""The tokens of a turn's prompt, made of numbers: the same wherever and whenever they are made.

    system prompt of the tenant | said 0 | answer 0 | said 1 | answer 1 | said 2 | generated so far

A simulated server samples token 0 alone, so that this is what answers are made of: blocks of an answer are found by the
next turn's prompt as they are in a real server. A text of its own in their place (`Attempt.replays` False) is for
comparing with servers whose answers are not known beforehand.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from jpaged.capacity.fleet.attempts import Attempt

NUM_IDS = 256
"""Token ids are below it, but for the first of a text: Python has each once, so that a prompt is a list of pointers."""
NUM_FIRST_IDS = 3000
"""First tokens are below it: a cache that finds parts of blocks would find one in 256 else."""
_STEP, _MIX, _LATER_MIX = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SYSTEM, _SAID, _ANSWERED = 1, 2, 3


def prompt_of(attempt: Attempt) -> tuple[int, ...]:
    """All tokens of an attempt's prompt."""
    session, turn = attempt.session, attempt.turn
    ids = list(_system(session.tenant, session.system_tokens))
    for earlier in range(turn + 1):
        ids += _text(_SAID, session.number, earlier, session.said[earlier])
        if earlier < turn:
            count = session.answered[earlier]
            ids += [0] * count if attempt.replays else _text(_ANSWERED, session.number, earlier, count)
    ids += [0] * attempt.num_generated
    return tuple(ids)


@lru_cache(maxsize=4096)
def _system(tenant: int, count: int) -> list[int]:
    return _text(_SYSTEM, tenant, 0, count)


def _text(kind: int, number: int, part: int, count: int) -> list[int]:
    """The first tokens of an endless text, ids from 1: the generator of Steele, Lea and Flood (SplitMix64)."""
    seed = np.uint64((number << 20 | part << 2 | kind) & (2**64 - 1))
    with np.errstate(over="ignore"):
        mixed = (seed * _MIX) ^ (seed >> np.uint64(29))
        state = mixed + np.arange(1, count + 1, dtype=np.uint64) * _STEP
        state = (state ^ (state >> np.uint64(30))) * _MIX
        state = (state ^ (state >> np.uint64(27))) * _LATER_MIX
        ids: list[int] = (1 + (state >> np.uint64(40)) % np.uint64(NUM_IDS - 1)).tolist()
        if count:
            ids[0] = int(1 + mixed % np.uint64(NUM_FIRST_IDS - 1))
    return ids
