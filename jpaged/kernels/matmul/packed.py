"""A matrix in the order in which the CPU kernel reads it, and the memory of such matrices.

float32    [parts * ceil(N / 32), K, 32]                and float16
bfloat16   [parts * ceil(N / 32), ceil(K / 2), 32, 2]   two of a column side by side, as AVX512_BF16 multiplies
quantized  codes and scales, as follows

int8      [parts * ceil(N / 32), ceil(K / 4), 32, 4]    four of a column side by side
fp8       [parts * ceil(N / 32), ceil(K / 4), 32, 4]    k, k + 2, k + 1, k + 3
4 bits    [parts * ceil(N / 32), ceil(K / 8), 32, 4]    eight: the low halves are four, the high halves the next four
5 bits    [parts * ceil(N / 32), 5 K / 32, 32, 4]       32: four lanes of low bits as above, one of all fifth bits
6 bits    [parts * ceil(N / 32), 3 K / 16, 32, 4]       16: two lanes of low bits, one of the two high bits of each
scales    [parts * ceil(N / 32), groups, 32]            and zeros

A code is a byte or a part of one: integers are shifted to begin with 0, floats are their bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.matmul.quantized import QuantizedMatrix, num_outer
from jpaged.kernels.matrix_format import VALUE_DTYPES

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Code = Literal["int8", "int4", "mxfp4", "fp8", "int5", "int6"]
"""The kinds of codes."""
CODES: tuple[Code, ...] = get_args(Code)
"""In the order of `Code` in quantised.h."""
Rounding = Literal["none", "row", "spans"]
"""Rounding of rows to int8 before the product: with one step for all of a row, or one for each span of k.

