"""Messages to and from replicas: small values that are sent between processes.

A turn is a request of a day. An attempt is one run of a turn on a replica: the first, or one that resumes after tokens
generated on another replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jpaged.capacity.fleet.day import Session


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
