"""Whether jax still has Pallas Triton, which some of the kernels for GPUs are written in."""

from __future__ import annotations

import functools
import importlib.util

_TRITON = "jax.experimental.pallas.triton"


@functools.cache
def has_triton() -> bool:
    """Whether this jax has the compiler; it was announced that one will not."""
    return importlib.util.find_spec(_TRITON) is not None
