"""The devices that JAX finds on this machine, and the host memory that is available to this process.

The query for devices may take seconds, or hang if an accelerator's runtime hangs.

Available host memory is free memory, within the container's limits. A container's limit is that of the control group or
of an ancestor group: version 2 (one tree) or version 1 (a tree for memory). The usage of a group excludes page-cache
pages that the kernel would drop first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import jax

from jpaged.hardware import find_hardware

_ROOT = Path("/")
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def physical_host_bytes() -> int:
    """Return the physical memory of the machine, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_host_bytes(root: Path = _ROOT) -> int:
    """Return the memory available without swapping.

    Args:
        root: of the file system to read `/proc` and `/sys` from.
    """
    free = _fields(root / "proc/meminfo").get("MemAvailable:")
    # Not Linux: physical memory is the best available estimate.
    available = physical_host_bytes() if free is None else free * 1024
    return min([available, *_left_to_groups(root)])


def _left_to_groups(root: Path) -> list[int]:
    """Return the bytes left to each control group of this process that has a limit."""
    left = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        base, limit_file, use_file, cached = _V2 if number == "0" else _V1
        group = (root / base / path.lstrip("/")).resolve()
        while group.is_relative_to((root / base).resolve()):
            limit = _number(group / limit_file)
            use = _number(group / use_file)
            if limit is not None and use is not None:
                left.append(max(0, limit - use + _fields(group / "memory.stat").get(cached, 0)))
            group = group.parent
    return left


def _number(path: Path) -> int | None:
    """Return the number in a file; None if the file is missing or contains `max`."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """Parse lines of a name and a number."""
    words = [line.split() for line in _lines(path)]
    return {line[0]: int(line[1]) for line in words if len(line) >= 2 and line[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class DeviceInfo:
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


def look() -> DeviceInfo:
    """Query JAX for its devices.

    Raises:
        RuntimeError: no platform could be started; names the platform.
    """
    devices = jax.devices()
    known = find_hardware(devices[0].device_kind)
    return DeviceInfo(
        platform=devices[0].platform,
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        hardware=None if known is None else known.name,
        available_bytes=available_host_bytes(),
        physical_bytes=physical_host_bytes(),
    )
