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

Only functions that trace import Pallas: it takes a third as long as jax, and every model imports this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jpaged.kernels.experts.routing import Routes
from jpaged.kernels.experts.weights import ExpertWeights, flat, join
from jpaged.kernels.matmul.on_device import lowered_device
from jpaged.kernels.matmul.quantized import QuantizedMatrix, rounds_rows
from jpaged.kernels.matrix_format import VALUE_DTYPES
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
_EIGHT_BITS = VALUE_DTYPES["int8"], VALUE_DTYPES["fp8"]
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
        is_interpreted: for tests.
    """

    num_tokens: int
    width: int
    inner: int
    tile_rows: int
    block: int
    gate: GateFunction
    vmem_bytes: int
    is_interpreted: Any = False

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
    if not all(map(_takes, matrices)) or len({str(_values(each).dtype) for each in matrices}) > 1:
        return None
    shape = (*x_te.shape, matrices[2].shape[1], routes.ids_tk.shape[1])
    if shape[1] % _NUM_SUBLANES or shape[2] % _NUM_SUBLANES:
        return None
    return choose_form(shape, weights.num_experts, gate, device.device_kind, _values(matrices[2]).dtype.itemsize)


def _takes(matrices: Any) -> bool:
    """Return True for bfloat16, and for 8 bits with a scale per column whose rows are not rounded."""
    if not isinstance(matrices, QuantizedMatrix):
        return bool(matrices.dtype == jnp.bfloat16)
    is_plain = matrices.zeros is None and matrices.group_ids is None and not rounds_rows(matrices)
    return is_plain and matrices.num_groups == 1 and matrices.values.dtype in _EIGHT_BITS


def _values(matrices: Any) -> Any:
    return matrices.values if isinstance(matrices, QuantizedMatrix) else matrices


def choose_form(
    shape: tuple[int, int, int, int], num_experts: int, gate: GateFunction, device_kind: str, itemsize: int = 2
) -> ExpertsForm | None:
    """Return the sizes for T tokens of width E with K of X experts of inner width F; None if they do not fit.

    Args:
        shape: T, E, F, K.
        num_experts: X.
        gate: the gate function.
        device_kind: as jax names the device.
        itemsize: bytes of a weight.
    """
    num_tokens, width, inner, top_k = shape
    limit = _LARGE_VMEM_BYTES if device_kind.startswith(_LARGE_KINDS) else _VMEM_BYTES
    even = -(-num_tokens * top_k // num_experts)
    tile_rows = min(max(_rounded_up(even + even // 4, 32), _LEAST_ROWS), _rounded_up(num_tokens, 16), _MOST_ROWS)
    of_rows = (num_tokens + _GROUP) * width * 6 + tile_rows * width * 16
    of_column = (2 * itemsize + 4 * (itemsize == 1)) * (3 if gate.has_gates else 2) * width + tile_rows * 16
    most = (limit - of_rows - (4 << 20)) // of_column
    least = _LEAST_COLUMNS if even <= _MANY_ROWS else _LEAST_OF_MANY_ROWS
    if num_tokens * top_k > _MAX_ROUTES or most < min(least, inner):
        return None
    block = inner
    if most < inner:
        num_blocks = -(-inner // (most // LANES * LANES))
        block = -(-inner // (num_blocks * LANES)) * LANES
    return ExpertsForm(num_tokens, width, inner, tile_rows, block, gate, limit)


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
    scales = [each.scales for each in (*inner, down)] if isinstance(down, QuantizedMatrix) else []
    biases: list[Any] = [weights.gate_bias, weights.up_bias][-len(inner) :] if weights.up_bias is not None else []
    refs = functools.partial(_ExpertRefs.of, num_inner=len(inner), has_scales=bool(scales), has_biases=bool(biases))
    lines = form.row_sums
    num_weights = form.width * form.inner * (len(inner) + 1)
    sums: jax.Array = pl.pallas_call(
        lambda *arrays: _kernel(refs(arrays), form),
        name="experts",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=_NUM_LISTS,
            grid=(form.num_blocks, jnp.maximum(rows.num_used[0], 1)),
            in_specs=_specs(form, len(inner), has_scales=bool(scales), has_biases=bool(biases)),
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=[
                pltpu.VMEM((form.row_words * form.stride, LANES), jnp.uint32),
                pltpu.VMEM((lines * form.stride, LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((form.num_tokens, lines, LANES), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=form.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(rows.tokens_p) * num_weights,
            transcendentals=0,
            bytes_accessed=_values(down).dtype.itemsize * len(rows.matrices_s) * num_weights,
        ),
        interpret=form.is_interpreted,
    )(
        *(rows.matrices_s, rows.experts_s, rows.starts_s, rows.counts_s, rows.tokens_p, rows.weights_p),
        *(pack(x_te), *map(_values, inner), _values(down), *scales),
        *(bias[:, None, :] for bias in biases),
    )
    return sums.reshape(form.num_tokens, -1)[:, : form.width]


_NUM_LISTS = 6
"""Arrays in scalar memory."""


def _specs(form: ExpertsForm, num_inner: int, *, has_scales: bool, has_biases: bool) -> list[Any]:
    """Return the blocks of the states, of gates and ups, of down, and of their scales and biases."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def inner_block(f: Any, s: Any, matrices_s: Any, *_: Any) -> tuple[Any, Any, Any]:
        return matrices_s[s], 0, f

    def bias_block(f: Any, s: Any, _: Any, experts_s: Any, *others: Any) -> tuple[Any, Any, Any]:
        del others
        return experts_s[s], 0, f

    specs = [pl.BlockSpec(memory_space=pltpu.VMEM)]
    specs += [pl.BlockSpec((1, form.width, form.block), inner_block)] * num_inner
    specs += [pl.BlockSpec((1, form.block, form.width), lambda f, s, matrices_s, *_: (matrices_s[s], f, 0))]
    if has_scales:
        specs += [pl.BlockSpec((1, 1, form.block), inner_block)] * num_inner
        specs += [pl.BlockSpec((1, 1, form.width), lambda f, s, matrices_s, *_: (matrices_s[s], 0, 0))]
    if has_biases:
        specs += [pl.BlockSpec((1, 1, form.block), bias_block)] * num_inner
    return specs


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
        scales: of these and of down, or none.
        biases: of the first, or none.
        tile: rows of states; line i of row r is at `i * stride + r`.
        results: rows of sums, in the same places.
    """

    starts: Any
    counts: Any
    tokens: Any
    weights: Any
    states: Any
    inner: Sequence[Any]
    down: Any
    scales: Sequence[Any]
    biases: Sequence[Any]
    sums: Any
    tile: Any
    results: Any

    @classmethod
    def of(cls, arrays: Sequence[Any], *, num_inner: int, has_scales: bool, has_biases: bool) -> _ExpertRefs:
        """Name the arrays in the order of the call."""
        left = iter(arrays[2:])

        def take(num: int) -> list[Any]:
            return [next(left) for _ in range(num)]

        lists, inner, down = take(5), take(num_inner), next(left)
        scales, biases = take((num_inner + 1) * has_scales), take(num_inner * has_biases)
        named: list[Any] = [*lists, inner, down, scales, biases, *left]
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
    products = [_dot(x, ref[0].astype(x.dtype)) for ref in refs.inner]
    if refs.scales:
        products = [y * ref[0] for y, ref in zip(products, refs.scales[:-1], strict=True)]
    if refs.biases:
        products = [y + ref[0].astype(jnp.float32) for y, ref in zip(products, refs.biases, strict=True)]
    inner, down = join(form.gate, products[0], products[-1]), refs.down[0].astype(x.dtype)
    if form.inner % form.block:
        left = form.inner - f * form.block  # beyond the matrices there is anything, even NaN
        inner = jnp.where(jax.lax.broadcasted_iota(jnp.int32, inner.shape, 1) < left, inner, 0.0)
        down = jnp.where(jax.lax.broadcasted_iota(jnp.int32, down.shape, 0) < left, down, jnp.zeros_like(down))
    y = _dot(inner.astype(x.dtype), down)
    y = y * refs.scales[-1][0] if refs.scales else y
    for i in range(form.row_sums):
        columns = y[:, i * LANES : (i + 1) * LANES]
        refs.results[lines(i), : columns.shape[1]] = columns


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
