"""The conversations of a day: start times, tenants and lengths, the tokens of their prompts, and messages to replicas.

    rate(t)   = mean * (1 + swing * cos(2 pi (t - peak) / day))            less at night, most in the afternoon
    tenants   Zipf: the share of the k-th is as 1 / k^skew; every prompt of a tenant begins with its system prompt
    bursts    in each 96th of a day a tenant has its share times a Gamma of mean 1; arrivals within are Poisson
    turns     geometric; a turn's prompt is the whole conversation before, and the new message
    thinking  exponential, from the end of an answer to the next turn

A day of simulated time may be shorter than 86,400 s (`seconds`): the curve and the bursts are scaled to that, and
nothing else: answers and thinking keep their durations.

A turn is a request of a day. An attempt is one run of a turn on a replica: the first, or one that resumes after tokens
generated on another replica. Attempts and their results are small values that are sent between processes.

The tokens of a turn's prompt are a deterministic function of numbers:

    system prompt of the tenant | message 0 | answer 0 | message 1 | answer 1 | message 2 | generated so far

A simulated server samples only token 0, so answers consist of it: the next turn's prompt hits the blocks of the answer
in the prefix cache, as on a real server. A separate text in place of the answer (`Attempt.replays` False) is for
comparisons with servers whose answers are not known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InvalidArgument

QUARTERS = 96
"""Parts of a day in which a tenant's share is constant: quarters of an hour."""
_MAX_SESSIONS, _MAX_TURNS = 5_000_000, 15_000_000


@dataclass(frozen=True, slots=True)
class TurnLengths:
    """Tokens, lognormal and at least 1: the mean before rounding, and the standard deviation of the logarithm."""

    mean: float
    sigma: float

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Return `count` random lengths."""
        drawn = generator.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Day:
    """Parameters of a day.

    Attributes:
        seconds: simulated duration of the day.
        rate_per_s: turns per second, the mean over the day.
        swing: amplitude of the rate around its mean, as a share of the mean.
        peak: time of the highest rate, as a share of the day.
        num_tenants, skew: parameters of Zipf's law.
        burst_shape: shape of the Gamma; the smaller, the burstier. A tenant's share varies by 1 / sqrt(shape).
        system: tokens of tenants' system prompts.
        said, answered: tokens of a user's message, and of the answer.
        mean_turns: mean number of turns in a conversation.
        mean_thinking_s: mean time between an answer and the next turn.
        min_thinking_s: minimum of that time.
        max_model_len: a conversation ends before it would exceed this number of tokens.
    """

    seconds: float
    rate_per_s: float
    max_model_len: int
    swing: float = 0.6
    peak: float = 15 / 24
    num_tenants: int = 200
    skew: float = 1.0
    burst_shape: float = 4.0
    system: TurnLengths = TurnLengths(900.0, 0.6)
    said: TurnLengths = TurnLengths(140.0, 1.0)
    answered: TurnLengths = TurnLengths(180.0, 0.8)
    mean_turns: float = 3.0
    mean_thinking_s: float = 8.0
    min_thinking_s: float = 1.0

    def rate_at(self, t_s: float) -> float:
        """Return the turns per second of the curve at a time, without bursts."""
        return self.rate_per_s * (1 + self.swing * math.cos(2 * math.pi * (t_s / self.seconds - self.peak)))


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation.

    Attributes:
        number: from 0, in order of start times.
        system_tokens: tokens of the tenant's system prompt.
        said, answered: tokens of each turn.
        thinking_s: before each turn except the first, from the end of the previous answer.
    """

    number: int
    begin_s: float
    tenant: int
    system_tokens: int
    said: tuple[int, ...]
    answered: tuple[int, ...]
    thinking_s: tuple[float, ...]

    def prompt_tokens(self, turn: int) -> int:
        """Return the tokens of a turn's prompt: system prompt, earlier messages and answers, and the new message."""
        return self.system_tokens + sum(self.said[: turn + 1]) + sum(self.answered[:turn])


