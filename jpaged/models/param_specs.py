"""The leaves of a parameter tree: their places, shapes and axes, and their tensors in a checkpoint.

Linear weights are `[out, in]` in a Hugging Face checkpoint and `[in, *out]` here; query, key and value are one kernel
here, grouped by key/value head (see `jpaged.models.layers`).

Each leaf of a quantized model has a format in the checkpoint's tensors, and one in memory for the matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.config import ModelConfig, Quantization

LM_HEAD = "lm_head.weight"

LogicalAxes = tuple[str | None, ...]
"""A name for each axis of a leaf, which determines how it is split over devices; None is whole everywhere."""

_STRIP = 64  # rows of a transposed strip: 128 bytes of bfloat16, two cache lines
_NARROW_STRIP = 16  # if rows of the result are whole pages apart, so that they share few sets of the cache
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the parameter tree and its checkpoint tensors.

    Attributes:
        path: keys from the root of the tree, or of one layer.
        tensors: name and shape of each tensor.
        pack: fills an empty leaf from the tensors, in that order, casting if types differ. A part of the leaf along an
            axis is filled from the parts of the tensors along their corresponding axis.
        tensor_axes: for each axis of the leaf the corresponding axis of every tensor, in equal steps; None for none.
        heads: the heads along the axis named "kv_heads".
        dtype: of the numbers, whatever the model's; None is the model's.
        num_unused: numbers that no tensor has.
        num_groups: groups of columns, each with a share of the outputs of every tensor, in order.
    """

    path: tuple[str, ...]
    axes: LogicalAxes
    shape: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    pack: Callable[[Sequence[np.ndarray], np.ndarray], None]
    tensor_axes: tuple[int | None, ...]
    heads: GroupedHeads | None = None
    dtype: np.dtype | None = None
    num_unused: int = 0
    num_groups: int = 1


def same(path: tuple[str, ...], name: str, axes: LogicalAxes, shape: tuple[int, ...]) -> Leaf:
    """Return a leaf that equals a tensor."""

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0]

    return Leaf(path, axes, shape, ((name, shape),), pack, tuple(range(len(shape))))


def whole(path: tuple[str, ...], name: str, width: int) -> Leaf:
    """Return a vector as wide as the hidden state: a norm's, or a bias added once after the sum over devices."""
    return same(path, name, ("embed",), (width,))


def embedding(config: ModelConfig, width: int, name: str) -> Leaf:
    """Return the embedding of tokens."""
    return same(("embed", "embedding"), name, ("vocab", "embed"), (config.vocab_size, width))


def output_matrix(config: ModelConfig, width: int, name: str = LM_HEAD) -> list[Leaf]:
    """Return the output matrix of the logits; empty if it is tied to the embedding."""
    if config.tie_word_embeddings:
        return []
    return [same(("lm_head", "embedding"), name, ("vocab", "embed"), (config.vocab_size, width))]


