"""The devices that JAX finds on this machine. The query may take seconds, or hang if an accelerator's runtime hangs."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jpaged.device.host_memory import available_host_bytes, physical_host_bytes
from jpaged.hardware import find_hardware


@dataclass(frozen=True, slots=True)
class Here:
    """The devices of the platform that JAX chose, and the host's memory.

    Attributes:
        platform: JAX's name for it: cpu, gpu or tpu.
        hardware: the device's name in `jpaged plan`; None if it is not in the table.
        available_bytes: host memory available to this process.
        physical_bytes: physical memory of the host.
    """

    platform: str
    device_kind: str
    num_devices: int
    hardware: str | None
    available_bytes: int
    physical_bytes: int


def look() -> Here:
    """Query JAX for its devices.

    Raises:
        RuntimeError: no platform could be started; names the platform.
    """
    devices = jax.devices()
    known = find_hardware(devices[0].device_kind)
    return Here(
        platform=devices[0].platform,
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        hardware=None if known is None else known.name,
        available_bytes=available_host_bytes(),
        physical_bytes=physical_host_bytes(),
    )
