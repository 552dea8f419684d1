"""The mask channel between the host and a running program on its CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jpaged.engine.executor import I32, Bool, Verdict
from jpaged.kernels.sampling.cpu.feed import Feed


@dataclass(frozen=True, slots=True)
class ProgramFeed:
    """An `engine.executor.MaskFeed`.

    Attributes:
        outputs: of the program.
    """

    feed: Feed
    outputs: jax.Array

    def give(self, mask_rw: I32, verdict: Verdict) -> None:
        self.feed.give(mask_rw, verdict)

    def wait(self) -> tuple[I32, Bool] | None:
        outputs: Any = self.outputs  # jax's annotations lack the method
        is_over = False
        while (drawn := self.feed.wait()) is None and not is_over:
            is_over = outputs.is_ready()  # its last sampled tokens have been received by then
        return drawn

    def close(self) -> None:
        self.feed.close()
