"""Records of in-flight work: started steps, and dispatches whose results are pending."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from jpaged.engine.executor import I32, MaskFeed, SamplingInputs, StepInputs, StepOutputs
from jpaged.engine.executor.telling import ToldOutputs
from jpaged.engine.grammars import BoundRow
from jpaged.engine.scheduling.schedule import Schedule
from jpaged.engine.scheduling.tells import StepTell


class Dispatched(NamedTuple):
    """A dispatch whose results have not been processed: its schedule and the executor's handles.

    Attributes:
        results: waits for the results and returns them, if they do not come from `Executor.collect`.
    """

    schedule: Schedule
    begin_s: float
    handle: Any
    tells: Iterable[tuple[StepTell, Callable[[], ToldOutputs]]] = ()
    results: Callable[[], StepOutputs] | None = None


class Started(NamedTuple):
    """A step whose forward pass is dispatched and whose sample is not.

    Attributes:
        bound: rows whose grammar masks depend on the tokens that the previous step sampled.
    """

    schedule: Schedule
    inputs: StepInputs
    hidden: Any
    sampling: SamplingInputs
    tells: Iterable[tuple[StepTell, Callable[[], ToldOutputs]]]
    bound: list[BoundRow]


class Fed(NamedTuple):
    """A dispatch of several steps that wait for masks."""

    schedule: Schedule
    begin_s: float
    handle: Any
    feed: MaskFeed
    sampling: SamplingInputs
    ending_ids_rx: I32
    bound: list[BoundRow]

    @contextmanager
    def closed_where_it_fails(self) -> Iterator[None]:
        """Close the feed if the body raises; otherwise the program would wait forever."""
        try:
            yield
        except BaseException:
            self.feed.close()
            raise
