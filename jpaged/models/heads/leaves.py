"""The leaves of a head: axes, and tensors in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jpaged.errors import InvalidArgument
from jpaged.models.decoder.leaves import Names, feed_forward, norm_leaves
from jpaged.models.heads.config import NUM_WATCHED, EagleConfig
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.leaves import (
    LM_HEAD,
    Leaf,
    Linears,
    embedding,
    qkv_bias,
    qkv_kernel,
    same,
    split_projections,
    stacked_kernel,
    transposed,
    whole,
)

IDS = "d2t"
"""A tensor: for each token that a head proposes, the difference between the model's id and the head's."""


def outer_leaves(config: EagleConfig, prefix: str) -> list[Leaf]:
    """See `Family`. The embedding, if any, comes first."""
    width, inner = config.hidden_size, NUM_WATCHED * config.target_hidden_size
    leaves = [embedding(config, width, f"{prefix}embed_tokens.weight")] if config.has_embedding else []
    leaves += [
        transposed(("fc", "kernel"), f"{prefix}fc.weight", ("heads", "embed"), (inner, width)),
        *norm_leaves(config, ("norm",), f"{prefix}norm"),
        same(("lm_head", "embedding"), LM_HEAD, ("vocab", "embed"), (config.draft_vocab_size, width)),
    ]
    return [*leaves, _ids(config)] if config.has_ids else leaves


def layer_leaves(config: EagleConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    """See `Family`."""
    prefix, width, names = f"{config.layer_name}.", config.hidden_size, Names()
    both = dataclasses.replace(config, hidden_size=2 * width)
    projections, out = split_projections(f"{prefix}self_attn."), Linears((f"{prefix}{names.out}",))
    num_numbers = config.num_heads * config.head_dim
    leaves = [
        *norm_leaves(config, ("embedding_norm",), f"{prefix}input_layernorm"),
        *norm_leaves(config, ("state_norm",), f"{prefix}hidden_norm"),
        *norm_leaves(config, ("mlp_norm",), f"{prefix}post_attention_layernorm"),
        qkv_kernel(both, projections),
        stacked_kernel(("attention", "out", "kernel"), out, ("heads", "embed"), (num_numbers, width)),
    ]
    if config.attention_bias:
        leaves.append(qkv_bias(both, projections))
    if config.attention_output_bias:
        leaves.append(whole(("attention", "out", "bias"), f"{prefix}{names.out}.bias", width))
    return leaves + feed_forward(config, prefix, names)


def _ids(config: EagleConfig) -> Leaf:
    """Return the leaf with the model's ids of the tokens that the head proposes."""
    size, vocab_size = config.draft_vocab_size, config.vocab_size

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        ids = tensors[0].astype(np.int64) + np.arange(size)
        if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < size:
            raise InvalidArgument(IDS, f"has duplicate token ids, or ids beyond the vocabulary of {vocab_size}")
        leaf[...] = ids

    return Leaf(("ids",), (None,), (size,), ((IDS, (size,)),), pack, (0,), dtype=np.dtype(np.int32))
