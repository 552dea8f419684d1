"""How many requests fill a pool, so that a trace can be made of so many batches, and what regions they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.plan.simulator.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Pool:
    """What bounds a batch: slots, rows, and the longest sequence."""

    num_slots: int
    block_size: int
    max_num_seqs: int
    max_model_len: int


def region_tokens(kv_policy: str, request: TraceRequest, max_model_len: int) -> int:
    """What a sequence of the request asks a reserving system for, before anything is rounded up."""
    if kv_policy == "reserve-max":
        return max_model_len
    if kv_policy == "reserve-pow2":
        return min(max_model_len, request.prompt_tokens + _next_power_of_two(request.output_tokens))
    return request.prompt_tokens + request.output_tokens


def batch_size(requests: Sequence[TraceRequest], kv_policy: str, pool: Pool) -> float:
    """Requests that the pool holds at a time when it is full and nothing is shared but prompts.

    A request weighs by the steps that it stays, which are its output tokens. Holes between regions are not counted, so
    that this is a little high for the reserving systems.
    """
    steps = sum(request.output_tokens for request in requests)
    held = sum(_held_slots(kv_policy, request, pool) * request.output_tokens for request in requests) / steps
    num_rows = max(max(request.n, request.beam_width) for request in requests)
    return max(1.0, min(pool.num_slots / held, pool.max_num_seqs / num_rows))


def _held_slots(kv_policy: str, request: TraceRequest, pool: Pool) -> float:
    num_sequences = max(request.n, request.beam_width)
    if kv_policy == "paged":
        own = request.output_tokens / 2 + pool.block_size / 2
        return request.prompt_tokens - request.prefix_tokens + num_sequences * own
    num_blocks = -(-region_tokens(kv_policy, request, pool.max_model_len) // pool.block_size)
    return num_sequences * _next_power_of_two(num_blocks) * pool.block_size


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
