"""The description of a GPU in the words of XLA's compiler, and a mesh of such devices that are not there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

H200 = Path(__file__).with_name("h200.toml")


def describe(path: Path = H200) -> str:
    """The target as XLA's GpuTargetConfigProto, in text."""
    facts = tomllib.loads(path.read_text())
    processor, memory = facts["multiprocessor"], facts["memory"]
    limits = dict(zip("xyz", facts["grid"]["limits"], strict=True))
    device = {
        "threads_per_block_limit": processor["threads_per_block"],
        "threads_per_warp": processor["threads_per_warp"],
        "threads_per_core_limit": processor["threads"],
        "shared_memory_per_block": processor["shared_bytes_per_block"],
        "shared_memory_per_block_optin": processor["shared_bytes_at_most"],
        "shared_memory_per_core": processor["shared_bytes"],
        "registers_per_core_limit": processor["registers"],
        "registers_per_block_limit": processor["registers_per_block"],
        "core_count": processor["count"],
        "fpus_per_core": processor["lanes"],
        "clock_rate_ghz": processor["clock_ghz"],
        **{f"block_dim_limit_{axis}": limit for axis, limit in limits.items()},
        "memory_bandwidth": memory["bytes_per_s"],
        "device_memory_size": memory["bytes"],
        "l2_cache_size": memory["l2_bytes"],
        "cuda_compute_capability": {"major": facts["compute_capability"]},
    }
    return _text(
        {
            "gpu_device_info": device,
            "platform_name": "CUDA",
            "dnn_version_info": _version(facts["software"]["cudnn"]),
            "runtime_version": {**_version(facts["software"]["cuda"]), "patch": 0},
            "device_description_str": facts["name"],
        }
    )


def mesh() -> jax.sharding.Mesh:
    """One H200."""
    topology = topologies.get_topology_desc("", platform="cuda", target_config=describe(), topology="1x1x1")
    return jax.sharding.Mesh(np.array(topology.devices).reshape(1), ("model",))


def _version(text: str) -> dict[str, int]:
    major, minor = text.split(".")
    return {"major": int(major), "minor": int(minor)}


def _text(message: dict[str, Any]) -> str:
    """A message in protobuf's text format."""
    lines = []
    for name, value in message.items():
        if isinstance(value, dict):
            lines.append(f"{name} {{ {_text(value)} }}")
        else:
            lines.append(f'{name}: "{value}"' if isinstance(value, str) else f"{name}: {value}")
    return "\n".join(lines)
