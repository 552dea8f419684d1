"""The device that a process runs on, and what it is called."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True, slots=True)
class BackendNames:
    """A device in words."""

    platform: str
    device_kind: str
    jax_version: str


def names_of(device: jax.Device) -> BackendNames:
    """What the device and its software are called."""
    return BackendNames(device.platform, device.device_kind, jax.__version__)
