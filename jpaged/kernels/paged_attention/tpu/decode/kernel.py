"""The Mosaic kernel of rows that decode, one query per row, limited by memory bandwidth.

All rows' chunks of keys form one list of items, processed by one loop. Three items are in progress in each turn, at
three stages that do not wait for each other, while the blocks of later items arrive in a ring of buffers:

    turn i      fetch   item i + 3
                wait    item i
                stage 3 of item i - 2    output += weights x values
                stage 2 of item i - 1    running maximum and sum, weights
                stage 1 of item i        scores = queries x keys, masked

    rows        | row 0         | row 1 | row 2                 |
    items       |  0    1    2  |  3    |  4    5    6    7     |

A step of the grid has a tile of the packed tokens, in the layout of the projection and of the next matmul. The
queries of these rows are unpacked at the beginning, and their outputs packed at the end. A row's state (maximum, sum,
output) is at the place of the row's token, so that stages of two rows do not conflict. Tokens of no row get zeros;
tokens of chunks also get zeros, until the other kernel overwrites them.

Heads that share a matmul, a bundle, have their queries stacked and their keys concatenated:

    | q0  0 |   | k0 |T       | s0 |
    | 0  q1 | x | k1 |    =   | s1 |        8 rows are a register, and a matmul is as deep as the multiplier

Each core of a device has its own segments, with the items split as evenly as whole rows allow, and its own results. If
its tokens begin within a tile of another core, both process the tile, each with its own rows.

The new keys are in the pool before the first fetch starts: every core stores all of them, without waiting for the
others. A core that stores a key while another reads it writes the same contents again. Blocks that no query sees are
not fetched; their part of a buffer is masked in the scores, and cleared in the values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention.tpu import tables, words
from jpaged.kernels.paged_attention.tpu.decode import items, stages
from jpaged.kernels.paged_attention.tpu.decode.plan import DecodePlan, DecodeRefs, DecodeScalars, Kept

_STORES = 4
"""Rows finished together: their reductions do not wait for each other."""


def _kernel(scalars: DecodeScalars, q_ref: Any, o_ref: Any, refs: DecodeRefs, kept: Kept, plan: DecodePlan) -> None:
    core, step, segments, tiles = pl.program_id(0), pl.program_id(1), scalars.segments, scalars.tiles
    places, ahead = plan.sizes.places, plan.sizes.ahead
    begin_core, end_core = scalars.cores[core], scalars.cores[core + 1]
    at_first = core * (tiles.first.shape[0] // plan.num_cores) + step
    first, last = tiles.first[at_first], tiles.first[at_first + 1]
    begin_turn, num_items, all_items = segments.items[first], segments.items[last], segments.items[end_core]
    num_items = num_items - begin_turn

    @pl.when(step == 0)
    def _() -> None:
        stages.clear(kept, plan)
        tables.begin(segments, begin_core, end_core, refs.tables, kept.pages, plan.paging)
        if plan.has_writes:
            items.store(scalars.writes, scalars.layer[0], refs.new, refs.pool, kept.written, plan.spec.layout)
        kept.cursor[0], kept.cursor[1], kept.cursor[2] = begin_core, segments.first[begin_core], 0
        kept.turn[0] = 0
        num_first = jnp.minimum(ahead, all_items - begin_turn)
        items.repeat(0, num_first, lambda _: items.start(scalars, refs, kept, plan))

    nobody = jnp.int32(places)

    def turn(i: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        (segment, item, buffer), (place_2, is_begin_2, buffer_2), (place_3, is_begin_3, buffer_3) = state
        is_item = i < num_items

        @pl.when(is_item)
        def _() -> None:
            @pl.when(begin_turn + i + ahead < all_items)
            def _() -> None:
                items.start(scalars, refs, kept, plan)

            items.receive(scalars, segment, item, buffer, kept, plan)

        stages.add(place_3, is_begin_3, buffer_3, kept, plan)
        stages.weigh(place_2, is_begin_2, kept, plan)
        stages.score(scalars, segment, item, buffer, refs, kept, plan)
        place = jnp.where(is_item, segments.place[segment], nobody)
        is_row_begin = item == segments.first[segment]
        after = items.following(segments, segment, item)
        # After the last item, the stages see it again, with the unused place.
        goes_on = i + 1 < num_items
        following = tuple(jnp.where(goes_on, a, b) for a, b in zip(after, (segment, item), strict=True))
        buffer_after = jnp.where(goes_on, items.buffer_after(buffer, plan), buffer)
        return (*following, buffer_after), (place, is_row_begin, buffer), (place_2, is_begin_2, buffer_2)

    @pl.when(num_items > 0)
    def _() -> None:
        stages.take_apart(q_ref, kept, plan)
        buffer = kept.turn[0]
        state = (first, segments.first[first], buffer)
        idle = (nobody, jnp.bool_(True), buffer)
        (_, _, buffer), _, _ = lax.fori_loop(0, num_items + 2, turn, (state, idle, idle))
        kept.turn[0] = items.buffer_after(buffer, plan)

    stages.clear(kept, plan)

    @pl.when(num_items > 0)
    def _() -> None:
        def some(i: Any) -> None:
            for j in range(_STORES):
                segment = jnp.minimum(first + i * _STORES + j, last - 1)
                stages.finish(segments.place[segment], refs, kept, plan)

        items.repeat(0, pl.cdiv(last - first, _STORES), some)

    # A core with fewer steps than another keeps the outputs of the last one.
    @pl.when(step < tiles.num[core])
    def _() -> None:
        stages.put_together(o_ref, kept, plan)


def call(
    scalars: DecodeScalars,
    q: jax.Array,
    scale: jax.Array,
    block_tables: jax.Array,
    new: jax.Array | None,
    pool: jax.Array,
    plan: DecodePlan,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the kernel over all segments.

    Args:
        scalars: as arrays.
        q: [T, H * lanes of a key], T whole tiles of `places`.
        scale: factors of scores (to base 2, unless they are capped) and of outputs [2, bundles, rows, 128].
        block_tables: of whole pages [S, N].
        new: [T, R, pack, lanes] in the pool's type, if the plan writes.
        pool: of all layers.
        plan: the static part.

    Returns:
        outputs, core by core [cores * T, H * lanes of a value], zero for tokens of no row; log-sum-exp [cores * T, 1,
        `DecodePlan.lse_lanes`] in the same order, undefined for tokens of no segment; the pool. Tiles in no step are
        undefined.
    """
    flat, tree = jax.tree.flatten(scalars)
    places, bundles = plan.sizes.places, plan.num_bundles
    o_width = q.shape[1] // plan.key_lanes * plan.value_lanes
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    num_scalars, inputs = len(flat), [q, scale, block_tables, *([] if new is None else [new]), pool]
    cores, num_tiles = plan.num_cores, len(q) // places

    def at_tile(core: Any, step: Any, *refs: Any) -> Any:
        return jax.tree.unflatten(tree, refs).tiles.tile[core * num_tiles + step]

    def at_result(core: Any, step: Any, *refs: Any) -> Any:
        return core * num_tiles + at_tile(core, step, *refs)

    def body(*refs: Any) -> None:
        scalar_refs, refs = jax.tree.unflatten(tree, refs[:num_scalars]), refs[num_scalars:]
        new_ref, pool_ref = refs[3] if plan.has_writes else None, refs[len(inputs) - 1]
        o_ref, lse_ref, *others = refs[len(inputs) :]
        pool_ref = others.pop(0) if plan.has_writes else pool_ref
        kept = Kept(*others)
        refs_of_rows = DecodeRefs(kept.q, refs[1], refs[2], new_ref, pool_ref, kept.q, lse_ref)
        _kernel(scalar_refs, refs[0], o_ref, refs_of_rows, kept, plan)

    results = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(cores, jnp.maximum(scalars.tiles.num.max(), 1)),
            in_specs=[
                pl.BlockSpec((places, q.shape[1]), lambda *where: (at_tile(*where), 0)),
                pl.BlockSpec((2, bundles, plan.rows, words.LANES), lambda *_: (0, 0, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
                *([anywhere] * (len(inputs) - 3)),
            ],
            out_specs=[
                pl.BlockSpec((places, o_width), lambda *where: (at_result(*where), 0)),
                pl.BlockSpec((places, 1, plan.lse_lanes), lambda *where: (at_result(*where), 0, 0)),
                *([anywhere] if plan.has_writes else []),
            ],
            scratch_shapes=list(_scratch_shapes(plan)),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((cores * len(q), o_width), q.dtype),
            jax.ShapeDtypeStruct((cores * len(q), 1, plan.lse_lanes), jnp.float32),
            *([jax.ShapeDtypeStruct(pool.shape, pool.dtype)] if plan.has_writes else []),
        ],
        input_output_aliases={num_scalars + len(inputs) - 1: 2} if plan.has_writes else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=plan.sizes.vmem_limit_bytes,
            # Ids are compared with the layer's blocks before use.
            disable_bounds_checks=True,
        ),
        cost_estimate=_cost(scalars, q, plan),
        name="paged_attention_decode",
    )(*flat, *inputs)
    return results[0], results[1], results[2] if plan.has_writes else pool


