"""The types of GGUF tensors: plain numbers, or blocks of a row with their scales.

| type       | block | bytes of a block, f16 first (Q2_K, Q3_K, Q6_K, TQ: last)      | stored as                  |
|------------|-------|---------------------------------------------------------------|----------------------------|
| Q8_0       | 32    | scale, 32 int8                                                | int8, a scale for 32       |
| Q4_0, Q4_1 | 32    | scale (Q4_1: and minimum), 16 with two numbers each           | int4, a scale for 32       |
| Q5_0, Q5_1 | 32    | likewise, with a word of fifth bits before the numbers        | int8, a scale for 32       |
| Q4_K       | 256   | scales of two kinds, 12 with 8 scales and 8 minima of 6 bits, | int4, a scale for 32       |
|            |       | 128 with two numbers each                                     |                            |
| Q5_K       | 256   | likewise, with 32 of fifth bits before the numbers            | int8, a scale for 32       |
| Q6_K       | 256   | 128 with four bits of two numbers, 64 with two of four, 16    | int8, a scale for 16       |
|            |       | int8 scales                                                   |                            |
| Q2_K       | 256   | 16 with a scale and a minimum of 4 bits, 64 with four numbers | int4, a scale for 16       |
| Q3_K       | 256   | 32 with third bits, 64 with two bits of four numbers, 12 with | int4, a scale for 16       |
|            |       | 16 scales of 6 bits                                           |                            |
| IQ4_NL     | 32    | scale, 16 with two indices of a table each                    | int8, a scale for 32       |
| IQ4_XS     | 256   | scale, 8 scales of 6 bits, 128 with two indices each          | int8, a scale for 32       |
| IQ1 to IQ3 | 256   | indices of rows of 4 or 8 numbers in a table, signs, scales   | int8, a scale for 16 or 32 |
| TQ1, TQ2   | 256   | numbers of three values, five or four to a byte; scale        | int4, a scale for 256      |
| MXFP4      | 32    | exponent of the scale, 16 with two float4 each                | mxfp4, a scale for 32      |

Types of five and six bits are int8 here; the packed kernel of CPUs stores them in five and six bits, and float16 scales
as such. Scales of scales are multiplied exactly, in float32. If groups have a minimum, which is added
to all their numbers, the zero point is derived from the minimum divided by the scale: a float32. Tables are those of
the `gguf` package.
"""

from __future__ import annotations

import dataclasses
import functools
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

_NO_NUMBER = 255
"""Exponent of an MXFP4 block that encodes NaN."""

# Values `[blocks, numbers]`, scales and zeros `[blocks, groups]`.
Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type whose blocks are kept without requantization.

    Attributes:
        size: numbers of a block.
        num_bytes: bytes of a block.
        halves: byte offsets of the float16 scales and minima of a block; None if they are not contiguous.
        form: format of matrices in memory.
        unpack: blocks `[blocks, bytes]`, uint8 -> values, scales and zeros.
    """

    size: int
    num_bytes: int
    halves: tuple[int, ...] | None
    form: MatrixFormat
    unpack: Callable[[np.ndarray], Unpacked]

    def is_finite(self, rows: np.ndarray) -> bool:
        """Return True if the numbers of rows `[out, bytes]` are finite."""
        blocks = np.asarray(rows).reshape(-1, self.num_bytes)
        if self.form.values == "mxfp4":
            return not bool((blocks[:, 0] == _NO_NUMBER).any())
        if self.halves is None:
            return bool(np.isfinite(self.unpack(np.ascontiguousarray(blocks))[1]).all())
        return all(bool(np.isfinite(_halves(blocks[:, at : at + 2])).all()) for at in self.halves)

    def matrix(self, rows: np.ndarray, form: MatrixFormat) -> StoredMatrix:
        """Return the matrix of rows `[out, bytes]`, in the type's format or in a common one of several types."""
        num_out = len(rows)
        values, scales, zeros = self._unpack(np.ascontiguousarray(rows).reshape(-1, self.num_bytes))
        if form.values == "mxfp4":
            values, scales = values * np.float32(0.5), scales * np.float32(2)
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

    def _unpack(self, blocks: np.ndarray) -> Unpacked:
        """Unpack blocks in strips, so that intermediate arrays stay small."""
        strips = [self.unpack(blocks[at : at + _STRIP_BLOCKS]) for at in range(0, len(blocks), _STRIP_BLOCKS)]
        if len(strips) < 2:
            return strips[0] if strips else self.unpack(blocks)
        values, scales, zeros = zip(*strips, strict=True)
        kept = [each for each in zeros if each is not None]
        return np.concatenate(values), np.concatenate(scales), np.concatenate(kept) if kept else None


