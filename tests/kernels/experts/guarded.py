"""Runs experts of which some lie in pages that nobody may read: who reads them dies of it.

    python -m tests.kernels.experts.guarded WHO

prints `unread` when a row was computed without them, and then sends the row to one of them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.experts import ExpertWeights, Routes, apply_experts
from jpaged.kernels.mixture_kind import SILU
from tests.kernels.experts.mixtures import expected, mixture, numbers, packed

_PROT_NONE = 0
NUM_EXPERTS, WIDTH, ALLOWED = 6, 128, (1, 4)
"""Matrices of one expert are whole pages."""


def guarded(array: jax.Array, num_experts: int) -> jax.Array:
    """The array in pages of its own, those of all experts but the allowed ones closed."""
    size = array.nbytes // num_experts
    if size % mmap.PAGESIZE:
        raise ValueError(f"an expert of {size} bytes is not whole pages")
    memory = np.frombuffer(mmap.mmap(-1, array.nbytes), np.uint8)
    memory[:] = np.asarray(array).reshape(-1).view(np.uint8)
    moved = jax.device_put(memory.view(array.dtype).reshape(array.shape), jax.devices()[0])
    if moved.unsafe_buffer_pointer() != memory.ctypes.data:
        raise RuntimeError("jax has copied the matrices elsewhere")
    libc = ctypes.CDLL(None, use_errno=True)
    for expert in set(range(num_experts)).difference(ALLOWED):
        begin = ctypes.c_void_p(memory.ctypes.data + expert * size)
        if libc.mprotect(begin, ctypes.c_size_t(size), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    return moved


def main() -> None:
    """See the module."""
    weights = mixture(NUM_EXPERTS, WIDTH, WIDTH, "float32", has_biases=False)
    x, rest = numbers((1, WIDTH), "float32"), jnp.full((1, 2), 0.5)
    routes = Routes(jnp.asarray([ALLOWED], jnp.int32), rest)
    want = expected(x, routes, weights, SILU)
    if sys.argv[1] == "cpu":
        weights = packed(weights)
        closed = (
            dataclasses.replace(matrix, blocks=guarded(matrix.blocks, NUM_EXPERTS))
            for matrix in (weights.gate, weights.up, weights.down)
        )
    else:
        closed = (guarded(matrix, NUM_EXPERTS) for matrix in (weights.gate, weights.up, weights.down))
    run = jax.jit(functools.partial(apply_experts, gate=SILU))
    weights = ExpertWeights(*closed)
    np.testing.assert_allclose(run(jnp.asarray(x), routes, weights), want, rtol=0, atol=1e-5)
    print("unread", flush=True)
    run(jnp.asarray(x), Routes(jnp.asarray([[1, 2]], jnp.int32), rest), weights).block_until_ready()
    print("read", flush=True)


if __name__ == "__main__":
    main()
