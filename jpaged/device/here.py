"""What jax finds on this machine. Asking may take seconds, or for ever where an accelerator's runtime hangs."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jpaged.device.host_memory import available_host_bytes, physical_host_bytes
from jpaged.hardware import find_hardware


@dataclass(frozen=True, slots=True)
class Here:
    """Devices of the platform that jax chose, and the host's memory.

    Attributes:
        platform: as jax calls it: cpu, gpu or tpu.
        hardware: what `jpaged plan` calls such a device; None where it is not in the table.
        available_bytes: that this process may still have of the host.
        physical_bytes: of the host.
    """

    platform: str
    device_kind: str
    num_devices: int
    hardware: str | None
    available_bytes: int
    physical_bytes: int


def look() -> Here:
    """Asks jax for its devices.

    Raises:
        RuntimeError: no platform could be started; says which.
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
