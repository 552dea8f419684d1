"""Faults of the Hopper kernel, such as a GPU would show as wrong tokens once in a while.

A barrier that is not waited for, memory that is written over while it is read, a key too many.
"""

from __future__ import annotations

from tests.mutation.planting import Fault

_KERNEL = "kernel.py"
_COMMITS = ("test_what_is_written_is_committed",)
_REFILLS = ("refills",)
_WARPGROUPS = ("warpgroups",)
_WIDEN = "    _widen(memory.kv_s.at[slot], memory.wide_s.at[slot], static)\n"
_SET_FREE = """
    @pl.when(i + stages < work.num_chunks)
    def _() -> None:
        plgpu.barrier_arrive(memory.free_barriers.at[me.number * stages + slot])
"""

GPU_FAULTS = (
    Fault(
        "a chunk is used before it has arrived",
        _KERNEL,
        "_ids(i + stages, memory, work, static)\n    plgpu.barrier_wait(memory.kv_barriers.at[slot])\n",
        "_ids(i + stages, memory, work, static)\n",
        _REFILLS,
    ),
    Fault(
        "queries are used before they have arrived",
        _KERNEL,
        "    plgpu.barrier_wait(memory.q_barriers.at[0])\n",
        "",
        _REFILLS,
    ),
    Fault(
        "the start of a tile is not rounded to eight rows",
        "work.py",
        "jnp.cumsum((size_n * tiling.group + 7) // 8)",
        "jnp.cumsum(size_n * tiling.group // 8)",
        ("test_every_key",),
    ),
    Fault(
        "a slot is refilled before its reads are committed",
        _KERNEL,
        "        plgpu.commit_smem()\n        _fetch(next_ids",
        "        _fetch(next_ids",
        _COMMITS,
    ),
    Fault(
        "converted numbers are not committed",
        _KERNEL,
        "        plgpu.commit_smem()\n        kv_s = memory.wide_s.at[me.number]\n",
        "        kv_s = memory.wide_s.at[me.number]\n",
        _COMMITS,
    ),
    Fault(
        "cleared numbers are not committed",
        _KERNEL,
        "_clean(i, kv_s, memory, work, static)\n            plgpu.commit_smem()\n",
        "_clean(i, kv_s, memory, work, static)\n",
        _COMMITS,
    ),
    Fault(
        "results are stored before they are committed",
        _KERNEL,
        "    plgpu.commit_smem()\n    plgpu.copy_smem_to_gmem(max_s",
        "    plgpu.copy_smem_to_gmem(max_s",
        _COMMITS,
    ),
    Fault(
        "the layer offset is ignored",
        _KERNEL,
        "first = memory.layer[0] * layout.blocks_per_layer",
        "first = memory.layer[0] * 0",
        _REFILLS,
    ),
    Fault(
        "a query sees the key after it",
        _KERNEL,
        "(keys <= positions)",
        "(keys <= positions + 1)",
        _REFILLS,
    ),
    Fault(
        "the window is one key too wide",
        _KERNEL,
        "keys > positions - work.window",
        "keys >= positions - work.window",
        ("parts",),
    ),
    Fault(
        "the running sums are not rescaled to the new maximum",
        _KERNEL,
        "fade = jnp.exp2(state.max - new_max)",
        "fade = jnp.exp2(state.max - state.max)",
        _REFILLS,
    ),
    Fault(
        "values outside the context are not cleared",
        _KERNEL,
        "        is_kept = (keys >= work.begin) & (keys < work.end)\n",
        "        is_kept = keys >= 0\n",
        _REFILLS,
    ),
    Fault(
        "a block id beyond the layer counts as valid",
        _KERNEL,
        "return (block_id >= 0) & (block_id < static.spec.layout.blocks_per_layer)",
        "return block_id >= 0",
        ("test_what_lies_around",),
    ),
    Fault(
        "keys use the scale of values",
        _KERNEL,
        "spec.kind.scale * _scale(0, memory, work, static)",
        "spec.kind.scale * _scale(1, memory, work, static)",
        ("int8",),
    ),
    Fault(
        "parts of a context overlap",
        "work.py",
        "jnp.clip(chunks_n[tile_i] - skipped_i, 0, share_n[tile_i])",
        "jnp.maximum(chunks_n[tile_i] - skipped_i, 0)",
        ("parts",),
    ),
    Fault(
        "rounding errors are written while the result is still read",
        _KERNEL,
        "        plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n",
        "",
        _COMMITS,
    ),
    Fault(
        "rounding errors are stored as zeros",
        _KERNEL,
        "(numbers - rounded.astype(jnp.float32))",
        "(numbers - numbers)",
        ("test_parts_are_merged",),
    ),
    Fault(
        "the number of parts ignores the size of the chip",
        "work.py",
        "mean = -(-chunks_n.sum() // tiling.wanted_items)",
        "mean = -(-chunks_n.max() // tiling.max_parts)",
        ("test_contexts_are_cut",),
    ),
    Fault(
        "parts are merged without their sums",
        "attention.py",
        "share = jnp.exp2(largest - top) * total",
        "share = jnp.exp2(largest - top)",
        ("parts",),
    ),
    Fault(
        "rows that no copy reaches are not cleared",
        _KERNEL,
        "            _clear(memory.kv_s.at[slot], memory.wide_s is not None, static)\n",
        "            pass\n",
        ("blocks",),
    ),
    Fault(
        "a chunk that only some queries see is not masked",
        _KERNEL,
        "end = jnp.clip(lax.div(end_key, span)",
        "end = jnp.clip(lax.div(end_key + span - 1, span)",
        _REFILLS,
    ),
    Fault(
        "a chunk outside the last query's window is not masked",
        _KERNEL,
        "work.position + last_token - work.window + 1",
        "work.position - work.window + 1",
        ("narrow",),
    ),
    Fault(
        "a consumer frees a slot that it still reads",
        _KERNEL,
        "        yield memory.kv_s.at[slot]\n" + _SET_FREE,
        _SET_FREE + "    if memory.wide_s is None:\n        yield memory.kv_s.at[slot]\n",
        _WARPGROUPS,
    ),
    Fault(
        "the producer converts to a slot that is still read",
        _KERNEL,
        "        _wait_until_free(slot, memory, work, static)\n\n" + _WIDEN,
        "        pass\n\n" + _WIDEN + "    pl.when(i >= 2)(lambda: _wait_until_free(slot, memory, work, static))\n",
        ("narrow",),
    ),
    Fault(
        "a consumer does not wait until a chunk is cleared",
        _KERNEL,
        "                plgpu.barrier_wait(memory.ready_barriers.at[slot])\n",
        "                pass\n",
        _WARPGROUPS,
    ),
    Fault(
        "the producer's writes are not committed",
        _KERNEL,
        "    plgpu.commit_smem()\n    plgpu.barrier_arrive(memory.ready_barriers",
        "    plgpu.barrier_arrive(memory.ready_barriers",
        _COMMITS,
    ),
    Fault(
        "both consumers compute the first 64 rows",
        _KERNEL,
        "jnp.where(is_whole, number * TILE_ROWS, 0)",
        "jnp.where(is_whole, number * 0, 0)",
        _WARPGROUPS,
    ),
    Fault(
        "the second consumer's sums are not rescaled",
        _KERNEL,
        "jnp.exp2(other_max - new_max) * other_sum",
        "other_sum",
        _WARPGROUPS,
    ),
    Fault(
        "the second consumer's sums are read before they are written",
        _KERNEL,
        "    plgpu.barrier_wait(memory.sum_barriers.at[1])\n",
        "",
        _WARPGROUPS,
    ),
    Fault(
        "the number of slots is not divisible by the consumers",
        "work.py",
        "// _NUM_CONSUMERS * _NUM_CONSUMERS",
        "",
        ("test_what_is_not_refused",),
    ),
)
