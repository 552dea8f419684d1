"""What reading a shared prefix once costs on a device, for the scheduler to decide by.

    cpu   measured on one core, 1024 shared tokens: up to 4, 8, 16, 32 and 64 queries together cost as much as 3.2, 4.0,
          6.6, 12.5 and 22 that read alone (head size 32; 128 gains more: 2.1, 3.0 and 4.6), so 3.2 for every 8. Below
          a block or two the second call and the merging show: 16 tokens a query, 220 a step
    xla   on CPUs, measured likewise: a tile of 8, 16 and 64 places costs 2.3, 3.0 and 6.8, whether or not a query is in
          each; merging, about 16 tokens a query and 100 a step
    tpu   reckoned: the chip's one core reads a prefix at the full rate for one row as for many, so a tile costs 1; two
          outputs of H heads are written, read and merged, 2.5 H / K tokens; starting a kernel takes some 5 us, in which
          800 GB/s read about 4 MB

On GPUs rows do not read together: XLA brings the number of runs to the host for its decision in every layer of every
step, and one long row on a few processors is slower than many rows on all, before it is split.
"""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.config import Backend
from jpaged.engine.executor import CascadeCosts
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.reference import CHUNK_TOKENS, TILE_QUERIES

_TPU_START_BYTES = 4e6


def cascade_costs(
    backend: Backend, layout: KVLayout, kinds: Sequence[AttentionKind], num_heads: int
) -> CascadeCosts | None:
    """The costs on a backend; None on GPUs, and with a sliding window: no key is then common to all queries."""
    block_size = layout.block_size
    if any(kind.sliding_window is not None for kind in kinds) or layout.form == "gpu":
        return None
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
