"""The format of each leaf of a quantized model: in the checkpoint's tensors, and in memory for the matmul."""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.leaves import Leaf
from jpaged.models.quantisation.rules import Quantisation

_SPLIT = frozenset({"heads", "feed_forward"})
"""Axes that are both contracted and split over devices."""
_NEVER = frozenset({"bias", "scale", "sinks", "embedding"})
_CHOOSING = frozenset({"router", "score"})
"""Layers that score experts."""
EXPERT_AXES = frozenset({"experts", "expert_parts"})
"""Axes of experts."""


def module_of(name: str) -> str:
    """Return the name of the module that a tensor belongs to."""
    return name.removesuffix(".weight")


def contracted_axis(leaf: Leaf) -> int:
    """Return the contracted axis of a matrix, counted from the end."""
    if leaf.path[-1] == "embedding":
        return -1
    return (1 if leaf.axes[0] in EXPERT_AXES else 0) - len(leaf.shape)


def stored_formats(quantisation: Quantisation | None, leaf: Leaf) -> list[MatrixFormat | None]:
    """Return the format of each tensor of a leaf in the checkpoint; None is unquantized.

    Routers, norms, biases and the embedding of tokens are never quantized.
    """
    is_output = leaf.path[0] == "lm_head"
    is_left = not _CHOOSING.isdisjoint(leaf.path) or (
        leaf.path[-1] in _NEVER and not (is_output and leaf.path[-1] == "embedding")
    )
    if quantisation is None or is_left or (is_output and not quantisation.has_output):
        return [None] * len(leaf.tensors)
    return [quantisation.format_of(module_of(name)) if len(shape) > 1 else None for name, shape in leaf.tensors]


def leaf_format(quantisation: Quantisation | None, leaf: Leaf) -> MatrixFormat | None:
    """Return the format in which a leaf is stored and multiplied; None is unquantized.

    A matrix of matmuls is quantized if all its tensors are, in the same format; otherwise its tensors are dequantized.
    """
    first, *others = stored_formats(quantisation, leaf)
    is_product = leaf.path[-1] == "kernel" or leaf.path[0] == "lm_head"
    if quantisation is None or first is None or not is_product or any(form != first for form in others):
        return None
    axis = contracted_axis(leaf)
    return first.split(leaf.shape[axis], quantisation.num_parts if leaf.axes[axis] in _SPLIT else 1)


def is_uniform(quantisation: Quantisation | None, leaves: Sequence[Leaf]) -> bool:
    """Return True if the same leaf of several layers has one format, so that it can be stacked."""
    return quantisation is None or len({leaf_format(quantisation, leaf) for leaf in leaves}) == 1
