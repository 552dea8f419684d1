"""Blocks in host memory: swapped-out groups, and cached prefixes offloaded from the device pool.

    swap out   device ── copy begins ──> in flight ── written when it has arrived ──> blocks
    swap in    device <── one transfer ── blocks          after transfers in flight to those blocks were written

With several processes, each one stores the parts of every block that its own devices hold. The memory is allocated at
once, but pages are touched only as blocks are written, so the system provides them on demand.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from jpaged.device.host_memory import physical_host_bytes
from jpaged.device.multihost.shards import AddressableShards
from jpaged.errors import InternalError, InvalidArgument
from jpaged.kernels.kv_layout import KVLayout

MAX_ON_THE_WAY = 4
"""Maximum transfers in flight; each takes device memory."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Transfer:
    contents: jax.Array
    block_ids: list[int]


class HostPool:
    """Owns the blocks and the transfers in flight to them. Block 0 is not used, as in the device pool."""

    def __init__(self, layout: KVLayout, num_blocks: int, sharding: NamedSharding) -> None:
        self.num_blocks = num_blocks
        self._staging = _staging_sharding(sharding)
        self._parts = AddressableShards(sharding)
        self._block_shape = layout.block_shape
        shape = self._parts.shape((num_blocks + 1 if num_blocks else 0, *layout.block_shape))
        try:
            self._blocks: NDArray = np.empty(shape, layout.storage_dtype)
        except MemoryError as error:
            num_bytes = num_blocks * layout.bytes_per_block
            raise InvalidArgument("swap_space", f"cannot allocate {num_bytes / _GIB:.2f} GiB of host memory") from error
        self.on_the_way: deque[_Transfer] = deque()

    def receive(self, contents: jax.Array, block_ids: list[int]) -> None:
        """Start the copy of device blocks to the host blocks with these ids. Padding after them is ignored."""
        while len(self.on_the_way) >= MAX_ON_THE_WAY:
            self._land()
        if self._staging is not None:
            contents = jax.device_put(contents, self._staging)
        else:
            contents.copy_to_host_async()
        self.on_the_way.append(_Transfer(contents, block_ids))

    def land_ready(self) -> None:
        """Write the transfers that have arrived, in order: a later one may be to the same block."""
        while self.on_the_way and _has_arrived(self.on_the_way[0].contents):
            self._land()

    def land_all(self) -> None:
        """Wait for all transfers in flight, and write them."""
        while self.on_the_way:
            self._land()

    def read(self, block_ids: Sequence[int], num_padded: int) -> NDArray | jax.Array:
        """Return a new array of these blocks, after waiting for transfers in flight to them. Padding is zeros."""
        wanted = set(block_ids)
        while any(not wanted.isdisjoint(transfer.block_ids) for transfer in self.on_the_way):
            self._land()
        contents = np.empty((num_padded, *self._blocks.shape[1:]), self._blocks.dtype)
        # "clip" writes straight into `out`, "raise" through a copy; ids were checked before.
        np.take(self._blocks, block_ids, axis=0, out=contents[: len(block_ids)], mode="clip")
        contents[len(block_ids) :] = 0
        return self._parts.to_devices(contents, (num_padded, *self._block_shape))

    @property
    def is_whole(self) -> bool:
        """True if there are blocks and this process holds every block completely."""
        return self.num_blocks > 0 and self._blocks.shape[1:] == self._block_shape

    @property
    def blocks(self) -> NDArray:
        """Array `[blocks + 1, *block]` of this process's parts of each block."""
        return self._blocks

    def release(self) -> None:
        """Free the memory. Idempotent."""
        self.on_the_way.clear()
        self._blocks = self._blocks[:0].copy()

    def _land(self) -> None:
        transfer = self.on_the_way.popleft()
        try:
            contents = self._parts.to_host(transfer.contents)
        except jax.errors.JaxRuntimeError as error:
            raise InternalError(f"copying blocks {transfer.block_ids[:8]} to host memory failed: {error}") from error
        self._blocks[transfer.block_ids] = contents[: len(transfer.block_ids)]


class WholeHostBlocks:
    """Implements `engine.executor.HostBlocks` over a pool of which this process holds all parts of each block.

    Args:
        identity: computes the KV identity (`jpaged.device.identity`); called once, at the first use.
    """

    def __init__(self, pool: HostPool, identity: Callable[[], bytes]) -> None:
        self._pool = pool
        self._blocks = pool.blocks
        self._make_identity: Callable[[], bytes] | None = identity
        self._identity = b""
        self._lock = threading.Lock()

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of one KV group, all its layers."""
        return self._blocks.itemsize * math.prod(self._blocks.shape[1:])

    def view(self, block_id: int) -> memoryview:
        """Return the bytes of a block.

        Raises:
            InternalError: the id names no block.
        """
        if not 1 <= block_id < len(self._blocks):
            raise InternalError(f"host block {block_id} is not from 1 to {len(self._blocks) - 1}")
        return self._blocks[block_id].reshape(-1).view(np.uint8).data

    def have_landed(self, block_ids: Sequence[int]) -> bool:
        """Return True if no transfer to these blocks is in flight."""
        self._pool.land_ready()
        wanted = set(block_ids)
        return all(wanted.isdisjoint(transfer.block_ids) for transfer in self._pool.on_the_way)

    def kv_identity(self) -> bytes:
        """Return the digest that the bytes depend on; the first call waits until every weight is read."""
        with self._lock:
            if self._make_identity is not None:
                self._identity, self._make_identity = self._make_identity(), None
            return self._identity


def num_host_blocks(swap_space_gib: float, layout: KVLayout, num_pools: int = 1) -> int:
    """Return the blocks of each pool if `num_pools` pools share this much host memory.

    Raises:
        InvalidArgument: the host has less memory.
    """
    num_bytes, physical = int(swap_space_gib * _GIB), physical_host_bytes()
    if num_bytes > physical:
        raise InvalidArgument("swap_space", f"{swap_space_gib:g} GiB; the host has {physical / _GIB:.2f} GiB")
    return num_bytes // num_pools // layout.bytes_per_block


def _has_arrived(contents: Any) -> bool:
    """Return True if the copy has arrived. Every jax array has `is_ready`; the declared type lacks it."""
    return bool(contents.is_ready())


def _staging_sharding(sharding: NamedSharding) -> NamedSharding | None:
    """Return a sharding in pinned host memory, which accelerators write to directly; None on CPUs."""
    device: jax.Device = next(iter(sharding.addressable_devices))
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or "pinned_host" not in kinds:
        return None
    return sharding.with_memory_kind("pinned_host")
