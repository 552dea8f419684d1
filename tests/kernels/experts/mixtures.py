"""Random mixtures of experts, and one by one in float64 what they make of rows."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jpaged.kernels import matmul
from jpaged.kernels.experts import ExpertWeights, Routes
from jpaged.kernels.mixture_kind import GateFunction

CLAMPED = GateFunction("clamped", alpha=1.702, limit=0.5)


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Normal numbers, of matrices so small that a row stays as large as it is."""
    scale = shape[-2] ** -0.5 if len(shape) == 3 else 1.0
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(jnp.dtype(dtype))


def mixture(num_experts: int, width: int, inner: int, dtype: str, *, has_biases: bool = True) -> ExpertWeights:
    """The weights of so many experts."""
    gate, up = (jnp.asarray(numbers((num_experts, width, inner), dtype, seed)) for seed in (1, 2))
    down = jnp.asarray(numbers((num_experts, inner, width), dtype, 3))
    if not has_biases:
        return ExpertWeights(gate, up, down)
    gate_bias, up_bias = (jnp.asarray(numbers((num_experts, inner), dtype, seed)) for seed in (4, 5))
    return ExpertWeights(gate, up, down, gate_bias, up_bias, jnp.asarray(numbers((num_experts, width), dtype, 6)))


def packed(weights: ExpertWeights, *, rounds_rows: bool = False) -> ExpertWeights:
    """The weights as the CPU's kernel reads them."""
    packer = matmul.loaded().packer(SingleDeviceSharding(jax.devices()[0]), rounds_rows=rounds_rows)

    def pack(matrices_xio: jax.Array | matmul.QuantizedMatrix) -> matmul.PackedMatrix:
        return packer.pack(matmul.swap_experts(matrices_xio), num_parts=matrices_xio.shape[0])

    return dataclasses.replace(weights, gate=pack(weights.gate), up=pack(weights.up), down=pack(weights.down))


def random_routes(num_tokens: int, num_experts: int, top_k: int, num_in_use: int | None = None) -> Routes:
    """Each row to different experts at random; those behind the ones in use nowhere."""
    rng = np.random.default_rng([num_tokens, num_experts, top_k])
    ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    ids[num_tokens if num_in_use is None else num_in_use :] = num_experts
    return Routes(jnp.asarray(ids), jnp.asarray(rng.uniform(0.1, 1, ids.shape).astype(np.float32)))


def expected(x: np.ndarray, routes: Routes, weights: ExpertWeights, gate: GateFunction) -> np.ndarray:
    """Row by row and expert by expert."""
    num_experts, y = weights.num_experts, np.zeros(x.shape)
    kernels = [np.asarray(kernel, np.float64) for kernel in (weights.gate, weights.up, weights.down)]
    given = (weights.gate_bias, weights.up_bias, weights.down_bias)
    biases = [np.zeros((num_experts, 1)) if bias is None else np.asarray(bias, np.float64) for bias in given]
    for row, (ids, row_weights) in enumerate(
        zip(np.asarray(routes.ids_tk), np.asarray(routes.weights_tk), strict=True)
    ):
        for expert, weight in zip(ids, row_weights, strict=True):
            if expert == num_experts:
                continue
            gates, ups = (x[row].astype(np.float64) @ kernels[i][expert] + biases[i][expert] for i in (0, 1))
            if gate.kind == "silu":
                inner = gates / (1 + np.exp(-gates)) * ups
            elif gate.kind == "gelu_tanh":
                inner = gates / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (gates + 0.044715 * gates**3))) * ups
            elif gate.kind == "relu2":
                inner = np.maximum(ups, 0) ** 2
            else:
                gates, ups = np.minimum(gates, gate.limit), np.clip(ups, -gate.limit, gate.limit)
                inner = (ups + 1) * gates / (1 + np.exp(-gate.alpha * gates))
            inner = inner.astype(np.float32).astype(x.dtype).astype(np.float64)
            y[row] += weight * (inner @ kernels[2][expert] + biases[2][expert])
    return y
