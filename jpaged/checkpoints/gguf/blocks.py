"""The types of GGUF tensors: plain numbers, or blocks of a row that begin with their scales.

| type       | block | bytes of a block, f16 first (Q6_K: last)                      | stored as                  |
|------------|-------|---------------------------------------------------------------|----------------------------|
| Q8_0       | 32    | scale, 32 int8                                                | int8, a scale for 32       |
| Q4_0, Q4_1 | 32    | scale (Q4_1: and minimum), 16 with two numbers each           | int4, a scale for 32       |
| Q5_0, Q5_1 | 32    | likewise, with a word of fifth bits before the numbers        | int8, a scale for 32       |
| Q4_K       | 256   | scales of two kinds, 12 with 8 scales and 8 minima of 6 bits, | int4, a scale for 32       |
|            |       | 128 with two numbers each                                     |                            |
| Q5_K       | 256   | likewise, with 32 of fifth bits before the numbers            | int8, a scale for 32       |
| Q6_K       | 256   | 128 with four bits of two numbers, 64 with two of four, 16    | int8, a scale for 16       |
|            |       | int8 scales                                                   |                            |

Types of five and six bits are int8 here; the packed kernel of CPUs stores them in five and six bits, and float16 scales
as such. Scales of scales are multiplied exactly, in float32. If groups have a minimum, which is added
to all their numbers, the zero point is derived from the minimum divided by the scale: a float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.checkpoints.quantized.scheme import StoredMatrix
from jpaged.kernels.matrix_format import NUM_BITS, MatrixFormat, Values

FLOATS: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Types of tensors with plain numbers."""

# Values `[blocks, numbers]`, scales and zeros `[blocks, groups]`.
Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type whose blocks are kept without requantization.

    Attributes:
        size: numbers of a block.
        num_bytes: bytes of a block.
        halves: byte offsets of the float16 scales and minima of a block.
        form: format of matrices in memory.
        unpack: blocks `[blocks, bytes]`, uint8 -> values, scales and zeros.
    """

    size: int
    num_bytes: int
    halves: tuple[int, ...]
    form: MatrixFormat
    unpack: Callable[[np.ndarray], Unpacked]

    def is_finite(self, rows: np.ndarray) -> bool:
        """Return True if the numbers of rows `[out, bytes]` are finite."""
        blocks = np.asarray(rows).reshape(-1, self.num_bytes)
        return all(bool(np.isfinite(_halves(blocks[:, at : at + 2])).all()) for at in self.halves)

    def matrix(self, rows: np.ndarray, form: MatrixFormat) -> StoredMatrix:
        """Return the matrix of rows `[out, bytes]`, in the type's format or in a common one of several types."""
        num_out = len(rows)
        values, scales, zeros = self.unpack(np.ascontiguousarray(rows).reshape(-1, self.num_bytes))
        assert self.form.group_size is not None
        assert form.group_size is not None
        repeats = self.form.group_size // form.group_size

        def of_groups(array: np.ndarray) -> np.ndarray:
            return np.repeat(array.reshape(num_out, -1), repeats, axis=1)

        if zeros is None and form.has_zeros:
            zeros = np.zeros_like(scales)
        return StoredMatrix(
            values.reshape(num_out, -1).astype(form.dtype),
            of_groups(scales),
            None if zeros is None else of_groups(zeros),
            group_size=form.group_size,
        )


def joint_form(forms: Sequence[MatrixFormat]) -> MatrixFormat:
    """Return the narrowest format that holds the numbers of several: the format of a leaf with mixed types."""
    first, *others = forms
    if all(form == first for form in others):
        return first
    values: Values = "int8" if any(form.values == "int8" for form in forms) else "int4"
    size = math.gcd(*(form.group_size or 0 for form in forms))
    has_zeros = any(form.has_zeros for form in forms)
    num_bits = max(form.num_bits or NUM_BITS[form.values] for form in forms)
    return MatrixFormat(
        values,
        size,
        has_zeros=has_zeros,
        has_whole_zeros=not has_zeros,
        num_bits=None if num_bits == NUM_BITS[values] else num_bits,
        has_half_scales=all(form.has_half_scales for form in forms),
    )


def dequantize_blocks(kind: str, data: np.ndarray) -> np.ndarray:
    """Return the dequantized weights of a type's data, in the stored type or float32."""
    if kind in FLOATS:
        return data.view(FLOATS[kind])
    if kind == "Q8_0":
        return _dequantize_q8_0(data)
    import gguf

    weights: Any = gguf.quants.dequantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType[kind])
    return np.asarray(weights)


_STRIP_BLOCKS = 1 << 14  # their numbers stay in a core's cache


