"""Runs the TPU kernel on this machine, in the two ways that show different mistakes.

LATE    a DMA happens when somebody waits for it: what nobody waits for never happens
EARLY   a DMA happens at once, and each access is checked against all that it is not ordered with
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention import paged_attention, paged_attention_update
from jpaged.kernels.paged_attention.tpu import sizes as sizing
from tests.conftest import QUICK_XLA_OPTIONS
from tests.kernels.attention_conformance import PagedAttentionConformance, Support

LATE = pltpu.InterpretParams(dma_execution_mode="on_wait")
# Each DMA draws an entry of the clocks. By default there is one for all of them, and no two DMAs ever race.
EARLY = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True, vector_clock_size=256)

# What XLA compiles is the interpreter, whose copies and clocks are the test: it is not what a server runs.
COMPILER_OPTIONS = QUICK_XLA_OPTIONS

_STATIC = ("spec", "backend")
_attention = jax.jit(paged_attention, static_argnames=_STATIC, compiler_options=COMPILER_OPTIONS)
_update = jax.jit(
    paged_attention_update, static_argnames=_STATIC, donate_argnames="pool", compiler_options=COMPILER_OPTIONS
)


@contextlib.contextmanager
def interpreted(params: pltpu.InterpretParams) -> Iterator[None]:
    """What is called inside runs in the interpreter; a race is an error."""
    # The interpreter's own record is renewed by every call of a kernel, and an update makes two; what it prints stays.
    printed = io.StringIO()
    try:
        with pltpu.force_tpu_interpret_mode(params), contextlib.redirect_stdout(printed):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()


@contextlib.contextmanager
def small_sizes() -> Iterator[None]:
    """Chunks and tiles that the short contexts of tests have several of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "_MAX_CHUNK_TOKENS", 128)
        patch.setattr(sizing, "_TILES", (32, 16))
        yield


class Interpreted(PagedAttentionConformance):
    """The suite, with an interpreter as the device."""

    backend = "pallas-tpu"
    form = "tpu"
    supports = Support(block_sizes=frozenset({8, 16, 32, 64, 128}))
    params = LATE

    def attend(self, q, pool, layer, rows, spec, scales):
        with interpreted(self.params), small_sizes():
            return jax.block_until_ready(_attention(q, pool, layer, rows, spec, scales, backend=self.backend))

    def update(self, q, new_kv, pool, layer, rows, spec, scales):
        with interpreted(self.params), small_sizes():
            return jax.block_until_ready(_update(q, new_kv, pool, layer, rows, spec, scales, backend=self.backend))


class Late(Interpreted):
    params = LATE


class Early(Interpreted):
    params = EARLY
