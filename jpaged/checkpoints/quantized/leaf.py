"""Leaves of the tree from a quantized checkpoint: arrays packed in the layout of the weights, or plain weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoints.quantized.scheme import Scheme, Shape, StoredMatrix, read_matrix
from jpaged.checkpoints.tensor_files import TensorSource
from jpaged.errors import InvalidArgument
from jpaged.kernels.matmul.quantized import QuantizedMatrix, abstract_matrix
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.param_specs import EXPERT_AXES, Leaf, contracted_axis, get_module, stored_formats
from jpaged.models.sharding import PaddedAxis

# (name, shape as stored, contracted axis as stored) -> the matrix.
ReadMatrix = Callable[[str, Shape, int], StoredMatrix]


@dataclass(frozen=True, slots=True)
class LeafPart:
    """One array of a quantized leaf, of the padded model.

    Attributes:
        shape: of the complete array.
        read: returns a part as a new array, given a slice for each axis.
    """

    shape: Shape
    read: Callable[[tuple[slice, ...]], np.ndarray]


def quantized_leaf(
    read_matrix: ReadMatrix,
    leaves: Sequence[Leaf],
    form: MatrixFormat,
    *,
    is_stacked: bool,
    split: PaddedAxis | None,
    dtype: np.dtype,
) -> QuantizedMatrix:
    """Return a leaf, or that of all layers stacked, as a matrix of `LeafPart`s.

    The first read of a part reads the tensors.

    Args:
        form: format in memory.
        split: the axis along which it is split over devices, and padded.
        dtype: of the model.
    """
    arrays: list[_Arrays] = []

    def all_arrays() -> _Arrays:
        if not arrays:
            of_each = [_pack(read_matrix, leaf, form) for leaf in leaves]
            arrays.append(_Arrays.stacked(of_each) if is_stacked else of_each[0])
        return arrays[0]

    axis = contracted_axis(leaves[0])
    shape = (len(leaves), *leaves[0].shape) if is_stacked else leaves[0].shape
    abstract = abstract_matrix(form, shape, axis, dtype)

    def part(name: str) -> LeafPart | None:
        described = getattr(abstract, name)
        if described is None:
            return None
        place = None if split is None else split.axis + is_stacked
        # The contracted axis is never padded, and listed groups and scales of inputs have no other axis.
        is_plain = split is None or place == len(shape) + axis or name in ("group_ids", "input_scale")

        def read(index: tuple[slice, ...]) -> np.ndarray:
            array = getattr(all_arrays(), name)
            if is_plain or split is None or place is None:
                return np.array(array[index], order="C")
            begin, end, _ = index[place].indices(split.wide_size)
            of_layers = (*index[:is_stacked], *(slice(None),) * (place - is_stacked))
            cut = array[(*of_layers, slice(*split.source(begin, end)))]
            return split.padded(np.ascontiguousarray(cut), begin, end)

        if is_plain or split is None:
            return LeafPart(described.shape, read)
        outer = described.shape[:is_stacked]
        return LeafPart((*outer, *split.padded_shape(described.shape[is_stacked:])), read)

    return dataclasses.replace(
        abstract,
        values=part("values"),
        scales=part("scales"),
        zeros=part("zeros"),
        group_ids=part("group_ids"),
        input_scale=part("input_scale"),
    )


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The packed arrays of a quantized leaf as published."""

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    group_ids: np.ndarray | None
    input_scale: np.ndarray | None

    @classmethod
    def stacked(cls, layers: Sequence[_Arrays]) -> _Arrays:
        def stack(name: str) -> Any:
            arrays = [getattr(layer, name) for layer in layers]
            return None if arrays[0] is None else np.stack(arrays)

        return cls(*map(stack, cls.__slots__))


