"""Prompt tokens of a turn: a deterministic function of numbers.

    system prompt of the tenant | message 0 | answer 0 | message 1 | answer 1 | message 2 | generated so far

A simulated server samples only token 0, so answers consist of it: the next turn's prompt hits the blocks of the answer
in the prefix cache, as on a real server. A separate text in place of the answer (`Attempt.replays` False) is for
comparisons with servers whose answers are not known beforehand.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from jpaged.capacity.fleet.attempts import Attempt

NUM_IDS = 256
"""Bound of token ids except the first of a text: Python caches small integers, so a prompt is a list of pointers."""
NUM_FIRST_IDS = 3000
"""Bound of first tokens: with 256 of them, a cache that matches parts of blocks would find one by chance."""
_STEP, _MIX, _LATER_MIX = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SYSTEM, _SAID, _ANSWERED = 1, 2, 3


def prompt_of(attempt: Attempt) -> tuple[int, ...]:
    """Return all tokens of an attempt's prompt."""
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
    """Return the first tokens of a deterministic text, ids from 1, by SplitMix64 (Steele, Lea and Flood)."""
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
