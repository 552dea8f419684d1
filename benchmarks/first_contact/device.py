"""The machine: packages and their versions, devices, their memory, and copies to host memory."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata

from benchmarks.first_contact.cells import Cells, NotOnThisPlatform, Values

_PACKAGES = (
    *("jax", "jaxlib", "numpy", "ml_dtypes", "grpcio", "protobuf", "tokenizers", "safetensors", "transformers"),
    *("libtpu", "orbax-checkpoint", "starlette", "uvicorn", "torch", "triton"),
)
_PREFIXES = "jax-cuda", "nvidia-"
_IMPORTED = (
    *("jpaged.llm", "jpaged.cli.serve", "jpaged.server.grpc_server", "jpaged.http.app", "jpaged.bench.cli.serve"),
    *("jpaged.plan.step_times", "jpaged.kernels.paged_attention.triton.kernel"),
    "jpaged.kernels.paged_attention.gpu.kernel",
)
"""Modules that import all packages which the checks require."""
_COPY_BYTES = {"full": 256 << 20, "tiny": 1 << 20}


def check(cells: Cells, size: str) -> None:
    """Write what the machine has; a missing package is a failure of this check already."""
    cells.plan(["packages", "devices", "pinned_host", "imports"])
    cells.run("packages", _packages)
    cells.run("devices", _devices)
    cells.run("pinned_host", lambda: _pinned_host(_COPY_BYTES[size]))
    cells.run("imports", _imports)


def _packages() -> Values:
    versions = {
        name: found.version
        for found in metadata.distributions()
        if (name := (found.metadata["Name"] or "").lower()) in _PACKAGES or name.startswith(_PREFIXES)
    }
    host = {"python": platform.python_version(), "executable": sys.executable, "num_cpus": os.cpu_count()}
    return {**host, "versions": dict(sorted(versions.items()))}


def _imports() -> Values:
    missing = {}
    for name in _IMPORTED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing[name] = str(error)
    if missing:
        raise ImportError(f"{missing}; `--pack` adds packages")
    return {}


def _devices() -> Values:
    import jax

    from jpaged.hardware import find_hardware

    device = jax.devices()[0]
    known = find_hardware(device.device_kind)
    stats = device.memory_stats() or {}
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "num_devices": len(jax.devices()),
        "hardware": None if known is None else known.name,
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "platform_version": device.client.platform_version,
        "memory_stats": {name: value for name, value in stats.items() if "limit" in name or "in_use" in name},
        "memories": sorted(memory.kind for memory in device.addressable_memories()),
        "nvidia_smi": _nvidia_smi(),
    }


def _nvidia_smi() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    fields = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=5).stdout.strip()


def _pinned_host(num_bytes: int) -> Values:
    """Copy random numbers to pinned host memory and back; the second copies are timed, because the first compile."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise NotOnThisPlatform(f"{device.device_kind} has no pinned_host memory")
    on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
    on_device = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    x = jax.device_put(jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32), on_device)
    seconds = {}
    for _ in range(2):
        begin_s = time.perf_counter()
        there = jax.block_until_ready(jax.device_put(x, on_host))
        middle_s = time.perf_counter()
        back = jax.block_until_ready(jax.device_put(there, on_device))
        seconds = {"out": middle_s - begin_s, "in": time.perf_counter() - middle_s}
    if not bool((back == x).all()):
        raise ValueError("the numbers changed in host memory")
    return {f"{name}_bytes_per_s": num_bytes / value for name, value in seconds.items()}