def joint_form(forms: Sequence[MatrixFormat]) -> MatrixFormat:
    """Return the narrowest format that holds the numbers of several: the format of a leaf with mixed types."""
    first, *others = forms
    if all(form == first for form in others):
        return first
    forms = [_WHOLE_MXFP4 if form.values == "mxfp4" else form for form in forms]
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


def _bits(packed: np.ndarray, width: int) -> np.ndarray:
    """Unpack uint8 `[..., n]` to `[..., n * 8 / width]`, lowest bits first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return (packed[..., None] >> shifts & np.uint8(2**width - 1)).reshape(*packed.shape[:-1], -1)


def _planes(packed: np.ndarray, width: int) -> np.ndarray:
    """Unpack uint8 `[blocks, n]` to 256 numbers: every 32 bytes are the lowest bits of 32, then those of the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, 32) >> shifts & np.uint8(2**width - 1)).reshape(len(packed), -1)


def _q2_k(blocks: np.ndarray) -> Unpacked:
    scales = (blocks[:, :16] & 15) * _halves(blocks[:, 80:82])
    least = -((blocks[:, :16] >> 4) * _halves(blocks[:, 82:]))
    return _from_least(_planes(blocks[:, 16:80], 2), 2, scales, least)


def _q3_k(blocks: np.ndarray) -> Unpacked:
    low, high = _nibbles(blocks[:, 96:104]), _planes_of_scales(blocks[:, 104:108])
    scales = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    numbers = _planes(blocks[:, 32:96], 2) | _planes(blocks[:, :32], 1) << np.uint8(2)
    return numbers.view(np.int8) - np.int8(4), scales * _halves(blocks[:, 108:]), None


def _planes_of_scales(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 `[blocks, 4]` to the two high bits of 16 scales: the lowest bits of the bytes, then the next."""
    return (packed[:, None] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)).reshape(len(packed), 16)


@functools.cache
def _table(kind: str) -> np.ndarray:
    """Return the numbers that the indices of a type stand for, int8 `[entries, numbers of an entry]`."""
    from gguf import quants

    found: Any = getattr(quants, kind)
    if found.grid_hex is None:
        return np.array(found.kvalues, np.int8)[:, None]
    found.init_grid()
    return np.asarray(found.grid).reshape(found.grid_shape).astype(np.int8)


@functools.cache
def _sign_table() -> np.ndarray:
    """Return the factors of 8 numbers, int8 `[128, 8]`: the number of negative ones is even."""
    from gguf import quants

    return _signs(np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)[:, None])


def _signs(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 `[..., n]` to factors of 1 and -1, int8 `[..., 8 n]`."""
    return np.int8(1) - (np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(1)).view(np.int8)


def _iq4_nl(blocks: np.ndarray) -> Unpacked:
    return _table("IQ4_NL")[_nibbles(blocks[:, 2:]), 0], _halves(blocks[:, :2]), None


def _iq4_xs(blocks: np.ndarray) -> Unpacked:
    scales = (_bits(blocks[:, 4:8], 4) | _bits(blocks[:, 2:4], 2) << np.uint8(4)).view(np.int8) - np.int8(32)
    numbers = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256)
    return _table("IQ4_NL")[numbers, 0], scales * _halves(blocks[:, :2]), None