def _dequantize_q8_0(data: np.ndarray) -> np.ndarray:
    """Return float32 weights: three times as fast as the package, as most embeddings have this type."""
    blocks = np.ascontiguousarray(data).reshape(-1, BLOCK_TYPES["Q8_0"].num_bytes)
    weights = np.empty((len(blocks), BLOCK_TYPES["Q8_0"].size), np.float32)
    for begin in range(0, len(blocks), _STRIP_BLOCKS):
        values, scales, _ = _q8_0(blocks[begin : begin + _STRIP_BLOCKS])
        np.multiply(values, scales, out=weights[begin : begin + _STRIP_BLOCKS], dtype=np.float32)
    return weights.reshape(*data.shape[:-1], -1)


def _halves(blocks: np.ndarray) -> np.ndarray:
    """Return the float16 at the start of bytes as float32, `[blocks, 1]`."""
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 `[..., n]` to `[..., 2 n]`: all low halves, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _q8_0(blocks: np.ndarray) -> Unpacked:
    return blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]), None


def _q4_0(blocks: np.ndarray) -> Unpacked:
    return _nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _halves(blocks[:, :2]), None


def _from_least(numbers: np.ndarray, middle: int, scales: np.ndarray, least: np.ndarray) -> Unpacked:
    """Convert numbers from 0, whose group's minimum is added after scaling, to signed values with zero points.

    A group with a scale of 0 has a single value: it becomes one unit, of the size of the minimum, relative to its zero
    point.
    """
    is_one = scales == 0
    values = numbers.view(np.int8) - np.int8(middle)
    groups = values.reshape(*scales.shape, -1)
    groups[is_one] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        zeros = np.where(is_one, np.float32(1), -least / scales - np.float32(middle))
    return groups.reshape(values.shape), np.where(is_one, -least, scales), zeros


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 `[blocks, 4]`, one bit for each of 32 numbers, to their fifth bits, `[blocks, 32]`."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q4_1(blocks: np.ndarray) -> Unpacked:
    return _from_least(_nibbles(blocks[:, 4:]), 8, _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q5_0(blocks: np.ndarray) -> Unpacked:
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return numbers.view(np.int8) - np.int8(16), _halves(blocks[:, :2]), None


def _q5_1(blocks: np.ndarray) -> Unpacked:
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _from_least(numbers, 16, _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _scales_and_leasts(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and minima of Q4_K and Q5_K; four have high bits in the others' bytes."""
    first, second, low = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.concatenate((first & 63, low & 15 | first >> 2 & 48), axis=1)
    leasts = np.concatenate((second & 63, low >> 4 | second >> 2 & 48), axis=1)
    return scales * _halves(blocks[:, :2]), -(leasts * _halves(blocks[:, 2:4]))


def _q4_k(blocks: np.ndarray) -> Unpacked:
    numbers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return _from_least(numbers, 8, *_scales_and_leasts(blocks))


def _q5_k(blocks: np.ndarray) -> Unpacked:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _from_least((low | high << np.uint8(4)).reshape(-1, 256), 16, *_scales_and_leasts(blocks))


def _q6_k(blocks: np.ndarray) -> Unpacked:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    values = (low | high << np.uint8(4)).reshape(-1, 256).view(np.int8) - np.int8(32)
    return values, blocks[:, 192:208].view(np.int8) * _halves(blocks[:, 208:]), None


_LEAST = MatrixFormat("int4", 32, has_zeros=True, has_whole_zeros=False)
_HALVES = MatrixFormat("int8", 32, has_half_scales=True)


def _changed(form: MatrixFormat, **changes: Any) -> MatrixFormat:
    return dataclasses.replace(form, **changes)


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q8_0": BlockType(32, 34, (0,), _HALVES, _q8_0),
    "Q4_0": BlockType(32, 18, (0,), _changed(_HALVES, values="int4"), _q4_0),
    "Q4_1": BlockType(32, 20, (0, 2), _changed(_LEAST, has_half_scales=True), _q4_1),
    "Q5_0": BlockType(32, 22, (0,), _changed(_HALVES, num_bits=5), _q5_0),
    "Q5_1": BlockType(32, 24, (0, 2), _changed(_LEAST, values="int8", num_bits=5, has_half_scales=True), _q5_1),
    "Q4_K": BlockType(256, 144, (0, 2), _LEAST, _q4_k),
    "Q5_K": BlockType(256, 176, (0, 2), _changed(_LEAST, values="int8", num_bits=5), _q5_k),
    "Q6_K": BlockType(256, 210, (208,), MatrixFormat("int8", 16, num_bits=6), _q6_k),
}
"""Types that are kept without requantization."""
READ = (*FLOATS, *BLOCK_TYPES)
