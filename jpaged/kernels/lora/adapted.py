"""A matrix with adapters, each in a slot of its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A matrix `[in, *out]` and its adapters, in place of a leaf of parameters.

        (x @ a[s - 1].T) @ b[s - 1]        is what a row of adapter slot s adds to its product, of each part by itself

    Parts are what a checkpoint has as matrices of their own: queries, keys and values, or gates and ups. Slots and
    ranks that are not in use are zeros.

    Attributes:
        base: an array, a `QuantisedMatrix`, a `StackedMatrix` or a `PackedMatrix`.
        a: `[slots, parts * rank, in]`; float32 or bfloat16, as rows are.
        b: of each part `[slots, rank, its columns]`, which hold what an adapter is scaled by.
        num_groups: of columns of the matrix: each has a share of each part, one part behind the other.
    """

    base: Any
    a: jax.Array
    b: tuple[jax.Array, ...]
    num_groups: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return tuple(self.base.shape)

    @property
    def dtype(self) -> np.dtype:
        """The type of the matrix."""
        return np.dtype(self.base.dtype)

    @property
    def rank(self) -> int:
        """The rank that each adapter has room for."""
        return int(self.b[0].shape[-2])
