"""Which memory an option names."""

from __future__ import annotations

from jpaged.config import KVPolicy
from jpaged.engine.executor import Geometry
from jpaged.engine.kv.contiguous import ReservedMemory
from jpaged.engine.kv.interface import KVMemory
from jpaged.engine.kv.paged import PagedMemory
from jpaged.engine.kv.prefixes import PrefixOptions


def make_memory(geometry: Geometry, kv_policy: KVPolicy, prefix: PrefixOptions) -> KVMemory:
    """The memory of a policy: paged, or one of the baselines."""
    if kv_policy == "paged":
        return PagedMemory(
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            num_host_blocks=geometry.num_host_blocks,
            prefix=prefix,
        )
    return ReservedMemory(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        max_model_len=geometry.max_model_len,
        policy=kv_policy,
    )
