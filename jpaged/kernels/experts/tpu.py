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

Numbers of 4 bits, and floats of 8 bits, become bfloat16 in vector memory, once for all rows of an expert:

    word of 8 codes   7 6 5 4 3 2 1 0     a mask leaves codes j and j + 4, which are the two halves of a word: a few
    j = 1             . . 5 . . . 1 .     operations on whole words convert both at their places

So rows of matrices come in the order of `order_of_depth`, and states and inner values are brought to it.

Only functions that trace import Pallas: it takes a third as long as jax, and every model imports this module.
"""

from __future__ import annotations

import dataclasses
import functools
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
_CHUNK_DEPTH, _CHUNK_COLUMNS = 256, 512
"""Numbers that are unpacked in one iteration."""
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
        """True if weights are converted once for all rows, and not by each matmul."""
        return self.values not in (None, "int8") or self.group_sizes != (None, None)

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
    unit = 8 * num_codes
    return size % unit == 0 or (unit % size == 0 and size % num_codes == 0)


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
    of_rows = (num_tokens + _GROUP) * width * 6 + tile_rows * width * 16
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
    """Return the vector memory of a column of gates and ups, and the row of downs: two blocks, and converted weights."""
    num_bytes = 2.0 if form.values is None else NUM_BITS[form.values] / 8
    of_number = 2 * num_bytes + (2 if form.is_unpacked else 4 * (form.values is not None))
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


def _unpacked_shapes(form: ExpertsForm, num_inner: int, *, has_zeros: bool) -> list[Any]:
    """Return scratch memory for converted weights, then for the scales of one matrix, then for its zero points."""
    from jax.experimental.pallas import tpu as pltpu

    if not form.is_unpacked:
        return []
    shapes = [(form.width, form.block)] * num_inner + [(form.block, form.width)]
    sizes = [form.group_sizes[0]] * num_inner + [form.group_sizes[1]]
    scratch = [pltpu.VMEM((shape[0] // 2, shape[1]), jnp.int32) for shape in shapes]
    for shape, size in zip(shapes, sizes, strict=True):
        if size:
            scratch += [pltpu.VMEM((shape[0] // size, shape[1]), jnp.int32)] * (1 + has_zeros)
    return scratch


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
        unpacked: converted weights, then scales, then zero points of each of these; or none.
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
    unpacked: Sequence[Any]

    @classmethod
    def of(cls, arrays: Sequence[Any], num_inner: int, num_scales: int, num_zeros: int, num_biases: int) -> _ExpertRefs:
        """Name the arrays in the order of the call."""
        left = iter(arrays[2:])

        def take(num: int) -> list[Any]:
            return [next(left) for _ in range(num)]

        lists, inner, down = take(5), take(num_inner), next(left)
        named: list[Any] = [*lists, inner, down, take(num_scales), take(num_zeros), take(num_biases), *take(3), [*left]]
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

    if form.is_unpacked:
        _unpack_matrices(refs, form, f)

    def run_tile(i: Any, _: None) -> None:
        first, num = start + i * size, jnp.minimum(count - i * size, size)
        _gather(refs, form, first, num)
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
    from jax.experimental import pallas as pl

    def lines(i: int) -> Any:
        return pl.ds(i * form.stride, form.tile_rows)

    parts = [_unpack(refs.tile[lines(i), :]) for i in range(form.row_words)]
    x = jnp.concatenate([low for low, _ in parts] + [high for _, high in parts], axis=1)[:, : form.width]
    *gates_and_ups, down = _weights(refs, form, f)
    products = [_dot(x, each) for each in gates_and_ups]
    if refs.scales and form.group_sizes[0] is None:
        products = [y * ref[0] for y, ref in zip(products, refs.scales[:-1], strict=True)]
    if refs.biases:
        products = [y + ref[0].astype(jnp.float32) for y, ref in zip(products, refs.biases, strict=True)]
    inner = join(form.gate, products[0], products[-1])
    if form.inner % form.block:
        left = form.inner - f * form.block  # beyond the matrices there is anything, even NaN
        inner = jnp.where(jax.lax.broadcasted_iota(jnp.int32, inner.shape, 1) < left, inner, 0.0)
    y = _dot(_reordered_columns(inner.astype(x.dtype), form), down)
    y = y * refs.scales[-1][0] if refs.scales and form.group_sizes[1] is None else y
    for i in range(form.row_sums):
        columns = y[:, i * LANES : (i + 1) * LANES]
        refs.results[lines(i), : columns.shape[1]] = columns


def _weights(refs: _ExpertRefs, form: ExpertsForm, f: Any) -> list[jax.Array]:
    """Return block f of gates, ups and downs in bfloat16; rows beyond the matrix are finite."""
    from jax.experimental.pallas import tpu as pltpu

    if form.is_unpacked:
        return [pltpu.bitcast(ref[...], jnp.bfloat16) for ref in refs.unpacked[: len(refs.inner) + 1]]
    *inner, down = (ref[0].astype(jnp.bfloat16) for ref in (*refs.inner, refs.down))
    if form.inner % form.block:
        is_own = jax.lax.broadcasted_iota(jnp.int32, down.shape, 0) < form.inner - f * form.block
        down = jnp.where(is_own, down, jnp.zeros_like(down))
    return [*inner, down]


def _order_of_unit(form: ExpertsForm) -> np.ndarray:
    """Return the row of the matrix at each place of a unit of converted weights."""
    half = form.unit // 16
    return np.arange(form.unit).reshape(8, 2, half).transpose(2, 0, 1).reshape(-1)


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


def _unpack_matrices(refs: _ExpertRefs, form: ExpertsForm, f: Any) -> None:
    """Convert block f of an expert's matrices, and multiply by the scales of groups."""
    matrices = [*refs.inner, refs.down]
    sizes = [form.group_sizes[0]] * len(refs.inner) + [form.group_sizes[1]]
    words = iter(refs.unpacked[len(matrices) :])
    for i, (ref, size) in enumerate(zip(matrices, sizes, strict=True)):
        scales = zeros = None
        if size is not None:
            left = form.inner - f * form.block if ref is refs.down and form.inner % form.block else None
            scales = _repeat_in_words(refs.scales[i], next(words), size, left, _SCALED.get(form.values, 1.0))
            if refs.zeros:
                zeros = _repeat_in_words(refs.zeros[i], next(words), size, left, shift=_SHIFTED.get(form.values, 0.0))
        _unpack_matrix(ref, refs.unpacked[i], form, size, scales, zeros)


