"""One request's life: a `Group` of sequences, and what each sequence knows of itself.

    WAITING ──admit──> RUNNING ──finish──> FINISHED
       ^                  │ preempt
       └──────────────────┘           a waiting sequence can finish too (abort, deadline)

    token_ids   [ prompt .......... | collected outputs .... ] (in flight)
                 └ num_computed: KV written by the steps dispatched so far ┘

A token "in flight" has been drawn by a dispatched step whose results the host has not seen: the sequence is already
longer by it, but its value lives on the device alone. While a step is put together at most one token of a sequence is
in flight; two are between the dispatch of that step and the collection of the one before.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from jpaged.engine.block_pool import BlockTable
from jpaged.errors import InternalError
from jpaged.types import OutputEvent, Request

Sink = Callable[[OutputEvent], None]
"""Where a request's events go; called on the engine thread."""


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class Sequence:
    """One chain of tokens. Written by the engine thread alone.

    Attributes:
        num_computed_tokens: tokens whose keys and values are in the pool once every dispatched step has run.
        num_in_flight_tokens: tokens drawn by dispatched steps that were not collected yet.
        in_flight_row: the sequence's row in the last step that drew a token for it; used while that is in flight.
    """

    __slots__ = (
        "block_table",
        "cumulative_logprob",
        "in_flight_row",
        "index",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_prompt_tokens",
        "status",
        "token_ids",
    )

    def __init__(self, index: int, prompt_token_ids: tuple[int, ...], max_blocks: int) -> None:
        self.index = index
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.block_table = BlockTable(max_blocks)
        self.status = Status.WAITING
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.in_flight_row = 0
        self.cumulative_logprob = 0.0

    @property
    def num_tokens(self) -> int:
        """Length, a token in flight included."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far, one in flight included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that still have to go through the model: 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    def move_to(self, status: Status) -> None:
        if status not in TRANSITIONS[self.status]:
            raise InternalError(f"a {self.status.value} sequence cannot become {status.value}")
        self.status = status


class Group:
    """The sequences of one request: scheduled, preempted and ended together.

    Attributes:
        arrival: position in the order of arrival; the scheduler's first come, first served.
    """

    __slots__ = ("arrival", "arrival_s", "first_token_s", "num_preemptions", "request", "sequences", "sink")

    def __init__(self, request: Request, arrival: int, arrival_s: float, sink: Sink, max_blocks: int) -> None:
        self.request = request
        self.arrival = arrival
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.num_preemptions = 0
        self.sink = sink
        self.sequences = [Sequence(0, request.prompt_token_ids, max_blocks)]

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)
