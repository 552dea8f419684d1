"""Runs the Hopper kernel on CPUs, in Pallas' interpreter: copies, barriers and the threads' memory are simulated.

The tensor core's products are not: the kernel takes plain ones instead. That lets keys and queries be float32 here, so
that numbers can be compared to the sixth digit, although the device has no such product and the backend refuses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# The parameters have a public name from jax 0.11 on, the state of the race detector has none.
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jpaged.kernels.paged_attention.api import implementation
from jpaged.kernels.paged_attention.gpu import attention as gpu
from jpaged.kernels.paged_attention.gpu.work import Tiling, narrow_tiling, wide_tiling
from jpaged.kernels.paged_attention.spec import AttentionCall, ContextPart
from tests.conftest import QUICK_XLA_OPTIONS

# Copies of several engines, so that waiting for one does not look like waiting for those before it.
PARAMS = InterpretGPUParams(detect_races=True, num_tma_threads_per_device=5)


def _run(q, pool, layer, parts, scales, tiling: Tiling) -> tuple[jax.Array, jax.Array]:
    rows, spec = parts[0].rows, parts[0].spec
    return gpu.attend_parts(AttentionCall(q, pool, layer, rows, spec, scales), parts, tiling, PARAMS)


# What XLA compiles is the interpreter, which is not what a server runs: it need not be quick.
_jitted = jax.jit(_run, static_argnames="tiling", compiler_options=QUICK_XLA_OPTIONS)


def attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    parts: Sequence[ContextPart],
    scales: jax.Array | None,
    max_parts: int = 1,
    tile_rows: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """The backend's `attend_parts` with so many parts of contexts, such tiles, and two stages; a race is an error.

    The first of the parts is of the call's rows.
    """
    rows, spec = parts[0].rows, parts[0].spec
    on_device = spec.layout
    if on_device.dtype == jnp.float32:
        on_device = dataclasses.replace(on_device, dtype=jnp.dtype("bfloat16"))
    dtype = jnp.dtype("bfloat16") if q.dtype == jnp.float32 else q.dtype
    queries = dataclasses.replace(AttentionCall(q, pool, layer, rows, spec, scales).queries, dtype=dtype)
    implementation("pallas-gpu", dataclasses.replace(spec, layout=on_device), queries)
    tiling = (narrow_tiling if tile_rows == 64 else wide_tiling)(spec.layout, q.shape[1] // spec.layout.num_kv_heads)
    assert tiling is not None
    wanted = rows.kv_lens_s.shape[0] * max_parts  # room for all parts of all rows
    tiling = dataclasses.replace(tiling, max_parts=max_parts, wanted_items=wanted, min_chunks=1, stages=2)
    try:
        out = jax.block_until_ready(_jitted(q, pool, layer, tuple(parts), scales, tiling=tiling))
        races: Any = interpreter.get_races()
        assert not races.races_found
    finally:
        interpreter.reset_gpu_interpret_mode_state()
    return out
