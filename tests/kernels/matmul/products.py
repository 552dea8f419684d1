"""Calls of the CPU product whose programs are kept: those of the same shapes are compiled once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.matmul import Norm, PackedMatrix, ProductKernel


def multiply(
    run: ProductKernel,
    x: Any,
    matrix: PackedMatrix,
    num_rows: int | None = None,
    *,
    norm: Norm | None = None,
    dtype: np.dtype | None = None,
    **around: Any,
) -> np.ndarray:
    """Return `run.multiply` of the first `num_rows` rows of x; by default of all."""
    arrays = () if norm is None else (norm.scale, norm.bias)
    program = _program(run, None if norm is None else (norm.kind, norm.eps), dtype)
    return np.asarray(
        program(jnp.asarray(x), matrix, np.int32(len(x) if num_rows is None else num_rows), arrays, around)
    )


@functools.cache
def _program(run: ProductKernel, norm: tuple[Any, float] | None, dtype: np.dtype | None) -> Callable[..., jax.Array]:
    def multiply(
        x: jax.Array, matrix: PackedMatrix, num_rows: jax.Array, arrays: tuple[Any, ...], around: dict[str, Any]
    ) -> jax.Array:
        return run.multiply(
            x, matrix, num_rows, norm=None if norm is None else Norm(*norm, *arrays), dtype=dtype, **around
        )

    return jax.jit(multiply)
