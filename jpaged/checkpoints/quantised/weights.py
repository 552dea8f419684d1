"""Adapter of a quantized checkpoint to plain weights, for leaves that are not stored quantized in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged.checkpoints.quantised.scheme import Scheme, read_matrix
from jpaged.checkpoints.tensor_source import TensorSource
from jpaged.models.param_specs import Leaf, contracted_axis, module_of, stored_formats


@dataclass(frozen=True, slots=True)
class Dequantised:
    """The tensors of a few leaves, as a `TensorSource`; quantized ones as float32 weights."""

    files: TensorSource
    scheme: Scheme
    leaves: tuple[Leaf, ...]

    @property
    def names(self) -> frozenset[str]:
        """See `TensorSource`."""
        return self.files.names | {name for leaf in self.leaves for name, _ in leaf.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        leaf = self._quantised(name)
        return self.files.shape(name) if leaf is None else dict(leaf.tensors)[name]

    def dtype(self, name: str) -> np.dtype:
        """See `TensorSource`."""
        return self.files.dtype(name) if self._quantised(name) is None else np.dtype(np.float32)

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource`; a quantized tensor is read completely."""
        leaf = self._quantised(name)
        if leaf is None:
            return self.files.read(name, shape, index)
        is_transposed = is_input_first(leaf)
        matrix = read_matrix(self.scheme, self.files, module_of(name), shape[::-1] if is_transposed else shape)
        weights = matrix.weights()
        return (weights.T if is_transposed else weights)[index]

    def where(self, name: str) -> Path:
        """See `TensorSource`."""
        return self.files.where(name)

    def _quantised(self, name: str) -> Leaf | None:
        """Return the leaf of a quantized tensor, or None."""
        for leaf in self.leaves:
            forms = stored_formats(self.scheme.quantisation, leaf)
            if any(own == name and form is not None for (own, _), form in zip(leaf.tensors, forms, strict=True)):
                return leaf
        return None


def is_input_first(leaf: Leaf) -> bool:
    """Return True if a checkpoint has the weights of a leaf as `[in, out]`, and not as `[out, in]`."""
    return leaf.path[-1] == "kernel" and leaf.tensor_axes[len(leaf.shape) + contracted_axis(leaf)] == 0
