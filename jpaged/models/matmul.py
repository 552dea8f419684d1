"""The matmul of the models, accumulated in float32, and its gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jpaged.kernels.product.depth import parts_on_device
from jpaged.kernels.product.on_device import PartedMatrix, multiply_on_device
from jpaged.kernels.product.quantised import QuantisedMatrix
from jpaged.kernels.product.stacked import StackedMatrix


def dot(x_te: jax.Array, matrix: jax.Array | QuantisedMatrix | StackedMatrix | PartedMatrix, axis: int) -> jax.Array:
    """Contract x's last axis with one axis of a matrix, the first or the last; returns float32.

    A quantized matrix has its own axis, and no gradient.
    """
    if isinstance(matrix, QuantisedMatrix | StackedMatrix | PartedMatrix):
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
