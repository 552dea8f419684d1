"""Costs of reading a shared prefix once (cascade attention) on a device, as input for the scheduler's decisions.

    cpu   measured on one core, 1024 shared tokens: up to 4, 8, 16, 32 and 64 queries together cost 3.2, 4.0, 6.6, 12.5
          and 22 times one that reads alone (head size 32; 128 gains more: 2.1, 3.0 and 4.6), so 3.2 for every 8. Below
          a block or two the second call and the merging show: 16 tokens a query, 220 a step
    xla   measured on CPUs, in the same way: a tile of 8, 16 and 64 places costs 2.3, 3.0 and 6.8, whether or not every
          place has a query; merging costs about 16 tokens a query and 100 a step
    tpu   estimated: the chip's one core reads a prefix at the full rate for one row as for many, so a tile costs 1; two
          outputs of H heads are written, read and merged, 2.5 H / K tokens; starting a kernel takes some 5 us, in which
          800 GB/s read about 4 MB
    gpu   estimated: a tile has room for 64 query heads of a key/value head, in the Triton kernel for 32 (16 if they
          are wide). It costs the same as a row that decodes alone, which fills the tile less. On Hopper a query's
          second output is written in 32 bits, read and merged, 2 H / K tokens; the Triton kernel does so with both
          outputs, 4 H / K. No extra kernel is started, but more thread blocks: 0.3 us at 3.3 TB/s, or 0.5 us at 2 TB/s

Layers with a sliding window have a third pass, over the tokens that only some queries see: at most a block or two.
Only the part of a prefix inside all windows is shared. The XLA loop does not share on GPUs: the number of runs would
have to reach the host for a decision in every layer of every step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jpaged.config import Backend
from jpaged.engine.executor.shapes import CascadeCosts
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.backends import IMPLEMENTATIONS
from jpaged.kernels.paged_attention.gpu.tiling import TILE_ROWS
from jpaged.kernels.paged_attention.reference import CHUNK_TOKENS, TILE_QUERIES
from jpaged.kernels.paged_attention.triton.work import group_of, shared_rows

_TPU_START_BYTES = 4e6
_GPU_START_BYTES = 1e6
_THIRD_PASS = 1.5
"""Cost factor of the pass over the edges of windows, if it is a call separate from the second pass."""


def cascade_costs(
    backend: Backend, layout: KVLayout, kinds: Sequence[AttentionKind], num_heads: int, num_context_parts: int = 1
) -> CascadeCosts | None:
    """Return the costs on a backend; None if rows do not share prefix reads there.

    Args:
        backend: the attention backend.
        layout: one device's part of the pool.
        kinds: attention kind of each layer.
        num_heads: query heads of one device.
        num_context_parts: devices that share each context. A cost that equals n tokens on one device equals `n *
            num_context_parts` tokens of a whole context.
    """
    joint = IMPLEMENTATIONS[backend].attend_parts is not None
    has_sinks = any(kind.num_sink_tokens for kind in kinds)  # their second pass reads each row's own sink tokens
    if has_sinks or (layout.form == "gpu" and not joint):
        return None
    costs = _full_costs(backend, layout, num_heads)
    costs = dataclasses.replace(
        costs,
        granule_tokens=costs.granule_tokens * num_context_parts,
        query_tokens=costs.query_tokens * num_context_parts,
        step_tokens=costs.step_tokens * num_context_parts,
    )
    windows = Counter(kind.sliding_window for kind in kinds if kind.sliding_window is not None)
    if not windows:
        return costs
    passes = 1.0 if joint else _THIRD_PASS
    return dataclasses.replace(
        costs,
        query_tokens=costs.query_tokens * passes,
        step_tokens=costs.step_tokens * passes,
        windows=tuple((window, count / len(kinds)) for window, count in sorted(windows.items())),
    )


def _full_costs(backend: Backend, layout: KVLayout, num_heads: int) -> CascadeCosts:
    """Return the costs of attention without a sliding window."""
    block_size, group = layout.block_size, num_heads // layout.num_kv_heads
    if layout.form == "gpu":
        is_triton = backend == "pallas-triton"
        group = group_of(layout, num_heads) if is_triton else group
        tile_rows = shared_rows(layout, np.dtype(np.float16)) if is_triton else TILE_ROWS
        return CascadeCosts(
            granule_tokens=block_size,
            tile_queries=max(1, tile_rows // group),
            tile_tokens=1.0,
            query_share=0.0,
            query_tokens=(4.0 if is_triton else 2.0) * group,
            step_tokens=_GPU_START_BYTES * block_size * layout.num_layers / layout.bytes_per_block,
        )
    if backend == "cpu":
        return CascadeCosts(
            granule_tokens=block_size,
            tile_queries=8,
            tile_tokens=3.2,
            query_share=0.0,
            query_tokens=16.0,
            step_tokens=220.0,
        )
    if layout.form == "tpu":
        return CascadeCosts(
            granule_tokens=block_size,
            tile_queries=TILE_QUERIES,
            tile_tokens=1.0,
            query_share=0.0,
            query_tokens=2.5 * num_heads / layout.num_kv_heads,
            step_tokens=_TPU_START_BYTES * block_size * layout.num_layers / layout.bytes_per_block,
        )
    return CascadeCosts(
        granule_tokens=max(1, CHUNK_TOKENS // block_size) * block_size,
        tile_queries=TILE_QUERIES,
        tile_tokens=1.7,
        query_share=0.08,
        query_tokens=16.0,
        step_tokens=100.0,
    )
