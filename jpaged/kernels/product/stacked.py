"""A quantized matrix of one of several layers, in one array with those of the others.

A scan would first slice a layer's part from the stack, and XLA for TPUs materializes that part: in memory, if it
exceeds the free on-chip memory. The kernel reads it in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jpaged.kernels.product.quantised import QuantisedMatrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """A matrix of one of several layers, in place of the layer's matrix.

    Attributes:
        matrices: `[L, K, *out]`.
        index: int32 scalar: the layer.
    """

    matrices: QuantisedMatrix
    index: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one layer's matrix."""
        return self.matrices.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """The type of the model."""
        return self.matrices.dtype

    def own(self) -> QuantisedMatrix:
        """Return the layer's matrix, sliced."""
        own: QuantisedMatrix = jax.tree.map(
            lambda array: jax.lax.dynamic_index_in_dim(array, self.index, keepdims=False), self.matrices
        )
        return own
