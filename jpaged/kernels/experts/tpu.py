"""The kernel for TPUs: a layer's experts from rows to weighted sums, in one pass over the weights of the used experts.

grid (blocks of the inner width, used experts)

        gate [E, F]     up [E, F]      down [F, E]
         ┌───┬───┐      ┌───┬───┐      ┌───────┐       An expert's blocks are fetched while the rows of the previous
         │ * │   │      │ * │   │      │ *     │       expert are multiplied, however many those are. Experts without
         └───┴───┘      └───┴───┘      ├───────┤       rows are not in the grid.
                                       └───────┘

    states, packed  ──gather──>  tile of rows ──> gates, ups ──> inner ──> results ──add, weighted──>  sums
    [T, E/256, 128]              [R, E]                                                               [T, E/128, 128]

States and sums stay in vector memory. A row takes whole registers there, so that few instructions copy or add it. The
list of each expert's rows is in scalar memory. So neither the sorted rows nor their results are arrays in the device's
memory. A row's results are added in the order of its experts' numbers.

Only functions that trace import Pallas: it takes a third as long as jax, and every model imports this module.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jpaged.kernels.experts.routing import Routes
from jpaged.kernels.experts.weights import ExpertWeights, flat, join
from jpaged.kernels.lowered_device import lowered_device
from jpaged.kernels.matmul.quantized import QuantizedMatrix, rounds_rows
from jpaged.kernels.mixture_kind import GateFunction

if TYPE_CHECKING:
    from jaxtyping import Array, Float

LANES = 128
_PACKED = 2 * LANES
_GROUP = 8
"""Rows that are gathered or added together. An expert has each token once, so they are different ones."""
_LEAST_ROWS, _MOST_ROWS = 64, 256
"""Rows of a tile: 64 take a tenth longer than 16, and 128 a quarter, because matrix units load their weights first."""
_MAX_ROUTES = 1 << 16
"""Tokens and weights of routes take 8 bytes each of scalar memory, which has 1 MiB."""
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


def find_form(
    x_te: jax.Array, routes: Routes, weights: ExpertWeights, gate: GateFunction
) -> ExpertsForm | None:
    """Return the sizes of a call on the device that is lowered for; None if the kernel does not support it."""
    device = lowered_device()
    matrices = [flat(each)[0] for each in (weights.gate, weights.up, weights.down)]
    if device is None or device.platform != "tpu" or x_te.dtype != jnp.bfloat16:
        return None
    if not all(map(_takes, matrices)) or len({str(_values(each).dtype) for each in matrices}) > 1:
        return None
    shape = (*x_te.shape, matrices[2].shape[1], routes.ids_tk.shape[1])
    return choose_form(shape, weights.num_experts, gate, device.device_kind, _values(matrices[2]).dtype.itemsize)


def _takes(matrices: Any) -> bool:
    """Return True for bfloat16, and for 8 bits with a scale per column whose rows are not rounded."""
    if not isinstance(matrices, QuantizedMatrix):
        return bool(matrices.dtype == jnp.bfloat16)
    is_plain = matrices.zeros is None and matrices.group_ids is None and not rounds_rows(matrices)
    return is_plain and matrices.num_groups == 1 and matrices.values.dtype.itemsize == 1 and matrices.num_bits is None


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
    if num_tokens * top_k > _MAX_ROUTES or most < min(LANES, inner):
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
        starts_s: int32 `[S]`: the first of its rows in `tokens_p`.
        counts_s: int32 `[S]`: the number of its rows.
        num_used: int32 `[1]`: experts with rows.
        tokens_p: int32 `[P]`: rows sorted by expert, and `_GROUP` more.
        weights_p: float32 `[P]`: their weights.
    """

    matrices_s: jax.Array
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
            starts[used],
            counts[used],
            jnp.sum(counts > 0, dtype=jnp.int32)[None],
            jnp.pad(order // top_k, (0, _GROUP)),
            jnp.pad(weights, (0, _GROUP)),
        )


