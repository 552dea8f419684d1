"""Moves of whole blocks, all layers of them, as programs: a list of ids is padded to one of a few sizes.

    copy      (pool, ids [2, C]) -> pool                        all sources are read before a destination is written
    swap_out  (pool, ids [C]) -> contents [C, L, B, 2K, D]      the pool stays
    swap_in   (pool, contents, ids [C]) -> pool

Padding names the null block: reads of it are harmless, and writes to it are dropped. A program that returns the pool
gets it donated and updates it in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jpaged.device.host_pool import HostPool
from jpaged.device.mesh import CONTENTS_SPEC, POOL_SPEC, on_shards, replicated
from jpaged.device.programs.compile import ProgramSpec
from jpaged.device.programs.store import ProgramStore
from jpaged.device.step.runner import KVPool
from jpaged.engine.executor import NULL_BLOCK, BlockMoves, Move
from jpaged.errors import InternalError
from jpaged.kernels.kv_layout import KVLayout

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
            for size, ids_2c in copies_of(moves, sizes):
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


def copies_of(moves: BlockMoves, sizes: Sequence[int]) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """Yield the calls that copy blocks: the size of each program, and the ids of sources and destinations [2, C]."""
    for begin in range(0, len(moves.sources), sizes[-1]):
        part = slice(begin, begin + sizes[-1])
        sources, destinations = moves.sources[part], moves.destinations[part]
        size = next(size for size in sizes if size >= len(sources))
        yield size, np.stack((_padded(sources, size), _padded(destinations, size)))


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
    local, whole = layout.local, PartitionSpec()

    def copy(pool: jax.Array, ids_2c: jax.Array) -> jax.Array:
        return local.write_blocks(pool, ids_2c[1], local.read_blocks(pool, ids_2c[0]))

    def swap_out(pool: jax.Array, ids_c: jax.Array) -> jax.Array:
        return local.read_blocks(pool, ids_c)

    def swap_in(pool: jax.Array, contents: jax.Array, ids_c: jax.Array) -> jax.Array:
        return local.write_blocks(pool, ids_c, contents)

    of_pool, of_contents = NamedSharding(mesh, POOL_SPEC), NamedSharding(mesh, CONTENTS_SPEC)
    pool = jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype, sharding=of_pool)
    ids = jax.ShapeDtypeStruct((spec.size,), np.int32, sharding=replicated(mesh))
    contents = jax.ShapeDtypeStruct((spec.size, *layout.block_shape), layout.storage_dtype, sharding=of_contents)
    pair = jax.ShapeDtypeStruct((2, spec.size), np.int32, sharding=replicated(mesh))
    if spec.kind in ("copy", "draft_copy"):
        return jax.jit(
            on_shards(copy, mesh, (POOL_SPEC, whole), POOL_SPEC), donate_argnums=0, out_shardings=of_pool
        ).lower(pool, pair)
    if spec.kind == "swap_out":
        return jax.jit(on_shards(swap_out, mesh, (POOL_SPEC, whole), CONTENTS_SPEC), out_shardings=of_contents).lower(
            pool, ids
        )
    if spec.kind == "swap_in":
        run = on_shards(swap_in, mesh, (POOL_SPEC, CONTENTS_SPEC, whole), POOL_SPEC)
        return jax.jit(run, donate_argnums=0, out_shardings=of_pool).lower(pool, contents, ids)
    raise InternalError(f"{spec} does not move blocks")
