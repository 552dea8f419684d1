"""Building blocks of models: matmul, matrices, norms, the grouped query/key/value projection and embeddings.

The matmul is accumulated in float32, and has its own gradient.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import math
import operator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from jpaged.errors import InternalError
from jpaged.kernels import lora
from jpaged.kernels import matmul as matmul_module
from jpaged.kernels.matmul.on_device import PartedMatrix, multiply_on_device, parts_on_device
from jpaged.kernels.matmul.quantized import QuantizedMatrix, StackedMatrix
from jpaged.models import rope
from jpaged.models.config import Activation, ModelConfig
from jpaged.models.stack import LayerPlace, StackedArray
from jpaged.models.tokens import HeadsKernel, Rows, TokenBatch


def dot(x_te: jax.Array, matrix: jax.Array | QuantizedMatrix | StackedMatrix | PartedMatrix, axis: int) -> jax.Array:
    """Contract x's last axis with one axis of a matrix, the first or the last; returns float32.

    A quantized matrix has its own axis, and no gradient.
    """
    if isinstance(matrix, QuantizedMatrix | StackedMatrix | PartedMatrix):
        return multiply_on_device(x_te, matrix)
    return _dot(x_te, matrix, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(x_te: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Multiply with an array.

    The accumulator type is set even for bfloat16: XLA's CPU backend is ten times slower without it. Full precision is
    set for float32: TPUs and GPUs would otherwise round the operands to bfloat16 and TF32. On a GPU the sum is split
    into parts if XLA would otherwise pad the matrix.
    """
    if axis == 0 and x_te.ndim == 2 and (parts := parts_on_device(x_te, matrix)) > 1:
        x_tsk, matrices = x_te.reshape(len(x_te), parts, -1), matrix.reshape(parts, -1, *matrix.shape[1:])
        return accumulate(x_tsk, matrices, ((2,), (1,)), ((1,), (0,))).sum(0)
    return accumulate(x_te, matrix, ((x_te.ndim - 1,), (axis,)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ColumnParts:
    """Hidden states `[T, E]` as equal parts of their columns, `[T, E / parts]` each.

    The matmul that makes them sums each part over the devices by itself, and the next one multiplies with each part as
    soon as its sum is complete. So the sum of one part overlaps with the products of the others:

        down    | w0 | w1 | w2 | w3 |                                columns of the kernel
        sums         | s0 ... | s1 ... | s2 ... | s3 ... |
        qkv                                | w0 | w1 | w2 | w3 |     rows of the kernel; results are added

    A row's result depends on no other row, and each weight is read once.
    """

    parts: tuple[jax.Array, ...]

    @classmethod
    def split(cls, x_te: jax.Array, num_parts: int) -> ColumnParts:
        """Split hidden states; the number must divide their width."""
        return cls(tuple(jnp.split(x_te, num_parts, axis=1)))

    @property
    def dtype(self) -> np.dtype:
        """Type of the states."""
        return np.dtype(self.parts[0].dtype)

    @property
    def width(self) -> int:
        """E."""
        return sum(part.shape[1] for part in self.parts)

    def joined(self) -> jax.Array:
        """Return the states `[T, E]`."""
        return jnp.concatenate(self.parts, axis=1)

    def multiply(self, kernel: jax.Array | StackedArray, norm: RMSNorm) -> jax.Array:
        """Multiply the normalized states with a kernel `[E, *out]`; returns float32 `[T, *out]`.

        The root mean square of a row is known after its last part, and divides the sum of the products.
        """
        num_parts, remaining = len(self.parts), list(self.parts)
        weights = jnp.split(norm.weights, num_parts)
        squares_t = functools.reduce(operator.add, map(RMSNorm.measure, self.parts))
        sums: jax.Array | None = None
        for i, weights_e in enumerate(weights):
            x_te = remaining[i]
            scaled_te = (x_te.astype(jnp.float32) * weights_e).astype(x_te.dtype)
            y = dot(scaled_te, _part(kernel, 0, i, num_parts), 0)
            sums = y if sums is None else sums + y
            if i + 1 < num_parts:
                # Without the barrier, XLA for TPUs waits for all sums before it multiplies.
                remaining[i + 1], sums = jax.lax.optimization_barrier((remaining[i + 1], sums))
        assert sums is not None
        return sums * jax.lax.rsqrt(squares_t / self.width + norm.eps).reshape(-1, *([1] * (sums.ndim - 1)))


RowChunks = tuple[ColumnParts, ...]
"""Hidden states as chunks of their rows, equally many, each in parts of its columns.

The sums of a chunk after `down` overlap with the feed-forward of the next one, which is longer than `down` and the next
layer's projection:

    chunk 0    | out |     | up, down |          | qkv |
    chunk 1          | out |          | up, down |     | qkv |
    sums             | 0 ... | 1 ...  | 0 ...    | 1 ...

Each chunk reads the weights, so chunks have enough rows that products take longer than that.
"""


def split_states(x_te: jax.Array, num_chunks: int, num_parts: int) -> RowChunks:
    """Split hidden states; the numbers must divide rows and columns."""
    return tuple(ColumnParts.split(rows, num_parts) for rows in jnp.split(x_te, num_chunks))


def join_states(chunks: RowChunks) -> jax.Array:
    """Return the states `[T, E]`."""
    return jnp.concatenate([chunk.joined() for chunk in chunks])


def _part(kernel: jax.Array | StackedArray, axis: int, part: int, num_parts: int) -> jax.Array:
    """Return one of the equal parts of a matrix along an axis."""
    if isinstance(kernel, StackedArray):
        return kernel.part(axis, part, num_parts)
    return jnp.split(kernel, num_parts, axis=axis)[part]


def accumulate(
    a: jax.Array,
    b: jax.Array,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    batched: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> jax.Array:
    """Return `dot_general` of two arrays of one type, with a float32 result."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (contracted, batched), precision, jnp.float32)


def transposed(x: jax.Array) -> jax.Array:
    """Swap the last two axes, and keep XLA from folding the transposition into an adjacent matmul.

    On CPUs a bfloat16 matmul that contracts the leading axes of both matrices takes six times as long as the copy and a
    plain matmul, and if XLA folds late, it fails to compile.
    """
    as_is = Layout(tuple(range(x.ndim)))
    return with_layout_constraint(jnp.swapaxes(with_layout_constraint(x, as_is), -1, -2), as_is)


def _forward(x_te: jax.Array, matrix: jax.Array, axis: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _dot(x_te, matrix, axis), (x_te, matrix)


def _backward(axis: int, saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_te, matrix = saved
    num_tokens, width = x_te.shape
    dy_to = dy.reshape(num_tokens, -1).astype(x_te.dtype)
    flat = matrix.reshape(width, -1) if axis == 0 else matrix.reshape(-1, width)
    dx_te = accumulate(dy_to, flat, ((1,), (1 - axis,)))
    dw_eo = accumulate(transposed(x_te), dy_to, ((1,), (0,)))
    d_matrix = (dw_eo if axis == 0 else transposed(dw_eo)).reshape(matrix.shape)
    return dx_te.astype(x_te.dtype), d_matrix.astype(matrix.dtype)


_dot.defvjp(_forward, _backward)


class Attend(Protocol):
    """Attention over the contents of the carry."""

    def __call__(
        self,
        q_thd: jax.Array,
        k_tkd: jax.Array,
        v_tkd: jax.Array | None,
        carry: Any,
        place: LayerPlace,
        sinks_h: jax.Array | None = None,
        /,
    ) -> tuple[jax.Array, Any]:
        """Map queries, keys and values of a layer to (attention outputs `[T, H, D]`, carry).

        If values are a prefix of keys (`ModelConfig.value_dim`), v is None, and only that prefix of the outputs is
        valid. Sinks are scores of each head that take a share of the attention weights and have no value.
        """
        ...


# Nested dictionaries of arrays. "layers" is a list of trees in loop mode, and a dict of stacked trees by name in scan
# mode.
Params = dict[str, Any]

_INIT_STD = 0.02


class Param:
    """A parameter of a module: an array, or a matrix in another form that takes its place."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, index: EllipsisType) -> Any:
        """Return the array."""
        return self._value

    def __setitem__(self, index: EllipsisType, value: Any) -> None:
        """Replace the array."""
        self._value = value

    def get_value(self) -> Any:
        """Return the array or the matrix."""
        return self._value


class RandomKeys:
    """A sequence of independent random keys."""

    def __init__(self, key: jax.Array) -> None:
        self._key = key
        self._num_taken = 0

    def next_key(self) -> jax.Array:
        """Return a key that differs from all earlier ones."""
        key = jax.random.fold_in(self._key, np.uint32(self._num_taken))
        self._num_taken += 1
        return key


class Module:
    """A part of a model: its attributes are parameters, other modules, and constants.

    Flax's modules would do the same, but importing them takes as long as importing jax.
    """

    def params(self) -> Params:
        """Return the values of all parameters by attribute, as nested dictionaries without empty ones."""
        found: Params = {}
        for name, value in vars(self).items():
            if isinstance(value, Param):
                found[name] = value.get_value()
            elif isinstance(value, Module) and (inside := value.params()):
                found[name] = inside
        return found

    def with_params(self, params: Params | None) -> Self:
        """Return a copy with these parameters, a tree as `params` returns; None removes the values."""
        made = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Param):
                setattr(made, name, Param(None if params is None else params[name]))
            elif isinstance(value, Module):
                setattr(made, name, value.with_params(None if params is None else params.get(name, {})))
        return made


class RMSNorm(Module):
    """Computes x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, returned in x's type.

    The stored weight is the scale less the offset, if there is one: Gemma's weights are near 0, not near 1.
    """

    def __init__(self, width: int, eps: float, dtype: np.dtype, offset: float = 0.0) -> None:
        self.scale = Param(jnp.ones((width,), dtype))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array, squares: jax.Array | None = None) -> jax.Array:
        """Normalize the last axis, whose sum of squares may be given."""
        x32 = x.astype(jnp.float32)
        squares = self.measure(x) if squares is None else squares
        x32 = x32 * jax.lax.rsqrt(squares[..., None] / x.shape[-1] + self.eps)
        return (x32 * self.weights).astype(x.dtype)

    @property
    def weights(self) -> jax.Array:
        """The scale with the offset, float32: it has more digits than the stored weights."""
        return self.scale[...].astype(jnp.float32) + self.offset

    @property
    def for_kernel(self) -> matmul_module.Norm | None:
        """Equivalent norm of a matmul kernel; None with an offset: kernels take scales of the rows' own type."""
        return None if self.offset else matmul_module.Norm("rms", self.eps, self.scale[...])

    @staticmethod
    def measure(x: jax.Array) -> jax.Array:
        """Return the sum of the squares of the last axis, in float32."""
        return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Measured:
    """Hidden states for the next layer, with the sum of squares that its norm needs, computed at their source.

    XLA for TPUs then adds and measures in one pass; it does not fuse across the end of a loop.

    Attributes:
        x_te: the states.
        squares_t: the sum of each token's squares in float32; None leaves it to the norm.
    """

    x_te: jax.Array
    squares_t: jax.Array | None

    @classmethod
    def of(cls, x_te: jax.Array, *, is_measured: bool) -> Measured:
        """Return states, measured or not."""
        return cls(x_te, RMSNorm.measure(x_te) if is_measured else None)


@dataclass(frozen=True, slots=True)
class MeasuredNorm:
    """A norm of states that were measured before."""

    norm: RMSNorm
    squares_t: jax.Array | None

    def __call__(self, x_te: jax.Array) -> jax.Array:
        """Normalize the states that were measured."""
        return self.norm(x_te, self.squares_t)

    @property
    def for_kernel(self) -> matmul_module.Norm | None:
        """Equivalent norm of a matmul kernel, which measures by itself."""
        return self.norm.for_kernel


class LayerNorm(Module):
    """Computes (x - mean) / sqrt(var + eps) * scale + bias over the last axis, in float32, returned in x's type.

    A norm that is not affine has neither scale nor bias. The stored weight is the scale less the offset.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        is_affine: bool,
        dtype: np.dtype,
        *,
        use_bias: bool = True,
        offset: float = 0.0,
    ) -> None:
        self.scale = Param(jnp.ones((width,), dtype)) if is_affine else None
        self.bias = Param(jnp.zeros((width,), dtype)) if is_affine and use_bias else None
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize the last axis."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        if self.scale is not None:
            x32 = x32 * (self.scale[...].astype(jnp.float32) + self.offset)
        if self.bias is not None:
            x32 = x32 + self.bias[...].astype(jnp.float32)
        return x32.astype(x.dtype)

    @property
    def for_kernel(self) -> matmul_module.Norm | None:
        """Equivalent norm of a matmul kernel; None with an offset: kernels take scales of the rows' own type."""
        if self.offset:
            return None
        scale, bias = (None if param is None else param[...] for param in (self.scale, self.bias))
        return matmul_module.Norm("layer", self.eps, scale, bias)


Norm = RMSNorm | MeasuredNorm | LayerNorm


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Apply the activation in float32; returns x's type."""
    x32 = x.astype(jnp.float32)
    if activation == "silu":
        return jax.nn.silu(x32).astype(x.dtype)
    if activation in ("relu", "relu2"):
        positive = jax.nn.relu(x32)
        return (positive if activation == "relu" else jnp.square(positive)).astype(x.dtype)
    return jax.nn.gelu(x32, approximate=activation == "gelu_tanh").astype(x.dtype)


def _fused(norm: Norm | None, x: jax.Array) -> tuple[matmul_module.Norm | None, jax.Array]:
    """Return a matmul kernel's norm, and the rows; normalizes them here if the kernel cannot."""
    before = None if norm is None else norm.for_kernel
    return before, x if norm is None or before is not None else norm(x)


def _fused_gate(activation: Activation) -> matmul_module.Gate | None:
    """Return the activation by its name in matmul kernels; None if they have none."""
    return next((gate for gate in matmul_module.GATES if gate == activation), None)


class Linear(Module):
    """`norm(x)[T, in] @ kernel[in, *out] + bias[*out]`, accumulated in float32, returned in x's type.

    The kernel may be packed (`jpaged.kernels.matmul`): the operations around the matmul are then fused into it. It may
    have adapters (`jpaged.kernels.lora`), which add to the sums before anything else.
    """

    def __init__(self, width: int, out: tuple[int, ...], use_bias: bool, dtype: np.dtype, rngs: RandomKeys) -> None:
        self.kernel = Param(normal(rngs.next_key(), (width, *out), dtype))
        self.bias = Param(jnp.zeros(out, dtype)) if use_bias else None

    @property
    def is_packed(self) -> bool:
        """True if a matmul kernel with packed weights multiplies, on one CPU device."""
        kernel = self.kernel.get_value()
        return isinstance(kernel.base if isinstance(kernel, lora.AdaptedMatrix) else kernel, matmul_module.PackedMatrix)

    def multiply_parts(self, x: ColumnParts, norm: Norm) -> jax.Array:
        """Map states `[T, in]` in parts to `[T, *out]`, as a call does; the norm is an RMS norm."""
        if not isinstance(norm, RMSNorm):
            raise InternalError(f"states in parts have an RMS norm, not {type(norm).__name__}")
        y = x.multiply(self.kernel.get_value(), norm)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return self.activate(y).astype(x.dtype)

    def add_to_parts(self, x_te: jax.Array, residual: ColumnParts) -> ColumnParts:
        """Map `[T, in]` to `[T, out]` and add it to a residual in parts; devices sum each part by itself."""
        kernel, num_parts = self.kernel.get_value(), len(residual.parts)
        biases = None if self.bias is None else jnp.split(self.bias[...].astype(jnp.float32), num_parts)
        summed = []
        for i, part_te in enumerate(residual.parts):
            y_te = dot(x_te, _part(kernel, 1, i, num_parts), 0)
            y_te = y_te if biases is None else y_te + biases[i]
            summed.append(part_te + y_te.astype(x_te.dtype))
        return ColumnParts(tuple(summed))

    def __call__(
        self,
        x_te: jax.Array,
        rows: Rows,
        *,
        norm: Norm | None = None,
        residual: jax.Array | None = None,
        norm_after: Norm | None = None,
    ) -> jax.Array:
        """Map `[T, in]` to `[T, *out]`.

        Adds a residual `[T, out]`, if given, and may normalize the sum.
        """
        kernel = self.kernel.get_value()
        if self.is_packed:
            y = self._multiply(kernel, x_te, rows, norm, residual)
            if norm_after is None:
                return y
            after, y = _fused(norm_after, y)
            return y if after is None else matmul_module.loaded().normalise(y, after, rows.num_in_use)
        x_te = x_te if norm is None else norm(x_te)
        if not isinstance(kernel, lora.AdaptedMatrix):
            y = dot(x_te, kernel, 0)
        elif rows.adapters_t is None:
            y = dot(x_te, kernel.base, 0)
        else:
            y = lora.scaled(dot(x_te, kernel.base, 0), rows.adapters_t, kernel)
            y = y + lora.adapt(x_te, rows.adapters_t, kernel)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        y = self.activate(y).astype(x_te.dtype)
        y = y if residual is None else residual + y
        return y if norm_after is None else norm_after(y)

    def activate(self, y: jax.Array) -> jax.Array:
        """Map the float32 sums to the output; the identity here."""
        return y

    def _multiply(
        self,
        kernel: matmul_module.PackedMatrix | lora.AdaptedMatrix,
        x_te: jax.Array,
        rows: Rows,
        norm: Norm | None,
        residual: jax.Array | None,
    ) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        run, num_rows = self._kernel, rows.num_in_use
        before, x_te = _fused(norm, x_te)
        packed, delta = kernel.base if isinstance(kernel, lora.AdaptedMatrix) else kernel, None
        if isinstance(kernel, lora.AdaptedMatrix) and rows.adapters_t is not None:
            # Both matmuls read the normalized rows.
            x_te, before = x_te if before is None else run.normalise(x_te, before, num_rows), None
            delta = matmul_module.RowDelta(
                lora.loaded().adapt(x_te, rows.adapters_t, num_rows, kernel),
                rows.adapters_t,
                lora.joined_vectors(kernel),
            )
        y = run.multiply(x_te, packed, num_rows, norm=before, bias=bias, residual=residual, delta=delta)
        return y.reshape(len(y), *packed.shape[1:]) if packed.num_parts == 1 else y

    @property
    def _kernel(self) -> matmul_module.ProductKernel:
        return matmul_module.loaded()


class ActivatedLinear(Linear):
    """act(x W): `[T, E]` to `[T, F]`."""

    def __init__(
        self, width: int, inner: int, use_bias: bool, activation: Activation, dtype: np.dtype, rngs: RandomKeys
    ) -> None:
        super().__init__(width, (inner,), use_bias, dtype, rngs)
        self.activation = activation

    def activate(self, y: jax.Array) -> jax.Array:
        """Apply the activation; the sums are rounded as a separate matmul would round them."""
        return activate(y.astype(self.kernel.get_value().dtype), self.activation)

    def _multiply(
        self,
        kernel: matmul_module.PackedMatrix | lora.AdaptedMatrix,
        x_te: jax.Array,
        rows: Rows,
        norm: Norm | None,
        residual: jax.Array | None,
    ) -> jax.Array:
        y = super()._multiply(kernel, x_te, rows, norm, residual)
        return activate(y, self.activation) if _fused_gate(self.activation) is None else y

    @property
    def _kernel(self) -> matmul_module.ProductKernel:
        return dataclasses.replace(matmul_module.loaded(), activation=_fused_gate(self.activation))


class GatedLinear(Linear):
    """act(first half) * second half of a matmul whose kernel is `[E, 2, F]`: `[T, E]` to `[T, F]`."""

    def __init__(
        self, width: int, inner: int, use_bias: bool, activation: Activation, dtype: np.dtype, rngs: RandomKeys
    ) -> None:
        super().__init__(width, (2, inner), use_bias, dtype, rngs)
        self.activation = activation

    def activate(self, y: jax.Array) -> jax.Array:
        """Apply the gate; both halves are rounded as separate matmuls would be."""
        dtype = self.kernel.get_value().dtype
        gate, up = (x.squeeze(1).astype(dtype).astype(jnp.float32) for x in jnp.split(y, 2, axis=1))
        return activate(gate, self.activation) * up

    def _multiply(
        self,
        kernel: matmul_module.PackedMatrix | lora.AdaptedMatrix,
        x_te: jax.Array,
        rows: Rows,
        norm: Norm | None,
        residual: jax.Array | None,
    ) -> jax.Array:
        y = super()._multiply(kernel, x_te, rows, norm, residual)
        return self.activate(y).astype(x_te.dtype) if y.ndim > 2 else y

    @property
    def _kernel(self) -> matmul_module.ProductKernel:
        run = matmul_module.loaded()
        gate = _fused_gate(self.activation)
        return run if gate is None else dataclasses.replace(run, gate=gate)


class QKVLinear(Linear):
    """One kernel for query, key and value, grouped by key/value head.

    Splitting its columns over devices gives every device whole groups:

        kernel [E, K * (G + 2) * D]      G = H / K query heads, then their key, then their value

    It has no axes of heads: a TPU pads the last one to 128 numbers, and would copy heads of 64 or 96 in every step.
    """

    def __init__(
        self, config: ModelConfig, use_bias: bool, dtype: np.dtype, rngs: RandomKeys, num_inputs: int | None = None
    ) -> None:
        of_group = config.num_heads // config.num_kv_heads + 2
        self.groups = config.num_kv_heads, of_group, config.head_dim
        super().__init__(num_inputs or config.hidden_size, (math.prod(self.groups),), use_bias, dtype, rngs)

    def project(self, x_te: jax.Array, rows: Rows, norm: Norm | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (q_thd, k_tkd, v_tkd), queries not scaled."""
        return self.split(self(x_te, rows, norm=norm))

    def split(self, qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (q_thd, k_tkd, v_tkd) of the result of a call."""
        qkv = self._grouped(qkv)
        num_rows, num_groups, of_group, head_dim = qkv.shape
        q, k, v = jnp.split(qkv, (of_group - 2, of_group - 1), axis=2)
        return q.reshape(num_rows, num_groups * (of_group - 2), head_dim), k.squeeze(2), v.squeeze(2)

    def project_rotated(
        self,
        x_te: jax.Array,
        rows: Rows,
        angles: Any,
        norm: Norm | None,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
        heads: HeadsKernel | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return `project` with queries and keys normalized, if there are norms for them, and rotated.

        The angles are cosines and sines `[T, D/2]`, or the kernel's form of them.
        """
        is_fused = head_norms is None or head_norms[0].for_kernel is not None
        if heads is not None or not (is_fused and self.is_packed):
            return self.rotate(self(x_te, rows, norm=norm), angles, head_norms, heads)
        qkv = self._grouped(self(x_te, rows, norm=norm))
        if head_norms is None:
            return matmul_module.loaded().rotate(qkv, angles, rows.num_in_use)
        q_scale, k_scale = (head_norm.scale[...] for head_norm in head_norms)
        eps = head_norms[0].eps
        return matmul_module.loaded().rotate(qkv, angles, rows.num_in_use, q_scale=q_scale, k_scale=k_scale, eps=eps)

    def rotate(
        self,
        qkv: jax.Array,
        angles: Any,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
        heads: HeadsKernel | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return `project_rotated` for the result of a call, without packed weights."""
        if heads is not None:
            # The barrier keeps XLA for TPUs from putting tokens into the lanes instead of rows of heads.
            grouped = self._grouped(jax.lax.optimization_barrier(qkv))
            if head_norms is None:
                return heads.turn(grouped, angles, None)
            q_norm, k_norm = head_norms
            return heads.turn(grouped, angles, (q_norm.weights, k_norm.weights, q_norm.eps))
        q_thd, k_tkd, v_tkd = self.split(qkv)
        if head_norms is not None:
            q_thd, k_tkd = head_norms[0](q_thd), head_norms[1](k_tkd)
        return rope.apply(q_thd, *angles), rope.apply(k_tkd, *angles), v_tkd

    def _grouped(self, qkv: jax.Array) -> jax.Array:
        """Return `[T, K, G + 2, D]`."""
        return qkv.reshape(len(qkv), *self.groups)


# The random keys of the modules before and after the layers.
EndsKeys = tuple[jax.Array, jax.Array]


def _get_base(matrix: Any) -> Any:
    """Return a matrix without its adapters."""
    return matrix.base if isinstance(matrix, lora.AdaptedMatrix) else matrix


class TokenEmbedding(Module):
    """A matrix with a row for each id: an embedding of ids, and an output matrix for hidden states."""

    def __init__(self, size: int, width: int, dtype: np.dtype, key: jax.Array) -> None:
        self.embedding = Param(normal(key, (size, width), dtype))
        self.adapters: lora.EmbeddingAdapters | None = None

    def with_params(self, params: Params | None) -> Self:
        """Return a copy with these parameters, and with the adapters of ids next to them if there are any."""
        made = super().with_params(params)
        made.adapters = None if params is None else params.get("adapters")
        return made

    def __call__(self, ids_t: jax.Array, adapters_t: jax.Array | None = None) -> jax.Array:
        """Map `[T]` to `[T, width]`; rows may have adapters."""
        # CPUs gather bfloat16 from float32: without a dependency on the ids, XLA would widen the whole matrix before a
        # loop.
        embedding, ids_t = jax.lax.optimization_barrier((_get_base(self.embedding.get_value()), ids_t))
        x_te: jax.Array = embedding[ids_t] if isinstance(embedding, jax.Array) else embedding.rows(ids_t)
        return x_te if self.adapters is None or adapters_t is None else self.adapters.add(x_te, ids_t, adapters_t)

    def logits(self, hidden_re: jax.Array, num_rows: jax.Array, norm: Norm | None) -> jax.Array:
        """Map `[R, width]`, of which the first rows are in use, to float32 `[R, size]`; applies a norm first.

        Results of the other rows may be undefined: writing zeros takes as long as a tenth of the product of one row.
        """
        matrix, slots_r = self.embedding.get_value(), None
        embedding = _get_base(matrix)
        if isinstance(matrix, lora.AdaptedMatrix):
            matrix, slots_r = matrix.of_output, matrix.adapters_r
        if isinstance(embedding, matmul_module.PackedMatrix):
            before, hidden_re = _fused(norm, hidden_re)
            kernel, delta = dataclasses.replace(matmul_module.loaded(), clears=False), None
            if slots_r is not None:  # both matmuls read the normalized rows
                hidden_re = hidden_re if before is None else kernel.normalise(hidden_re, before, num_rows)
                sums_rv, before = lora.loaded().adapt(hidden_re, slots_r, num_rows, matrix), None
                delta = matmul_module.RowDelta(sums_rv, slots_r, lora.joined_vectors(matrix))
            dtype = np.dtype(np.float32)
            return kernel.multiply(hidden_re, embedding, num_rows, norm=before, dtype=dtype, delta=delta)
        hidden_re = hidden_re if norm is None else norm(hidden_re)
        logits_rv = dot(hidden_re, embedding, 1)
        if slots_r is None:
            return logits_rv
        return lora.scaled(logits_rv, slots_r, matrix) + lora.adapt(hidden_re, slots_r, matrix)


class Ends(Module, abc.ABC):
    """The modules around the layers: the embedding before them and the output matrix after them, which may be tied.

    Families subclass it to add their other modules there.
    """

    def __init__(self, config: ModelConfig, width: int, dtype: np.dtype, keys: EndsKeys) -> None:
        self.embed = TokenEmbedding(config.vocab_size, width, dtype, keys[0])
        is_tied = config.tie_word_embeddings
        self.lm_head = None if is_tied else TokenEmbedding(config.vocab_size, width, dtype, keys[1])

    @abc.abstractmethod
    def begin(self, tokens: TokenBatch) -> tuple[Any, Any]:
        """Return the input of the first layer (usually hidden states `[T, E]`) and the values that all layers share."""

    def embed_inputs(self, tokens: TokenBatch, scale: float = 1.0, *, scales_given: bool = False) -> jax.Array:
        """Return the embeddings of tokens times a scale, with those that callers give in place of tokens.

        Args:
            scales_given: the scale also multiplies the given ones.
        """
        x_te, given = self.embed(tokens.ids_t, tokens.adapters_t), tokens.embeds
        if given is not None and scales_given:
            x_te, given = given.replace(x_te), None
        if scale != 1:
            x_te = x_te * jnp.asarray(scale, x_te.dtype)
        return x_te if given is None else given.replace(x_te)

    def end(self, x: Any) -> jax.Array:
        """Return the hidden states `[T, E]` of the last layer's output."""
        return x

    @property
    @abc.abstractmethod
    def final_norm(self) -> Norm | None:
        """Norm between the last layer and the output matrix, if there is one."""

    def normed(self, hidden_re: jax.Array) -> jax.Array:
        """Return the last layer's states after the final norm, `[R, E]`: the model's hidden states in APIs."""
        return hidden_re if self.final_norm is None else self.final_norm(hidden_re)

    def combine(self, features_tf: jax.Array, rows: Rows) -> jax.Array:
        """Return a head's input states `[T, E]` from hidden states of the target model."""
        raise InternalError(f"{type(self).__name__} does not accept hidden states of another model")

    def own_states(self, hidden_te: jax.Array) -> jax.Array:
        """Return a head's input states `[T, E]` from its own hidden states `[T, E]`, for the next proposal."""
        return hidden_te

    def logits(self, hidden_re: jax.Array, num_rows: jax.Array) -> jax.Array:
        """Map the last layer's states `[R, E]`, of which the first rows are in use, to float32 logits `[R, V]`."""
        return (self.lm_head or self.embed).logits(hidden_re, num_rows, self.final_norm)


def normal(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Return random parameters with a standard deviation of 0.02."""
    return (jax.random.normal(key, shape) * _INIT_STD).astype(dtype)
