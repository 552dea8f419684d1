"""Storing of a step's new keys and values in the pool, inside a TPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.kv_layout import KVLayout


def store(writes: tuple[Any, ...], layer: Any, new_ref: Any, pool_ref: Any, written: Any, layout: KVLayout) -> None:
    """Store every new token in its slot; whole blocks in one DMA each. Returns when all have arrived.

    Args:
        writes: (slots [T], whether B tokens from here on fill a block [T]), in scalar memory.
        layer: the layer whose blocks are written.
        new_ref: [T, R, pack, lanes], anywhere.
        pool_ref: of all layers.
        written: semaphores of whole blocks and of single tokens.
        layout: of the pool.
    """
    slots_ref, is_whole_ref = writes
    block_size, num_tokens = layout.block_size, new_ref.shape[0]
    num_slots, first_block = layout.blocks_per_layer * block_size, layer * layout.blocks_per_layer

    def copy_block(t: Any, block: Any) -> Any:
        return pltpu.make_async_copy(new_ref.at[pl.ds(t, block_size)], pool_ref.at[block], written.at[0])

    def copy_token(t: Any, block: Any, offset: Any) -> Any:
        # Slices instead of indices: the interpreter of jax 0.10 and 0.11 ignores that an index refers to a part of a
        # whole.
        return pltpu.make_async_copy(new_ref.at[pl.ds(t, 1)], pool_ref.at[block, pl.ds(offset, 1)], written.at[1])

    def start(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        t, num_blocks, num_singles = state
        slot = slots_ref[t]
        is_inside = (slot >= 0) & (slot < num_slots)
        is_whole = is_inside & (is_whole_ref[t] > 0)
        is_single = is_inside & (is_whole_ref[t] == 0)

        @pl.when(is_whole)
        def _() -> None:
            if num_tokens >= block_size:
                copy_block(t, first_block + slot // block_size).start()

        @pl.when(is_single)
        def _() -> None:
            copy_token(t, first_block + slot // block_size, lax.rem(slot, block_size)).start()

        step = jnp.where(is_whole, block_size, 1)
        return t + step, num_blocks + is_whole.astype(jnp.int32), num_singles + is_single.astype(jnp.int32)

    zero = jnp.int32(0)
    _, num_blocks, num_singles = lax.while_loop(lambda state: state[0] < num_tokens, start, (zero, zero, zero))
    if num_tokens >= block_size:
        _repeat(num_blocks, lambda _: copy_block(0, 0).wait())
    _repeat(num_singles, lambda _: copy_token(0, 0, 0).wait())


def _repeat(num_turns: Any, body: Callable[[Any], None]) -> None:
    def turn(i: Any, carry: None) -> None:
        body(i)
        return carry

    lax.fori_loop(0, num_turns, turn, None)