@dataclass(frozen=True, slots=True)
class Linears:
    """Linear layers of a checkpoint whose outputs are concatenated in one kernel here.

    Attributes:
        names: without `.weight` and `.bias`; a single one may have the outputs of all.
        is_transposed: weights are `[in, out]`, not `[out, in]`.
    """

    names: tuple[str, ...]
    is_transposed: bool = False

    def weights(self, num_outputs: Sequence[int], width: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return name and shape of the weights of parts with these numbers of outputs."""
        outputs = num_outputs if len(self.names) > 1 else (sum(num_outputs),)
        shapes = ((width, num) if self.is_transposed else (num, width) for num in outputs)
        return tuple((f"{name}.weight", shape) for name, shape in zip(self.names, shapes, strict=True))

    def biases(self, num_outputs: Sequence[int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return name and shape of the biases."""
        outputs = num_outputs if len(self.names) > 1 else (sum(num_outputs),)
        return tuple((f"{name}.bias", (num,)) for name, num in zip(self.names, outputs, strict=True))

    def by_output(self, tensors: Sequence[np.ndarray], num_outputs: Sequence[int]) -> list[np.ndarray]:
        """Return weights of each part as `[out, in]`, or biases `[out]`, from tensors stored as above."""
        rows = [tensor.T if self.is_transposed and tensor.ndim > 1 else tensor for tensor in tensors]
        return rows if len(rows) > 1 else np.split(rows[0], np.cumsum(num_outputs)[:-1])

    @property
    def out_axis(self) -> int:
        """Axis of outputs in a stored weight."""
        return 1 if self.is_transposed else 0


def stacked_kernel(path: tuple[str, ...], linears: Linears, axes: LogicalAxes, shape: tuple[int, ...]) -> Leaf:
    """Return weights as one kernel `[in, out]`, or `[in, parts, out]` for several parts."""
    num_outputs = (shape[-1],) * (shape[1] if len(shape) == 3 else 1)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        parts = [leaf] if leaf.ndim == 2 else [leaf[:, index] for index in range(leaf.shape[1])]
        for part, rows in zip(parts, linears.by_output(tensors, (leaf.shape[-1],) * len(parts)), strict=True):
            transpose(rows, part)

    is_one = len(linears.names) == len(num_outputs)
    out_axis: int | None = linears.out_axis if is_one else None
    tensor_axes = (1 - linears.out_axis, *(None,) * (len(shape) - 2), out_axis)
    return Leaf(path, axes, shape, linears.weights(num_outputs, shape[0]), pack, tensor_axes)


def stacked_bias(path: tuple[str, ...], linears: Linears, axes: LogicalAxes, shape: tuple[int, ...]) -> Leaf:
    """Return biases as one leaf `[out]`, or `[parts, out]` for several parts."""
    num_outputs = (shape[-1],) * (shape[0] if len(shape) == 2 else 1)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        parts = leaf.reshape(-1, leaf.shape[-1])
        for part, bias in zip(parts, linears.by_output(tensors, (leaf.shape[-1],) * len(parts)), strict=True):
            part[...] = bias

    is_one = len(linears.names) == len(num_outputs)
    tensor_axes = (*(None,) * (len(shape) - 1), 0 if is_one else None)
    return Leaf(path, axes, shape, linears.biases(num_outputs), pack, tensor_axes)


def transposed(path: tuple[str, ...], name: str, axes: LogicalAxes, shape: tuple[int, int]) -> Leaf:
    """Return a linear weight, `[in, out]` here."""
    return stacked_kernel(path, Linears((name.removesuffix(".weight"),)), axes, shape)


def split_projections(prefix: str) -> Linears:
    """Return query, key and value under their names in most families."""
    return Linears(tuple(f"{prefix}{part}_proj" for part in "qkv"))


def rotated_first(head_dim: int, num_rotated: int, *, is_interleaved: bool = False) -> np.ndarray:
    """Return an order of a head's dimensions in which the rotated ones come first in both halves.

        as published   a a a b b b c c c c       a rotates against b, c is not rotated
        here           a a a c c b b b c c       dimension i rotates against i + D/2, some of them by an angle of zero

    Scores are unchanged, because queries and keys are reordered in the same way. Interleaved, neighbors are rotated
    against each other as published.
    """
    rotated, rest = np.arange(num_rotated), np.arange(num_rotated, head_dim)
    halves = (rotated[::2], rotated[1::2]) if is_interleaved else np.split(rotated, 2)
    first, second = np.split(rest, [len(rest) // 2])
    return np.concatenate((halves[0], first, halves[1], second))


def qkv_kernel(
    config: ModelConfig, linears: Linears, *, is_grouped: bool = False, order: np.ndarray | None = None
) -> Leaf:
    """Return the kernel from query `[H*D, E]`, key and value `[K*D, E]` -> `[E, K * (G + 2) * D]`.

    Args:
        is_grouped: one linear layer has each key/value head's queries, key and value together.
        order: of the dimensions of queries and keys, if it is not as published.
    """
    width, heads = config.hidden_size, GroupedHeads.of(config)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        for columns, part in heads.parts(tensors, linears, is_grouped, order):
            transpose(part, leaf[:, columns])

    out_axis = linears.out_axis if is_grouped or len(linears.names) > 1 else None
    return Leaf(
        ("attention", "qkv", "kernel"),
        ("embed", "kv_heads"),
        (width, heads.size),
        linears.weights(heads.outputs, width),
        pack,
        (1 - linears.out_axis, out_axis),
        heads,
    )


def qkv_bias(
    config: ModelConfig, linears: Linears, *, is_grouped: bool = False, order: np.ndarray | None = None
) -> Leaf:
    """Return the bias from query `[H*D]`, key and value `[K*D]` -> `[K * (G + 2) * D]`; see `qkv_kernel`."""
    heads = GroupedHeads.of(config)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        for columns, part in heads.parts(tensors, linears, is_grouped, order):
            leaf[columns] = part

    path, axes = ("attention", "qkv", "bias"), ("kv_heads",)
    tensor_axes = (0 if is_grouped or len(linears.names) > 1 else None,)
    return Leaf(path, axes, (heads.size,), linears.biases(heads.outputs), pack, tensor_axes, heads)


def head_scales(
    config: ModelConfig, tensors: tuple[tuple[str, tuple[int, ...]], ...], order: np.ndarray | None
) -> Leaf:
    """Return scales of all queries and keys `[K * (G + 2) * D]`, with zeros for values; see `qkv_kernel`.

    Args:
        tensors: scales of all queries, then of all keys: one tensor each, `[H*D]` or `[H, D]`, or one per head.
    """
    heads = GroupedHeads.of(config)

    def pack(arrays: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        num_queries = len(arrays) * heads.group // (heads.group + 1) if len(arrays) > 2 else 1
        concat = arrays[0].__array_namespace__().concat  # NumPy's, or JAX's when traced
        q, k = (concat([each.reshape(-1) for each in part]) for part in (arrays[:num_queries], arrays[num_queries:]))
        dims = slice(None) if order is None else order
        q = q.reshape(-1, heads.group, heads.head_dim)[..., dims]
        k = k.reshape(-1, 1, heads.head_dim)[..., dims]
        leaf[...] = concat((q, k, np.zeros(k.shape, k.dtype)), axis=1).reshape(-1)

    tensor_axes = (0 if len(tensors) == 2 else None,)
    return Leaf(
        ("attention", "heads_norm", "scale"),
        ("kv_heads",),
        (heads.size,),
        tensors,
        pack,
        tensor_axes,
        heads,
        num_unused=heads.num_kv_heads * heads.head_dim,
    )


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """The heads of grouped-query attention in the columns of a leaf, each with its queries, key and value.

    Attributes:
        num_kv_heads: K.
        group: query heads that read one of them, G.
        head_dim: D.
    """

    num_kv_heads: int
    group: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> GroupedHeads:
        """Return the heads of a model."""
        return cls(config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)

    @property
    def group_size(self) -> int:
        """Columns of one key/value head, (G + 2) * D."""
        return (self.group + 2) * self.head_dim

    @property
    def size(self) -> int:
        """Columns of all heads."""
        return self.num_kv_heads * self.group_size

    def repeated(self, repeats: int) -> GroupedHeads:
        """Return the heads with each key/value head repeated, with its share of the queries."""
        return GroupedHeads(self.num_kv_heads * repeats, self.group // repeats, self.head_dim)

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Outputs of the projections of query, key and value."""
        one = self.num_kv_heads * self.head_dim
        return one * self.group, one, one

    def parts(
        self, tensors: Sequence[np.ndarray], linears: Linears, is_grouped: bool, order: np.ndarray | None
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (columns, rows of the projections) of each head, for all or a part of the key/value heads."""
        if is_grouped and len(linears.names) == 1:
            (rows,) = linears.by_output(tensors, (0,))
            groups = rows.reshape(-1, self.group + 2, self.head_dim, *rows.shape[1:])
            found = ((index, row, groups[index, row]) for index in range(len(groups)) for row in range(self.group + 2))
        else:
            sizes = self.outputs if len(tensors) == 1 else ()
            q, k, v = linears.by_output(tensors, sizes)
            q = q.reshape(-1, self.group, self.head_dim, *q.shape[1:])
            k, v = (each.reshape(-1, self.head_dim, *each.shape[1:]) for each in (k, v))
            found = (
                (index, row, part)
                for index in range(len(k))
                for row, part in enumerate((*q[index], k[index], v[index]))
            )
        for index, row, part in found:
            first = index * self.group_size + row * self.head_dim
            is_turned = order is not None and row <= self.group
            yield slice(first, first + self.head_dim), part[order] if is_turned else part


def transpose(tensor: np.ndarray, leaf: np.ndarray) -> None:
    """Write `[out, in]` as `[in, out]`, in strips that stay in cache: five times as fast as in one assignment."""
    if not isinstance(leaf, np.ndarray):  # traced
        leaf[...] = tensor.T
        return
    if leaf.strides[0] == leaf.itemsize:  # a column is in one piece
        leaf.T[...] = tensor
        return
    size = _STRIP if leaf.strides[0] % _PAGE_BYTES else _NARROW_STRIP
    for start in range(0, len(tensor), size):
        leaf[:, start : start + size] = tensor[start : start + size].T


_SPLIT = frozenset({"heads", "feed_forward"})
"""Axes that are both contracted and split over devices."""
_NEVER = frozenset({"bias", "scale", "sinks", "taps"})
_PLAIN = frozenset({"router", "score", "eh_proj"})
"""Layers that score experts, and that of the input of MTP layers."""
EXPERT_AXES = frozenset({"experts", "expert_parts"})
"""Axes of experts."""
SPLIT_AXES = frozenset({"heads", "kv_heads", "feed_forward", "expert_parts", "vocab"})
"""Axes along which devices split a leaf; each device has the whole of a leaf without one."""


def get_module(name: str) -> str:
    """Return the name of the module that a tensor belongs to."""
    return name.removesuffix(".weight")


def contracted_axis(leaf: Leaf) -> int:
    """Return the contracted axis of a matrix, counted from the end."""
    if leaf.path[-1] == "embedding":
        return -1
    return (1 if leaf.axes[0] in EXPERT_AXES else 0) - len(leaf.shape)


def stored_formats(quantization: Quantization | None, leaf: Leaf) -> list[MatrixFormat | None]:
    """Return the format of each tensor of a leaf in the checkpoint; None is unquantized.

    Routers, norms, biases, embeddings of positions and the input of MTP layers are never quantized.
    """
    is_left = leaf.path[-1] in _NEVER or not _PLAIN.isdisjoint(leaf.path)
    if quantization is None or is_left or not _applies(quantization, leaf):
        return [None] * len(leaf.tensors)
    return [quantization.get_format(get_module(name)) if len(shape) > 1 else None for name, shape in leaf.tensors]


def _applies(quantization: Quantization, leaf: Leaf) -> bool:
    """Return True if the rules apply to a leaf, of a layer or outside."""
    if leaf.path[0] == "lm_head":
        return quantization.has_output
    return leaf.path[-1] != "embedding" or (leaf.path[0] == "embed" and quantization.has_embedding)


def leaf_format(quantization: Quantization | None, leaf: Leaf) -> MatrixFormat | None:
    """Return the format in which a leaf is stored and multiplied; None is unquantized.

    A matrix of matmuls is quantized if all its tensors are, in the same format; otherwise its tensors are dequantized.
    """
    first, *others = stored_formats(quantization, leaf)
    if quantization is None or first is None or not is_matrix(leaf) or any(form != first for form in others):
        return None
    axis = contracted_axis(leaf)
    return first.split(leaf.shape[axis], quantization.num_parts if leaf.axes[axis] in _SPLIT else 1)


def is_matrix(leaf: Leaf) -> bool:
    """Return True if rows are multiplied with a leaf, or gathered from it by token ids."""
    return leaf.path[-1] == "kernel" or leaf.path[0] in ("lm_head", "embed")


def is_uniform(quantization: Quantization | None, leaves: Sequence[Leaf]) -> bool:
    """Return True if the same leaf of several layers has one format, so that it can be stacked."""
    return quantization is None or len({leaf_format(quantization, leaf) for leaf in leaves}) == 1
