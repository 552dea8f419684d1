"""The kernel for TPUs: a layer's experts from rows to weighted sums, in one pass over the weights of the used experts.

grid (blocks of the inner width, used experts)

        gate [E, F]     up [E, F]      down [F, E]
         ┌───┬───┐      ┌───┬───┐      ┌───────┐       An expert's blocks are fetched while the rows of the previous
         │ * │   │      │ * │   │      │ *     │       expert are multiplied, whatever their number. Experts without
         └───┴───┘      └───┴───┘      ├───────┤       rows are not in the grid.
                                       └───────┘

    states, packed  ──gather──>  tile of rows ──> gates, ups ──> inner ──> results ──add, weighted──>  sums
    [T, E/256, 128]              [R, E]                                                               [T, E/128, 128]

States and sums stay in vector memory. A row takes whole registers there, so that few instructions copy or add it. The
list of each expert's rows is in scalar memory. So neither the sorted rows nor their results are arrays in the device's
memory. A row's results are added in ascending order of the experts.

Numbers of 4 bits, floats of 8 bits and numbers with scales of groups become bfloat16 chunk by chunk, once for all rows
of an expert. Matrix units multiply with one chunk while the next is converted:

    word of 8 codes   7 6 5 4 3 2 1 0     A mask leaves codes j and j + 4 in the two halves of a word, where a few
    j = 1             . . 5 . . . 1 .     operations on whole words convert both.

So the rows of converted matrices have another order, in which states (`_reordered`) and inner values
(`_reordered_columns`) are multiplied.

Only functions that trace import Pallas: it takes a third as long as jax, and every model imports this module.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.experts.routing import Routes
from jpaged.kernels.experts.weights import ExpertWeights, flat, join
from jpaged.kernels.matmul.on_device import lowered_device
from jpaged.kernels.matmul.quantized import QuantizedMatrix, rounds_rows
from jpaged.kernels.matrix_format import NUM_BITS, VALUE_DTYPES, Values
from jpaged.kernels.mixture_kind import GateFunction

if TYPE_CHECKING:
    from jaxtyping import Array, Float

LANES = 128
_PACKED = 2 * LANES
_GROUP = 8
"""Rows that are gathered or added together. An expert has each token once, so they are different ones."""
_LEAST_ROWS, _MOST_ROWS = 64, 256
"""Rows of a tile: 64 take a tenth longer than 16, and 128 a quarter, because matrix units load their weights first."""
_LEAST_COLUMNS, _LEAST_OF_MANY_ROWS = 2 * LANES, 8 * LANES
"""Columns of a block, if the inner width does not fit. Each block gathers and adds all rows again: with 1024 columns
that takes half as long as its products, which only memory hides."""
_MANY_ROWS = 128
"""Rows of an expert above which products take about as long as memory."""
_NUM_SUBLANES = 32
"""Rows of a register of 8-bit numbers: depths are whole ones."""
_MAX_ROUTES = 1 << 16
"""Tokens and weights of routes take 8 bytes each of scalar memory, which has 1 MiB."""
_CODES_OF_WORD: Mapping[Values, int] = {"mxfp4": 8, "int4": 8, "fp8": 4, "int8": 2}
"""Numbers of a column that are unpacked from a word of 32 bits; int8 is converted by the hardware, in pairs."""
_PAIR = 16
"""Rows of a register of bfloat16: two in a word."""
_CHUNK_DEPTH, _CHUNK_COLUMNS = 2 * LANES, 2 * LANES
"""Numbers that are converted, and then multiplied, together: as many as a matrix unit holds."""
_VMEM_BYTES, _LARGE_VMEM_BYTES = 56 << 20, 100 << 20
_LARGE_KINDS = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
"""Kinds of devices with 128 MiB of vector memory; others have 64 MiB."""


@dataclass(frozen=True, slots=True)
class ExpertsForm:
    """Sizes of a call.

    Attributes:
        num_tokens: T.
        width: E.
        inner: F.
        tile_rows: rows of an expert that are multiplied together.
        block: columns of gates and ups in a block; the last block may extend beyond the matrices.
        gate: the gate function.
        vmem_bytes: limit of the kernel's vector memory.
        values: type of the weights; None is bfloat16.
        group_sizes: numbers that share a scale, of gates and ups and of downs; None is all of a column.
        is_interpreted: for tests.
    """

    num_tokens: int
    width: int
    inner: int
    tile_rows: int
    block: int
    gate: GateFunction
    vmem_bytes: int
    values: Values | None = None
    group_sizes: tuple[int | None, int | None] = (None, None)
    is_interpreted: Any = False

    @property
    def is_unpacked(self) -> bool:
        """True if instructions convert weights chunk by chunk, and not the whole block in a matmul."""
        return self.values not in (None, "int8") or self.group_sizes != (None, None)

    @property
    def keeps_weights(self) -> bool:
        """True if an expert may have several tiles of rows, for which converted weights are kept."""
        return self.is_unpacked and self.num_tokens > self.tile_rows

    @property
    def unit(self) -> int:
        """Rows of matrices that are reordered together; 1 if none are."""
        num_codes = 2 if self.values is None else _CODES_OF_WORD[self.values]
        return 1 if num_codes == 2 else 8 * num_codes

    @property
    def num_blocks(self) -> int:
        """Blocks of the inner width."""
        return -(-self.inner // self.block)

    @property
    def stride(self) -> int:
        """Lines between those of a row: odd, so that they are in different banks and one instruction reads them."""
        return self.tile_rows + 1

    @property
    def row_words(self) -> int:
        """Lines of 128 words of a packed state: two numbers of 16 bits share a word."""
        return -(-self.width // _PACKED)

    @property
    def row_sums(self) -> int:
        """Lines of 128 numbers of a row of sums."""
        return -(-self.width // LANES)


def find_form(x_te: jax.Array, routes: Routes, weights: ExpertWeights, gate: GateFunction) -> ExpertsForm | None:
    """Return the sizes of a call on the device that is lowered for; None if the kernel does not support it."""
    device = lowered_device()
    matrices = [flat(each)[0] for each in (weights.gate, weights.up, weights.down)]
    if device is None or device.platform != "tpu" or x_te.dtype != jnp.bfloat16:
        return None
    if not all(map(_takes, matrices)) or len({_kind(each) for each in matrices}) > 1:
        return None
    shape = (*x_te.shape, matrices[2].shape[1], routes.ids_tk.shape[1])
    sizes = _group_size(matrices[1]), _group_size(matrices[2])
    if _group_size(matrices[0]) != sizes[0] or shape[1] % _NUM_SUBLANES or shape[2] % _NUM_SUBLANES:
        return None
    form = choose_form(shape, weights.num_experts, gate, device.device_kind, _kind(matrices[2])[0], sizes)
    return None if form is None or shape[1] % form.unit or shape[2] % form.unit else form


def _takes(matrices: Any) -> bool:
    """Return True for bfloat16, and for fewer bits whose groups are whole words and whose rows are not rounded."""
    if not isinstance(matrices, QuantizedMatrix):
        return bool(matrices.dtype == jnp.bfloat16)
    if matrices.group_ids is not None or rounds_rows(matrices):
        return False
    num_codes, size = _CODES_OF_WORD[_kind(matrices)[0]], matrices.group_size
    if matrices.num_groups == 1:
        return matrices.zeros is None
    if matrices.zeros is not None and matrices.zeros.dtype != jnp.int8:
        return False
    return size % _CHUNK_DEPTH == 0 or (_CHUNK_DEPTH % size == 0 and size % num_codes == 0)


def _kind(matrices: Any) -> tuple[Any, bool]:
    """Return the type of the weights, None for bfloat16, and whether they have zero points."""
    if not isinstance(matrices, QuantizedMatrix):
        return None, False
    names = {dtype: name for name, dtype in VALUE_DTYPES.items()}
    return names[np.dtype(matrices.values.dtype)], matrices.zeros is not None


def _group_size(matrices: Any) -> int | None:
    if not isinstance(matrices, QuantizedMatrix) or matrices.num_groups == 1:
        return None
    return matrices.group_size


def _values(matrices: Any) -> Any:
    return matrices.values if isinstance(matrices, QuantizedMatrix) else matrices


def choose_form(
    shape: tuple[int, int, int, int],
    num_experts: int,
    gate: GateFunction,
    device_kind: str,
    values: Values | None = None,
    group_sizes: tuple[int | None, int | None] = (None, None),
) -> ExpertsForm | None:
    """Return the sizes for T tokens of width E with K of X experts of inner width F; None if they do not fit.

    Args:
        shape: T, E, F, K.
        num_experts: X.
        gate: the gate function.
        device_kind: as jax names the device.
        values, group_sizes: as of `ExpertsForm`.
    """
    num_tokens, width, inner, top_k = shape
    limit = _LARGE_VMEM_BYTES if device_kind.startswith(_LARGE_KINDS) else _VMEM_BYTES
    even = -(-num_tokens * top_k // num_experts)
    tile_rows = min(max(_rounded_up(even + even // 4, 32), _LEAST_ROWS), _rounded_up(num_tokens, 16), _MOST_ROWS)
    form = ExpertsForm(num_tokens, width, inner, tile_rows, inner, gate, limit, values, group_sizes)
    of_rows = (num_tokens + _GROUP) * width * 6 + tile_rows * width * (22 if form.is_unpacked else 16)
    most = int((limit - of_rows - (4 << 20)) // (_bytes_of_column(form) + tile_rows * 16))
    least = _LEAST_COLUMNS if even <= _MANY_ROWS else _LEAST_OF_MANY_ROWS
    if num_tokens * top_k > _MAX_ROUTES or most < min(least, inner):
        return None
    if most >= inner:
        return form
    # Scales of downs come in blocks, too: of whole registers.
    unit = math.lcm(LANES, 8 * (group_sizes[1] or 1))
    if most < unit:
        return None
    num_blocks = -(-inner // (most // unit * unit))
    return dataclasses.replace(form, block=-(-inner // (num_blocks * unit)) * unit)


def _bytes_of_column(form: ExpertsForm) -> float:
    """Return the vector memory of a column of gates and ups and a row of downs: two blocks, and converted weights."""
    num_bytes = 2.0 if form.values is None else NUM_BITS[form.values] / 8
    of_number = 2 * num_bytes + (2 * form.keeps_weights if form.is_unpacked else 4 * (form.values is not None))
    sizes = [form.group_sizes[0]] * (2 if form.gate.has_gates else 1) + [form.group_sizes[1]]
    return form.width * sum(of_number + (16 / size if size else 0) for size in sizes)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows of each used expert, for scalar memory.

    Attributes:
        matrices_s: int32 `[S]`: the matrix of each expert with rows, in their order; then others.
        experts_s: int32 `[S]`: its number in the layer.
        starts_s: int32 `[S]`: the expert's first row in `tokens_p`.
        counts_s: int32 `[S]`: the expert's number of rows.
        num_used: int32 `[1]`: experts with rows.
        tokens_p: int32 `[P]`: rows sorted by expert, and `_GROUP` more.
        weights_p: float32 `[P]`: their weights.
    """

    matrices_s: jax.Array
    experts_s: jax.Array
    starts_s: jax.Array
    counts_s: jax.Array
    num_used: jax.Array
    tokens_p: jax.Array
    weights_p: jax.Array

    @classmethod
    def sort(cls, routes: Routes, num_experts: int, first: jax.Array | int) -> ExpertRows:
        """Sort the routes by expert.

        Args:
            first: index of the layer's first matrix.
        """
        num_tokens, top_k = routes.ids_tk.shape
        ids, places = routes.ids_tk.reshape(-1), jnp.arange(num_tokens * top_k, dtype=jnp.int32)
        weights = routes.weights_tk.reshape(-1).astype(jnp.float32)
        _, order, weights = jax.lax.sort((ids, places, weights), num_keys=1, is_stable=True)
        counts = jnp.sum(jnp.arange(num_experts, dtype=ids.dtype)[:, None] == ids, axis=1, dtype=jnp.int32)
        used = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)[: len(ids)]
        starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
        return cls(
            first + used,
            used,
            starts[used],
            counts[used],
            jnp.sum(counts > 0, dtype=jnp.int32)[None],
            jnp.pad(order // top_k, (0, _GROUP)),
            jnp.pad(weights, (0, _GROUP)),
        )


def apply(x_te: Float[Array, "T E"], routes: Routes, weights: ExpertWeights, form: ExpertsForm) -> Float[Array, "T E"]:
    """Return the weighted sum of the outputs of each row's experts, without the last bias, in float32."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    down, first = flat(weights.down)
    rows = ExpertRows.sort(routes, weights.num_experts, first)
    inner = [flat(each)[0] for each in ((weights.gate,) if form.gate.has_gates else ()) + (weights.up,)]
    quantized = [each for each in (*inner, down) if isinstance(each, QuantizedMatrix)]
    factors = [each.scales for each in quantized] + [each.zeros for each in quantized if each.zeros is not None]
    biases: list[Any] = [weights.gate_bias, weights.up_bias][-len(inner) :] if weights.up_bias is not None else []
    has_zeros = len(factors) > len(quantized)
    counts = len(inner), len(quantized), len(quantized) * has_zeros, len(biases)
    lines = form.row_sums
    num_weights = form.width * form.inner * (len(inner) + 1)
    sums: jax.Array = pl.pallas_call(
        lambda *arrays: _kernel(_ExpertRefs.of(arrays, *counts), form),
        name="experts",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=_NUM_LISTS,
            grid=(form.num_blocks, jnp.maximum(rows.num_used[0], 1)),
            in_specs=_specs(form, *counts),
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=[
                pltpu.VMEM((form.row_words * form.stride, LANES), jnp.uint32),
                pltpu.VMEM((lines * form.stride, LANES), jnp.float32),
                *_unpacked_shapes(form, len(inner), has_zeros=has_zeros),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((form.num_tokens, lines, LANES), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=form.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(rows.tokens_p) * num_weights,
            transcendentals=0,
            bytes_accessed=jax.dtypes.itemsize_bits(_values(down).dtype) // 4 * len(rows.matrices_s) * num_weights // 2,
        ),
        interpret=form.is_interpreted,
    )(
        *(rows.matrices_s, rows.experts_s, rows.starts_s, rows.counts_s, rows.tokens_p, rows.weights_p),
        *(pack(_reordered(x_te, form)), *map(_values, inner), _values(down), *factors),
        *(bias[:, None, :] for bias in biases),
    )
    return sums.reshape(form.num_tokens, -1)[:, : form.width]


_NUM_LISTS = 6
"""Arrays in scalar memory."""


def _specs(form: ExpertsForm, num_inner: int, num_scales: int, num_zeros: int, num_biases: int) -> list[Any]:
    """Return the blocks of the states, of gates and ups, of down, and of their scales, zero points and biases."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def inner_block(f: Any, s: Any, matrices_s: Any, *_: Any) -> tuple[Any, Any, Any]:
        return matrices_s[s], 0, f

    def down_block(f: Any, s: Any, matrices_s: Any, *_: Any) -> tuple[Any, Any, Any]:
        return matrices_s[s], f, 0

    def bias_block(f: Any, s: Any, _: Any, experts_s: Any, *others: Any) -> tuple[Any, Any, Any]:
        del others
        return experts_s[s], 0, f

    of_inner, of_down = form.group_sizes
    inner_groups, down_groups = form.width // of_inner if of_inner else 1, form.block // of_down if of_down else 1
    factors = [pl.BlockSpec((1, inner_groups, form.block), inner_block)] * num_inner
    down_place = down_block if of_down else lambda f, s, matrices_s, *_: (matrices_s[s], 0, 0)
    factors += [pl.BlockSpec((1, down_groups, form.width), down_place)]
    specs = [pl.BlockSpec(memory_space=pltpu.VMEM)]
    specs += [pl.BlockSpec((1, form.width, form.block), inner_block)] * num_inner
    specs += [pl.BlockSpec((1, form.block, form.width), down_block)]
    specs += factors * (bool(num_scales) + bool(num_zeros))
    return specs + [pl.BlockSpec((1, 1, form.block), bias_block)] * num_biases


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class _UnpackedRefs:
    """Scratch memory of weights that are converted.

    Attributes:
        weights: of each matrix in words of two, if they are kept; or none.
        scales, zeros: of each matrix, two of a word; or none.
        states: a tile of rows in chunks of the depth.
        inner: the same of inner values.
        sums: of gates and ups, then of downs.
    """

    weights: Any
    scales: Any
    zeros: Any
    states: Any
    inner: Any
    sums: Any


def _unpacked_shapes(form: ExpertsForm, num_inner: int, *, has_zeros: bool) -> list[Any]:
    from jax.experimental.pallas import tpu as pltpu

    if not form.is_unpacked:
        return []
    shapes = [(form.width, form.block)] * num_inner + [(form.block, form.width)]
    sizes = [form.group_sizes[0]] * num_inner + [form.group_sizes[1]]
    weights = [pltpu.VMEM((depth // 2, columns), jnp.int32) for depth, columns in shapes if form.keeps_weights]
    scales = [
        pltpu.VMEM((-(-depth // _CHUNK_DEPTH), _rounded_up(_groups_of_chunk(size), 8), columns), jnp.int32)
        for (depth, columns), size in zip(shapes, sizes, strict=True)
        if size
    ]

    def chunks(depth: int) -> Any:
        return pltpu.VMEM((-(-depth // _CHUNK_DEPTH), form.tile_rows, _CHUNK_DEPTH), jnp.bfloat16)

    sums = [pltpu.VMEM((form.tile_rows, columns), jnp.float32) for _, columns in shapes]
    zeros = scales if has_zeros else []
    return [_UnpackedRefs(weights, scales, zeros, chunks(form.width), chunks(form.block), sums)]


def pack(x_te: Float[Array, "T E"]) -> jax.Array:
    """Return states `[T, E / 256, 128]` of 32 bits: a number of the first half, and above it one of the second."""
    num_tokens, width = x_te.shape
    x_te = jnp.pad(x_te, ((0, 0), (0, -width % _PACKED)))
    low, high = jnp.split(jax.lax.bitcast_convert_type(x_te, jnp.uint16).astype(jnp.uint32), 2, axis=1)
    return (low | (high << 16)).reshape(num_tokens, -1, LANES)


def _unpack(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the lower and the upper numbers of 16 bits."""
    low = jax.lax.bitcast_convert_type(words << 16, jnp.float32)
    high = jax.lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return low.astype(jnp.bfloat16), high.astype(jnp.bfloat16)


@dataclass(frozen=True, slots=True)
class _ExpertRefs:
    """Arrays that the kernel reads and writes: as `ExpertRows`, then blocks, sums, and scratch memory for a tile.

    Attributes:
        inner: gate and up, or only up.
        scales, zeros: of these and of down, or none.
        biases: of the first, or none.
        tile: rows of states; line i of row r is at `i * stride + r`.
        results: rows of sums, in the same places.
        unpacked: if weights are converted.
    """

    starts: Any
    counts: Any
    tokens: Any
    weights: Any
    states: Any
    inner: Sequence[Any]
    down: Any
    scales: Sequence[Any]
    zeros: Sequence[Any]
    biases: Sequence[Any]
    sums: Any
    tile: Any
    results: Any
    unpacked: Any = None

    @classmethod
    def of(cls, arrays: Sequence[Any], num_inner: int, num_scales: int, num_zeros: int, num_biases: int) -> _ExpertRefs:
        """Name the arrays in the order of the call."""
        left = iter(arrays[2:])

        def take(num: int) -> list[Any]:
            return [next(left) for _ in range(num)]

        lists, inner, down = take(5), take(num_inner), next(left)
        named: list[Any] = [*lists, inner, down, take(num_scales), take(num_zeros), take(num_biases), *left]
        return cls(*named)


def _kernel(refs: _ExpertRefs, form: ExpertsForm) -> None:
    from jax.experimental import pallas as pl

    f, s, size = pl.program_id(0), pl.program_id(1), form.tile_rows
    start, count = refs.starts[s], refs.counts[s]

    @pl.when((f == 0) & (s == 0))
    def _clear() -> None:
        def clear(token: Any, _: None) -> None:
            refs.sums[token] = jnp.zeros((form.row_sums, LANES), jnp.float32)

        jax.lax.fori_loop(0, form.num_tokens, clear, None)

    matrices = _coded_matrices(refs, form, f) if form.is_unpacked else []

    def run_tile(i: Any, _: None) -> None:
        first, num = start + i * size, jnp.minimum(count - i * size, size)
        _gather(refs, form, first, num)
        if form.keeps_weights:
            pl.when(i == 0)(lambda: _multiply_coded(refs, form, f, matrices))
            pl.when(i > 0)(lambda: _multiply_coded(refs, form, f, matrices, is_converted=True))
        elif form.is_unpacked:
            _multiply_coded(refs, form, f, matrices)
        else:
            _multiply(refs, form, f)
        _add(refs, form, first, num)

    jax.lax.fori_loop(0, jax.lax.div(count + size - 1, size), run_tile, None)


def _for_groups(num: Any, of_group: Callable[[Any], None]) -> None:
    """Call for the first row of each group of rows; the last group may have fewer of them."""
    jax.lax.fori_loop(0, (num + _GROUP - 1) >> 3, lambda group, _: of_group(group * _GROUP), None)


def _gather(refs: _ExpertRefs, form: ExpertsForm, first: Any, num: Any) -> None:
    """Copy the states of a tile's rows, and of up to 7 more."""
    from jax.experimental import pallas as pl

    def copy(begin: Any) -> None:
        for row in range(_GROUP):
            token = refs.tokens[first + begin + row]
            refs.tile[pl.ds(begin + row, form.row_words, stride=form.stride), :] = refs.states[token]

    _for_groups(num, copy)


def _multiply(refs: _ExpertRefs, form: ExpertsForm, f: Any) -> None:
    """Multiply a tile with block f."""
    parts = _read_tile(refs, form)
    x = jnp.concatenate(parts, axis=1)[:, : form.width]
    products = [_dot(x, ref[0].astype(x.dtype)) for ref in refs.inner]
    inner, down = _join(products, refs, form, f).astype(x.dtype), refs.down[0].astype(x.dtype)
    if form.inner % form.block:
        left = form.inner - f * form.block  # beyond the matrices there is anything, even NaN
        down = jnp.where(jax.lax.broadcasted_iota(jnp.int32, down.shape, 0) < left, down, jnp.zeros_like(down))
    _write_results(_dot(inner, down), refs, form)


def _read_tile(refs: _ExpertRefs, form: ExpertsForm) -> list[jax.Array]:
    """Return a tile of rows, 128 columns after the others."""
    from jax.experimental import pallas as pl

    parts = [_unpack(refs.tile[pl.ds(i * form.stride, form.tile_rows), :]) for i in range(form.row_words)]
    return [low for low, _ in parts] + [high for _, high in parts]


def _join(products: list[jax.Array], refs: _ExpertRefs, form: ExpertsForm, f: Any) -> jax.Array:
    """Return the inner values of block f; zeros beyond the matrices, where products are anything, even NaN."""
    if refs.scales and form.group_sizes[0] is None:
        products = [y * ref[0] for y, ref in zip(products, refs.scales[:-1], strict=True)]
    if refs.biases:
        products = [y + ref[0].astype(jnp.float32) for y, ref in zip(products, refs.biases, strict=True)]
    inner = join(form.gate, products[0], products[-1])
    if form.inner % form.block == 0:
        return inner
    left = form.inner - f * form.block
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, inner.shape, 1) < left, inner, 0.0)


def _write_results(y: jax.Array, refs: _ExpertRefs, form: ExpertsForm) -> None:
    from jax.experimental import pallas as pl

    y = y * refs.scales[-1][0] if refs.scales and form.group_sizes[1] is None else y
    for i in range(form.row_sums):
        columns = y[:, i * LANES : (i + 1) * LANES]
        refs.results[pl.ds(i * form.stride, form.tile_rows), : columns.shape[1]] = columns


def _reordered(x_te: jax.Array, form: ExpertsForm) -> jax.Array:
    """Return states in the order of the rows of converted weights."""
    if form.unit == 1:
        return x_te
    units = x_te.reshape(len(x_te), -1, 8, 2, form.unit // 16)
    return units.transpose(0, 1, 4, 2, 3).reshape(x_te.shape)


def _reordered_columns(inner: jax.Array, form: ExpertsForm) -> jax.Array:
    """Return inner values in the order of the rows of converted weights: a matmul is faster than moves of lanes."""
    if form.unit == 1:
        return inner
    place = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    own, half = place & (form.unit - 1), form.unit // 16
    row = (own & 15) // 2 * 2 * half + (own & 1) * half + own // 16 + place - own
    moves = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0) == row).astype(jnp.bfloat16)
    parts = []
    for i in range(0, inner.shape[1], LANES):
        part = inner[:, i : i + LANES]
        size = part.shape[1]
        parts.append(_dot(part, moves[:size, :size]).astype(inner.dtype))
    return jnp.concatenate(parts, axis=1)


def _multiply_coded(
    refs: _ExpertRefs, form: ExpertsForm, f: Any, matrices: Sequence[_CodedMatrix], *, is_converted: bool = False
) -> None:
    """Multiply a tile with block f.

    Args:
        is_converted: the weights were kept from the previous tile.
    """
    own = refs.unpacked
    for i, part in enumerate(_read_tile(refs, form)):
        own.states[i // 2, :, i % 2 * LANES : (i % 2 + 1) * LANES] = part
    _add_products(own.states, matrices[:-1], own.sums[:-1], is_converted=is_converted)
    inner = _join([ref[...] for ref in own.sums[:-1]], refs, form, f)
    inner = _reordered_columns(inner.astype(jnp.bfloat16), form)
    for i in range(own.inner.shape[0]):
        part = inner[:, i * _CHUNK_DEPTH : (i + 1) * _CHUNK_DEPTH]
        own.inner[i, :, : part.shape[1]] = part
    _add_products(own.inner, matrices[-1:], own.sums[-1:], is_converted=is_converted)
    _write_results(own.sums[-1][...], refs, form)


def _add_products(rows: Any, matrices: Sequence[_CodedMatrix], sums: Sequence[Any], *, is_converted: bool) -> None:
    """Multiply rows with matrices of the same depth: a chunk is converted while another is multiplied."""
    depth = matrices[0].depth
    for each in sums:
        each[...] = jnp.zeros_like(each)

    def add(i: Any, size: int) -> None:
        x = rows[i][:, :size]
        for matrix, y in zip(matrices, sums, strict=True):
            for begin in range(0, matrix.num_columns, _CHUNK_COLUMNS):
                own = slice(begin, min(begin + _CHUNK_COLUMNS, matrix.num_columns))
                weights = matrix.read(i * _CHUNK_DEPTH, size, own) if is_converted else matrix.convert(i, size, own)
                y[:, own] += _dot(x, weights)

    jax.lax.fori_loop(0, depth // _CHUNK_DEPTH, lambda i, _: add(i, _CHUNK_DEPTH), None)
    if depth % _CHUNK_DEPTH:
        add(depth // _CHUNK_DEPTH, depth % _CHUNK_DEPTH)


def _coded_matrices(refs: _ExpertRefs, form: ExpertsForm, f: Any) -> list[_CodedMatrix]:
    """Return an expert's matrices in block f, and prepare their scales."""
    own, blocks = refs.unpacked, [*refs.inner, refs.down]
    sizes = [form.group_sizes[0]] * len(refs.inner) + [form.group_sizes[1]]
    assert form.values is not None
    matrices, scales, zeros = [], iter(own.scales), iter(own.zeros)
    for i, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        words: list[Any] = [None, None]
        if size is not None:
            left = form.inner - f * form.block if block is refs.down and form.inner % form.block else None
            words[0] = _repeat_in_words(refs.scales[i], next(scales), size, left, _SCALED.get(form.values, 1.0))
            if refs.zeros:
                shift = _SHIFTED.get(form.values, 0.0)
                words[1] = _repeat_in_words(refs.zeros[i], next(zeros), size, left, shift=shift)
        kept = own.weights[i] if own.weights else None
        matrices.append(_CodedMatrix(form.values, block, size, words[0], words[1], kept))
    return matrices


@dataclass(frozen=True, slots=True)
class _CodedMatrix:
    """A block of a matrix in vector memory.

    Attributes:
        values: type of the numbers.
        codes: the numbers `[1, K, N]`.
        group_size: numbers that share a scale; None if products are scaled.
        scales, zeros: of each group, two of a word; or None.
        kept: converted numbers, two in a word; or None.
    """

    values: Values
    codes: Any
    group_size: int | None
    scales: Any
    zeros: Any
    kept: Any

    @property
    def depth(self) -> int:
        """K."""
        return int(self.codes.shape[1])

    @property
    def num_columns(self) -> int:
        """N."""
        return int(self.codes.shape[2])

    def read(self, first: Any, size: int, own: slice) -> jax.Array:
        """Return converted weights that were kept."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.bitcast(self.kept[pl.ds(first // 2, size // 2), own], jnp.bfloat16)

    def convert(self, i: Any, size: int, own: slice) -> jax.Array:
        """Convert rows of chunk i and some columns to bfloat16, and keep them for further tiles."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        first, num_codes = i * _CHUNK_DEPTH, _CODES_OF_WORD[self.values]
        codes = self.codes[0, pl.ds(first, size), own]
        codes = codes.astype(jnp.bfloat16) if num_codes == 2 else pltpu.bitcast(codes, jnp.int32)
        unit, found = 8 * num_codes, []
        lines = len(codes) * unit // size
        for at in range(0, size, unit):
            part = codes[at // unit * lines : (at // unit + 1) * lines]
            found += _CONVERSIONS[self.values](
                part, self._factors(self.scales, i, at, own), self._factors(self.zeros, i, at, own)
            )
        weights = jnp.concatenate(found, axis=0)
        if self.kept is not None:
            self.kept[pl.ds(first // 2, size // 2), own] = pltpu.bitcast(weights, jnp.int32)
        return weights

    def _factors(self, words: Any, i: Any, at: int, own: slice) -> jax.Array | None:
        """Return those of a unit of rows of chunk i, two rows in a line of words."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        if words is None or self.group_size is None:
            return None
        size, num_codes = self.group_size, _CODES_OF_WORD[self.values]
        unit = 8 * num_codes
        rows = [words[i, pl.ds(begin // size, 1), own] for begin in range(at, at + unit, min(size, unit))]
        found = jnp.broadcast_to(rows[0], (8, own.stop - own.start))
        line = jax.lax.broadcasted_iota(jnp.int32, found.shape, 0)
        for number, row in enumerate(rows[1:], 1):
            found = jnp.where(line < number * size // num_codes, found, row)
        return pltpu.bitcast(found, jnp.bfloat16)


def _repeat_in_words(ref: Any, words: Any, size: int, left: Any, factor: float = 1.0, shift: float = 0.0) -> Any:
    """Write each number of a block, rounded to bfloat16, to both halves of a word; zeros beyond the matrix."""
    numbers = ref[0].astype(jnp.float32) * factor + shift
    if left is not None:
        is_own = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, 0) * size < left
        numbers = jnp.where(is_own, numbers, 0.0)
    bits = jax.lax.bitcast_convert_type(numbers.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32)
    found = jax.lax.bitcast_convert_type(bits | (bits >> 16), jnp.int32)
    num = _groups_of_chunk(size)
    for i in range(words.shape[0]):
        part = found[i * _CHUNK_DEPTH // size :][:num]
        words[i, : len(part), :] = part
    return words


def _groups_of_chunk(size: int) -> int:
    return max(1, _CHUNK_DEPTH // size)


def _convert_pairs(values: jax.Array, scales: jax.Array | None, zeros: jax.Array | None) -> list[jax.Array]:
    return [_scaled(values if zeros is None else values - zeros, scales)]


def _scaled(numbers: jax.Array, scales: jax.Array | None) -> jax.Array:
    return numbers if scales is None else numbers * scales


def _convert_int4(words: jax.Array, scales: jax.Array | None, zeros: jax.Array | None) -> list[jax.Array]:
    """Return numbers j and j + 4 of each word: as the last bits of 136 + number."""
    from jax.experimental.pallas import tpu as pltpu

    found = []
    for j in range(4):
        shifted = ((words >> 4 * j if j else words) & 0x000F000F) ^ 0x43084308
        numbers = pltpu.bitcast(shifted, jnp.bfloat16) - (jnp.bfloat16(136) if zeros is None else zeros)
        found.append(_scaled(numbers, scales))
    return found


def _convert_mxfp4(words: jax.Array, scales: jax.Array | None, zeros: jax.Array | None) -> list[jax.Array]:
    """Return numbers j and j + 4 of each word: a sign, and two bits of the exponent and one of the mantissa.

    The bits of a magnitude are added to those of a bfloat16. If the exponent is 0, they differ: 1/2 has the bits of 0.
    Every number except 0 has one more bit, of the larger exponent, so 0 becomes 2**-33.

    Args:
        scales: powers of two, times 2**-33.
    """
    from jax.experimental.pallas import tpu as pltpu

    del zeros
    least = jnp.full((2 * len(words), words.shape[1]), _SCALED["mxfp4"], jnp.bfloat16) if scales is None else scales
    has_exponent = ((words >> 1) | (words >> 2)) & 0x11111111
    signs, magnitudes = words | has_exponent, words & (has_exponent | np.int32(-0x11111112))
    found = []
    for j in range(4):
        ends = (signs << (12 - 4 * j) if j < 3 else signs) & np.int32(-0x6FFF7000)
        middle = (magnitudes << (6 - 4 * j) if j < 2 else magnitudes >> (4 * j - 6)) & 0x01C001C0
        found.append(pltpu.bitcast((ends | middle) + pltpu.bitcast(least, jnp.int32), jnp.bfloat16))
    return found


def _convert_fp8(words: jax.Array, scales: jax.Array | None, zeros: jax.Array | None) -> list[jax.Array]:
    """Return numbers j and j + 2 of each word: a sign, four bits of the exponent and three of the mantissa.

    The magnitude's bits are those of a bfloat16 with another exponent, unless the exponent is 0. Such
    a number becomes `least <= t < 2 * least` and stands for `2 * (t - least)`, which is less than `t` only then.
    """
    from jax.experimental.pallas import tpu as pltpu

    del zeros
    least, found = jnp.bfloat16(2.0**-7), []
    for upper in (words << 8, words):
        larger = pltpu.bitcast(((upper >> 4) & 0x07F007F0) + 0x3C003C00, jnp.bfloat16)
        above = larger - least
        magnitudes = jnp.minimum(larger, above + above)
        signs = upper & np.int32(-0x7FFF8000)
        found.append(_scaled(pltpu.bitcast(pltpu.bitcast(magnitudes, jnp.int32) | signs, jnp.bfloat16), scales))
    return found


_SCALED: Mapping[Any, float] = {"mxfp4": 2.0**-33}
_SHIFTED: Mapping[Any, float] = {"int4": 136.0}
"""What scales are multiplied by, and what is added to zero points, before weights are converted."""
_CONVERSIONS: Mapping[Values, Callable[[jax.Array, jax.Array | None, jax.Array | None], list[jax.Array]]] = {
    "int8": _convert_pairs,
    "int4": _convert_int4,
    "mxfp4": _convert_mxfp4,
    "fp8": _convert_fp8,
}


def _add(refs: _ExpertRefs, form: ExpertsForm, first: Any, num: Any) -> None:
    """Add the weighted results of a tile's rows to the sums of their tokens.

    All sums of a group are read before one is written. Places after the last row take the first row's token, and write
    its old sum back before that row writes the new one.
    """
    from jax.experimental import pallas as pl

    def add(begin: Any) -> None:
        found = []
        for i in range(_GROUP):
            row = begin + i
            is_own = row < num
            token = refs.tokens[first + jnp.where(is_own, row, begin)]
            y = refs.results[pl.ds(row, form.row_sums, stride=form.stride), :] * refs.weights[first + row]
            total = refs.sums[token]
            found.append((token, jnp.where(is_own, total + y, total)))
        for token, total in reversed(found):
            refs.sums[token] = total

    _for_groups(num, add)


def _dot(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.lax.dot(x, weights, preferred_element_type=jnp.float32)
