"""The matrices that LoRA adapters may apply to, and the layout of an adapter next to each.

If a matrix `[in, *out]` is made of several checkpoint tensors, each of these is a part: queries, keys and values, or
gates and ups. An adapter keeps a separate pair per tensor, as trained, so that no zeros are multiplied.

    a       [parts * rank, in]
    b       for each part [rank, its columns], times the adapter's scale

DoRA and biases need two more numbers for each output, if the server has room for them:

    vectors for each part [2, its columns], float32: a scale of the base's product less 1, and a shift
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jpaged.models.config import ModelConfig
from jpaged.models.model import LeafPath, placed_leaves
from jpaged.models.param_specs import Leaf, Linears, LogicalAxes, get_module, stacked_kernel
from jpaged.models.registry import find_family
from jpaged.models.stack import LayerMode

_OF_EXPERTS = frozenset({"experts", "router"})


@dataclass(frozen=True, slots=True)
class AdaptedPlace:
    """A place in the tree whose matrix may have adapters.

    Attributes:
        path: from the root.
        leaves: the leaf there, or those of the layers that are stacked there.
        is_stacked: an axis of layers comes first.
        is_input: the matrix is the embedding of ids, which are its inputs.
    """

    path: LeafPath
    leaves: Sequence[Leaf]
    is_stacked: bool
    is_input: bool = False

    @property
    def num_parts(self) -> int:
        """Parts of the matrix."""
        return len(self.leaves[0].tensors)

    @property
    def num_groups(self) -> int:
        """Groups of columns with a share of every part: the key/value heads, if queries, keys and values are parts."""
        heads = self.leaves[0].heads
        return 1 if heads is None or self.num_parts == 1 else heads.num_kv_heads

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Return the shapes of one adapter's a, and of b for each part, without an axis of layers."""
        width, *out = self.leaves[0].shape
        heads, num_parts = self.leaves[0].heads, self.num_parts
        columns: tuple[int, ...] = (math.prod(out) // num_parts,) * num_parts
        if heads is not None and num_parts > 1:
            columns = heads.outputs
        return (self.num_parts * rank, width), tuple((rank, num) for num in columns)

    def vector_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one adapter's vectors, without an axis of layers."""
        return () if self.is_input else self.shapes(2)[1]

    def axes(self) -> tuple[LogicalAxes, LogicalAxes]:
        """Return the axis names of a, and of b of each part, without an axis of layers."""
        width, *out = self.leaves[0].axes
        # gates and ups of one tensor: a device's part of both is no contiguous range of columns
        if self.num_parts == 1 and len(out) > 1:
            return (None, width), (None, None)
        return (None, width), (None, next((name for name in out if name is not None), None))

    def split(self, b: np.ndarray) -> tuple[np.ndarray, ...]:
        """Split `[rank, *out]`, packed as the matrix is, into parts."""
        columns = [num // self.num_groups for _, num in self.shapes(len(b))[1]]
        of_groups = np.split(b.reshape(len(b), self.num_groups, -1), np.cumsum(columns)[:-1], axis=2)
        return tuple(np.ascontiguousarray(part).reshape(len(b), -1) for part in of_groups)


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory, as a model's programs take it: zeros for matrices that it does not change.

    Attributes:
        matrices: for each place a, and b of each part; with an axis of layers first if those are stacked.
        vectors: for each place those of each part; empty if the server has no room for them.
        digest: a hash of every place and its matrices, 32 bytes; computed at construction, on the loading thread.
    """

    matrices: Mapping[LeafPath, tuple[np.ndarray, tuple[np.ndarray, ...]]]
    vectors: Mapping[LeafPath, tuple[np.ndarray, ...]] = field(default_factory=dict)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        found = hashlib.sha256()
        for path, (a, b) in sorted(self.matrices.items(), key=lambda item: str(item[0])):
            for array in (a, *b, *self.vectors.get(path, ())):
                found.update(repr((path, array.shape, array.dtype.name)).encode())
                found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        object.__setattr__(self, "digest", found.digest())

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        vectors = sum(part.nbytes for parts in self.vectors.values() for part in parts)
        return vectors + sum(a.nbytes + sum(part.nbytes for part in b) for a, b in self.matrices.values())


def is_of_experts(leaf: Leaf) -> bool:
    """Return True if a leaf belongs to experts or their router, which take no adapters."""
    return not _OF_EXPERTS.isdisjoint(leaf.path)


def adapted_places(
    config: ModelConfig, layer_mode: LayerMode, *, has_output: bool = False, has_input: bool = False
) -> Iterator[AdaptedPlace]:
    """Yield every place that may have adapters, in the order of the tree.

    The output matrix and the embedding are described as kernels `[in, out]`. If the output matrix is tied to the
    embedding, its place is the embedding. The adapters of ids have their own place next to it.

    Args:
        has_output: with the output matrix.
        has_input: with the embedding of ids.
    """
    for path, leaves in placed_leaves(config, layer_mode):
        if path[0] == "layers" and path[-1] == "kernel" and not is_of_experts(leaves[0]):
            yield AdaptedPlace(path, leaves, layer_mode == "scan")
    if has_output:
        path = get_output_path(config)
        size, width = next(leaf.shape for own, (leaf, *_) in placed_leaves(config, "loop") if own == path)
        linears = Linears((get_module(find_family(config.architecture).lm_head),))
        yield AdaptedPlace(path, (stacked_kernel(path, linears, ("embed", "vocab"), (width, size)),), False)
    if has_input:
        (embedding,) = next(leaves for own, leaves in placed_leaves(config, "loop") if own == ("embed", "embedding"))
        linears = Linears((get_module(embedding.tensors[0][0]),))
        kernel = stacked_kernel(INPUT_PATH, linears, (None, "embed"), embedding.shape)
        yield AdaptedPlace(INPUT_PATH, (kernel,), False, is_input=True)


INPUT_PATH = ("embed", "adapters")
"""Path of the adapters of ids, next to the embedding."""


def get_output_path(config: ModelConfig) -> tuple[str, str]:
    """Return the path of the matrix of the logits."""
    return "embed" if config.tie_word_embeddings else "lm_head", "embedding"
