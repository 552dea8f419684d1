"""The device that a program is lowered for."""

from __future__ import annotations

import math

import jax
from jax.sharding import AbstractDevice


def lowered_device() -> AbstractDevice | None:
    """The one device of the program, or of its part; None where it is not known, or XLA divides the program."""
    mesh = jax.sharding.get_abstract_mesh()
    is_divided = math.prod(mesh.shape[name] for name in mesh.auto_axes) > 1
    return None if is_divided else mesh.abstract_device