def draw_sessions(day: Day, seed: int) -> list[Session]:
    """Generate all conversations that begin within a day, in order of start times.

    Raises:
        InvalidArgument: too many for one computer's memory, or no tenant's system prompt leaves room for a turn.
    """
    generator = np.random.default_rng(seed)
    expected = day.rate_per_s * day.seconds / day.mean_turns
    if expected > _MAX_SESSIONS:
        raise InvalidArgument("rate", f"{expected:.3g} conversations in a day are above the limit of {_MAX_SESSIONS}")
    if (expected_turns := day.rate_per_s * day.seconds) > _MAX_TURNS:
        raise InvalidArgument("rate", f"{expected_turns:.3g} requests in a day are above the limit of {_MAX_TURNS}")
    system = np.minimum(day.system.draw(day.num_tenants, generator), day.max_model_len // 2)
    begins_s, tenants = _begins(day, generator)
    num_turns = generator.geometric(1 / day.mean_turns, len(begins_s))
    total = int(num_turns.sum())
    said, answered = day.said.draw(total, generator), day.answered.draw(total, generator)
    thinking_s = np.maximum(day.min_thinking_s, generator.exponential(day.mean_thinking_s, total))
    ends = np.cumsum(num_turns)
    return list(_fitting(day, begins_s, tenants, system, (ends - num_turns, ends), (said, answered, thinking_s)))


def _begins(day: Day, generator: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the start times of conversations, in order, and their tenants."""
    width_s = day.seconds / QUARTERS
    shares_n = 1 / np.arange(1, day.num_tenants + 1) ** day.skew
    shares_n /= shares_n.sum()
    middles_q = (np.arange(QUARTERS) + 0.5) * width_s
    rates_q = np.array([day.rate_at(float(t_s)) for t_s in middles_q]) / day.mean_turns
    bursts_nq = generator.gamma(day.burst_shape, 1 / day.burst_shape, (day.num_tenants, QUARTERS))
    counts_nq = generator.poisson(shares_n[:, None] * bursts_nq * rates_q * width_s)
    tenants, quarters = (np.repeat(places.ravel(), counts_nq.ravel()) for places in np.indices(counts_nq.shape))
    begins_s = (quarters + generator.random(len(quarters))) * width_s
    order = np.argsort(begins_s, kind="stable")
    return begins_s[order], tenants[order]


def _fitting(
    day: Day,
    begins_s: NDArray[np.float64],
    tenants: NDArray[np.int64],
    system: NDArray[np.int64],
    places: tuple[NDArray[np.int64], NDArray[np.int64]],
    turns: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]],
) -> Iterator[Session]:
    """Yield each conversation, without the turns that would be too long; a first turn is cut to fit."""
    said, answered, thinking_s = turns
    for number, (begin_s, tenant, first, last) in enumerate(zip(begins_s, tenants, *places, strict=True)):
        system_tokens = int(system[tenant])
        room = day.max_model_len - system_tokens
        mine, theirs = said[first:last].tolist(), answered[first:last].tolist()
        mine[0] = min(mine[0], room - 1)
        theirs[0] = min(theirs[0], room - mine[0])
        lens = np.cumsum(np.add(mine, theirs))
        count = max(1, int(np.searchsorted(lens, room, side="right")))
        yield Session(
            number,
            float(begin_s),
            int(tenant),
            system_tokens,
            tuple(mine[:count]),
            tuple(theirs[:count]),
            tuple(thinking_s[first + 1 : first + count].tolist()),
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run of a turn on a replica.

    Attributes:
        number: unique number of the attempt.
        arrival_s: at the replica.
        num_generated: tokens of the answer that other replicas generated before.
        replays: later prompts contain the tokens that a simulated server generates; otherwise a separate text.
    """

    number: int
    session: Session
    turn: int
    arrival_s: float
    num_generated: int = 0
    replays: bool = True

    @property
    def num_tokens_left(self) -> int:
        """Tokens of the answer that are still to come."""
        return self.session.answered[self.turn] - self.num_generated

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, including those generated before."""
        return self.session.prompt_tokens(self.turn) + self.num_generated


class Ended(NamedTuple):
    """End of an attempt: finished, or cut off when its replica stopped.

    Attributes:
        first_token_s: None if no token was generated.
        num_tokens: tokens from this replica.
        num_cached: tokens of the prompt that the replica had cached.
        is_whole: the answer is complete.
    """

    end_s: float
    number: int
    place: int
    first_token_s: float | None
    num_tokens: int
    num_cached: int
    is_whole: bool


class PoolLoad(NamedTuple):
    """Load of a replica between two steps."""

    num_running: int
    num_waiting: int
    num_blocks_used: int


class Totals(NamedTuple):
    """Counters of a replica over its lifetime.

    Attributes:
        busy_s: seconds in steps, copies and swaps.
    """

    busy_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    def plus(self, other: Totals) -> Totals:
        """Return the sum of both."""
        return Totals._make(mine + theirs for mine, theirs in zip(self, other, strict=True))


class Change(NamedTuple):
    """Start or stop of a replica, at the beginning of a window.

    Attributes:
        kind: `begin` an empty replica, or `kill` the current one.
        pool: for a start, the index of the deployment.
    """

    place: int
    kind: Literal["begin", "kill"]
    pool: int = 0


NUM_IDS = 256
"""Bound of token ids except the first of a text: Python caches small integers, so a prompt is a list of pointers."""
NUM_FIRST_IDS = 3000
"""Bound of first tokens: with 256 of them, a cache that matches parts of blocks would find one by chance."""
_STEP, _MIX, _LATER_MIX = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SYSTEM, _SAID, _ANSWERED = 1, 2, 3


def get_prompt(attempt: Attempt) -> tuple[int, ...]:
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
