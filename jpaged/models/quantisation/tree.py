"""The parameter tree with quantized matrices: shapes, and the names of axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.kernels.product.quantised import abstract_matrix, component_axes
from jpaged.models.config import ModelConfig
from jpaged.models.layer_kinds import stacks_of
from jpaged.models.leaves import Leaf, LogicalAxes
from jpaged.models.quantisation.formats import EXPERT_AXES, contracted_axis, is_uniform, leaf_format
from jpaged.models.quantisation.rules import Quantisation
from jpaged.models.registry import find_family
from jpaged.models.stack import LayerMode

MatricesOf = Literal["layers", "head", "all"]
LeafPath = tuple[str | int, ...]
"""Place of a leaf in the tree: ("layers", 3, "mlp", "down", "kernel"), in scan mode with the name of a stack."""


def placed_leaves(config: ModelConfig, layer_mode: LayerMode) -> Iterator[tuple[LeafPath, Sequence[Leaf]]]:
    """Yield every place in the tree and its leaf, or the leaves of the layers that are stacked there."""
    family = find_family(config.architecture)
    prefix = family.name_prefix(())
    layers = [
        family.layer_leaves(config, f"{prefix}{family.layers_prefix}{index}.", kind)
        for index, kind in enumerate(config.layer_kinds)
    ]
    if layer_mode == "scan":
        for name, stacked in stacks_of(config.layer_kinds).items():
            for of_each in zip(*(layers[index] for index in stacked), strict=True):
                yield ("layers", name, *of_each[0].path), of_each
    else:
        for index, of_layer in enumerate(layers):
            for leaf in of_layer:
                yield ("layers", index, *leaf.path), (leaf,)
    for leaf in family.outer_leaves(config, prefix):
        yield leaf.path, (leaf,)


def dense_formats(config: ModelConfig, part: MatricesOf = "all") -> frozenset[MatrixFormat]:
    """Return the formats of the quantized matrices that all rows are multiplied with, in the layers or after them."""
    if config.quantisation is None:
        return frozenset()
    found = (
        leaf_format(config.quantisation, leaf)
        for path, leaves in placed_leaves(config, "loop")
        for leaf in leaves
        if EXPERT_AXES.isdisjoint(leaf.axes) and part in ("all", "layers" if path[0] == "layers" else "head")
    )
    return frozenset(form for form in found if form is not None)


def can_stack(config: ModelConfig) -> bool:
    """Return True if layers that would be stacked have the same formats."""
    quantisation = config.quantisation
    return quantisation is None or all(is_uniform(quantisation, leaves) for _, leaves in placed_leaves(config, "scan"))


def leaf_axes(quantisation: Quantisation | None, leaf: Leaf, dtype: np.dtype, *, is_stacked: bool) -> Any:
    """Return the axis names of a leaf, or those of all arrays of a quantized one; an axis of layers comes first."""
    axes: LogicalAxes = ("layers", *leaf.axes) if is_stacked else leaf.axes
    form = leaf_format(quantisation, leaf)
    return axes if form is None else component_axes(axes, contracted_axis(leaf), form, dtype)


def put_quantised(shapes: Any, config: ModelConfig, layer_mode: LayerMode, dtype: np.dtype) -> None:
    """Replace the shapes of matrices that are quantized by their quantized forms in a tree of shapes, in place."""
    for path, (leaf, *_) in placed_leaves(config, layer_mode):
        form = leaf_format(config.quantisation, leaf)
        if form is not None:
            inside = shapes
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = abstract_matrix(form, inside[path[-1]].shape, contracted_axis(leaf), dtype)
