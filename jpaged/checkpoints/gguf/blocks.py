"""The types of GGUF's tensors: numbers, or blocks of a row that begin with their scales.

| type | block | bytes of a block                                  | as kept                          |
|------|-------|---------------------------------------------------|----------------------------------|
| Q8_0 | 32    | scale f16, 32 int8                                | int8, a scale for 32             |
| Q4_0 | 32    | scale f16, 16 with two numbers each, less 8       | int4, a scale for 32             |
| Q6_K | 256   | 128 low halves, 64 with two bits of four numbers, | int8, a scale for 16             |
|      |       | 16 int8 for 16 numbers each, scale of these f16   |                                  |

Scales of scales are multiplied out, exactly, in float32. Other types that can be read become weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.checkpoints.quantised.scheme import StoredMatrix
from jpaged.kernels.matrix_format import MatrixFormat, Values

FLOATS: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Types of tensors that are numbers."""

# Values `[blocks, numbers]`, scales and zeros `[blocks, groups]`.
Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type whose blocks are kept as they are.

    Attributes:
        size: numbers of a block.
        num_bytes: of a block.
        form: what a matrix of it is kept in.
        unpack: blocks `[blocks, bytes]`, uint8 -> values, scales and zeros.
    """

    size: int
    num_bytes: int
    form: MatrixFormat
    unpack: Callable[[np.ndarray], Unpacked]

    def matrix(self, rows: np.ndarray, form: MatrixFormat) -> StoredMatrix:
        """A matrix of rows `[out, bytes]`, in its own form or in one that several types have in common."""
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
    """The narrowest form that holds the numbers of several: what matrices of one leaf are kept in."""
    first, *others = forms
    if all(form == first for form in others):
        return first
    values: Values = "int8" if any(form.values == "int8" for form in forms) else "int4"
    size = math.gcd(*(form.group_size or 0 for form in forms))
    return dataclasses.replace(first, values=values, group_size=size, has_zeros=any(form.has_zeros for form in forms))


def weights_of(kind: str, data: np.ndarray) -> np.ndarray:
    """The weights that bytes or numbers of a type stand for, in its own type or in float32."""
    if kind in FLOATS:
        return data.view(FLOATS[kind])
    import gguf

    weights: Any = gguf.quants.dequantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType[kind])
    return np.asarray(weights)


def _halves(blocks: np.ndarray) -> np.ndarray:
    """float16 at the beginning of bytes as float32, `[blocks, 1]`."""
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 `[..., n]` -> `[..., 2 n]`: all low halves, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _q8_0(blocks: np.ndarray) -> Unpacked:
    return blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]), None


def _q4_0(blocks: np.ndarray) -> Unpacked:
    return _nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _halves(blocks[:, :2]), None


def _q6_k(blocks: np.ndarray) -> Unpacked:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    values = (low | high << np.uint8(4)).reshape(-1, 256).view(np.int8) - np.int8(32)
    return values, blocks[:, 192:208].view(np.int8) * _halves(blocks[:, 208:]), None


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q8_0": BlockType(32, 34, MatrixFormat("int8", 32), _q8_0),
    "Q4_0": BlockType(32, 18, MatrixFormat("int4", 32), _q4_0),
    "Q6_K": BlockType(256, 210, MatrixFormat("int8", 16), _q6_k),
}
"""Types that are kept as they are."""
AS_WEIGHTS = ("Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K")
"""Types that are read as the weights that they stand for."""
READ = (*FLOATS, *BLOCK_TYPES, *AS_WEIGHTS)
