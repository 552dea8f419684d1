"""Blocks in host memory: where groups are swapped out to, and where cached prefixes outlive the device pool.

    swap out   device ── copy begins ──> on its way ── lands when it has arrived ──> blocks
    swap in    device <── one transfer ── blocks          after what is on its way to those blocks has landed

Of several processes, each keeps what its own devices have of every block. The memory is asked for at once and touched
only where blocks land, so the system gives it as it is used.
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
"""Transfers that may be under way at once, each with device memory of its own."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Transfer:
    contents: jax.Array
    block_ids: list[int]


class HostPool:
    """Owns the blocks and the transfers that are on their way to them. Block 0 is not used, as in the device's pool."""

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
            raise InvalidArgument("swap_space", f"{num_bytes / _GIB:.2f} GiB of host memory are refused") from error
        self.on_the_way: deque[_Transfer] = deque()

    def receive(self, contents: jax.Array, block_ids: list[int]) -> None:
        """Starts the copy of device blocks to the host blocks of these ids; padding behind them is left out."""
        while len(self.on_the_way) >= MAX_ON_THE_WAY:
            self._land()
        if self._staging is not None:
            contents = jax.device_put(contents, self._staging)
        else:
            contents.copy_to_host_async()
        self.on_the_way.append(_Transfer(contents, block_ids))

    def land_ready(self) -> None:
        """Lands what has arrived. Transfers land in order: a later one may be to the same block."""
        while self.on_the_way and _has_arrived(self.on_the_way[0].contents):
            self._land()

    def land_all(self) -> None:
        """Waits for everything that is on its way."""
        while self.on_the_way:
            self._land()

    def read(self, block_ids: Sequence[int], num_padded: int) -> NDArray | jax.Array:
        """A fresh array of these blocks, once they have all landed; what is in the padding does not matter."""
        wanted = set(block_ids)
        while any(not wanted.isdisjoint(transfer.block_ids) for transfer in self.on_the_way):
            self._land()
        contents = np.empty((num_padded, *self._blocks.shape[1:]), self._blocks.dtype)
        # "clip" writes straight into `out`, "raise" by way of a copy; ids were checked before.
        np.take(self._blocks, block_ids, axis=0, out=contents[: len(block_ids)], mode="clip")
        contents[len(block_ids) :] = 0
        return self._parts.to_devices(contents, (num_padded, *self._block_shape))

    @property
    def is_whole(self) -> bool:
        """Blocks are here, each with all of its parts."""
        return self.num_blocks > 0 and self._blocks.shape[1:] == self._block_shape

    @property
    def blocks(self) -> NDArray:
        """`[blocks + 1, *block]`, what this process has of each."""
        return self._blocks

    def release(self) -> None:
        """Frees the memory. Idempotent."""
        self.on_the_way.clear()
        self._blocks = self._blocks[:0].copy()

    def _land(self) -> None:
        transfer = self.on_the_way.popleft()
        try:
            contents = self._parts.to_host(transfer.contents)
        except jax.errors.JaxRuntimeError as error:
            raise InternalError(f"blocks {transfer.block_ids[:8]} did not reach host memory: {error}") from error
        self._blocks[transfer.block_ids] = contents[: len(transfer.block_ids)]


class WholeHostBlocks:
    """Implements `engine.executor.HostBlocks` over a pool whose blocks are here with all of their parts.

    Args:
        identity: tells what the bytes depend on; asked once, when somebody asks.
    """

    def __init__(self, pool: HostPool, identity: Callable[[], bytes]) -> None:
        self._pool = pool
        self._blocks = pool.blocks
        self._make_identity: Callable[[], bytes] | None = identity
        self._identity = b""
        self._lock = threading.Lock()

    @property
    def bytes_per_block(self) -> int:
        """All layers of a block of one KV group."""
        return self._blocks.itemsize * math.prod(self._blocks.shape[1:])

    def view(self, block_id: int) -> memoryview:
        """The bytes of a block.

        Raises:
            InternalError: the id names no block.
        """
        if not 1 <= block_id < len(self._blocks):
            raise InternalError(f"host block {block_id} is none from 1 to {len(self._blocks) - 1}")
        return self._blocks[block_id].reshape(-1).view(np.uint8).data

    def have_landed(self, block_ids: Sequence[int]) -> bool:
        """Whether nothing is on its way to these blocks."""
        self._pool.land_ready()
        wanted = set(block_ids)
        return all(wanted.isdisjoint(transfer.block_ids) for transfer in self._pool.on_the_way)

    def kv_identity(self) -> bytes:
        """What the bytes depend on; whoever asks first waits until every weight is read."""
        with self._lock:
            if self._make_identity is not None:
                self._identity, self._make_identity = self._make_identity(), None
            return self._identity


def num_host_blocks(swap_space_gib: float, layout: KVLayout, num_pools: int = 1) -> int:
    """Blocks of each of so many pools that fit into so much host memory together.

    Raises:
        InvalidArgument: the host does not have it.
    """
    num_bytes, physical = int(swap_space_gib * _GIB), physical_host_bytes()
    if num_bytes > physical:
        raise InvalidArgument("swap_space", f"{swap_space_gib:g} GiB; the host has {physical / _GIB:.2f} GiB")
    return num_bytes // num_pools // layout.bytes_per_block


def _has_arrived(contents: Any) -> bool:
    """Every jax array has `is_ready`; the declared type leaves it out."""
    return bool(contents.is_ready())


def _staging_sharding(sharding: NamedSharding) -> NamedSharding | None:
    """Page-locked host memory, which an accelerator writes to by itself; None on a CPU, whose memory is the host's."""
    device: jax.Device = next(iter(sharding.addressable_devices))
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or "pinned_host" not in kinds:
        return None
    return sharding.with_memory_kind("pinned_host")
