"""The Triton kernels of paged attention: one attends to parts of contexts, one merges a token's parts.

    rows of a tile    | t0 h0 | t0 h1 | t1 h0 | t1 h1 | ...     tokens of one row, the query heads of one KV head

    for each chunk    ids of the keys' blocks; K; S = Q K^T; softmax; V; O += P V

The compiler pipelines the loop: while a chunk is multiplied, the next one's keys and values are in flight (cp.async). A
key is located by its block's id alone, so blocks may have any size. Head sizes that are no power of two are split into
powers of two, because a program's arrays have only such axes: 80 is 64 and 16. A latent is split after its value, which
consists of the first pieces, and is read once.

8-bit numbers come in pairs, as 16-bit words: Triton counts the elements before one with 31 bits, and a pool of 4 GiB
would need 32. Even and odd columns are multiplied separately. Ampere does not convert 8-bit floats, so the kernel does
it by shifts: the result is a 16-bit float with an exponent that is 8 too small.

A program does not read what it does not see: masked lanes become zeros, and so do keys and values of blocks outside the
layer.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jpaged.kernels.kv_layout import KVLayout, output_dim
from jpaged.kernels.paged_attention.spec import Attended, AttentionSpec
from jpaged.kernels.paged_attention.triton.work import AttentionWork, Cut, MergeField, Tile, TritonItemField

_LOG2_E = math.log2(math.e)
_LOWEST = -1e30
"""Start of the running maximum: finite, so that a chunk without a visible key leaves no NaN."""


@dataclass(frozen=True, slots=True)
class TritonKernelParams:
    """Compile-time constants of the kernels.

    Attributes:
        specs: attention spec of each list of rows.
        cut: sizes of the work.
        is_interpreted: run them on a CPU, in Pallas' interpreter.
    """

    specs: tuple[AttentionSpec, ...]
    cut: Cut
    is_interpreted: bool = False

    @property
    def kinds(self) -> tuple[_Kind, ...]:
        """Compile-time constants of the programs of each list."""
        return tuple(_Kind(spec, tile) for spec, tile in zip(self.specs, self.cut.tiles, strict=True))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Compile-time constants of a program; several lists of rows may share them.

    Attributes:
        spec: of the rows' attention.
        tile: sizes of a program's work.
    """

    spec: AttentionSpec
    tile: Tile

    @property
    def lanes(self) -> int:
        """Numbers of the pool per word."""
        return 2 if is_paired(self.spec.layout) else 1

    @property
    def pieces(self) -> list[_HeadColumns]:
        """The powers of two that make up a key's words; for each, its lanes in order."""
        value_dim, head_dim = output_dim(self.spec.layout), self.spec.layout.head_dim
        return [*self.value_pieces, *self._cut(value_dim, head_dim)]

    @property
    def value_pieces(self) -> list[_HeadColumns]:
        """The pieces of a value."""
        return self._cut(0, output_dim(self.spec.layout))

    def _cut(self, first: int, last: int) -> list[_HeadColumns]:
        begin, left, found = first // self.lanes, (last - first) // self.lanes, []
        while left:
            size = 1 << (left.bit_length() - 1)
            found += [_HeadColumns(begin, size, lane, self.lanes) for lane in range(self.lanes)]
            begin, left = begin + size, left - size
        return found

    def kv_head(self, program: jax.Array) -> jax.Array | int:
        """Return the key/value head that a program reads."""
        return program if self.spec.layout.value_dim is None else 0

    def dtype(self, q_dtype: Any) -> Any:
        """Return the type of the matmuls: the queries' type, or the pool's if that is wider."""
        return q_dtype if self.spec.layout.is_scaled else jnp.promote_types(q_dtype, self.spec.layout.dtype)


