"""An array over several processes, as this process's part of it: one numpy array of the local devices' shards.

    whole      [C, L, B, 2K, D] split on 2K      process 0: devices 0, 1      process 1: devices 2, 3
    local      [C, L, B, 2K / 2, D]              the shards of this process's devices, concatenated

If all devices belong to this process, an array and its local part are the same.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

Shape = tuple[int, ...]


class AddressableShards:
    """This process's part of arrays of one sharding, split on at most one axis.

    Args:
        sharding: of the whole array.
    """

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding
        split = [axis for axis, name in enumerate(sharding.spec) if _num_parts(sharding, name) > 1]
        self._axis = split[0] if split else 0
        self._is_whole = sharding.is_fully_addressable or sharding.is_fully_replicated

    def shape(self, whole: Shape) -> Shape:
        """Return the shape of the local array."""
        if self._is_whole:
            return whole
        begins = self._begins(whole)
        shape = list(whole)
        shape[self._axis] = self._sharding.shard_shape(whole)[self._axis] * len(set(begins.values()))
        return tuple(shape)

    def to_host(self, array: jax.Array) -> NDArray:
        """Return the local array in host memory; waits for it."""
        if self._is_whole:
            return np.asarray(array)
        parts = {shard.index[self._axis].start or 0: shard.data for shard in array.addressable_shards}
        return np.concatenate([np.asarray(parts[begin]) for begin in sorted(parts)], axis=self._axis)

    def to_devices(self, local: NDArray, whole: Shape) -> jax.Array | NDArray:
        """Return the whole array, as a program takes it, from its local parts. Every process calls it in each step."""
        if self._is_whole:
            return local
        size = self._sharding.shard_shape(whole)[self._axis]
        begins = self._begins(whole)
        order = {begin: place for place, begin in enumerate(sorted(set(begins.values())))}
        before = (slice(None),) * self._axis
        parts = [
            jax.device_put(local[(*before, slice(order[begin] * size, (order[begin] + 1) * size))], device)
            for device, begin in begins.items()
        ]
        return jax.make_array_from_single_device_arrays(whole, self._sharding, parts)

    def _begins(self, whole: Shape) -> dict[jax.Device, int]:
        """Return the start on the split axis of the shard of each of this process's devices."""
        indices = self._sharding.addressable_devices_indices_map(whole)
        return {device: (index or ())[self._axis].start or 0 for device, index in indices.items()}


def _num_parts(sharding: NamedSharding, name: str | tuple[str, ...] | None) -> int:
    """Return the number of parts that an axis is split into by the mesh axes of this name."""
    names = (name,) if isinstance(name, str) else name or ()
    return math.prod(sharding.mesh.shape[one] for one in names)
