"""A matrix in the order in which the CPU kernel reads it, and the memory that such matrices lie in.

float32    [parts * ceil(N / 32), K, 32]
bfloat16   [parts * ceil(N / 32), ceil(K / 2), 32, 2]     two of a column side by side, as AVX512_BF16 multiplies
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

COLUMNS = 32
"""Columns of a block."""
_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_LINE = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix that only the kernel reads, in place of a leaf of parameters.

    Attributes:
        blocks: as above.
        shape: of the leaf that it was.
        is_embedding: the leaf is `[N, K]`, rows of an embedding; another is `[K, *out]`, with N = prod(out).
        num_parts: columns are in so many parts that each begin with a block: gates and what they are for.
    """

    blocks: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    is_embedding: bool = dataclasses.field(metadata={"static": True})
    num_parts: int = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> np.dtype:
        """The type of its numbers."""
        return np.dtype(self.blocks.dtype)

    @property
    def depth(self) -> int:
        """K."""
        return self.shape[-1] if self.is_embedding else self.shape[0]

    @property
    def num_columns(self) -> int:
        """Columns of one part."""
        return math.prod(self.shape) // self.depth // self.num_parts

    def rows(self, ids_t: Int[Array, "T"]) -> Float[Array, "T K"]:
        """Rows of an embedding, by their numbers."""
        found = self.blocks[ids_t // COLUMNS, :, ids_t % COLUMNS]
        return found.reshape(len(ids_t), -1)[:, : self.depth]


def packed_shape(shape: tuple[int, ...], dtype: np.dtype, *, is_embedding: bool, num_parts: int) -> tuple[int, ...]:
    """The shape of the blocks of a leaf."""
    depth = shape[-1] if is_embedding else shape[0]
    num_blocks = num_parts * -(-(math.prod(shape) // depth // num_parts) // COLUMNS)
    return (num_blocks, depth, COLUMNS) if dtype.itemsize == 4 else (num_blocks, -(-depth // 2), COLUMNS, 2)


class Packer:
    """Packs leaves one after the other into memory of huge pages, where the system has them.

    A core reads 22 GB/s from pages of 4 KiB and 30 from pages of 2 MiB (Zen 4): a decode of one row waits for nothing
    else. The arrays lie where they were packed, without a copy; a chunk is freed with the last of them.
    """

    def __init__(self, library: ctypes.CDLL, sharding: jax.sharding.Sharding) -> None:
        self._library = library
        self._sharding = sharding
        self._chunk = np.empty(0, np.uint8)

    def pack(self, leaf: Any, *, is_embedding: bool = False, num_parts: int = 1) -> PackedMatrix:
        """Packs a leaf of float32 or bfloat16 onto one CPU device; of a shape alone it makes a shape.

        Args:
            leaf: `[K, *out]`, where the first axis of `out` is that of the parts if there are several; or `[N, K]`.
            is_embedding: it is `[N, K]`.
            num_parts: see `PackedMatrix`.
        """
        dtype = np.dtype(leaf.dtype)
        shape = packed_shape(leaf.shape, dtype, is_embedding=is_embedding, num_parts=num_parts)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            blocks: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)
        else:
            blocks = jax.device_put(self._packed(np.asarray(leaf), shape, is_embedding, num_parts), self._sharding)
        return PackedMatrix(blocks, tuple(leaf.shape), is_embedding, num_parts)

    def _packed(self, leaf: np.ndarray, shape: tuple[int, ...], is_embedding: bool, num_parts: int) -> np.ndarray:
        depth = leaf.shape[-1] if is_embedding else leaf.shape[0]
        leaf = np.ascontiguousarray(leaf)
        num_columns = leaf.size // depth // num_parts
        steps = (1, depth) if is_embedding else (leaf.size // depth, 1)
        blocks = self._take(math.prod(shape) * leaf.itemsize).view(leaf.dtype).reshape(num_parts, -1)
        for part in range(num_parts):
            begin = leaf.ctypes.data + part * num_columns * steps[1] * leaf.itemsize
            numbers = (ctypes.c_int64(n) for n in (depth, num_columns, *steps, leaf.itemsize))
            self._library.jpaged_pack(ctypes.c_void_p(begin), *numbers, ctypes.c_void_p(blocks[part].ctypes.data))
        return blocks.reshape(shape)

    def _take(self, num_bytes: int) -> np.ndarray:
        """Fresh bytes, aligned to a cache line."""
        if num_bytes > len(self._chunk):
            self._chunk = _map_huge_pages(max(num_bytes, _CHUNK))
        taken = self._chunk[:num_bytes]
        self._chunk = self._chunk[-(-num_bytes // _LINE) * _LINE :]
        return taken


def _map_huge_pages(num_bytes: int) -> np.ndarray:
    """Bytes that begin with a huge page; they take memory when they are written to."""
    # Shared pages, which mmap makes by itself, are huge only where the system is set up for that.
    how = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    mapped = mmap.mmap(-1, num_bytes + _HUGE_PAGE, **how)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux alone has it
        with contextlib.suppress(OSError):  # and some kernels and sandboxes of it have not
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    return memory[-memory.ctypes.data % _HUGE_PAGE :][:num_bytes]
