"""The leaves of a Llama's tree, and the tensors that they are in a checkpoint; gate and up are one kernel here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpaged.models.leaves import (
    Leaf,
    embedding,
    output_matrix,
    qkv_bias,
    qkv_kernel,
    same,
    transpose,
    transposed,
    whole,
)
from jpaged.models.llama.config import LlamaConfig


def outer_leaves(config: LlamaConfig, prefix: str) -> list[Leaf]:
    """See `Family`."""
    width = config.hidden_size
    return [
        embedding(config, width, f"{prefix}embed_tokens.weight"),
        whole(("norm", "scale"), f"{prefix}norm.weight", width),
        *output_matrix(config, width),
    ]


def layer_leaves(config: LlamaConfig, prefix: str) -> list[Leaf]:
    """See `Family`."""
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    leaves = [
        whole(("attention_norm", "scale"), f"{prefix}input_layernorm.weight", width),
        whole(("mlp_norm", "scale"), f"{prefix}post_attention_layernorm.weight", width),
        qkv_kernel(config, attention),
        transposed(("attention", "out", "kernel"), f"{attention}o_proj.weight", ("heads", "embed"), (heads, width)),
        _gate_up_kernel(config, mlp),
        transposed(("mlp", "down", "kernel"), f"{mlp}down_proj.weight", ("feed_forward", "embed"), (inner, width)),
    ]
    if config.attention_bias:
        leaves.append(qkv_bias(config, attention))
    if config.attention_output_bias:
        leaves.append(whole(("attention", "out", "bias"), f"{attention}o_proj.bias", width))
    if config.qk_norm:
        for part in ("q_norm", "k_norm"):
            leaves.append(same(("attention", part, "scale"), f"{attention}{part}.weight", (None,), (config.head_dim,)))
    if config.mlp_bias:
        leaves.append(_gate_up_bias(config, mlp))
        leaves.append(whole(("mlp", "down", "bias"), f"{mlp}down_proj.bias", width))
    return leaves


def _gate_up_kernel(config: LlamaConfig, prefix: str) -> Leaf:
    """Gate and up `[F, E]` -> `[E, 2, F]`."""
    width, inner = config.hidden_size, config.intermediate_size

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        transpose(tensors[0], leaf[:, 0])
        transpose(tensors[1], leaf[:, 1])

    tensors = tuple((f"{prefix}{part}_proj.weight", (inner, width)) for part in ("gate", "up"))
    axes = ("embed", None, "feed_forward")
    return Leaf(("mlp", "gate_up", "kernel"), axes, (width, 2, inner), tensors, pack, (1, None, 0))


def _gate_up_bias(config: LlamaConfig, prefix: str) -> Leaf:
    inner = config.intermediate_size

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[0], leaf[1] = tensors

    tensors = tuple((f"{prefix}{part}_proj.bias", (inner,)) for part in ("gate", "up"))
    return Leaf(("mlp", "gate_up", "bias"), (None, "feed_forward"), (2, inner), tensors, pack, (None, 0))
