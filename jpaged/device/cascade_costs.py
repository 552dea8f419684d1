"""What reading a shared prefix once costs on a device, for the scheduler to decide by.

    xla     on CPUs, measured with head sizes 32 and 128 over 1024 shared tokens: a tile of 8, 16 and 64 queries costs
            as much as 2.3, 3.0 and 6.8 queries that each read alone; merging, about 16 tokens a query and 100 a step

On other devices the XLA version is slow either way, and the same numbers serve.
"""

from __future__ import annotations

from jpaged.engine.executor import CascadeCosts
from jpaged.kernels.paged_attention import AttentionSpec
from jpaged.kernels.paged_attention.reference import CHUNK_TOKENS, TILE_QUERIES


def cascade_costs(spec: AttentionSpec) -> CascadeCosts | None:
    """Of a call; None where no prefix can be common to all queries, for a sliding window."""
    if spec.sliding_window is not None:
        return None
    block_size = spec.layout.block_size
    return CascadeCosts(
        granule_tokens=max(1, CHUNK_TOKENS // block_size) * block_size,
        tile_queries=TILE_QUERIES,
        tile_tokens=1.7,
        query_share=0.08,
        query_tokens=16.0,
        step_tokens=100.0,
    )