def apply(
    x_te: Float[Array, "T E"], routes: Routes, weights: ExpertWeights, form: ExpertsForm
) -> Float[Array, "T E"]:
    """Return the weighted sum of the outputs of each row's experts, without the last bias, in float32."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    down, first = flat(weights.down)
    rows = ExpertRows.sort(routes, weights.num_experts, first)
    inner = [flat(each)[0] for each in ((weights.gate,) if form.gate.has_gates else ()) + (weights.up,)]
    has_scales = isinstance(down, QuantizedMatrix)
    scales = [*(each.scales for each in inner), down.scales] if has_scales else []
    matrices, down, width = [_values(each) for each in inner], _values(down), form.width
    biases = [weights.gate_bias] if form.gate.has_gates else []
    biases = [each[:, None, :] for each in (*biases, weights.up_bias) if each is not None]
    base = jnp.asarray(first, jnp.int32)[None]

    def of_inner(f: Any, s: Any, matrices_s: Any, *_: Any) -> tuple[Any, Any, Any]:
        return matrices_s[s], 0, f

    def of_bias(f: Any, s: Any, matrices_s: Any, *others: Any) -> tuple[Any, Any, Any]:
        return matrices_s[s] - others[4][0], 0, f

    lines = form.row_sums
    num_products = len(rows.tokens_p) * width * form.inner * (len(matrices) + 1)
    sums: jax.Array = pl.pallas_call(
        functools.partial(_kernel, form=form, num_matrices=len(matrices), has_scales=has_scales, has_biases=bool(biases)),
        name="experts",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(form.num_blocks, jnp.maximum(rows.num_used[0], 1)),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.VMEM),
                *(pl.BlockSpec((1, width, form.block), of_inner) for _ in matrices),
                pl.BlockSpec((1, form.block, width), lambda f, s, matrices_s, *_: (matrices_s[s], f, 0)),
                *(pl.BlockSpec((1, 1, form.block), of_inner) for _ in scales[:-1]),
                *(pl.BlockSpec((1, 1, width), lambda f, s, matrices_s, *_: (matrices_s[s], 0, 0)) for _ in scales[-1:]),
                *(pl.BlockSpec((1, 1, form.block), of_bias) for _ in biases),
            ],
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
            flops=2 * num_products,
            transcendentals=0,
            bytes_accessed=down.dtype.itemsize * len(rows.matrices_s) * width * form.inner * (len(matrices) + 1),
        ),
        interpret=form.is_interpreted,
    )(
        rows.matrices_s, rows.starts_s, rows.counts_s, rows.tokens_p, rows.weights_p, base,
        pack(x_te), *matrices, down, *scales, *biases,
    )  # fmt: skip
    return sums.reshape(form.num_tokens, -1)[:, :width]


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


def _kernel(
    matrices_ref: Any,
    starts_ref: Any,
    counts_ref: Any,
    tokens_ref: Any,
    weights_ref: Any,
    base_ref: Any,
    x_ref: Any,
    *others: Any,
    form: ExpertsForm,
    num_matrices: int,
    has_scales: bool,
    has_biases: bool,
) -> None:
    from jax.experimental import pallas as pl

    del matrices_ref, base_ref
    inner_refs, others = others[:num_matrices], others[num_matrices:]
    down_ref, *others = others
    scale_refs, others = (others[: num_matrices + 1], others[num_matrices + 1 :]) if has_scales else ((), others)
    bias_refs, others = (others[:num_matrices], others[num_matrices:]) if has_biases else ((), others)
    sums_ref, tile_ref, results_ref = others
    f, s = pl.program_id(0), pl.program_id(1)
    size, stride, lines, words = form.tile_rows, form.stride, form.row_sums, form.row_words
    start, count = starts_ref[s], counts_ref[s]

    @pl.when((f == 0) & (s == 0))
    def _begin() -> None:
        def clear(t: Any, _: None) -> None:
            sums_ref[t] = jnp.zeros((lines, LANES), jnp.float32)

        jax.lax.fori_loop(0, form.num_tokens, clear, None)

    def gather(first: Any, num: Any) -> None:
        def some(group: Any, _: None) -> None:
            for i in range(_GROUP):
                row = group * _GROUP + i
                token = tokens_ref[first + row]
                tile_ref[pl.ds(row, words, stride=stride), :] = x_ref[token]

        jax.lax.fori_loop(0, (num + _GROUP - 1) >> 3, some, None)

    def multiply() -> None:
        parts = [_unpack(tile_ref[pl.ds(i * stride, size), :]) for i in range(words)]
        x = jnp.concatenate([part[0] for part in parts] + [part[1] for part in parts], axis=1)[:, : form.width]
        products = [_dot(x, ref[0].astype(x.dtype)) for ref in inner_refs]
        if has_scales:
            products = [y * ref[0] for y, ref in zip(products, scale_refs, strict=False)]
        if has_biases:
            products = [y + ref[0].astype(jnp.float32) for y, ref in zip(products, bias_refs, strict=True)]
        inner, down = join(form.gate, products[0], products[-1]), down_ref[0].astype(x.dtype)
        if form.inner % form.block:
            left = form.inner - f * form.block  # beyond it there is anything, even NaN
            inner = jnp.where(jax.lax.broadcasted_iota(jnp.int32, inner.shape, 1) < left, inner, 0.0)
            down = jnp.where(jax.lax.broadcasted_iota(jnp.int32, down.shape, 0) < left, down, jnp.zeros_like(down))
        y = _dot(inner.astype(x.dtype), down)
        if has_scales:
            y = y * scale_refs[-1][0]
        for i in range(lines):
            columns = y[:, i * LANES : (i + 1) * LANES]
            results_ref[pl.ds(i * stride, size), : columns.shape[1]] = columns

    def add(first: Any, num: Any) -> None:
        def some(group: Any, _: None) -> None:
            found = []
            for i in range(_GROUP):
                row = group * _GROUP + i
                is_own = row < num
                token = tokens_ref[first + jnp.where(is_own, row, group * _GROUP)]
                y = results_ref[pl.ds(row, lines, stride=stride), :] * weights_ref[first + row]
                total = sums_ref[token]
                found.append((token, jnp.where(is_own, total + y, total)))
            for token, total in reversed(found):  # the first row, whose token the others take, comes last
                sums_ref[token] = total

        jax.lax.fori_loop(0, (num + _GROUP - 1) >> 3, some, None)

    def tile(i: Any, _: None) -> None:
        first, num = start + i * size, jnp.minimum(count - i * size, size)
        gather(first, num)
        multiply()
        add(first, num)

    jax.lax.fori_loop(0, jax.lax.div(count + size - 1, size), tile, None)

def _dot(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.lax.dot(x, weights, preferred_element_type=jnp.float32)
