"""Digest of everything that the bytes of a KV block depend on.

    model, its dtype ── layout of a block ── the code that computed it, the device ── every weight

Servers with the same digest may exchange blocks, and a server may reuse its own blocks on disk. Other kernels, another
compiler version, or a CPU with other instructions change the last bits of keys and values. The digest then differs, so
that tokens do not depend on the source of a prefix.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jaxlib
import numpy as np

from jpaged.device.compilation.aot_bundle import digest_of_sources
from jpaged.device.compilation.executable_cache import processor_features
from jpaged.device.mesh import first_device
from jpaged.device.step import Step
from jpaged.kernels.lora import AdaptedMatrix
from jpaged.models.layers import Params

_NUM_THREADS = 4


def kv_fingerprint(step: Step, params: Params) -> bytes:
    """Return the digest, 32 bytes.

    Args:
        params: as programs take them; adapters next to them do not count, because block hashes name the adapter.
    """
    device = first_device(step.mesh)
    layout = dataclasses.replace(step.layout, num_blocks=1)
    matmuls = step.linear_backend, step.activation_dtype
    kernels = (step.backend, *matmuls, step.layer_mode, dict(step.mesh.shape), step.kv_groups)
    found = hashlib.sha256(b"jpaged/kv/1\0")
    found.update(repr((step.model.config, np.dtype(step.model.dtype).name, layout, kernels)).encode())
    where = (device.platform, device.device_kind, processor_features() if device.platform == "cpu" else "")
    found.update(repr((where, jax.__version__, jaxlib.version.__version__, digest_of_sources())).encode())
    with ThreadPoolExecutor(_NUM_THREADS, "jpaged-identity") as threads:
        for digest in threads.map(_digest, _leaves(params)):
            found.update(digest)
    return found.digest()


def _leaves(params: Params) -> Iterator[tuple[str, Any]]:
    bare = jax.tree.map(
        lambda leaf: leaf.base if isinstance(leaf, AdaptedMatrix) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, AdaptedMatrix),
    )
    for path, leaf in jax.tree_util.tree_flatten_with_path(bare)[0]:
        yield jax.tree_util.keystr(path), leaf


def _digest(named: tuple[str, Any]) -> bytes:
    """Hash the parts of a leaf on this process's devices. Hashing releases the GIL."""
    name, leaf = named
    found = hashlib.sha256(repr((name, leaf.shape, np.dtype(leaf.dtype).name)).encode())
    parts = {str(shard.index): shard.data for shard in leaf.addressable_shards}
    for index in sorted(parts):
        found.update(np.ascontiguousarray(np.asarray(parts[index])).reshape(-1).view(np.uint8).data)
    return found.digest()
