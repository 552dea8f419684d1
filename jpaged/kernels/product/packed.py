"""A matrix in the order in which the CPU kernel reads it, and the memory of such matrices.

float32    [parts * ceil(N / 32), K, 32]
bfloat16   [parts * ceil(N / 32), ceil(K / 2), 32, 2]     two of a column side by side, as AVX512_BF16 multiplies
quantized  see `jpaged.kernels.product.scales`
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jpaged.kernels.product import scales
from jpaged.kernels.product.quantised import QuantisedMatrix
from jpaged.kernels.product.scales import PackedScales

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
        shape: of the original leaf.
        is_embedding: the leaf is `[N, K]`, rows of an embedding; otherwise `[K, *out]`, with N = prod(out).
        num_parts: parts of the columns, such as gates and ups, each of which begins with a block.
        scales: of a matrix whose blocks are codes; None if they are numbers.
    """

    blocks: jax.Array
    scales: PackedScales | None
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    is_embedding: bool = dataclasses.field(metadata={"static": True})
    num_parts: int = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> np.dtype:
        """Type of the numbers."""
        return np.dtype(self.blocks.dtype) if self.scales is None else self.scales.dtype

    @property
    def depth(self) -> int:
        """K."""
        return self.shape[-1] if self.is_embedding else self.shape[0]

    @property
    def num_columns(self) -> int:
        """Columns of one part."""
        return math.prod(self.shape) // self.depth // self.num_parts

    def rows(self, ids_t: Int[Array, "T"]) -> Float[Array, "T K"]:
        """Return rows of an embedding, by their ids."""

        def rows_of(blocks: jax.Array) -> jax.Array:
            return blocks[ids_t // COLUMNS, :, ids_t % COLUMNS]

        found = rows_of(self.blocks)
        if self.scales is None:
            return found.reshape(len(ids_t), -1)[:, : self.depth]
        zeros = None if self.scales.zeros is None else rows_of(self.scales.zeros)
        return self.scales.decode(found, rows_of(self.scales.scales), zeros)[:, : self.depth]


def packed_shape(shape: tuple[int, ...], dtype: np.dtype, *, is_embedding: bool, num_parts: int) -> tuple[int, ...]:
    """Return the shape of the blocks of a leaf."""
    depth = shape[-1] if is_embedding else shape[0]
    num_blocks = num_parts * -(-(math.prod(shape) // depth // num_parts) // COLUMNS)
    return (num_blocks, depth, COLUMNS) if dtype.itemsize == 4 else (num_blocks, -(-depth // 2), COLUMNS, 2)


class Packer:
    """Packs leaves one after the other into memory of huge pages, if the system has them.

    A core reads 22 GB/s from pages of 4 KiB and 30 from pages of 2 MiB (Zen 4), and reading limits a decode of one row.
    The arrays are used in place, without a copy; a chunk is freed with the last of them.
    """

    def __init__(self, library: ctypes.CDLL, sharding: jax.sharding.Sharding) -> None:
        self._library = library
        self._sharding = sharding
        self._chunk = np.empty(0, np.uint8)

    def pack(self, leaf: Any, *, is_embedding: bool = False, num_parts: int = 1) -> PackedMatrix:
        """Pack a leaf of float32 or bfloat16 onto one CPU device; packs a shape into a shape.

        Args:
            leaf: `[K, *out]`, with the parts as the first axis of `out` if there are several; or `[N, K]`. Or a
                quantized matrix of that shape, which `scales.can_pack`.
            is_embedding: it is `[N, K]`.
            num_parts: see `PackedMatrix`.
        """
        if isinstance(leaf, QuantisedMatrix):
            return self._pack_quantised(leaf, num_parts)
        dtype = np.dtype(leaf.dtype)
        shape = packed_shape(leaf.shape, dtype, is_embedding=is_embedding, num_parts=num_parts)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            blocks: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)
        else:
            blocks = jax.device_put(self._packed(np.asarray(leaf), shape, is_embedding, num_parts), self._sharding)
        return PackedMatrix(blocks, None, tuple(leaf.shape), is_embedding, num_parts)

    def _pack_quantised(self, matrix: QuantisedMatrix, num_parts: int) -> PackedMatrix:
        depth, num_lanes = matrix.depth, scales.num_lanes(matrix)
        num_columns = math.prod(matrix.shape) // depth // num_parts
        num_blocks = num_parts * -(-num_columns // COLUMNS)
        shapes = ((num_blocks, num_lanes, COLUMNS, 4), (num_blocks, matrix.num_groups, COLUMNS))

        def spread(of_groups: Any) -> np.ndarray:
            return scales.blocks_of(np.asarray(of_groups), num_parts, COLUMNS, is_embedding=matrix.is_embedding)

        # Rows that are not int8 are not rounded here, whatever their scale.
        step = matrix.input_scale if matrix.activations == "int8" else None
        arrays = (
            self._leaf(matrix.values, shapes[0], np.dtype(np.uint8), lambda: self._codes(matrix, shapes[0], num_parts)),
            self._leaf(matrix.scales, shapes[1], scales.scale_dtype(matrix), lambda: spread(matrix.scales)),
            self._leaf(matrix.zeros, shapes[1], scales.zeros_dtype(matrix), lambda: spread(matrix.zeros)),
            self._leaf(matrix.group_ids, (depth,), np.dtype(np.int32), lambda: scales.order_of(matrix)),
            self._leaf(step, (1,), np.dtype(np.float32), lambda: np.asarray(step)[None]),
        )

        described = scales.describe(matrix, *arrays[1:])
        return PackedMatrix(arrays[0], described, matrix.shape, matrix.is_embedding, num_parts)

    def _leaf(self, leaf: Any, shape: tuple[int, ...], dtype: np.dtype, make: Callable[[], np.ndarray]) -> Any:
        """Return the array from `make`, on the device; for a shape a shape, and for None None."""
        if leaf is None:
            return None
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)
        made = make()
        if made.dtype != np.uint8:  # codes are already in their final place
            kept = self._take(made.size * dtype.itemsize).view(dtype).reshape(shape)
            kept[...] = made
            made = kept
        return jax.device_put(made, self._sharding)

    def _codes(self, matrix: QuantisedMatrix, shape: tuple[int, ...], num_parts: int) -> np.ndarray:
        codes = np.ascontiguousarray(scales.codes_of(matrix))
        if matrix.group_ids is not None:
            codes = np.take(codes, scales.order_of(matrix), axis=matrix.axis)
        depth = matrix.depth
        num_columns = codes.size // depth // num_parts
        steps = (1, depth) if matrix.is_embedding else (codes.size // depth, 1)
        blocks = self._take(math.prod(shape)).reshape(num_parts, -1)
        for part in range(num_parts):
            begin = codes.ctypes.data + part * num_columns * steps[1]
            numbers = (ctypes.c_int64(n) for n in (depth, num_columns, *steps, scales.code_of(matrix)))
            self._library.jpaged_pack_codes(ctypes.c_void_p(begin), *numbers, ctypes.c_void_p(blocks[part].ctypes.data))
        return blocks.reshape(shape)

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
        """Return new bytes, aligned to a cache line."""
        if num_bytes > len(self._chunk):
            self._chunk = _map_huge_pages(max(num_bytes, _CHUNK))
        taken = self._chunk[:num_bytes]
        self._chunk = self._chunk[-(-num_bytes // _LINE) * _LINE :]
        return taken


def _map_huge_pages(num_bytes: int) -> np.ndarray:
    """Return bytes that begin with a huge page; they take memory when they are written to."""
    # Shared pages, mmap's default, are huge only if the system is configured for that.
    how = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    mapped = mmap.mmap(-1, num_bytes + _HUGE_PAGE, **how)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only
        with contextlib.suppress(OSError):  # some kernels and sandboxes lack it
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    return memory[-memory.ctypes.data % _HUGE_PAGE :][:num_bytes]
