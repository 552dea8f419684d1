"""Whether weights are numbers: each device looks at what it has, while the next leaf is read.

NaN in one weight is NaN in every token, which shows only when somebody waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.checkpoints.tensor_source import TensorSource
from jpaged.errors import InvalidArgument

_SLICE = 1 << 18
"""Numbers that are looked at in one go: they and the answers stay in the processor's cache."""


def check_finite(leaf: jax.Array) -> Callable[[], bool]:
    """Begin to look at a leaf; the call that comes back says whether what this process has of it is all finite.

    A CPU looks at once: the leaf was written just now, and no program has to be made for its shape. Other devices look
    meanwhile.
    """
    devices: set[jax.Device] = leaf.sharding.device_set
    if all(device.platform == "cpu" for device in devices):
        is_finite = finite_on_host(leaf)
        return lambda: is_finite
    flags = finite_flags(leaf)
    return lambda: all(bool(np.asarray(shard.data).all()) for shard in flags.addressable_shards)


def finite_on_host(leaf: jax.Array) -> bool:
    """Whether what this process has of a leaf is all finite, where the devices' memory is the host's."""
    return all(_is_finite(np.asarray(shard.data).reshape(-1)) for shard in leaf.addressable_shards)


def finite_flags(leaf: jax.Array) -> jax.Array:
    """A flag for each device of what it has of the leaf: False for NaN and infinities. Returns before it is known.

    Nothing passes between devices: processes load at their own pace.
    """
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        return _on_each(sharding.mesh, sharding.spec)(leaf)
    return _all_finite(leaf)


def _is_finite(flat: np.ndarray) -> bool:
    return all(bool(np.isfinite(flat[i : i + _SLICE]).all()) for i in range(0, flat.size, _SLICE))


def refuse_tensor(files: TensorSource, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raises InvalidArgument where a tensor, in the type that it is loaded in, is not all finite."""
    stored = files.read(name, shape)
    is_bad = ~np.isfinite(stored.astype(dtype))
    if not is_bad.any():
        return
    first = tuple(int(i) for i in np.argwhere(is_bad)[0])
    raise InvalidArgument(
        str(files.where(name)),
        f"tensor {name} has {is_bad.sum()} numbers of {is_bad.size} that are not finite as {dtype}: the first is "
        f"{float(stored[first])} at {list(first)}",
    )


@jax.jit
def _all_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all(keepdims=True).reshape(1)


@functools.lru_cache(maxsize=64)
def _on_each(mesh: Mesh, spec: PartitionSpec) -> jax.stages.Wrapped:
    flags = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(_all_finite, mesh=mesh, in_specs=spec, out_specs=flags, check_vma=False))