A span is a group of the matrix, or 64 numbers if groups are larger. The largest magnitude of a span is 127 steps.
"""
ROUNDINGS: tuple[Rounding, ...] = ("none", "row", "spans")
"""In the order of `Rounding` in core.h."""
_KINDS = {dtype: kind for kind, dtype in VALUE_DTYPES.items()}
_NARROW: dict[int, Code] = {5: "int5", 6: "int6"}
"""The kinds of int8 that need fewer bits."""
_BITS: dict[Code, int] = {"int8": 8, "int4": 4, "mxfp4": 4, "fp8": 8, "int5": 5, "int6": 6}
_CHUNKS: dict[Code, tuple[int, int]] = {
    "int8": (4, 1),
    "int4": (8, 1),
    "mxfp4": (8, 1),
    "fp8": (4, 1),
    "int5": (32, 5),
    "int6": (16, 3),
}
"""Numbers and lanes of a chunk of a column, the least that holds adjacent numbers."""
_MXFP4_NUMBERS = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_FP8_PLACES = (0, 2, 1, 3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PackedScales:
    """The scales of a packed matrix's codes, and the rounding of rows.

    Attributes:
        scales: as above; bfloat16 if they are powers of two (MXFP4), float16 if all are, otherwise float32.
        zeros: int8 or float32; None is zero.
        order: int32 `[K]`, if the matrix's depth was sorted by groups: the original index of each k.
        step: float32 `[1]`: the scale of rounded rows, if the checkpoint has one.
        kind: of the codes.
        group: numbers of a column that share a scale.
        rounding: of rows to int8.
        dtype: of the model.
    """

    scales: Any
    zeros: Any
    order: Any
    step: Any
    kind: Code = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    rounding: Rounding = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def code(self) -> int:
        """The kernel's number of the kind."""
        return CODES.index(self.kind)

    def decode(self, lanes: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
        """Return the numbers `[T, K]` of lanes `[T, lanes, 4]`, given scales and zeros `[T, groups]`; K is padded."""
        codes = self._codes(lanes).reshape(len(lanes), -1)
        if self.kind == "fp8":
            codes = lanes[:, :, jnp.array(_FP8_PLACES)].reshape(len(lanes), -1)
            numbers = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        elif self.kind == "mxfp4":
            numbers = jnp.asarray(_MXFP4_NUMBERS)[codes]
        else:
            numbers = codes.astype(jnp.float32) - 2.0 ** (_BITS[self.kind] - 1)
        depth = min(codes.shape[1], scales.shape[1] * self.group)
        numbers = numbers[:, :depth]
        if zeros is not None:
            numbers = numbers - jnp.repeat(zeros.astype(jnp.float32), self.group, axis=1)[:, :depth]
        return (numbers * jnp.repeat(scales.astype(jnp.float32), self.group, axis=1)[:, :depth]).astype(self.dtype)

    def _codes(self, lanes: jax.Array) -> jax.Array:
        """Return the codes of lanes `[T, lanes, 4]`, uint8 `[T, .., 4]`."""
        if self.kind in ("int8", "fp8"):
            return lanes
        halves = [lanes & 15, lanes >> 4]
        if self.kind not in _NARROW.values():
            return jnp.stack(halves, axis=2)
        num_high = _BITS[self.kind] - 4
        chunks = lanes.reshape(len(lanes), -1, _CHUNKS[self.kind][1], 4)
        low = jnp.stack([chunks[:, :, :-1] & 15, chunks[:, :, :-1] >> 4], axis=3)
        low = low.reshape(*low.shape[:2], -1, 4)
        shifts = num_high * jnp.arange(low.shape[2], dtype=jnp.uint8)[:, None]
        return low | (chunks[:, :, -1:] >> shifts & (2**num_high - 1)) << 4


def num_lanes(matrix: QuantizedMatrix) -> int:
    """Return the number of lanes of a column."""
    numbers, lanes = _CHUNKS[get_kind(matrix)]
    return -(-matrix.depth // numbers) * lanes


def can_pack(matrix: QuantizedMatrix) -> bool:
    """Return True if the kernel supports a matrix: a single one, whose groups are whole lanes and divide the depth."""
    return not num_outer(matrix.ndim, matrix.axis) and _has_whole_lanes(matrix)


def can_pack_experts(matrices: Any) -> bool:
    """Return True if the kernel supports the matrices of experts `[X, K, N]`, each of which is like a part of one."""
    if not isinstance(matrices, QuantizedMatrix):
        return True
    has_step = matrices.activations == "int8" and matrices.input_scale is not None
    return matrices.group_ids is None and not has_step and _has_whole_lanes(matrices)


def swap_experts(matrices: Any) -> Any:
    """Return the matrices of experts `[X, K, N]`, or their shapes, as one matrix of X parts, `[K, X, N]`."""
    if isinstance(matrices, QuantizedMatrix):
        arrays: dict[str, Any] = {name: getattr(matrices, name) for name in ("values", "scales", "zeros")}
        swapped: dict[str, Any] = {
            name: None if array is None else swap_experts(array) for name, array in arrays.items()
        }
        plain: dict[str, Any] = {"num_bits": None, "has_half_scales": False}  # the kernel of experts has no others
        return dataclasses.replace(matrices, **swapped, input_scale=None, axis=-3, **plain)
    if isinstance(matrices, jax.ShapeDtypeStruct):
        num_experts, depth, num_columns = matrices.shape
        return jax.ShapeDtypeStruct((depth, num_experts, num_columns), matrices.dtype)
    return np.swapaxes(np.asarray(matrices), 0, 1)


def get_code(matrix: QuantizedMatrix) -> int:
    """Return the kernel's number of the kind of a matrix's codes."""
    return CODES.index(get_kind(matrix))


def describe(
    matrix: QuantizedMatrix, scales: Any, zeros: Any, order: Any, step: Any, *, rounds_rows: bool
) -> PackedScales:
    """Return the description of a matrix with these arrays, which may be shapes.

    Args:
        rounds_rows: round rows by spans unless the checkpoint requires another rounding or the codes are floats.
    """
    kind = get_kind(matrix)
    rounding: Rounding = "spans" if rounds_rows and kind != "fp8" else "none"
    if matrix.activations == "int8":
        rounding = "row"
    return PackedScales(scales, zeros, order, step, kind, matrix.group_size, rounding, matrix.dtype)


def scale_dtype(matrix: QuantizedMatrix) -> np.dtype:
    """Return the type that stores scales without loss."""
    if get_kind(matrix) == "mxfp4":
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(np.float16 if matrix.has_half_scales else np.float32)


def zeros_dtype(matrix: QuantizedMatrix) -> np.dtype:
    """Return the type of the zero points; int8 if there are none."""
    return np.dtype(np.int8 if matrix.zeros is None else matrix.zeros.dtype)


def get_codes(matrix: QuantizedMatrix) -> np.ndarray:
    """Return a byte for each number, in the leaf's shape."""
    values = np.asarray(matrix.values).view(np.uint8)
    match get_kind(matrix):
        case "int8":
            return values ^ np.uint8(128)
        case "int5" | "int6" as kind:
            middle = np.uint8(1 << (_BITS[kind] - 1))
            return values + middle & np.uint8(2 * middle - 1)
        case "int4":
            return values & np.uint8(15) ^ np.uint8(8)
        case "mxfp4":
            return values & np.uint8(15)
        case _:
            return values


def get_order(matrix: QuantizedMatrix) -> np.ndarray:
    """Return the indices of a column's numbers sorted by their groups.

    Raises:
        Unsupported: listed groups have different sizes.
    """
    group_ids = np.asarray(matrix.group_ids)
    counts = np.bincount(group_ids, minlength=matrix.num_groups)
    if (counts != matrix.group_size).any():
        raise Unsupported(
            f"linear_backend: cpu cannot multiply groups of {counts.min()} to {counts.max()} numbers in one matrix: "
            "all must have the same size; linear_backend xla supports them"
        )
    return np.argsort(group_ids, kind="stable").astype(np.int32)


def get_blocks(of_groups: np.ndarray, num_parts: int, columns: int, *, is_embedding: bool) -> np.ndarray:
    """Return scales or zeros of a leaf, `[groups, *out]` or `[N, groups]`, as blocks `[.., groups, columns]`."""
    num_groups = of_groups.shape[-1] if is_embedding else of_groups.shape[0]
    of_columns = of_groups.T if is_embedding else of_groups
    parts = of_columns.reshape(num_groups, num_parts, -1)
    padding = -parts.shape[2] % columns
    padded = np.pad(parts, ((0, 0), (0, 0), (0, padding))).reshape(num_groups, -1, columns)
    return np.ascontiguousarray(padded.transpose(1, 0, 2))


def get_kind(matrix: QuantizedMatrix) -> Code:
    """Return the kind of a matrix's codes: int5 or int6 only if groups are whole chunks, in the original order."""
    narrow = None if matrix.num_bits is None else _NARROW.get(matrix.num_bits)
    if narrow is not None and matrix.group_ids is None and _divides(_CHUNKS[narrow][0], matrix):
        return narrow
    return _KINDS[np.dtype(matrix.values.dtype)]


def _divides(numbers: int, matrix: QuantizedMatrix) -> bool:
    return matrix.depth % matrix.num_groups == 0 and matrix.group_size % numbers == 0


def _has_whole_lanes(matrix: QuantizedMatrix) -> bool:
    return matrix.num_groups == 1 or _divides(_CHUNKS[get_kind(matrix)][0], matrix)


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
    return (num_blocks, -(-depth // 2), COLUMNS, 2) if dtype == ml_dtypes.bfloat16 else (num_blocks, depth, COLUMNS)


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """The columns of a matrix as a GGUF file stores them: rows of blocks.

    Attributes:
        types: type of each column's blocks, by its number in stored.cc; uint8 `[N]`.
        row_bytes: the most bytes of a row.
        read: (begin, end) -> the addresses of these columns' rows, uint64, and what keeps the rows in memory until it
            is dropped; called by several threads.
        where: column -> file and tensor name, for errors.
    """

    types: np.ndarray
    row_bytes: int
    read: Callable[[int, int], tuple[np.ndarray, object]]
    where: Callable[[int], tuple[str, str]]


_STRIP_BYTES = 1 << 20
"""Bytes of rows that are read and packed at once: they stay in a core's cache between the two."""


class Packer:
    """Packs leaves one after the other into memory of huge pages, if the system has them.

    A core reads 22 GB/s from pages of 4 KiB and 30 from pages of 2 MiB (Zen 4), and reading limits a decode of one row.
    The arrays are used in place, without a copy; a chunk is freed with the last of them.

    Args:
        rounds_rows: rows are rounded to int8 for quantized matrices of integers, except output matrices: rounding the
            last hidden states as well raised the perplexity of SmolLM2 by 0.51 % instead of 0.35 %.
    """

    def __init__(self, library: ctypes.CDLL, sharding: jax.sharding.Sharding, *, rounds_rows: bool = False) -> None:
        self._library = library
        self._rounds_rows = rounds_rows
        self._sharding = sharding
        self._chunk = np.empty(0, np.uint8)
        self._num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def pack(self, leaf: Any, *, is_embedding: bool = False, num_parts: int = 1) -> PackedMatrix:
        """Pack a leaf of float32, bfloat16 or float16 onto one CPU device; packs a shape into a shape.

        Args:
            leaf: `[K, *out]`, with the parts as the first axis of `out` if there are several; or `[N, K]`. Or a
                quantized matrix of that shape, which `scales.can_pack`. Packing is fastest if K is adjacent in memory.
            is_embedding: it is `[N, K]`.
            num_parts: see `PackedMatrix`.
        """
        if isinstance(leaf, QuantizedMatrix):
            return self._pack_quantized(leaf, num_parts)
        dtype = np.dtype(leaf.dtype)
        shape = packed_shape(leaf.shape, dtype, is_embedding=is_embedding, num_parts=num_parts)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            blocks: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)
        else:
            blocks = jax.device_put(self._packed(np.asarray(leaf), shape, is_embedding, num_parts), self._sharding)
        return PackedMatrix(blocks, None, tuple(leaf.shape), is_embedding, num_parts)

    @property
    def can_pack_stored(self) -> bool:
        """True if the library has `pack_stored`; one that was built earlier has not."""
        return hasattr(self._library, "jpaged_pack_stored")

    def pack_stored(self, matrix: QuantizedMatrix, columns: StoredColumns, *, num_parts: int = 1) -> PackedMatrix:
        """Read, decode and pack a matrix in one pass, on all cores; `pack` of the decoded arrays has the same bits.

        Args:
            matrix: shapes of integers in groups, with float32 scales and zeros; `can_pack` must hold.
            num_parts: see `PackedMatrix`.

        Raises:
            InvalidArgument: scales are not finite.
        """
        depth, lanes, num_groups = matrix.depth, num_lanes(matrix), matrix.num_groups
        num_columns = math.prod(matrix.shape) // depth // num_parts
        num_blocks = num_parts * -(-num_columns // COLUMNS)
        blocks = self._take(num_blocks * lanes * COLUMNS * 4).reshape(num_blocks, lanes, COLUMNS, 4)
        of_groups = (num_blocks, num_groups, COLUMNS)
        kept = scale_dtype(matrix)
        scales = self._take(kept.itemsize * math.prod(of_groups)).view(kept).reshape(of_groups)
        halves, singles = (scales, None) if kept == np.float16 else (None, scales)
        zeros = None
        if matrix.zeros is not None:
            zeros = self._take(4 * math.prod(of_groups)).view(np.float32).reshape(of_groups)
        numbers = [ctypes.c_int64(n) for n in (depth, _BITS[get_kind(matrix)], matrix.group_size)]
        run = self._library.jpaged_pack_stored
        run.restype = ctypes.c_int64
        strip = max(1, _STRIP_BYTES // columns.row_bytes // COLUMNS) * COLUMNS
        strips = [(part, begin) for part in range(num_parts) for begin in range(0, num_columns, strip)]

        def pack_strip(of: tuple[int, int]) -> None:
            part, first = of
            block, begin = part * (num_blocks // num_parts) + first // COLUMNS, part * num_columns + first
            end = begin + min(strip, num_columns - first)
            addresses, kept = columns.read(begin, end)
            types = np.ascontiguousarray(columns.types[begin:end])
            into = [None if array is None else array[block:].ctypes.data for array in (blocks, singles, halves, zeros)]
            pointers = [ctypes.c_void_p(each) for each in (addresses.ctypes.data, types.ctypes.data, *into)]
            bad = run(*pointers[:2], ctypes.c_int64(end - begin), *numbers, *pointers[2:])
            del kept
            if bad >= 0:
                file, name = columns.where(begin + bad)
                raise InvalidArgument(file, f"tensor {name} has block scales that are not finite")

        if self._num_threads == 1 or len(strips) == 1:
            for each in strips:
                pack_strip(each)
        else:
            with ThreadPoolExecutor(self._num_threads) as pool:
                list(pool.map(pack_strip, strips))
        packed, of_scales = jax.device_put(blocks, self._sharding), jax.device_put(scales, self._sharding)
        of_zeros = None if zeros is None else jax.device_put(zeros, self._sharding)
        rounds_rows = self._rounds_rows and not matrix.is_embedding
        described = describe(matrix, of_scales, of_zeros, None, None, rounds_rows=rounds_rows)
        return PackedMatrix(packed, described, matrix.shape, matrix.is_embedding, num_parts)

    def _pack_quantized(self, matrix: QuantizedMatrix, num_parts: int) -> PackedMatrix:
        depth, lanes = matrix.depth, num_lanes(matrix)
        num_columns = math.prod(matrix.shape) // depth // num_parts
        num_blocks = num_parts * -(-num_columns // COLUMNS)
        shapes = ((num_blocks, lanes, COLUMNS, 4), (num_blocks, matrix.num_groups, COLUMNS))

        def spread(of_groups: Any) -> np.ndarray:
            return get_blocks(np.asarray(of_groups), num_parts, COLUMNS, is_embedding=matrix.is_embedding)

        # Rows that are not int8 are not rounded here, whatever their scale.
        step = matrix.input_scale if matrix.activations == "int8" else None
        arrays = (
            self._leaf(matrix.values, shapes[0], np.dtype(np.uint8), lambda: self._codes(matrix, shapes[0], num_parts)),
            self._leaf(matrix.scales, shapes[1], scale_dtype(matrix), lambda: spread(matrix.scales)),
            self._leaf(matrix.zeros, shapes[1], zeros_dtype(matrix), lambda: spread(matrix.zeros)),
            self._leaf(matrix.group_ids, (depth,), np.dtype(np.int32), lambda: get_order(matrix)),
            self._leaf(step, (1,), np.dtype(np.float32), lambda: np.asarray(step)[None]),
        )

        described = describe(matrix, *arrays[1:], rounds_rows=self._rounds_rows and not matrix.is_embedding)
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

    def _codes(self, matrix: QuantizedMatrix, shape: tuple[int, ...], num_parts: int) -> np.ndarray:
        codes = np.ascontiguousarray(get_codes(matrix))
        if matrix.group_ids is not None:
            codes = np.take(codes, get_order(matrix), axis=matrix.axis)
        depth = matrix.depth
        num_columns = codes.size // depth // num_parts
        steps = (1, depth) if matrix.is_embedding else (codes.size // depth, 1)
        blocks = self._take(math.prod(shape)).reshape(num_parts, -1)
        for part in range(num_parts):
            begin = codes.ctypes.data + part * num_columns * steps[1]
            numbers = (ctypes.c_int64(n) for n in (depth, num_columns, *steps, get_code(matrix)))
            self._library.jpaged_pack_codes(ctypes.c_void_p(begin), *numbers, ctypes.c_void_p(blocks[part].ctypes.data))
        return blocks.reshape(shape)

    def _packed(self, leaf: np.ndarray, shape: tuple[int, ...], is_embedding: bool, num_parts: int) -> np.ndarray:
        depth = leaf.shape[-1] if is_embedding else leaf.shape[0]
        has_rows = is_embedding or np.moveaxis(leaf, 0, -1).flags.c_contiguous
        if is_embedding or not has_rows:
            leaf = np.ascontiguousarray(leaf)
        num_columns = leaf.size // depth // num_parts
        steps = (1, depth) if has_rows else (leaf.size // depth, 1)
        blocks = self._take(math.prod(shape) * leaf.itemsize).view(leaf.dtype).reshape(num_parts, -1)
        for part in range(num_parts):
            begin = leaf.ctypes.data + part * num_columns * steps[1] * leaf.itemsize
            numbers = [ctypes.c_int64(n) for n in (depth, num_columns, *steps)]
            end = ctypes.c_void_p(blocks[part].ctypes.data)
            if leaf.dtype == np.float16:
                self._library.jpaged_pack_f16(ctypes.c_void_p(begin), *numbers, end)
            else:
                self._library.jpaged_pack(ctypes.c_void_p(begin), *numbers, ctypes.c_int64(leaf.itemsize), end)
        return blocks.reshape(shape)

    def _take(self, num_bytes: int) -> np.ndarray:
        """Return new bytes, aligned to a cache line."""
        if num_bytes > len(self._chunk):
            self._chunk = map_huge_pages(max(num_bytes, _CHUNK))
        taken = self._chunk[:num_bytes]
        self._chunk = self._chunk[-(-num_bytes // _LINE) * _LINE :]
        return taken


def map_huge_pages(num_bytes: int) -> np.ndarray:
    """Return bytes that begin with a huge page; they take memory when they are written to."""
    # Shared pages, mmap's default, are huge only if the system is configured for that.
    how = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    mapped = mmap.mmap(-1, num_bytes + _HUGE_PAGE, **how)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only
        with contextlib.suppress(OSError):  # some kernels and sandboxes lack it
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    return memory[-memory.ctypes.data % _HUGE_PAGE :][:num_bytes]


_HUGE_FROM_BYTES = 4 << 20


def empty_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new array, in huge pages if it is large: writing to new small pages takes three times as long.

    A CPU device uses such an array in place, because it is aligned to a cache line.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_FROM_BYTES:
        return np.empty(shape, dtype)
    return map_huge_pages(num_bytes).view(dtype).reshape(shape)