def _repeat_in_words(ref: Any, words: Any, size: int, left: Any, factor: float = 1.0, shift: float = 0.0) -> Any:
    """Write each number of a block, rounded to bfloat16, to both halves of a word; zeros beyond the matrix."""
    numbers = ref[0].astype(jnp.float32) * factor + shift
    if left is not None:
        is_own = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, 0) * size < left
        numbers = jnp.where(is_own, numbers, 0.0)
    bits = jax.lax.bitcast_convert_type(numbers.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32)
    words[...] = jax.lax.bitcast_convert_type(bits | (bits >> 16), jnp.int32)
    return words


def _unpack_matrix(ref: Any, out: Any, form: ExpertsForm, size: int | None, scales: Any, zeros: Any) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    assert form.values is not None
    depth, columns = 2 * out.shape[0], out.shape[1]
    num_codes = _CODES_OF_WORD[form.values]
    unit = 8 * num_codes
    whole = max(unit, _NUM_SUBLANES)
    chunk = max(rows for rows in range(whole, _CHUNK_DEPTH + whole, whole) if depth % rows == 0)

    def factors(words: Any, first: Any, own: slice) -> jax.Array:
        """Those of a unit: row i of words has numbers `num_codes * i` and following."""
        assert size is not None
        rows = [words[pl.ds((first + skip) // size, 1), own] for skip in range(0, unit, min(size, unit))]
        found = jnp.broadcast_to(rows[0], (8, rows[0].shape[1]))
        lines = jax.lax.broadcasted_iota(jnp.int32, found.shape, 0)
        for i, row in enumerate(rows[1:], 1):
            found = jnp.where(lines < i * size // num_codes, found, row)
        return pltpu.bitcast(found, jnp.bfloat16)

    def unpack(i: Any, _: None) -> None:
        first = pl.multiple_of(i * chunk, chunk)
        for begin in range(0, columns, _CHUNK_COLUMNS):
            own = slice(begin, min(begin + _CHUNK_COLUMNS, columns))
            values = ref[0, pl.ds(first, chunk), own]
            values = values.astype(jnp.bfloat16) if num_codes == 2 else pltpu.bitcast(values, jnp.int32)
            lines = len(values) * unit // chunk
            for at in range(0, chunk, unit):
                part = values[at // unit * lines : (at // unit + 1) * lines]
                scale = None if size is None else factors(scales, first + at, own)
                zero = None if zeros is None else factors(zeros, first + at, own)
                for j, numbers in enumerate(_CONVERSIONS[form.values](part, scale, zero)):
                    place = first // 2 + (at + j * _PAIR) // 2
                    out[pl.ds(pl.multiple_of(place, 8), 8), own] = pltpu.bitcast(numbers, jnp.int32)

    jax.lax.fori_loop(0, depth // chunk, unpack, None)


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

    Args:
        scales: powers of two, halved; None if they are applied to products.
    """
    del zeros
    shifted = [words << (12 - 4 * j) if j < 3 else words for j in range(4)]
    return [_convert_float(each, 6, 0x01C001C0, jnp.bfloat16(0.5) if scales is None else scales) for each in shifted]


def _convert_fp8(words: jax.Array, scales: jax.Array | None, zeros: jax.Array | None) -> list[jax.Array]:
    """Return numbers j and j + 2 of each word: a sign, four bits of the exponent and three of the mantissa."""
    del zeros
    numbers = [_convert_float(each, 4, 0x07F007F0, jnp.bfloat16(2.0**-7)) for each in (words << 8, words)]
    return [_scaled(each, scales) for each in numbers]


def _convert_float(words: jax.Array, num_bits: int, mask: int, least: Any) -> jax.Array:
    """Convert floats at the upper ends of half words.

    The magnitude's bits are those of a bfloat16 with another exponent, unless the exponent is 0. With a larger one, such
    a number is `least <= t < 2 * least`, and stands for `2 * (t - least)`, which is less than `t` then, and not otherwise.

    Args:
        num_bits: that magnitudes are moved by, to be bfloat16.
        least: a power of two, or some.
    """
    from jax.experimental.pallas import tpu as pltpu

    least = jnp.broadcast_to(least, (2 * len(words), words.shape[1]))
    larger = pltpu.bitcast(((words >> num_bits) & mask) + pltpu.bitcast(least, jnp.int32), jnp.bfloat16)
    above = larger - least
    magnitudes = jnp.minimum(larger, above + above)
    signs = words & np.int32(-0x7FFF8000)
    return pltpu.bitcast(pltpu.bitcast(magnitudes, jnp.int32) | signs, jnp.bfloat16)


_SCALED: Mapping[Any, float] = {"mxfp4": 0.5}
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
