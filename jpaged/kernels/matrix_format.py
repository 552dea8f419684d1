"""The format of a quantized matrix: a value for a model's config, without arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

Values = Literal["int8", "int4", "fp8", "mxfp4"]
Activations = Literal["int8", "fp8", "fp8-groups"]
"""Types that rows are rounded to before a matmul: int8 or fp8 with a scale per row, or fp8 with one per group."""

VALUE_DTYPES: Mapping[Values, np.dtype] = {
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "mxfp4": np.dtype(ml_dtypes.float4_e2m1fn),
}
LARGEST: Mapping[Values, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "mxfp4": 6.0}
"""The largest number of each type, to which the largest weight of a group is scaled."""
NUM_BITS: Mapping[Values, int] = {"int8": 8, "int4": 4, "fp8": 8, "mxfp4": 4}


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """The format of a quantized matrix, as far as shapes and matmuls depend on it.

    Attributes:
        values: the type of the numbers.
        group_size: numbers of a column that share a scale; None is all of them.
        has_zeros: groups have zero points (integers only).
        has_whole_zeros: zero points are int8; otherwise float32, as from the minima of groups in GGUF.
        has_group_ids: the group of each number is listed, not derived from its position (GPTQ's desc_act).
        activations: the type that rows are rounded to before the matmul.
        has_input_scale: rows have one scale from the checkpoint, instead of a scale per row.
        num_bits: bits of the numbers, 5 or 6, if they are int8 but need fewer bits; None is those of the type.
        has_half_scales: every scale is a float16 number.
    """

    values: Values
    group_size: int | None = None
    has_zeros: bool = False
    has_group_ids: bool = False
    activations: Activations | None = None
    has_input_scale: bool = False
    has_whole_zeros: bool = True
    num_bits: int | None = None
    has_half_scales: bool = False

    @property
    def dtype(self) -> np.dtype:
        """Type of the values."""
        return VALUE_DTYPES[self.values]

    @property
    def largest(self) -> float:
        """The largest number, to which the largest weight of a group is scaled."""
        return LARGEST[self.values] if self.num_bits is None else 2.0 ** (self.num_bits - 1) - 1

    @property
    def zeros_dtype(self) -> np.dtype:
        """Type of the zero points."""
        return np.dtype(np.int8 if self.has_whole_zeros else np.float32)

    def num_groups(self, depth: int) -> int:
        """Return the number of groups of a column of this depth."""
        return 1 if self.group_size is None else -(-depth // self.group_size)

    def split(self, depth: int, num_parts: int) -> MatrixFormat:
        """Return the format with smaller groups, so that none crosses the end of the depth or of a part.

        The scales of a group that is cut are repeated. Listed groups are not split: their scales are whole on every
        device.
        """
        if self.group_size is None or self.has_group_ids or depth % num_parts:
            return self
        return dataclasses.replace(self, group_size=math.gcd(self.group_size, depth // num_parts))
