"""Moves of whole blocks, all layers of them, and the pool of blocks in host memory.

Moves are programs: a list of ids is padded to one of a few sizes.

    copy      (pool, ids [2, C]) -> pool                        all sources are read before a destination is written
    swap_out  (pool, ids [C]) -> contents [C, L, B, 2K, D]      the pool stays
    swap_in   (pool, contents, ids [C]) -> pool

Padding names the null block: reads of it are harmless, and writes to it are dropped. A program that returns the pool
gets it donated and updates it in place.

This process's part of an array over several processes is one numpy array of the local devices' shards:

    whole      [C, L, B, 2K, D] split on 2K      process 0: devices 0, 1      process 1: devices 2, 3
    local      [C, L, B, 2K / 2, D]              the shards of this process's devices, put together

If all devices belong to this process, an array and its local part are the same.

Host memory has blocks of swapped-out groups, and of cached prefixes offloaded from the device pool:

    swap out   device ── copy begins ──> in flight ── written when it has arrived ──> blocks
    swap in    device <── one transfer ── blocks          after transfers in flight to those blocks were written

With several processes, each one stores the parts of every block that its own devices hold. Host memory is allocated at
once, but pages are touched only as blocks are written, so the system provides them on demand.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.program_registry import ProgramStore
from jpaged.device.device_info import physical_host_bytes
from jpaged.device.mesh import MODEL_AXIS, contents_spec, on_shards, pool_spec, replicated
from jpaged.device.model_runner import DonatedArray, KVPool
from jpaged.engine.executor import NULL_BLOCK, BlockArrays, BlockMoves, Move
from jpaged.errors import InternalError, InvalidArgument
from jpaged.kernels.kv_layout import KVLayout
from jpaged.models.layer_kinds import LayerKind

Shape = tuple[int, ...]


class AddressableShards:
    """This process's part of arrays of one sharding: a contiguous range on each axis that is split.

    Args:
        sharding: of the whole array.
    """

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding
        self._is_whole = sharding.is_fully_addressable or sharding.is_fully_replicated

    def shape(self, whole: Shape) -> Shape:
        """Return the shape of the local array."""
        return whole if self._is_whole else self._parts(whole).shape

    def to_host(self, array: jax.Array) -> NDArray:
        """Return the local array in host memory; waits for it."""
        if self._is_whole:
            return np.asarray(array)
        parts = self._parts(array.shape)
        shards = {parts.begins[shard.device]: shard for shard in array.addressable_shards}
        if len(shards) == 1:
            return np.asarray(next(iter(shards.values())).data)
        local = np.empty(parts.shape, array.dtype)
        for shard in shards.values():
            local[parts.get_slices(shard.device)] = np.asarray(shard.data)
        return local

    def to_devices(self, local: NDArray, whole: Shape) -> jax.Array | NDArray:
        """Return the whole array, as a program takes it, from its local parts. Every process calls it in each step."""
        if self._is_whole:
            return local
        parts = self._parts(whole)
        shards = [jax.device_put(local[parts.get_slices(device)], device) for device in parts.begins]
        return jax.make_array_from_single_device_arrays(whole, self._sharding, shards)

    def _parts(self, whole: Shape) -> _LocalParts:
        return _LocalParts.of(self._sharding, whole)


@dataclass(frozen=True, slots=True)
class _LocalParts:
    """The shards of this process's devices in its local array.

    Attributes:
        begins: of each device's shard in the local array.
        shard_shape: of each shard.
        shape: of the local array.
    """

    begins: dict[jax.Device, Shape]
    shard_shape: Shape
    shape: Shape

    @classmethod
    def of(cls, sharding: NamedSharding, whole: Shape) -> _LocalParts:
        """Return the parts of an array of this shape."""
        indices = sharding.addressable_devices_indices_map(whole)
        begins = {device: tuple(part.start or 0 for part in index or ()) for device, index in indices.items()}
        firsts, lasts = (tuple(map(pick, zip(*begins.values(), strict=True))) for pick in (min, max))
        shard = sharding.shard_shape(whole)
        local = {device: tuple(np.subtract(begin, firsts).tolist()) for device, begin in begins.items()}
        return cls(local, shard, tuple((np.subtract(lasts, firsts) + shard).tolist()))

    def get_slices(self, device: jax.Device) -> tuple[slice, ...]:
        """Return the place of a device's shard in the local array."""
        return tuple(
            slice(begin, begin + size) for begin, size in zip(self.begins[device], self.shard_shape, strict=True)
        )


