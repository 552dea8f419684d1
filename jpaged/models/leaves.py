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
        tensors: name and shape of each tensor.
        pack: tensors in that order, and an empty leaf that it fills, casting where types differ. A part of the leaf
            along an axis is filled from the parts of the tensors that follow it.
        tensor_axes: for each axis of the leaf the one that follows it in every tensor, in equal steps; None for none.
    """

    path: tuple[str, ...]
    axes: LogicalAxes
    shape: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    pack: Callable[[Sequence[np.ndarray], np.ndarray], None]
    tensor_axes: tuple[int | None, ...]


def same(path: tuple[str, ...], name: str, axes: LogicalAxes, shape: tuple[int, ...]) -> Leaf:
    """A leaf that is a tensor as it is."""

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0]

    return Leaf(path, axes, shape, ((name, shape),), pack, tuple(range(len(shape))))


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
    return [same(("lm_head", "embedding"), LM_HEAD, ("vocab", "embed"), (config.vocab_size, width))]


def transposed(path: tuple[str, ...], name: str, axes: LogicalAxes, shape: tuple[int, int]) -> Leaf:
    """A linear weight, `[in, out]` here."""

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        transpose(tensors[0], leaf)

    return Leaf(path, axes, shape, ((name, shape[::-1]),), pack, (1, 0))


def qkv_kernel(config: ModelConfig, prefix: str) -> Leaf:
    """Query `[H*D, E]`, key and value `[K*D, E]` -> `[E, K, G + 2, D]`."""
    width, head_dim, group = config.hidden_size, config.head_dim, config.num_heads // config.num_kv_heads

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        q_rows = tensors[0].reshape(-1, group, head_dim, width)
        k_rows, v_rows = (tensor.reshape(-1, head_dim, width) for tensor in tensors[1:])
        for index in range(leaf.shape[1]):
            for row, part in enumerate((*q_rows[index], k_rows[index], v_rows[index])):
                transpose(part, leaf[:, index, row])

    shape = (width, config.num_kv_heads, group + 2, head_dim)
    axes = ("embed", "kv_heads", None, None)
    tensors = _qkv_tensors(config, prefix, "weight", (width,))
    return Leaf(("attention", "qkv", "kernel"), axes, shape, tensors, pack, (1, 0, None, None))


def qkv_bias(config: ModelConfig, prefix: str) -> Leaf:
    """Query `[H*D]`, key and value `[K*D]` -> `[K, G + 2, D]`."""
    head_dim, group = config.head_dim, config.num_heads // config.num_kv_heads

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[:, :group] = tensors[0].reshape(-1, group, head_dim)
        leaf[:, group] = tensors[1].reshape(-1, head_dim)
        leaf[:, group + 1] = tensors[2].reshape(-1, head_dim)

    shape = (config.num_kv_heads, group + 2, head_dim)
    tensors = _qkv_tensors(config, prefix, "bias", ())
    return Leaf(("attention", "qkv", "bias"), ("kv_heads", None, None), shape, tensors, pack, (0, None, None))


def transpose(tensor: np.ndarray, leaf: np.ndarray) -> None:
    """Writes `[out, in]` as `[in, out]`, in strips that stay in cache: five times as fast as in one assignment."""
    for start in range(0, len(tensor), _STRIP):
        leaf[:, start : start + _STRIP] = tensor[start : start + _STRIP].T


def _qkv_tensors(
    config: ModelConfig, prefix: str, suffix: str, width: tuple[int, ...]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    num_heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    return tuple((f"{prefix}{part}_proj.{suffix}", (num * config.head_dim, *width)) for part, num in num_heads.items())
