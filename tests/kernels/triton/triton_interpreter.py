"""Runs the Triton kernels on CPUs, in Pallas' interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jpaged.kernels.paged_attention.api import implementation
from jpaged.kernels.paged_attention.spec import AttentionCall, ContextPart
from jpaged.kernels.paged_attention.triton import attention as triton
from jpaged.kernels.paged_attention.triton.work import Cut, choose_cut
from tests.conftest import QUICK_XLA_OPTIONS


def _run(q, pool, layer, parts, scales, cut: Cut) -> tuple[jax.Array, jax.Array]:
    rows, spec = parts[0].rows, parts[0].spec
    return triton.attend_parts(AttentionCall(q, pool, layer, rows, spec, scales), parts, cut, is_interpreted=True)


# What XLA compiles is the interpreter, which is not what a server runs: it need not be quick.
_jitted = jax.jit(_run, static_argnames="cut", compiler_options=QUICK_XLA_OPTIONS)


def attend(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    parts: Sequence[ContextPart],
    scales: jax.Array | None,
    part_chunks: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The backend's `attend_parts`; the first of the parts is of the call's rows.

    Args:
        q: queries; with the other arrays as `AttentionCall` has them.
        pool: of form gpu.
        layer: which.
        parts: lists of rows.
        scales: of a pool of 8 bits.
        part_chunks: chunks of the shortest part, for contexts that are too short for the rule's; None takes the rule's.
    """
    rows, spec = parts[0].rows, parts[0].spec
    implementation("pallas-triton", spec, AttentionCall(q, pool, layer, rows, spec, scales).queries)
    num_rows, table_width = rows.block_tables_sm.shape
    are_shared = [part.table_rows_s is not None for part in parts]
    cut = choose_cut(spec, q.dtype, q.shape[1], (q.shape[0], num_rows, table_width), are_shared)
    if part_chunks is not None:
        part_tokens = part_chunks * max(tile.chunk_tokens for tile in cut.tiles)
        max_tokens = table_width * spec.layout.block_size
        cut = dataclasses.replace(cut, part_tokens=part_tokens, num_parts=64, max_tokens=max_tokens)
    return _jitted(q, pool, layer, tuple(parts), scales, cut=cut)