def _pack(read_matrix: ReadMatrix, leaf: Leaf, form: MatrixFormat) -> _Arrays:
    """Read the tensors of a leaf, and pack each of their arrays as the leaf packs weights."""
    place = len(leaf.shape) + contracted_axis(leaf)
    stored_axis = leaf.tensor_axes[place]
    assert stored_axis is not None
    matrices = [read_matrix(name, shape, stored_axis) for name, shape in leaf.tensors]
    num_groups = form.num_groups(leaf.shape[place])

    def pack(arrays: Sequence[np.ndarray], size: int, dtype: np.dtype) -> np.ndarray:
        packed = np.empty((*leaf.shape[:place], size, *leaf.shape[place + 1 :]), dtype)
        leaf.pack([np.swapaxes(array, stored_axis, 1) for array in arrays], packed)
        return packed

    values = pack([matrix.values for matrix in matrices], leaf.shape[place], form.dtype)
    scales = pack(
        [_regroup(each, each.scales, form, num_groups) for each in matrices], num_groups, np.dtype(np.float32)
    )
    zeros = None
    if form.has_zeros:
        of_each = [_regroup(each, each.zeros, form, num_groups) for each in matrices]
        zeros = pack(of_each, num_groups, form.zeros_dtype)
    return _Arrays(values, scales, zeros, _group_ids(leaf, matrices, form), _input_scale(leaf, matrices, form))


def _regroup(matrix: StoredMatrix, of_groups: np.ndarray | None, form: MatrixFormat, num_groups: int) -> np.ndarray:
    """Broadcast scales or zeros to every output and group; repeat them if groups are smaller than published."""
    assert of_groups is not None
    shape = list(matrix.values.shape)
    shape[1] = num_groups
    if matrix.group_size != form.group_size:
        # Group i starts with number i * size, which is in the published group of that number.
        starts = np.arange(num_groups) * (form.group_size or 0)
        of_groups = of_groups[:, starts // (matrix.group_size or 1)]
    return np.broadcast_to(of_groups, shape)


def _group_ids(leaf: Leaf, matrices: Sequence[StoredMatrix], form: MatrixFormat) -> np.ndarray | None:
    if not form.has_group_ids:
        return None
    if leaf.axes[0] in EXPERT_AXES:
        return np.stack([matrix.group_ids for matrix in matrices if matrix.group_ids is not None]).astype(np.int32)
    first, *others = (matrix.group_ids for matrix in matrices)
    assert first is not None
    if any(other is None or not np.array_equal(first, other) for other in others):
        names = ", ".join(name for name, _ in leaf.tensors)
        raise InvalidArgument("checkpoint", f"{names} have the same inputs but list their groups in different orders")
    return first.astype(np.int32)


def _input_scale(leaf: Leaf, matrices: Sequence[StoredMatrix], form: MatrixFormat) -> np.ndarray | None:
    """Return a scale for each expert; for matrices that share inputs the largest one, which fits all."""
    if not form.has_input_scale:
        return None
    scales = np.array([matrix.input_scale or 0.0 for matrix in matrices], np.float32)
    return scales if leaf.axes[0] in EXPERT_AXES else np.asarray(scales.max())


@dataclass(frozen=True, slots=True)
class Dequantized:
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
        leaf = self._quantized(name)
        return self.files.shape(name) if leaf is None else dict(leaf.tensors)[name]

    def dtype(self, name: str) -> np.dtype:
        """See `TensorSource`."""
        return self.files.dtype(name) if self._quantized(name) is None else np.dtype(np.float32)

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource`; a quantized tensor is read completely."""
        leaf = self._quantized(name)
        if leaf is None:
            return self.files.read(name, shape, index)
        is_transposed = is_input_first(leaf)
        matrix = read_matrix(self.scheme, self.files, get_module(name), shape[::-1] if is_transposed else shape)
        weights = matrix.weights()
        return (weights.T if is_transposed else weights)[index]

    def where(self, name: str) -> Path:
        """See `TensorSource`."""
        return self.files.where(name)

    def _quantized(self, name: str) -> Leaf | None:
        """Return the leaf of a quantized tensor, or None."""
        for leaf in self.leaves:
            forms = stored_formats(self.scheme.quantization, leaf)
            if any(own == name and form is not None for (own, _), form in zip(leaf.tensors, forms, strict=True)):
                return leaf
        return None


def is_input_first(leaf: Leaf) -> bool:
    """Return True if a checkpoint has the weights of a leaf as `[in, out]`, and not as `[out, in]`."""
    return leaf.path[-1] == "kernel" and leaf.tensor_axes[len(leaf.shape) + contracted_axis(leaf)] == 0
