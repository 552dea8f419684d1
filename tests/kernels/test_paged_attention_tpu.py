"""The TPU backend, interpreted here: with DMAs as late as they may be, and as early, looking for races."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import jax
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.attention_conformance import PagedAttentionConformance, Support

LATE = pltpu.InterpretParams(dma_execution_mode="on_wait")
EARLY = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)


@contextlib.contextmanager
def interpreted(params: pltpu.InterpretParams) -> Iterator[None]:
    """Runs what is called inside in the interpreter; a race is an error."""
    printed = io.StringIO()
    try:
        with pltpu.force_tpu_interpret_mode(params), contextlib.redirect_stdout(printed):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()


class Interpreted(PagedAttentionConformance):
    backend = "pallas-tpu"
    form = "tpu"
    supports = Support(block_sizes=frozenset({8, 16, 32, 64, 128}))
    params: pltpu.InterpretParams

    def attend(self, q, pool, layer, rows, spec, scales):
        with interpreted(self.params):
            return jax.block_until_ready(super().attend(q, pool, layer, rows, spec, scales))

    def update(self, q, new_kv, pool, layer, rows, spec, scales):
        with interpreted(self.params):
            return jax.block_until_ready(super().update(q, new_kv, pool, layer, rows, spec, scales))


class TestLate(Interpreted):
    params = LATE


class TestEarly(Interpreted):
    params = EARLY
