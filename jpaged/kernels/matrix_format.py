"""How a matrix is quantised: a value that a model's config can have, and that needs no arrays."""

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
"""What rows are rounded to before a product: int8 or fp8 with a scale a row, or fp8 with a scale a row and group."""

VALUE_DTYPES: Mapping[Values, np.dtype] = {
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "mxfp4": np.dtype(ml_dtypes.float4_e2m1fn),
}
LARGEST: Mapping[Values, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "mxfp4": 6.0}
"""The largest number of each kind, which the largest weight of a group becomes."""
NUM_BITS: Mapping[Values, int] = {"int8": 8, "int4": 4, "fp8": 8, "mxfp4": 4}


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """How a matrix is quantised, as far as its shapes and its product go.

    Attributes:
        values: the type of its numbers.
        group_size: numbers of a column that share a scale; None is all of them.
        has_zeros: groups have zero points (of integers alone).
        has_whole_zeros: which are whole numbers, int8; float32 otherwise, as GGUF's least numbers of groups make them.
        has_group_ids: the group of a number is listed rather than counted (GPTQ's desc_act).
        activations: what rows are rounded to before the product.
        has_input_scale: with one scale that the checkpoint brings, rather than with what each row asks for.
    """

    values: Values
    group_size: int | None = None
    has_zeros: bool = False
    has_group_ids: bool = False
    activations: Activations | None = None
    has_input_scale: bool = False
    has_whole_zeros: bool = True

    @property
    def dtype(self) -> np.dtype:
        """The type of the values."""
        return VALUE_DTYPES[self.values]

    @property
    def zeros_dtype(self) -> np.dtype:
        """The type of the zero points."""
        return np.dtype(np.int8 if self.has_whole_zeros else np.float32)

    def num_groups(self, depth: int) -> int:
        """Groups of a column of this depth."""
        return 1 if self.group_size is None else -(-depth // self.group_size)

    def split(self, depth: int, num_parts: int) -> MatrixFormat:
        """The same with groups so small that none is cut where the depth ends, or is split into so many parts.

        The scales of a group that is cut are repeated. Groups that are listed are not split: scales are whole then.
        """
        if self.group_size is None or self.has_group_ids or depth % num_parts:
            return self
        return dataclasses.replace(self, group_size=math.gcd(self.group_size, depth // num_parts))
