"""The leaves of a parameter tree: their places, shapes and axes, and the tensors of a checkpoint that they are made of.

Linear weights are `[out, in]` in a Hugging Face checkpoint and `[in, *out]` here; query, key and value are one kernel
here, grouped by key/value head (see `jpaged.models.layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.models.config import ModelConfig

LM_HEAD = "lm_head.weight"

LogicalAxes = tuple[str | None, ...]
"""A name for each axis of a leaf, which says how it is split over devices; None is whole everywhere."""

_STRIP = 64  # rows of a transposed strip: 128 bytes of bfloat16, two cache lines


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of our tree and the checkpoint tensors that it is made of.

    Attributes:
        path: keys from the root of the tree, or of one layer.
        axes: the names of its axes.
        shape: of the leaf.
        tensors: name and shape of each tensor.
        pack: tensors in that order, and an empty leaf that it fills, casting where types differ. A part of the leaf
            along an axis is filled from the parts of the tensors that follow it.
        unpack: the leaf back to tensors, views where possible.
        tensor_axes: for each axis of the leaf the one that follows it in every tensor, in equal steps; None for none.
    """

    path: tuple[str, ...]
    axes: LogicalAxes
    shape: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    pack: Callable[[Sequence[np.ndarray], np.ndarray], None]
    unpack: Callable[[np.ndarray], Sequence[np.ndarray]]
    tensor_axes: tuple[int | None, ...]


def same(path: tuple[str, ...], name: str, axes: LogicalAxes, shape: tuple[int, ...]) -> Leaf:
    """A leaf that is a tensor as it is."""

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0]

    return Leaf(path, axes, shape, ((name, shape),), pack, lambda leaf: [leaf], tuple(range(len(shape))))


def whole(path: tuple[str, ...], name: str, width: int) -> Leaf:
    """A vector as wide as the hidden state: a norm's, or a bias added once to the sum of all parts' products."""
    return same(path, name, ("embed",), (width,))


def embedding(config: ModelConfig, width: int, name: str) -> Leaf:
    """The embedding of tokens."""
    return same(("embed", "embedding"), name, ("vocab", "embed"), (config.vocab_size, width))


def output_matrix(config: ModelConfig, width: int) -> list[Leaf]:
    """The matrix that makes logits; none where the embedding is it."""
    if config.tie_word_embeddings:
        return []
    return [same(("lm_head", "kernel"), LM_HEAD, ("vocab", "embed"), (config.vocab_size, width))]


def transposed(path: tuple[str, ...], name: str, axes: LogicalAxes, shape: tuple[int, int]) -> Leaf:
    """A linear weight, `[in, out]` here."""

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        transpose(tensors[0], leaf)

    return Leaf(path, axes, shape, ((name, shape[::-1]),), pack, lambda leaf: [leaf.T], (1, 0))


def qkv_kernel(config: ModelConfig, prefix: str) -> Leaf:
    """Query `[H*D, E]`, key and value `[K*D, E]` <-> `[E, K, G + 2, D]`."""
    width, num_groups, head_dim = config.hidden_size, config.num_kv_heads, config.head_dim
    group = config.num_heads // num_groups
    q, k, v = _qkv_names(prefix, "weight")
    rows = (num_groups * group * head_dim, width), (num_groups * head_dim, width)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        q_rows = tensors[0].reshape(-1, group, head_dim, width)
        k_rows, v_rows = (tensor.reshape(-1, head_dim, width) for tensor in tensors[1:])
        for index in range(leaf.shape[1]):
            for row, part in enumerate((*q_rows[index], k_rows[index], v_rows[index])):
                transpose(part, leaf[:, index, row])

    def unpack(leaf: np.ndarray) -> Sequence[np.ndarray]:
        parts = leaf[:, :, :group], leaf[:, :, group], leaf[:, :, group + 1]
        return [np.ascontiguousarray(part).reshape(width, -1).T for part in parts]

    tensors = ((q, rows[0]), (k, rows[1]), (v, rows[1]))
    shape = (width, num_groups, group + 2, head_dim)
    axes = ("embed", "kv_heads", None, None)
    return Leaf(("attention", "qkv", "kernel"), axes, shape, tensors, pack, unpack, (1, 0, None, None))


def qkv_bias(config: ModelConfig, prefix: str) -> Leaf:
    """Query `[H*D]`, key and value `[K*D]` <-> `[K, G + 2, D]`."""
    num_groups, head_dim = config.num_kv_heads, config.head_dim
    group = config.num_heads // num_groups
    q, k, v = _qkv_names(prefix, "bias")

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[:, :group] = tensors[0].reshape(-1, group, head_dim)
        leaf[:, group] = tensors[1].reshape(-1, head_dim)
        leaf[:, group + 1] = tensors[2].reshape(-1, head_dim)

    def unpack(leaf: np.ndarray) -> Sequence[np.ndarray]:
        return [leaf[:, :group].reshape(-1), leaf[:, group].reshape(-1), leaf[:, group + 1].reshape(-1)]

    rows = (num_groups * group * head_dim,), (num_groups * head_dim,)
    tensors = ((q, rows[0]), (k, rows[1]), (v, rows[1]))
    shape = (num_groups, group + 2, head_dim)
    axes = ("kv_heads", None, None)
    return Leaf(("attention", "qkv", "bias"), axes, shape, tensors, pack, unpack, (0, None, None))


def transpose(tensor: np.ndarray, leaf: np.ndarray) -> None:
    """Writes `[out, in]` as `[in, out]`, in strips that stay in cache: five times as fast as in one assignment."""
    for start in range(0, len(tensor), _STRIP):
        leaf[:, start : start + _STRIP] = tensor[start : start + _STRIP].T


def _qkv_names(prefix: str, suffix: str) -> tuple[str, str, str]:
    return f"{prefix}q_proj.{suffix}", f"{prefix}k_proj.{suffix}", f"{prefix}v_proj.{suffix}"