class _HeadColumns(NamedTuple):
    """Columns of a head that are multiplied at a time.

    Attributes:
        begin: its first word.
        size: number of words.
        lane: index of the number in each word.
        lanes: numbers of a word.
    """

    begin: int
    size: int
    lane: int
    lanes: int

    @property
    def words(self) -> jax.Array:
        """Places of the words in a head's."""
        return self.begin + jnp.arange(self.size)[None, :]

    @property
    def columns(self) -> jax.Array:
        """Places of the numbers in a head."""
        return self.lanes * self.words + self.lane


def is_paired(layout: KVLayout) -> bool:
    """Return True if the pool's numbers come in pairs: 8-bit numbers, if halves of a head are wide enough."""
    return layout.is_scaled and layout.head_dim % 32 == 0


def pack_words(pool: jax.Array, layout: KVLayout) -> jax.Array:
    """Return the pool in the type that the kernel reads, which is free: a bitcast."""
    if not layout.is_scaled:
        return pool
    if not is_paired(layout):
        return lax.bitcast_convert_type(pool, jnp.int8)
    return lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], -1, 2), jnp.int16)


class _Memory(NamedTuple):
    """References to the kernel's arrays."""

    items: Any
    tables: Any
    layer: Any
    scales: Any
    q: Any
    pool: Any
    out: Any
    lse: Any
    part_out: Any
    part_max: Any
    part_sum: Any


class _TritonSoftmax(NamedTuple):
    """The online softmax so far: largest score in base 2, sum of weights, sums of weighted values by pieces."""

    max: jax.Array
    sum: jax.Array
    out: tuple[jax.Array, ...]


