"""What goes to replicas and comes back: small values, which travel between processes.

A turn is a request of a day. An attempt is one of its runs on a replica: the first, or one that goes on elsewhere with
what was generated before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jpaged.capacity.fleet.day import Session


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run of a turn on a replica.

    Attributes:
        number: of the attempt; no two have the same.
        arrival_s: at the replica.
        num_generated: tokens of the answer that came before, elsewhere.
        replays: later prompts have what a simulated server generates, and not a text of their own.
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
        """Tokens of the prompt, those that came before included."""
        return self.session.prompt_tokens(self.turn) + self.num_generated


class Ended(NamedTuple):
    """How an attempt ended, or was cut off when its replica went.

    Attributes:
        first_token_s: None where none came.
        num_tokens: that came from this replica.
        num_cached: tokens of the prompt that the replica had.
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
    """How busy a replica is between two steps."""

    num_running: int
    num_waiting: int
    num_blocks_used: int


class Totals(NamedTuple):
    """What a replica has counted in its life.

    Attributes:
        busy_s: in steps, copies and swaps.
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
        """Both together."""
        return Totals._make(mine + theirs for mine, theirs in zip(self, other, strict=True))


class Change(NamedTuple):
    """A replica comes or goes, at the beginning of a window.

    Attributes:
        kind: `begin` an empty one, or `kill` what is there.
        pool: the number of the deployment that it has, where it begins.
    """

    place: int
    kind: Literal["begin", "kill"]
    pool: int = 0
