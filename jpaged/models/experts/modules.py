"""The router, the experts, and the shared expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.kernels import product
from jpaged.kernels.experts import ExpertsKernel, ExpertWeights, apply_experts, route
from jpaged.models.experts.mixture import Mixture
from jpaged.models.layers import GatedLinear, Linear, Norm, normal
from jpaged.models.matmul import dot
from jpaged.models.tokens import Rows


class Router(nnx.Module):
    """A score for each row and expert, in float32."""

    def __init__(self, width: int, mixture: Mixture, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        num_experts = mixture.routing.num_experts
        self.kernel = nnx.Param(normal(rngs.params(), (width, num_experts), dtype))
        self.bias = nnx.Param(jnp.zeros((num_experts,), dtype)) if mixture.router_bias else None
        # Added to scores whose differences may be below the resolution of bfloat16.
        self.choice_bias = nnx.Param(jnp.zeros((num_experts,), jnp.float32)) if mixture.choice_bias else None

    def __call__(self, x_te: jax.Array, rows: Rows) -> jax.Array:
        """Map `[T, E]` to `[T, X]`."""
        kernel = self.kernel.get_value()
        if isinstance(kernel, product.PackedMatrix):
            logits_tx = product.loaded().multiply(x_te, kernel, rows.num_in_use, dtype=np.dtype(np.float32))
        else:
            logits_tx = dot(x_te, kernel, 0)
        return logits_tx if self.bias is None else logits_tx + self.bias[...].astype(jnp.float32)


class ExpertLinear(nnx.Module):
    """One matrix for each expert, `[X, in, out]`, and biases `[X, out]`."""

    def __init__(
        self, num_experts: int, widths: tuple[int, int], use_bias: bool, dtype: np.dtype, rngs: nnx.Rngs
    ) -> None:
        self.kernel = nnx.Param(normal(rngs.params(), (num_experts, *widths), dtype))
        self.bias = nnx.Param(jnp.zeros((num_experts, widths[1]), dtype)) if use_bias else None


class Experts(nnx.Module):
    """The matrices of all experts."""

    def __init__(self, width: int, mixture: Mixture, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        num_experts, inner, use_bias = mixture.routing.num_experts, mixture.width, mixture.has_biases
        self.gate = ExpertLinear(num_experts, (width, inner), use_bias, dtype, rngs)
        self.up = ExpertLinear(num_experts, (width, inner), use_bias, dtype, rngs)
        self.down = ExpertLinear(num_experts, (inner, width), use_bias, dtype, rngs)

    @property
    def weights(self) -> ExpertWeights:
        """The arrays."""
        linears = (self.gate, self.up, self.down)
        biases = (None if linear.bias is None else linear.bias[...] for linear in linears)
        return ExpertWeights(*(linear.kernel.get_value() for linear in linears), *biases)


class SharedExpert(nnx.Module):
    """An expert that all rows use, optionally weighted by a score."""

    def __init__(self, width: int, mixture: Mixture, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.gate_up = GatedLinear(width, mixture.shared_width, False, "silu", dtype, rngs)
        self.down = Linear(mixture.shared_width, (width,), False, dtype, rngs)
        self.score = Linear(width, (1,), False, dtype, rngs) if mixture.shared_is_weighed else None

    def __call__(self, x_te: jax.Array, rows: Rows) -> jax.Array:
        """Map `[T, E]` to float32 `[T, E]`."""
        y_te = self.down(self.gate_up(x_te, rows), rows).astype(jnp.float32)
        if self.score is None:
            return y_te
        return jax.nn.sigmoid(self.score(x_te, rows).astype(jnp.float32)) * y_te


class MixtureOfExperts(nnx.Module):
    """The weighted sum of the outputs of each row's experts, plus the shared expert's."""

    def __init__(self, width: int, mixture: Mixture, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.router = Router(width, mixture, dtype, rngs)
        self.experts = Experts(width, mixture, dtype, rngs)
        self.shared = SharedExpert(width, mixture, dtype, rngs) if mixture.shared_width else None
        self.mixture = mixture

    def __call__(
        self,
        x_te: jax.Array,
        rows: Rows,
        *,
        norm: Norm,
        residual: jax.Array | None = None,
        kernel: ExpertsKernel | None = None,
    ) -> jax.Array:
        """Map `[T, E]` to `[T, E]`; adds the residual, if any.

        Sums are made in float32 and rounded once.
        """
        is_packed = isinstance(self.router.kernel.get_value(), product.PackedMatrix)
        before = norm.for_kernel if is_packed else None
        h_te = norm(x_te) if before is None else product.loaded().normalise(x_te, before, rows.num_in_use)
        choice_bias = None if self.router.choice_bias is None else self.router.choice_bias[...]
        routes = route(self.router(h_te, rows), self.mixture.routing, rows.num_in_use, choice_bias)
        y_te = apply_experts(h_te, routes, self.experts.weights, self.mixture.gate, kernel)
        if self.shared is not None:
            y_te = y_te + self.shared(h_te, rows)
        y_te = y_te.astype(x_te.dtype)
        return y_te if residual is None else residual + y_te
