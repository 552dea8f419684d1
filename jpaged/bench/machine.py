"""Machine and versions that a number was measured with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jpaged.version import __version__

_LIBRARIES = ("numpy", "jax", "jaxlib", "grpcio", "httpx2")


def machine() -> dict[str, object]:
    """Return what the numbers depend on except the code; `usable_cpus` are those that this process may run on."""
    return {
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jpaged": __version__,
        **{name: text for name in _LIBRARIES if (text := _version(name))},
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
