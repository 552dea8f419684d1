"""The device that a program is lowered for, which GPUs have kernels, and the availability of Pallas Triton in jax."""

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


_MIN_CAPABILITY = (8, 0)


def unsupported_gpu_reason(device: jax.Device) -> str | None:
    """Return why a device is no NVIDIA GPU since Ampere, or None."""
    if device.platform != "gpu":
        return f"runs on NVIDIA GPUs since Ampere (sm_80); this is a {device.platform}"
    capability = str(device.compute_capability)
    numbers = capability.split(".")
    if not all(number.isdigit() for number in numbers):
        return f"runs on NVIDIA GPUs; this is {device.device_kind}, {capability}"
    if tuple(map(int, numbers)) < _MIN_CAPABILITY:
        return f"runs on Ampere (sm_80) and later; this is {device.device_kind}, sm_{capability.replace('.', '')}"
    return None


_TRITON = "jax.experimental.pallas.triton"


@functools.cache
def has_triton() -> bool:
    """Return True if this jax has the compiler; jax has announced its removal."""
    return importlib.util.find_spec(_TRITON) is not None