def copy_to(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Start the copy of an array to another memory of the same devices, and return the copy. Compiles nothing.

    Each shard is copied by itself: `device_put` of an array over several processes would compile a program.
    """
    kind = sharding.memory_kind
    parts = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


MAX_ON_THE_WAY = 4
"""Maximum transfers in flight; each takes device memory."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Contents in flight to host blocks; a row for block 0 is dropped.

    Attributes:
        at_device: the contents on the device, if they stay there until they have landed.
    """

    contents: jax.Array
    block_ids: list[int]
    at_device: jax.Array | None = None


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

    def receive(self, contents: jax.Array, block_ids: list[int], *, stays_on_device: bool = False) -> None:
        """Start the copy of device blocks to the host blocks with these ids. Padding after them is ignored.

        Args:
            stays_on_device: a swap-in is expected, which then reads the device's copy.
        """
        while len(self.on_the_way) >= MAX_ON_THE_WAY:
            self._land()
        at_device = contents if stays_on_device else None
        if self._staging is not None:
            contents = copy_to(contents, self._staging)
        else:
            contents.copy_to_host_async()
        self.on_the_way.append(_Transfer(contents, block_ids, at_device))

    def land_ready(self) -> None:
        """Write the transfers that have arrived, in order: a later one may be to the same block."""
        while self.on_the_way and _has_arrived(self.on_the_way[0].contents):
            self._land()

    def land_all(self) -> None:
        """Wait for all transfers in flight, and write them."""
        while self.on_the_way:
            self._land()

    def read(self, block_ids: Sequence[int], num_padded: int) -> NDArray | jax.Array:
        """Return a new array of these blocks, after waiting for transfers in flight to them. Padding is undefined."""
        if (at_device := self._find_on_device(block_ids, num_padded)) is not None:
            return at_device
        wanted = set(block_ids)
        while any(not wanted.isdisjoint(transfer.block_ids) for transfer in self.on_the_way):
            self._land()
        contents = np.empty((num_padded, *self._blocks.shape[1:]), self._blocks.dtype)
        # "clip" writes straight into `out`, "raise" through a copy; ids were checked before.
        np.take(self._blocks, block_ids, axis=0, out=contents[: len(block_ids)], mode="clip")
        contents[len(block_ids) :] = 0
        return self._parts.to_devices(contents, (num_padded, *self._block_shape))

    def _find_on_device(self, block_ids: Sequence[int], num_padded: int) -> jax.Array | None:
        """Return blocks that one transfer in flight, the last one to each of them, still has on the device."""
        wanted = set(block_ids)
        found = [transfer for transfer in self.on_the_way if not wanted.isdisjoint(transfer.block_ids)]
        if len(found) != 1 or found[0].at_device is None or not wanted.issubset(found[0].block_ids):
            return None
        (transfer,), at_device = found, found[0].at_device
        if transfer.block_ids == list(block_ids) and len(at_device) == num_padded:
            return at_device
        rows = [transfer.block_ids.index(block_id) for block_id in block_ids]
        chosen = at_device[np.array(rows + [0] * (num_padded - len(rows)), np.int32)]
        return jax.device_put(chosen, at_device.sharding)

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


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Layout and devices of arrays of blocks: `HostBlocks.place`.

    Attributes:
        sharding: of the contents of blocks, [C, *block].
    """

    layout: KVLayout
    sharding: NamedSharding


class WholeHostBlocks:
    """Implements `engine.executor.HostBlocks` over a pool of which this process holds all parts of each block.

    Args:
        identity: computes the KV identity (`kv_fingerprint`); called at the first use.
        read: reads device blocks into new arrays.
    """

    def __init__(
        self,
        pool: HostPool,
        identity: Callable[[], bytes],
        place: BlockPlace,
        read: Callable[[Sequence[int]], Iterator[tuple[jax.Array, int]]],
    ) -> None:
        self.place = place
        self._read = read
        self._pool = pool
        self._blocks = pool.blocks
        self._make_identity = identity
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

    def read(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> BlockArrays:
        """Start to read device blocks, then host blocks; see `HostBlocks.read`."""
        read = [*self._read(block_ids)]
        for some, size in _iter_sizes(host_block_ids, _SIZES):
            contents = self._pool.read(some, size)
            read.append((jax.device_put(contents, self.place.sharding), len(some)))
        return BlockArrays(tuple(array for array, _ in read), tuple(count for _, count in read))

    def receive(self, contents: BlockArrays, block_ids: Sequence[int]) -> None:
        """Start to write rows of arrays to host blocks; see `HostBlocks.receive`."""
        start = 0
        for array, count in zip(contents.arrays, contents.num_rows, strict=True):
            self._pool.receive(array, [*block_ids[start : start + count]], stays_on_device=True)
            start += count

    def kv_identity(self) -> bytes:
        """Return the digest that the bytes depend on; the first call waits until every weight is read."""
        with self._lock:
            self._identity = self._identity or self._make_identity()
            return self._identity

    def forget_identity(self) -> None:
        """Compute the KV identity again at the next use, because the weights have been read again."""
        with self._lock:
            self._identity = b""


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


_SIZES = (8, 64, 512)
_MAX_CONTENT_BYTES = 32 << 20
"""Maximum device memory of one call next to the pool.

At 20 to 50 GB/s of a host link the start-up cost of a call is negligible.
"""


def move_sizes(layout: KVLayout) -> tuple[int, ...]:
    """Return the sizes of a call in blocks, ascending, limited by the pool's size and by memory."""
    smaller = (0, *_SIZES)
    return tuple(
        size for size, last in zip(_SIZES, smaller, strict=False) if _fits(size, layout) and last < layout.num_blocks
    )


def content_bytes(layout: KVLayout) -> int:
    """Return the bytes of the largest call that a pool of any size makes."""
    return max(size for size in _SIZES if _fits(size, layout)) * layout.bytes_per_block


def _fits(size: int, layout: KVLayout) -> bool:
    return size == _SIZES[0] or size * layout.bytes_per_block <= _MAX_CONTENT_BYTES


class BlockMover:
    """Runs moves as calls of those programs. Owns neither pool; transfers to and from the host use it."""

    def __init__(self, layout: KVLayout, pool: KVPool, host: HostPool) -> None:
        self._layout = layout
        self._pool = pool
        self._host = host

    def run(self, moves: BlockMoves, programs: ProgramStore) -> None:
        """Start the moves.

        Raises:
            InternalError: an id names no block, or a copy reads what it writes; nothing was moved.
        """
        self._check(moves)
        sizes = programs.sizes(moves.move.value)
        if moves.move is Move.COPY:
            for size, ids_2c in iter_copies(moves, sizes):
                self._pool.put(programs.find(ProgramSpec("copy", size))(self._pool.take(), ids_2c))
            return
        for begin in range(0, len(moves.sources), sizes[-1]):
            part = slice(begin, begin + sizes[-1])
            sources, destinations = moves.sources[part], moves.destinations[part]
            size = next(size for size in sizes if size >= len(sources))
            executable = programs.find(ProgramSpec(moves.move.value, size))
            if moves.move is Move.SWAP_OUT:
                pool = self._pool.take()
                contents = executable(pool, _padded(sources, size))
                self._pool.put(pool)
                self._host.receive(contents, destinations)
            else:
                contents = self._host.read(sources, size)
                self._pool.put(executable(self._pool.take(), contents, _padded(destinations, size)))

    def read(self, block_ids: Sequence[int], programs: ProgramStore) -> Iterator[tuple[jax.Array, int]]:
        """Start to read blocks; yield arrays in the order of the ids, and the number of their rows without padding."""
        _check_ids("read blocks", [*block_ids], self._layout.num_blocks)
        for some, size in _iter_sizes(block_ids, programs.sizes(Move.SWAP_OUT.value)):
            pool = self._pool.take()
            contents = programs.find(ProgramSpec(Move.SWAP_OUT.value, size))(pool, _padded(some, size))
            self._pool.put(pool)
            yield contents, len(some)

    def wait(self) -> None:
        """Wait until every move has run, and swapped-out blocks are in host memory."""
        self._host.land_all()
        self._pool.wait()

    def _check(self, moves: BlockMoves) -> None:
        if len(moves.sources) != len(moves.destinations):
            raise InternalError(f"{len(moves.sources)} source blocks have {len(moves.destinations)} destinations")
        on_device, on_host = self._layout.num_blocks, self._host.num_blocks
        _check_ids(f"{moves.move.value} sources", moves.sources, on_host if moves.move is Move.SWAP_IN else on_device)
        limit = on_host if moves.move is Move.SWAP_OUT else on_device
        _check_ids(f"{moves.move.value} destinations", moves.destinations, limit)
        if moves.move is Move.COPY and not set(moves.sources).isdisjoint(moves.destinations):
            raise InternalError(f"a copy reads a block that it writes: {moves}")


class RoutePool:
    """Implements `engine.executor.RoutedExperts`: the experts of tokens are stored, and move, with the blocks of keys.

    Its programs take a fixed number of blocks; `warm_up` compiles them.

    Args:
        routes: as `StatefulPool.routes`; steps update it.
        struct: its shape.
        num_host_blocks: blocks in host memory.
        kinds: of all layers.
    """

    def __init__(
        self, routes: DonatedArray, struct: jax.ShapeDtypeStruct, num_host_blocks: int, kinds: Sequence[LayerKind]
    ) -> None:
        self._layers, self._num_layers = [number for number, kind in enumerate(kinds) if kind.is_sparse], len(kinds)
        self._routes, self.block_size = routes, struct.shape[1]
        self._host: NDArray[Any] = np.zeros((num_host_blocks + 1, *struct.shape[1:]), struct.dtype)
        self._on_the_way: deque[tuple[jax.Array, list[int]]] = deque()
        self._read = jax.jit(_read_routes, out_shardings=struct.sharding)
        self._write = jax.jit(_write_routes, donate_argnums=0, out_shardings=struct.sharding)

    @classmethod
    def of(
        cls,
        routes: DonatedArray | None,
        struct: jax.ShapeDtypeStruct | None,
        num_host_blocks: int,
        kinds: Sequence[LayerKind],
    ) -> RoutePool | None:
        """Return the pool; None if experts are not kept."""
        return None if routes is None or struct is None else cls(routes, struct, num_host_blocks, kinds)

    def warm_up(self) -> None:
        """Compile the programs; nothing is written."""
        contents = self._read_blocks([NULL_BLOCK])
        self._write_blocks([NULL_BLOCK], contents)
        self._write_blocks([NULL_BLOCK], np.asarray(contents))

    def read(self, block_ids: Sequence[int], num_tokens: int) -> NDArray[Any]:
        """Return the experts of the first tokens of these blocks; see `RoutedExperts`."""
        parts = [np.asarray(self._read_blocks(some))[: len(some)] for some in _iter_routes(block_ids)]
        ids_tx = np.concatenate([self._host[:0], *parts]).reshape(-1, self._host.shape[-1])[:num_tokens]
        ids_tlk = np.zeros((len(ids_tx), self._num_layers, ids_tx.shape[1] // len(self._layers)), ids_tx.dtype)
        ids_tlk[:, self._layers] = ids_tx.reshape(len(ids_tx), len(self._layers), -1)
        return ids_tlk

    def run(self, moves: BlockMoves) -> None:
        """Start the moves."""
        pairs = zip(_iter_routes(moves.sources), _iter_routes(moves.destinations), strict=True)
        if moves.move is Move.COPY:  # all sources are read before a destination is written
            for contents, destinations in [(self._read_blocks(some), those) for some, those in pairs]:
                self._write_blocks(destinations, contents)
            return
        for some, destinations in pairs:
            if moves.move is Move.SWAP_OUT:
                contents = self._read_blocks(some)
                contents.copy_to_host_async()
                self._on_the_way.append((contents, destinations))
            else:
                self._land(0)
                padded = np.zeros((_ROUTE_BLOCKS, *self._host.shape[1:]), self._host.dtype)
                padded[: len(some)] = self._host[some]
                self._write_blocks(destinations, padded)
        self._land(MAX_ON_THE_WAY)

    def _land(self, num_left: int) -> None:
        """Write transfers to host memory, the oldest first, until this number is left."""
        while len(self._on_the_way) > num_left:
            contents, block_ids = self._on_the_way.popleft()
            self._host[block_ids] = np.asarray(contents)[: len(block_ids)]

    def _read_blocks(self, block_ids: list[int]) -> Any:
        routes = self._routes.take()
        contents = self._read(routes, _padded(block_ids, _ROUTE_BLOCKS))
        self._routes.put(routes)
        return contents

    def _write_blocks(self, block_ids: list[int], contents: jax.Array | NDArray[Any]) -> None:
        self._routes.put(self._write(self._routes.take(), _padded(block_ids, _ROUTE_BLOCKS), contents))


_ROUTE_BLOCKS = 64
"""Blocks of a program that reads or writes routes."""


def _read_routes(routes_nbx: jax.Array, ids_c: jax.Array) -> jax.Array:
    return routes_nbx[ids_c]


def _write_routes(routes_nbx: jax.Array, ids_c: jax.Array, contents_cbx: jax.Array) -> jax.Array:
    """Return the routes with the contents of these blocks; nothing is written to the null block."""
    return routes_nbx.at[jnp.where(ids_c > 0, ids_c, len(routes_nbx))].set(contents_cbx, mode="drop")


def _iter_routes(block_ids: Sequence[int]) -> Iterator[list[int]]:
    for begin in range(0, len(block_ids), _ROUTE_BLOCKS):
        yield [*block_ids[begin : begin + _ROUTE_BLOCKS]]


def iter_copies(moves: BlockMoves, sizes: Sequence[int]) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """Yield the calls that copy blocks: the size of each program, and the ids of sources and destinations [2, C]."""
    for begin in range(0, len(moves.sources), sizes[-1]):
        part = slice(begin, begin + sizes[-1])
        sources, destinations = moves.sources[part], moves.destinations[part]
        size = next(size for size in sizes if size >= len(sources))
        yield size, np.stack((_padded(sources, size), _padded(destinations, size)))


def _iter_sizes(block_ids: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Yield ids for calls of some sizes, with little padding: largest first, padding only in the smallest."""
    start = 0
    while start < len(block_ids):
        size = max((size for size in sizes if size <= len(block_ids) - start), default=sizes[0])
        yield [*block_ids[start : start + size]], size
        start += size


def _padded(block_ids: list[int], size: int) -> NDArray[np.int32]:
    ids = np.full(size, NULL_BLOCK, np.int32)
    ids[: len(block_ids)] = block_ids
    return ids


def _check_ids(name: str, block_ids: list[int], num_blocks: int) -> None:
    wrong = [block_id for block_id in block_ids if not 1 <= block_id <= num_blocks]
    if wrong:
        raise InternalError(f"{name} {wrong[:8]} are not blocks from 1 to {num_blocks}")


def lower_move(spec: ProgramSpec, layout: KVLayout, mesh: Mesh) -> jax.stages.Lowered:
    """Trace and lower the program of a move. Every device moves its own part of the blocks."""
    local, whole, of_shards, of_blocks = layout.local, PartitionSpec(), pool_spec(layout), contents_spec(layout)

    def copy(pool: jax.Array, ids_2c: jax.Array) -> jax.Array:
        if layout.dp_size > 1:
            ids_2c = layout.local_ids(ids_2c, jax.lax.axis_index(MODEL_AXIS))
        return local.write_blocks(pool, ids_2c[1], local.read_blocks(pool, ids_2c[0]))

    def swap_out(pool: jax.Array, ids_c: jax.Array) -> jax.Array:
        return local.read_blocks(pool, ids_c)

    def swap_in(pool: jax.Array, contents: jax.Array, ids_c: jax.Array) -> jax.Array:
        return local.write_blocks(pool, ids_c, contents)

    of_pool, of_contents = NamedSharding(mesh, of_shards), NamedSharding(mesh, of_blocks)
    pool = jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype, sharding=of_pool)
    ids = jax.ShapeDtypeStruct((spec.size,), np.int32, sharding=replicated(mesh))
    contents = jax.ShapeDtypeStruct((spec.size, *layout.block_shape), layout.storage_dtype, sharding=of_contents)
    pair = jax.ShapeDtypeStruct((2, spec.size), np.int32, sharding=replicated(mesh))
    if spec.kind in ("copy", "draft_copy"):
        return jax.jit(
            on_shards(copy, mesh, (of_shards, whole), of_shards), donate_argnums=0, out_shardings=of_pool
        ).lower(pool, pair)
    if spec.kind == "swap_out":
        return jax.jit(on_shards(swap_out, mesh, (of_shards, whole), of_blocks), out_shardings=of_contents).lower(
            pool, ids
        )
    if spec.kind == "swap_in":
        run = on_shards(swap_in, mesh, (of_shards, of_blocks, whole), of_shards)
        return jax.jit(run, donate_argnums=0, out_shardings=of_pool).lower(pool, contents, ids)
    raise InternalError(f"{spec} does not move blocks")
