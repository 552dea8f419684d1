"""The devices that JAX finds on this machine, and the memory that is available to this process.

The query for devices may take seconds, or hang if an accelerator's runtime hangs.

JAX's allocator reserves a share of each GPU when JAX starts CUDA:

    all memory of a GPU
    |<------------ XLA_CLIENT_MEM_FRACTION of it ------------>|<---------- outside ---------->|
    | weights, pool, temporaries, inputs and outputs of steps | CUDA, program code and graphs |

Available host memory is free memory, within the container's limits. A container's limit is that of the control group or
of an ancestor group: version 2 (one tree) or version 1 (a tree for memory). The usage of a group excludes page-cache
pages that the kernel would drop first.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import jax
from jax._src import xla_bridge

from jpaged.config import (
    DEPRECATED_GPU_MEMORY_SHARE,
    GPU_MEMORY_SHARE_VARIABLE,
    gpu_memory_share,
    set_gpu_memory_share,
)
from jpaged.hardware import GPU_MEMORY_SHARE, find_hardware

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


_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_JAX_GPU_MEMORY_SHARE = 0.75
"""Share of a GPU that JAX's allocator takes if the environment sets none."""


def may_have_gpus() -> bool:
    """Return True if JAX may start CUDA: a plugin is installed, and the platforms are not limited to others."""
    platforms = str(getattr(jax.config, "jax_platforms", None) or "")  # mypy knows no option of jax.config
    is_allowed = not platforms or not {"cuda", "gpu"}.isdisjoint(platforms.split(","))
    return is_allowed and any(importlib.util.find_spec(name) is not None for name in _CUDA_PLUGINS)


def prepare_gpu_memory() -> str | None:
    """Let JAX's allocator take `GPU_MEMORY_SHARE` of each GPU, unless the environment sets a share.

    The first call must be before JAX starts its platforms, at which it reads the environment. Later calls only return
    the reason. Without CUDA it does nothing.

    Returns:
        Why the share is another one, as a line for the log; None if it is not.

    Raises:
        InvalidArgument: the environment sets no valid share, or sets both variables.
    """
    if not may_have_gpus():
        return None
    chosen = gpu_memory_share()
    if chosen is not None:
        name, share = chosen
        if name == DEPRECATED_GPU_MEMORY_SHARE:
            return (
                f"JAX's allocator takes {share:g} of each GPU ({name}, which is deprecated: set "
                f"{GPU_MEMORY_SHARE_VARIABLE} instead, or neither for {GPU_MEMORY_SHARE:g})"
            )
        if share == GPU_MEMORY_SHARE:
            return None
        return f"JAX's allocator takes {share:g} of each GPU ({name}; unset it for {GPU_MEMORY_SHARE:g})"
    if xla_bridge.backends_are_initialized():
        return (
            f"JAX's allocator takes {_JAX_GPU_MEMORY_SHARE:g} of each GPU, not {GPU_MEMORY_SHARE:g}, because this "
            "process used JAX before: load the model first, or set "
            f"{GPU_MEMORY_SHARE_VARIABLE}={GPU_MEMORY_SHARE:g} in the environment"
        )
    set_gpu_memory_share(GPU_MEMORY_SHARE)
    return None


def memory_outside_allocator(bytes_limit: int) -> int:
    """Return the bytes of a GPU that JAX's allocator leaves to CUDA, program code and graphs.

    Args:
        bytes_limit: of the allocator.
    """
    chosen = gpu_memory_share()
    share = _JAX_GPU_MEMORY_SHARE if chosen is None else chosen[1]
    return int(bytes_limit / share) - bytes_limit


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
        InvalidArgument: as `prepare_gpu_memory`.
        RuntimeError: no platform could be started; names the platform.
    """
    prepare_gpu_memory()
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
