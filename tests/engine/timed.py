"""A fake executor whose steps take time, one after another, and streams that know when their tokens came."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from jpaged.engine.executor import DeviceRates
from jpaged.testing import FakeExecutor
from tests.engine.harness import Harness


class TimedExecutor(FakeExecutor):
    """Steps take what `cost_s` says of their padded tokens and pairs, on the clock of `harness`.

    Attributes:
        sizes: padded tokens of each step.
        num_tokens: those in use.
    """

    def __init__(self, cost_s: Callable[[int, int], float], rates: DeviceRates, **shape: Any) -> None:
        super().__init__(**shape)
        self.cost_s = cost_s
        self.sizes: list[int] = []
        self.num_tokens: list[int] = []
        self._rates = rates
        self._free_s = 0.0
        self._ends_s: deque[float] = deque()

    @property
    def rates(self):
        return self._rates

    def harness(self, **options: Any) -> TimedHarness:
        h = TimedHarness(executor=self, **options)
        self.clock = h.clock
        return h

    def forward(self, inputs):
        hidden = super().forward(inputs)
        self.sizes.append(len(inputs.token_ids_t))
        self.num_tokens.append(inputs.num_tokens)
        self._free_s = max(self._free_s, self.clock()) + self.cost_s(self.sizes[-1], inputs.num_pairs)
        self._ends_s.append(self._free_s)
        return hidden

    def collect(self, handle):
        self.clock.advance(max(0.0, self._ends_s.popleft() - self.clock()))
        return super().collect(handle)


class TimedHarness(Harness):
    """Notes when each event came."""

    def __post_init__(self):
        super().__post_init__()
        self.times_s: dict[str, list[float]] = defaultdict(list)

    def receive(self, event):
        self.times_s[event.request_id].append(self.clock())
        super().receive(event)

    def gaps_s(self, *names):
        """The times between one token and the next of these requests."""
        pairs = [zip(self.times_s[name][:-1], self.times_s[name][1:], strict=True) for name in names]
        return [after - before for one in pairs for before, after in one]