def _scratch_shapes(plan: DecodePlan) -> Kept:
    layout, sizes, rows = plan.spec.layout, plan.sizes, (plan.num_bundles, plan.rows)
    tile = (sizes.pitch, *layout.token_shape[1:])
    return Kept(
        q=pltpu.VMEM((sizes.places, *rows, plan.key_lanes), jnp.float32),
        chunks=pltpu.VMEM((sizes.ring, plan.fetch_blocks, layout.block_size, *tile), layout.storage_dtype),
        values=pltpu.VMEM((sizes.ring, *_values_shape(plan)) if layout.is_joined else (1, 1, 8, 128), jnp.int32),
        scores=pltpu.VMEM((*rows, sizes.chunk_tokens), jnp.float32),
        weights=pltpu.VMEM((*rows, sizes.chunk_tokens), jnp.float32),
        fade=pltpu.VMEM((*rows, words.LANES), jnp.float32),
        m=pltpu.VMEM((sizes.places + 1, *rows, words.LANES), jnp.float32),
        l=pltpu.VMEM((sizes.places + 1, *rows, words.LANES), jnp.float32),
        o=pltpu.VMEM((sizes.places + 1, *rows, plan.value_lanes), jnp.float32),
        cursor=pltpu.SMEM((3,), jnp.int32),
        turn=pltpu.SMEM((1,), jnp.int32),
        special=pltpu.SMEM((sizes.ring,), jnp.int32),
        ids=pltpu.SMEM((1 + sizes.ring,), jnp.int32),
        pages=plan.paging.scratch_shapes(),
        fetched=pltpu.SemaphoreType.DMA((sizes.ring,)),
        written=pltpu.SemaphoreType.DMA((2,)),
    )


def _values_shape(plan: DecodePlan) -> tuple[int, int, int]:
    layout = plan.spec.layout
    num_tokens = words.tokens_a_word(layout.dtype, takes_fp8=plan.takes_fp8)
    return -(-layout.num_kv_heads // plan.column_heads), plan.sizes.chunk_tokens // num_tokens, words.LANES


def _cost(scalars: DecodeScalars, q: jax.Array, plan: DecodePlan) -> pl.CostEstimate:
    """Estimate the cost with full tables, an upper bound: the lengths are unknown at compile time."""
    layout = plan.spec.layout
    num_keys, num_segments = plan.table_width * layout.block_size, scalars.segments.row.shape[0]
    num_scores = num_segments * plan.num_bundles * plan.rows * num_keys
    bytes_per_token = layout.bytes_per_block // layout.num_layers // layout.block_size
    return pl.CostEstimate(
        flops=2 * num_scores * (plan.key_lanes + plan.value_lanes) * plan.sizes.bundle,
        transcendentals=num_scores,
        bytes_accessed=2 * q.nbytes + num_segments * num_keys * bytes_per_token,
    )
