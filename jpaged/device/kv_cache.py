"""The pool's one array, and how many blocks it gets.

Every step donates the array and gets it back updated. `KVPool` is the only holder: between `take` and `put` it is
spent, and touching it raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jpaged.errors import InternalError, InvalidArgument
from jpaged.kernels.kv_layout import KVLayout

_GIB = 1 << 30


class KVPool:
    """Holds the pool's array while no step has it."""

    def __init__(self, layout: KVLayout, sharding: Sharding) -> None:
        zeros = jax.jit(lambda: jnp.zeros(layout.shape, layout.storage_dtype), out_shardings=sharding)
        self._array: jax.Array | None = zeros()

    @property
    def is_spent(self) -> bool:
        return self._array is None

    def take(self) -> jax.Array:
        """Hands the array out to be donated.

        Raises:
            InternalError: a step that took it never gave it back, or the pool was released.
        """
        if self._array is None:
            raise InternalError("the KV pool is spent: a step failed after it was donated, or it was released")
        array, self._array = self._array, None
        return array

    def put(self, array: jax.Array) -> None:
        """Takes the array that a step returned."""
        if self._array is not None:
            raise InternalError("the KV pool was given back twice")
        self._array = array

    def wait(self) -> None:
        """Returns when everything that writes to the array has run."""
        if self._array is not None:
            self._array.block_until_ready()

    def release(self) -> None:
        """Frees the memory. Idempotent."""
        if self._array is not None:
            self._array.delete()
            self._array = None


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What decides the number of blocks.

    Attributes:
        bytes_per_block: of all layers, what one device holds of it.
        block_size: tokens in a block.
        max_num_seqs: sequences that run at once.
        max_model_len: tokens of a sequence at most.
        memory_utilization: share of the memory that weights, programs and the pool may take.
        weight_bytes: of the parameters of one device, which are in memory already.
        num_devices: that have no pool yet, of all copies of the model. Those of a CPU share the memory of their host.
    """

    bytes_per_block: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    memory_utilization: float
    weight_bytes: int
    num_devices: int = 1

    @property
    def blocks_per_seq(self) -> int:
        """Blocks of one sequence of the greatest length: the least that a pool has unless the user says so."""
        return -(-self.max_model_len // self.block_size)


def check_num_blocks(num_blocks: int, request: PoolRequest, device: jax.Device) -> int:
    """The number that the user chose, if the device can hold it; sequences longer than the pool are refused one by one.

    Raises:
        InvalidArgument: it cannot. A device that hides its memory is believed to.
    """
    if device.platform != "cpu" and not device.memory_stats():
        return num_blocks
    total, _ = _memory_bytes(device, request)
    most = max(0, (total - request.weight_bytes) // request.bytes_per_block - 1)
    if num_blocks > most:
        raise InvalidArgument(
            "num_blocks", f"{num_blocks} of {request.bytes_per_block} bytes are more than memory holds, {most}"
        )
    return num_blocks


def default_num_blocks(request: PoolRequest, device: jax.Device, temp_bytes: Callable[[], int]) -> int:
    """As many blocks as memory allows; on a CPU no more than max_num_seqs longest sequences can use.

    Args:
        request: the sizes.
        device: where the pool will be.
        temp_bytes: working memory of the largest program. Called only where memory is the limit: it compiles.

    Raises:
        InvalidArgument: not even one longest sequence fits.
    """
    total, is_exact = _memory_bytes(device, request)
    most = request.max_num_seqs * request.blocks_per_seq
    free = int(request.memory_utilization * total) - request.weight_bytes
    # A quarter in reserve makes the working memory of programs a detail that need not be compiled for.
    if not is_exact and (most + 1) * request.bytes_per_block < free * 3 // 4:
        return most
    working = temp_bytes()
    fitting = (free - working) // request.bytes_per_block - 1
    if fitting < request.blocks_per_seq:
        raise InvalidArgument(
            "memory_utilization",
            f"{request.memory_utilization:g} of {total / _GIB:.2f} GiB, less {request.weight_bytes / _GIB:.2f} for "
            f"weights and {working / _GIB:.2f} for programs, leaves {max(0, fitting)} blocks of "
            f"{request.bytes_per_block} bytes; one sequence of max_model_len ({request.max_model_len}) needs "
            f"{request.blocks_per_seq}: raise it, or lower max_model_len",
        )
    return fitting if is_exact else min(most, fitting)


def _memory_bytes(device: jax.Device, request: PoolRequest) -> tuple[int, bool]:
    """Memory of a device that this process can have, its weights included; and whether it is the device's own."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is not None and "bytes_limit" in stats:
        others = max(0, stats.get("bytes_in_use", 0) - request.weight_bytes)
        return stats["bytes_limit"] - others, True
    if device.platform != "cpu":
        raise InvalidArgument("num_blocks", f"{device.platform} does not report its memory; choose a number")
    return _available_host_bytes() // request.num_devices + request.weight_bytes, False


def _available_host_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: all physical memory is the best that is known
    return physical_host_bytes()


def physical_host_bytes() -> int:
    """Memory that the machine has, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
