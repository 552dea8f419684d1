"""A quantised matrix of one of several layers, in one array with those of the others.

A scan would cut a layer's part out of the stack first, and XLA for TPUs keeps that part: in memory, where it is larger
than what is free on the chip. The kernel reads it where it lies.
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
    """A matrix of one of several layers, in place of its own.

    Attributes:
        matrices: `[L, K, *out]`.
        index: int32 scalar: which layer.
    """

    matrices: QuantisedMatrix
    index: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's own."""
        return self.matrices.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """The type of the model."""
        return self.matrices.dtype

    def own(self) -> QuantisedMatrix:
        """The layer's own, cut out."""
        own: QuantisedMatrix = jax.tree.map(
            lambda array: jax.lax.dynamic_index_in_dim(array, self.index, keepdims=False), self.matrices
        )
        return own
