"""Check that weights are finite: each device checks its part while the next leaf is read.

NaN in one weight makes every token NaN, which would otherwise show only at the first request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.checkpoints.tensor_files import TensorSource
from jpaged.errors import InvalidArgument

_SLICE = 1 << 18
"""Numbers checked in one pass, so that they and the result fit into the processor's cache."""


def check_finite(leaf: jax.Array | np.ndarray) -> Callable[[], bool]:
    """Start to check a leaf. The returned function returns True if this process's part is finite.

    On a CPU the check runs at once: the leaf was just written, and no program must be compiled for its shape. Other
    devices check concurrently.
    """
    if isinstance(leaf, np.ndarray):
        is_finite = _is_finite(leaf.ravel("K"))
        return lambda: is_finite
    devices: set[jax.Device] = leaf.sharding.device_set
    if all(device.platform == "cpu" for device in devices):
        is_finite = finite_on_host(leaf)
        return lambda: is_finite
    flags = finite_flags(leaf)
    return lambda: all(bool(np.asarray(shard.data).all()) for shard in flags.addressable_shards)


def finite_on_host(leaf: jax.Array) -> bool:
    """Return True if this process's part of a leaf is finite, for devices that use host memory."""
    return all(_is_finite(np.asarray(shard.data).reshape(-1)) for shard in leaf.addressable_shards)


def finite_flags(leaf: jax.Array) -> jax.Array:
    """Return a flag per device: False if its part of the leaf has NaN or infinities. Does not wait.

    The devices do not communicate, because processes load at different speeds.
    """
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        return _on_each(sharding.mesh, sharding.spec)(leaf)
    return _all_finite(leaf)


_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits of infinity; those of larger values are NaN. The sign is bit 15."""


def _is_finite(flat: np.ndarray) -> bool:
    if (infinity := _INFINITY.get(flat.dtype.name)) is None:
        return all(bool(np.isfinite(flat[i : i + _SLICE]).all()) for i in range(0, flat.size, _SLICE))
    # As signed integers the largest is a positive number, and as unsigned ones a negative one: ten times as fast.
    slices = (flat[i : i + _SLICE] for i in range(0, flat.size, _SLICE))
    return all(
        part.view(np.int16).max() < infinity and part.view(np.uint16).max() < infinity + 0x8000 for part in slices
    )


def refuse_tensor(files: TensorSource, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise InvalidArgument if a tensor, cast to the type that it is loaded in, is not finite."""
    stored = files.read(name, shape)
    with np.errstate(over="ignore"):
        is_bad = ~np.isfinite(stored.astype(dtype))
    if not is_bad.any():
        return
    first = tuple(int(i) for i in np.argwhere(is_bad)[0])
    remedy = f"; {dtype} ends at {np.finfo(dtype).max:.0f}: choose --dtype bfloat16" if dtype == np.float16 else ""
    remedy = remedy if np.isfinite(stored[first]) else ""
    raise InvalidArgument(
        str(files.where(name)),
        f"tensor {name} has {is_bad.sum()} of {is_bad.size} numbers that are not finite as {dtype}: the first is "
        f"{float(stored[first])} at {list(first)}{remedy}",
    )


@jax.jit
def _all_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all(keepdims=True).reshape(1)


@functools.lru_cache(maxsize=64)
def _on_each(mesh: Mesh, spec: PartitionSpec) -> jax.stages.Wrapped:
    flags = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(_all_finite, mesh=mesh, in_specs=spec, out_specs=flags, check_vma=False))
