"""The description of a GPU in the words of XLA's compiler, and such devices that are not there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jpaged.errors import Unsupported

H200 = Path(__file__).with_name("h200.toml")
H200_HBM_BYTES = 150_000_000_000 * 3 // 4
"""Of an H200, that programs may use: jax takes three quarters of a GPU's memory unless told otherwise."""


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


def compile_only_gpus(num_devices: int) -> list[jax.Device]:
    """H200s of one machine that programs can be lowered and compiled for, and nothing else.

    Raises:
        Unsupported: jax has no CUDA packages here.
    """
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=describe(), topology=f"1x1x{num_devices}"
        )
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise Unsupported(
            f"h200: this Python cannot compile for CUDA: {reason}: install jax's CUDA packages (`pip install "
            "'jax[cuda13]'`, or `make EXTRAS=cuda`; no GPU is needed)"
        ) from error
    devices: list[jax.Device] = topology.devices
    return devices


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
