"""A mixture of packed experts in one call, which reads only the matrices of experts that have rows.

Each row of a result is a function of that row and its experts alone, to the last bit. It does not depend on the other
rows, their number or the number of threads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import InternalError
from jpaged.kernels.cpu.library import MAX_WIDTH, NAME, register
from jpaged.kernels.experts.routing import Routes
from jpaged.kernels.experts.weights import ExpertWeights
from jpaged.kernels.matmul import PackedMatrix, scale_operands
from jpaged.kernels.mixture_kind import GateFunction

if TYPE_CHECKING:
    from jaxtyping import Array, Float


_KINDS = ("silu", "clamped", "relu2", "gelu_tanh")
"""As in core.h."""


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """The library's function, as registered with XLA.

    Attributes:
        max_width: floats of the widest vectors to use, if the processor has them: 16, 8 or 4.
        max_threads: maximum threads of XLA's pool; 0 is all.
    """

    max_width: int = MAX_WIDTH
    max_threads: int = 0

    def apply(
        self, x_te: Float[Array, "T E"], routes: Routes, weights: ExpertWeights, gate: GateFunction
    ) -> Float[Array, "T E"]:
        """Return the weighted sum of the outputs of each row's experts, without the last bias, in float32.

        Args:
            x_te: float32, bfloat16 or float16, as matrices that are not quantized.
            weights: matrices packed as `[K, X, N]` in X parts; quantized ones have neither an order nor a step.
        """
        found = {"gate": weights.gate, "up": weights.up, "down": weights.down}
        matrices = {name: matrix for name, matrix in found.items() if isinstance(matrix, PackedMatrix)}
        if len(matrices) != len(found):
            raise InternalError("some expert matrices are packed and others are not")
        none = jnp.zeros((0,), x_te.dtype)
        biases = (none if bias is None else bias for bias in (weights.gate_bias, weights.up_bias))
        forms: dict[str, np.int64] = {}
        operands: list[jax.Array] = []
        for name, matrix in matrices.items():
            (scales, zeros, *_), form = scale_operands(matrix)
            operands += (matrix.blocks, scales, zeros)
            forms |= {f"{name}_{key}": value for key, value in form.items()}
        run = jax.ffi.ffi_call(f"{NAME}_experts", jax.ShapeDtypeStruct(x_te.shape, jnp.float32))
        y_te: jax.Array = run(
            *(x_te, routes.ids_tk, routes.weights_tk, *operands, *biases),
            **forms,
            num_experts=np.int64(weights.num_experts),
            inner=np.int64(matrices["gate"].num_columns),
            gate_kind=np.int64(_KINDS.index(gate.kind)),
            alpha=np.float32(gate.alpha),
            limit=np.float32(gate.limit),
            max_width=np.int64(self.max_width),
            max_threads=np.int64(self.max_threads),
        )
        return y_te


@functools.cache
def kernel() -> CpuExperts | str:
    """Return the package's kernel, or the reason why there is none."""
    found = register("experts")
    return found if isinstance(found, str) else CpuExperts()


def loaded() -> CpuExperts:
    """Return the package's kernel, for experts that were packed for it.

    Raises:
        InternalError: there is none.
    """
    found = kernel()
    if isinstance(found, str):
        raise InternalError(f"no kernel can read packed experts: {found}")
    return found
