"""The device that a program is lowered for, and the availability of Pallas Triton for it in jax."""

from __future__ import annotations

import functools
import importlib.util
import math

import jax
from jax.sharding import AbstractDevice


def lowered_device() -> AbstractDevice | None:
    """Return the one device of the program or its part; None if it is unknown, or XLA partitions the program."""
    mesh = jax.sharding.get_abstract_mesh()
    is_divided = math.prod(mesh.shape[name] for name in mesh.auto_axes) > 1
    return None if is_divided else mesh.abstract_device


_TRITON = "jax.experimental.pallas.triton"


@functools.cache
def has_triton() -> bool:
    """Return True if this jax has the compiler; jax has announced its removal."""
    return importlib.util.find_spec(_TRITON) is not None
