"""The device that a program is lowered for."""

from __future__ import annotations

import math

import jax
from jax.sharding import AbstractDevice


def lowered_device() -> AbstractDevice | None:
    """Return the one device of the program or its part; None if it is unknown, or XLA partitions the program."""
    mesh = jax.sharding.get_abstract_mesh()
    is_divided = math.prod(mesh.shape[name] for name in mesh.auto_axes) > 1
    return None if is_divided else mesh.abstract_device