def _scales_and_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales of four bits and the signs of 32 numbers, from uint32 `[blocks, 8]`."""
    rows = words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    return (words >> np.uint32(28)).astype(np.float32), _sign_table()[rows].reshape(len(words), 256)


def _iq2_xxs(blocks: np.ndarray) -> Unpacked:
    words = np.ascontiguousarray(blocks[:, 2:]).view(np.uint32).reshape(-1, 8, 2)
    scales, signs = _scales_and_signs(words[..., 1])
    rows = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    values = _table("IQ2_XXS")[rows].reshape(-1, 256) * signs
    return values, _halves(blocks[:, :2]) * (scales + np.float32(0.5)) * np.float32(0.25), None


def _iq2_scales(blocks: np.ndarray, packed: np.ndarray) -> np.ndarray:
    return _halves(blocks[:, :2]) * (_bits(packed, 4) + np.float32(0.5)) * np.float32(0.25)


def _iq2_xs(blocks: np.ndarray) -> Unpacked:
    words = np.ascontiguousarray(blocks[:, 2:66]).view(np.uint16)
    values = _table("IQ2_XS")[words & np.uint16(511)] * _sign_table()[words >> np.uint16(9)]
    return values.reshape(-1, 256), _iq2_scales(blocks, blocks[:, 66:]), None


def _iq2_s(blocks: np.ndarray) -> Unpacked:
    rows = blocks[:, 2:34] | _bits(blocks[:, 66:74], 2).astype(np.uint16) << np.uint16(8)
    values = _table("IQ2_S")[rows].reshape(-1, 256) * _signs(blocks[:, 34:66])
    return values, _iq2_scales(blocks, blocks[:, 74:]), None


def _iq3_xxs(blocks: np.ndarray) -> Unpacked:
    scales, signs = _scales_and_signs(np.ascontiguousarray(blocks[:, 66:]).view(np.uint32))
    values = (_table("IQ3_XXS") >> 1)[blocks[:, 2:66]].reshape(-1, 256) * signs  # all numbers of the table are even
    return values, _halves(blocks[:, :2]) * (scales + np.float32(0.5)), None


def _iq3_s(blocks: np.ndarray) -> Unpacked:
    rows = blocks[:, 2:66] | _bits(blocks[:, 66:74], 1).astype(np.uint16) << np.uint16(8)
    values = _table("IQ3_S")[rows].reshape(-1, 256) * _signs(blocks[:, 74:106])
    return values, _halves(blocks[:, :2]) * (2 * _bits(blocks[:, 106:], 4) + np.float32(1)), None


def _eighths(rows: np.ndarray, is_less: np.ndarray) -> np.ndarray:
    """Return numbers of IQ1 in eighths: rows of the table plus or, if `is_less`, minus an eighth."""
    deltas = np.where(is_less, np.int8(-1), np.int8(1))[..., None]
    return (_table("IQ1_S")[rows] * np.int8(8) + deltas).reshape(len(rows), 256)


def _iq1_s(blocks: np.ndarray) -> Unpacked:
    words = np.ascontiguousarray(blocks[:, 34:]).view(np.uint16)
    high = words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
    rows = blocks[:, 2:34] | high.reshape(-1, 32) << np.uint16(8)
    scales = (2 * (words >> np.uint16(12) & np.uint16(7)) + 1) * np.float32(0.125)
    return _eighths(rows, np.repeat(words >> np.uint16(15), 4, axis=1)), _halves(blocks[:, :2]) * scales, None


def _iq1_m(blocks: np.ndarray) -> Unpacked:
    words = np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)
    quarters = words >> np.uint16(12) << np.arange(0, 16, 4, dtype=np.uint16)
    scale = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    scales = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)).reshape(-1, 16)
    high = _bits(blocks[:, 32:48], 4)
    rows = blocks[:, :32] | (high & 7).astype(np.uint16) << np.uint16(8)
    return _eighths(rows, high >> 3), scale * ((2 * scales + 1) * np.float32(0.125)), None


def _tq1_0(blocks: np.ndarray) -> Unpacked:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = ((blocks[:, :32], powers), (blocks[:, 32:48], powers), (blocks[:, 48:52], powers[:4]))
    shifted = [(part[:, None] * factors).reshape(len(blocks), -1) for part, factors in parts]
    numbers = (np.concatenate(shifted, axis=1).astype(np.uint16) * 3 >> 8).astype(np.int8)
    return numbers - np.int8(1), _halves(blocks[:, 52:]), None


def _tq2_0(blocks: np.ndarray) -> Unpacked:
    return _planes(blocks[:, :64], 2).view(np.int8) - np.int8(1), _halves(blocks[:, 64:]), None


def _mxfp4(blocks: np.ndarray) -> Unpacked:
    """Unpack twice the numbers of float4, which are whole, and half their scales."""
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _table("MXFP4")[_nibbles(blocks[:, 1:]), 0], scales, None


_LEAST = MatrixFormat("int4", 32, has_zeros=True, has_whole_zeros=False)
_HALVES = MatrixFormat("int8", 32, has_half_scales=True)


def _changed(form: MatrixFormat, **changes: Any) -> MatrixFormat:
    return dataclasses.replace(form, **changes)


_WHOLE_MXFP4 = _changed(_HALVES, num_bits=5, has_half_scales=False)
_SIXTEEN = MatrixFormat("int8", 16)
_FULL_SCALES = MatrixFormat("int8", 32)
_TERNARY = MatrixFormat("int4", 256, has_half_scales=True)

BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q8_0": BlockType(32, 34, (0,), _HALVES, _q8_0),
    "Q4_0": BlockType(32, 18, (0,), _changed(_HALVES, values="int4"), _q4_0),
    "Q4_1": BlockType(32, 20, (0, 2), _changed(_LEAST, has_half_scales=True), _q4_1),
    "Q5_0": BlockType(32, 22, (0,), _changed(_HALVES, num_bits=5), _q5_0),
    "Q5_1": BlockType(32, 24, (0, 2), _changed(_LEAST, values="int8", num_bits=5, has_half_scales=True), _q5_1),
    "Q4_K": BlockType(256, 144, (0, 2), _LEAST, _q4_k),
    "Q5_K": BlockType(256, 176, (0, 2), _changed(_LEAST, values="int8", num_bits=5), _q5_k),
    "Q6_K": BlockType(256, 210, (208,), MatrixFormat("int8", 16, num_bits=6), _q6_k),
    "Q2_K": BlockType(256, 84, (80, 82), _changed(_LEAST, group_size=16), _q2_k),
    "Q3_K": BlockType(256, 110, (108,), _changed(_SIXTEEN, values="int4"), _q3_k),
    "IQ4_NL": BlockType(32, 18, (0,), _HALVES, _iq4_nl),
    "IQ4_XS": BlockType(256, 136, (0,), _FULL_SCALES, _iq4_xs),
    "IQ3_XXS": BlockType(256, 98, (0,), _changed(_FULL_SCALES, num_bits=6), _iq3_xxs),
    "IQ3_S": BlockType(256, 110, (0,), _changed(_FULL_SCALES, num_bits=5), _iq3_s),
    "IQ2_XXS": BlockType(256, 66, (0,), _FULL_SCALES, _iq2_xxs),
    "IQ2_XS": BlockType(256, 74, (0,), _SIXTEEN, _iq2_xs),
    "IQ2_S": BlockType(256, 82, (0,), _SIXTEEN, _iq2_s),
    "IQ1_S": BlockType(256, 50, (0,), _changed(_FULL_SCALES, num_bits=5), _iq1_s),
    "IQ1_M": BlockType(256, 56, None, _changed(_SIXTEEN, num_bits=6), _iq1_m),
    "TQ1_0": BlockType(256, 54, (52,), _TERNARY, _tq1_0),
    "TQ2_0": BlockType(256, 66, (64,), _TERNARY, _tq2_0),
    "MXFP4": BlockType(32, 17, (), MatrixFormat("mxfp4", 32), _mxfp4),
}
"""Types that are kept without requantization; the packed kernel's library reads the first eight from files."""
PACKED_TYPES = tuple(BLOCK_TYPES)[:8]
READ = (*FLOATS, *BLOCK_TYPES)
