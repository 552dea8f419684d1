"""A matrix with adapters, each in its own slot."""

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

        (x @ a[s - 1].T) @ b[s - 1]        is the delta of a row with adapter slot s, computed for each part separately

    Parts are separate matrices of the checkpoint: queries, keys and values, or gates and ups. Unused slots and ranks
    are zeros.

    Attributes:
        base: an array, a `QuantisedMatrix`, a `StackedMatrix` or a `PackedMatrix`.
        a: `[slots, parts * rank, in]`; float32 or bfloat16, as rows are.
        b: for each part `[slots, rank, its columns]`, including the adapter's scale.
        num_groups: groups of columns of the matrix; each has a share of each part, in order.
    """

    base: Any
    a: jax.Array
    b: tuple[jax.Array, ...]
    num_groups: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return tuple(self.base.shape)

    @property
    def dtype(self) -> np.dtype:
        """Type of the matrix."""
        return np.dtype(self.base.dtype)

    @property
    def rank(self) -> int:
        """Maximum rank of an adapter."""
        return int(self.b[0].shape[-2])