def attend_items(
    q_thd: jax.Array,
    pool: jax.Array,
    tables_sm: jax.Array,
    work: AttentionWork,
    layer: jax.Array,
    scales: jax.Array,
    static: TritonKernelParams,
) -> Attended:
    """Run both kernels.

    Args:
        q_thd: queries.
        pool: [P, B, 2K, D] (for latents [P, B, 1, D]), converted by `pack_words`.
        tables_sm: block ids within the layer.
        work: the list of work items.
        layer: [1].
        scales: [L, K, 2], or one number that is not read.
        static: compile-time constants.

    Returns:
        outputs [T, H, value's D] in the queries' type and log-sum-exps [T, H] of all tokens.
    """
    cut, kinds = static.cut, static.kinds
    layout = kinds[0].spec.layout
    num_groups = q_thd.shape[1] // cut.merged_tile.group
    merged_shape = (num_groups, max(1, cut.merged_rows))
    whole = (
        jax.ShapeDtypeStruct((*q_thd.shape[:2], output_dim(layout)), q_thd.dtype),
        jax.ShapeDtypeStruct(q_thd.shape[:2], jnp.float32),
    )
    sums = jax.ShapeDtypeStruct(merged_shape, jnp.float32)
    merged = (jax.ShapeDtypeStruct((*merged_shape, output_dim(layout)), jnp.float32), sums, sums)
    call = functools.partial(pl.pallas_call, interpret=static.is_interpreted)
    num_warps = max(kind.tile.num_warps(layout, q_thd.dtype) for kind in kinds)
    out, lse, *parts = call(
        functools.partial(_paged_attention, kinds, cut.merged_rows > 0),
        out_shape=(*whole, *merged),
        grid=(num_groups, cut.num_items),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
        name="paged_attention",
    )(work.items, tables_sm, layer, scales, q_thd, pool)
    if cut.merged_rows == 0:
        return out, lse
    out, lse = call(
        functools.partial(_paged_attention_merge, kinds, cut.merged_tile),
        out_shape=whole,
        grid=(num_groups, -(-q_thd.shape[0] // cut.merged_tile.num_tokens)),
        input_output_aliases={4: 0, 5: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="paged_attention_merge",
    )(work.merges, *parts, out, lse)
    return out, lse


def _paged_attention(kinds: tuple[_Kind, ...], has_merges: bool, *refs: Any) -> None:
    memory = _Memory(*refs)
    head, item = pl.program_id(0), pl.program_id(1)
    is_used = memory.items[item, TritonItemField.NUM_TOKENS] > 0
    different = dict.fromkeys(kinds)
    for kind in different:
        is_mine = is_used
        if len(different) > 1:
            lists = [
                memory.items[item, TritonItemField.LIST] == place for place, its in enumerate(kinds) if its == kind
            ]
            is_mine &= functools.reduce(operator.or_, lists)
        pl.when(is_mine)(functools.partial(_attend_item, item, head, memory, kind, has_merges))


def _attend_item(item: jax.Array, head: jax.Array, memory: _Memory, kind: _Kind, has_merges: bool) -> None:
    tile = kind.tile
    first_token, num_tokens = (
        memory.items[item, field] for field in (TritonItemField.FIRST_TOKEN, TritonItemField.NUM_TOKENS)
    )
    places = _Places.of(head, first_token, num_tokens, tile)
    queries = [
        plgpu.load(_at(memory.q, places, piece), mask=places.is_row[:, None], other=0).astype(
            kind.dtype(memory.q.dtype)
        )
        for piece in kind.pieces
    ]

    fields = _Item.of(item, head, memory, kind)

    def chunk(i: jax.Array, state: Any) -> Any:
        max_, sum_, *out = state
        new = _attend_chunk(i, _TritonSoftmax(max_, sum_, tuple(out)), queries, fields, memory, kind)
        return (new.max, new.sum, *new.out)

    max_, sum_, *out = lax.fori_loop(0, memory.items[item, TritonItemField.NUM_CHUNKS], chunk, _nothing(kind))
    state = _TritonSoftmax(max_, sum_, tuple(out))
    if kind.spec.layout.is_scaled:
        state = state._replace(out=tuple(x * _scale(1, fields.head, memory) for x in state.out))
    if not has_merges:
        _store(state, places, memory.out, memory.lse, kind)
        return
    first_row = memory.items[item, TritonItemField.MERGED_ROW]
    pl.when(first_row < 0)(lambda: _store(state, places, memory.out, memory.lse, kind))

    @pl.when(first_row >= 0)
    def _store_part() -> None:
        rows = first_row + jnp.arange(tile.rows)
        memory.part_max[head, rows] = state.max
        memory.part_sum[head, rows] = state.sum
        for piece, numbers in zip(kind.value_pieces, state.out, strict=True):
            memory.part_out[head, rows[:, None], piece.columns] = numbers


def _nothing(kind: _Kind) -> tuple[jax.Array, ...]:
    """Return the state before any key is seen, as a loop takes it."""
    rows = kind.tile.rows
    return (
        jnp.full((rows,), _LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        *(jnp.zeros((rows, piece.size), jnp.float32) for piece in kind.value_pieces),
    )


class _Item(NamedTuple):
    """Values that all chunks of an item share, in registers; see `TritonItemField`.

    Attributes:
        head: of keys and values.
        first_place: the layer's first block in the pool.
        scale: of the scores, including the scale of the head's keys.
    """

    head: jax.Array | int
    row: jax.Array
    position: jax.Array
    begin: jax.Array
    end: jax.Array
    first_key: jax.Array
    first_place: jax.Array
    scale: jax.Array | float

    @classmethod
    def of(cls, item: jax.Array, head: jax.Array, memory: _Memory, kind: _Kind) -> _Item:
        layout, kv_head = kind.spec.layout, kind.kv_head(head)
        return cls(
            head=kv_head,
            row=memory.items[item, TritonItemField.ROW],
            position=memory.items[item, TritonItemField.POSITION],
            begin=memory.items[item, TritonItemField.KV_BEGIN],
            end=memory.items[item, TritonItemField.KV_END],
            first_key=memory.items[item, TritonItemField.FIRST_KEY],
            first_place=memory.layer[0] * layout.blocks_per_layer,
            scale=kind.spec.kind.scale * (_scale(0, kv_head, memory) if layout.is_scaled else 1.0),
        )


class _Places(NamedTuple):
    """Token and query head of each row of a tile, and whether the row is in use."""

    token: jax.Array
    head: jax.Array
    is_row: jax.Array

    @classmethod
    def of(cls, head: jax.Array, first_token: jax.Array, num_tokens: jax.Array, tile: Tile) -> _Places:
        rows = jnp.arange(tile.rows, dtype=jnp.int32)
        tokens = lax.div(rows, jnp.int32(tile.group))
        return cls(first_token + tokens, head * tile.group + lax.rem(rows, jnp.int32(tile.group)), tokens < num_tokens)


def _at(ref: Any, places: _Places, piece: _HeadColumns) -> Any:
    return ref.at[places.token[:, None], places.head[:, None], piece.columns]


def _scale(part: int, head: jax.Array | int, memory: _Memory) -> jax.Array:
    """Return the scale by which this head's keys (0) or values (1) are divided in the pool."""
    return memory.scales[memory.layer[0], head, part]


def _attend_chunk(
    i: jax.Array,
    state: _TritonSoftmax,
    queries: list[jax.Array],
    item: _Item,
    memory: _Memory,
    kind: _Kind,
) -> _TritonSoftmax:
    spec, tile = kind.spec, kind.tile
    keys = item.first_key + i * tile.chunk_tokens + jnp.arange(tile.chunk_tokens, dtype=jnp.int32)
    is_context = (keys >= item.begin) & (keys < item.end)
    columns = lax.div(keys, jnp.int32(spec.layout.block_size))
    ids = plgpu.load(memory.tables.at[item.row, columns], mask=is_context, other=0)
    is_read = is_context & (ids >= 0) & (ids < spec.layout.blocks_per_layer)
    places = jnp.where(is_read, ids, 0) + item.first_place
    offsets = lax.rem(keys, jnp.int32(spec.layout.block_size))
    is_latent = spec.layout.value_dim is not None

    def read(part: int) -> list[jax.Array]:
        numbers = []
        for piece in kind.pieces[:: kind.lanes]:
            row = item.head if is_latent else 2 * item.head + part
            words = memory.pool.at[places[:, None], offsets[:, None], row, piece.words]
            found = plgpu.load(words, mask=is_read[:, None], other=0)
            numbers += [_number(found, lane, kind).astype(queries[0].dtype) for lane in range(kind.lanes)]
        return numbers

    scores, of_keys = jnp.zeros((tile.rows, tile.chunk_tokens), jnp.float32), read(0)
    for query, numbers in zip(queries, of_keys, strict=True):
        scores += _product(query, numbers.T)
    rows = lax.div(jnp.arange(tile.rows, dtype=jnp.int32), jnp.int32(tile.group))
    distances = (item.position + rows)[:, None] - keys[None, :]
    is_seen = is_context[None, :] & (distances >= 0)
    if spec.kind.sliding_window is not None:
        is_seen &= distances < spec.kind.sliding_window
    scores = jnp.where(is_seen, _capped(scores, item.scale, spec.kind.soft_cap), -jnp.inf)

    new_max = jnp.maximum(state.max, scores.max(axis=1))
    weights = jnp.exp2(scores - new_max[:, None])
    fade = jnp.exp2(state.max - new_max)
    of_values = of_keys[: len(kind.value_pieces)] if is_latent else read(1)
    out = tuple(
        total * fade[:, None] + _product(weights.astype(queries[0].dtype), numbers)
        for total, numbers in zip(state.out, of_values, strict=True)
    )
    return _TritonSoftmax(new_max, state.sum * fade + weights.sum(axis=1), out)


def _number(words: jax.Array, lane: int, kind: _Kind) -> jax.Array:
    """Return one number of each word; 8-bit numbers as 32-bit floats."""
    layout = kind.spec.layout
    if not layout.is_scaled:
        return words
    words = words.astype(jnp.int16)
    bits = words >> 8 if lane else (words << 8) >> 8  # with their sign
    if layout.dtype == jnp.int8:
        return bits.astype(jnp.float32)
    bits = (bits & -0x8000) | ((bits & 0x7F) << 7)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256.0


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _capped(scores: jax.Array, scale: jax.Array | float, soft_cap: float | None) -> jax.Array:
    """Return scores in base 2."""
    if soft_cap is None:
        return scores * (scale * _LOG2_E)
    # tanh by one power: the device's own is accurate to 3 digits.
    power = jnp.exp2(scores * (scale * (2 * _LOG2_E / soft_cap)))
    return (soft_cap * _LOG2_E) * (1 - 2 / (power + 1))


def _store(state: _TritonSoftmax, places: _Places, out: Any, lse: Any, kind: _Kind) -> None:
    """Write a tile's results; a row that has seen no key gets 0 and minus infinity."""
    has_keys = state.sum > 0
    total = jnp.where(has_keys, state.sum, 1.0)
    logarithms = jnp.where(has_keys, state.max * math.log(2.0) + jnp.log(total), -jnp.inf)
    plgpu.store(lse.at[places.token, places.head], logarithms, mask=places.is_row)
    for piece, numbers in zip(kind.value_pieces, state.out, strict=True):
        whole = (numbers / total[:, None]).astype(out.dtype)
        plgpu.store(_at(out, places, piece), whole, mask=places.is_row[:, None])


def _paged_attention_merge(kinds: tuple[_Kind, ...], tile: Tile, *refs: Any) -> None:
    """Merge the parts of some tokens' results, from all lists of rows."""
    merges, part_out, part_max, part_sum, _, _, out, lse = refs
    kind, num_tokens = _Kind(kinds[0].spec, tile), out.shape[0]
    head, first_token = pl.program_id(0), pl.program_id(1) * tile.num_tokens
    places = _Places.of(head, first_token, jnp.minimum(num_tokens - first_token, tile.num_tokens), tile)
    heads = places.head - head * tile.group

    def field(place: int, field: MergeField) -> jax.Array:
        return plgpu.load(merges.at[place, places.token, int(field)], mask=places.is_row, other=0)

    nums_parts = [field(place, MergeField.NUM_PARTS) for place in range(len(kinds))]
    is_merged = functools.reduce(jnp.maximum, nums_parts)

    def parts_of(place: int, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first_rows = field(place, MergeField.FIRST_ROW) + heads

        def part(i: jax.Array, state: Any) -> Any:
            max_, sum_, *sums = state
            is_part = i < nums_parts[place]
            rows = first_rows + i * kinds[place].tile.rows
            their_max = plgpu.load(part_max.at[head, rows], mask=is_part, other=_LOWEST)
            their_sum = plgpu.load(part_sum.at[head, rows], mask=is_part, other=0)
            new_max = jnp.maximum(max_, their_max)
            fade, share = jnp.exp2(max_ - new_max), jnp.exp2(their_max - new_max)
            found = []
            for piece, numbers in zip(kind.value_pieces, sums, strict=True):
                at = part_out.at[head, rows[:, None], piece.columns]
                found.append(numbers * fade[:, None] + plgpu.load(at, mask=is_part[:, None], other=0) * share[:, None])
            return (new_max, sum_ * fade + their_sum * share, *found)

        merged: tuple[jax.Array, ...] = lax.fori_loop(0, nums_parts[place].max(), part, state)
        return merged

    @pl.when(is_merged.max() > 0)
    def _merge() -> None:
        state = _nothing(kind)
        for place in range(len(kinds)):
            state = parts_of(place, state)
        max_, sum_, *sums = state
        _store(_TritonSoftmax(max_, sum_, tuple(sums)), places._replace(is_row=is_merged > 0), out, lse, kind)
