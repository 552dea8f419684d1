"""Memories without an engine around them, and groups for them."""

from __future__ import annotations

from jpaged.engine.kv_cache.contiguous import ContiguousKVCacheManager
from jpaged.engine.kv_cache.interface import KVCacheManager
from jpaged.engine.kv_cache.paged import PagedKVCacheManager
from jpaged.engine.sequence import SequenceGroup, Status
from jpaged.testing import FakeExecutor
from jpaged.types import Request, SamplingParams


def group_of(num_prompt_tokens, first=0, **sampling):
    """A group whose prompt is so many tokens that count up from the first."""
    prompt = tuple(range(first, first + num_prompt_tokens))
    return SequenceGroup(Request("g", prompt, SamplingParams(max_tokens=8, **sampling)), 0, 0.0, print, 8)


def paged_memory(num_blocks: int, num_host_blocks: int = 0) -> PagedKVCacheManager:
    """Paged memory in blocks of four tokens."""
    executor = FakeExecutor(num_blocks=num_blocks, block_size=4, num_host_blocks=num_host_blocks)
    return PagedKVCacheManager(executor.geometry)


def reserved_memory(num_blocks: int, *, max_model_len: int, policy: str) -> ContiguousKVCacheManager:
    """Contiguous memory in blocks of four tokens."""
    executor = FakeExecutor(num_blocks=num_blocks, block_size=4, max_model_len=max_model_len)
    return ContiguousKVCacheManager(executor.geometry, policy)


def computed(memory, group):
    """Runs a group's prompt, forks, and samples a token for each."""
    leader, *others = group.live
    num_cached = memory.admit(group)
    group.move_to(Status.RUNNING)
    memory.grow(leader, leader.num_prompt_tokens - num_cached)
    leader.set_num_computed_tokens(leader.num_prompt_tokens)
    for other in others:
        memory.fork(leader, other)
    group.forked()
    for sequence in group.live:
        sequence.token_ids.append(200)
    return group


def num_swapped_blocks(memory: KVCacheManager) -> int:
    """Blocks of host memory that groups hold."""
    if memory.swapping is None or memory.host is None:
        return 0
    return memory.host.pool.num_used - sum(table.num_blocks for table in memory.host._held)
