"""Availability of Pallas Triton in jax, which some GPU kernels are written in."""

from __future__ import annotations

import functools
import importlib.util

_TRITON = "jax.experimental.pallas.triton"


@functools.cache
def has_triton() -> bool:
    """Return True if this jax has the compiler; jax has announced its removal."""
    return importlib.util.find_spec(_TRITON) is not None
