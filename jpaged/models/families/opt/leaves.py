"""The leaves of an OPT model's tree, and their tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from jpaged.models.families.opt.config import POSITION_OFFSET, OptConfig
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.leaves import (
    Leaf,
    embedding,
    output_matrix,
    qkv_bias,
    qkv_kernel,
    same,
    split_projections,
    transposed,
    whole,
)


def name_prefix(stored: Iterable[str]) -> str:
    """See `Family`. Checkpoints saved without their head lack the outer `model.`."""
    is_bare = {name.partition(".")[0] for name in stored} - {"lm_head"} == {"decoder"}
    return "decoder." if is_bare else "model.decoder."


def outer_leaves(config: OptConfig, prefix: str) -> list[Leaf]:
    """See `Family`."""
    width, embed_size = config.hidden_size, config.embed_size
    positions = (config.max_position_embeddings + POSITION_OFFSET, width)
    leaves = [
        embedding(config, embed_size, f"{prefix}embed_tokens.weight"),
        same(("positions", "embedding"), f"{prefix}embed_positions.weight", (None, "embed"), positions),
    ]
    if embed_size != width:
        leaves += [
            transposed(("project_in", "kernel"), f"{prefix}project_in.weight", (None, "embed"), (embed_size, width)),
            transposed(("project_out", "kernel"), f"{prefix}project_out.weight", ("embed", None), (width, embed_size)),
        ]
    if config.final_norm:
        leaves += _layer_norm(config, "norm", f"{prefix}final_layer_norm")
    return leaves + output_matrix(config, embed_size)


def layer_leaves(config: OptConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    """See `Family`."""
    attention = f"{prefix}self_attn."
    projections = split_projections(attention)
    width, inner = config.hidden_size, config.intermediate_size
    leaves = [
        *_layer_norm(config, "attention_norm", f"{prefix}self_attn_layer_norm"),
        *_layer_norm(config, "mlp_norm", f"{prefix}final_layer_norm"),
        qkv_kernel(config, projections),
        transposed(("attention", "out", "kernel"), f"{attention}out_proj.weight", ("heads", "embed"), (width, width)),
        transposed(("mlp", "up", "kernel"), f"{prefix}fc1.weight", ("embed", "feed_forward"), (width, inner)),
        transposed(("mlp", "down", "kernel"), f"{prefix}fc2.weight", ("feed_forward", "embed"), (inner, width)),
    ]
    if config.use_bias:
        leaves += [
            qkv_bias(config, projections),
            whole(("attention", "out", "bias"), f"{attention}out_proj.bias", width),
            same(("mlp", "up", "bias"), f"{prefix}fc1.bias", ("feed_forward",), (inner,)),
            whole(("mlp", "down", "bias"), f"{prefix}fc2.bias", width),
        ]
    return leaves


def _layer_norm(config: OptConfig, key: str, name: str) -> list[Leaf]:
    if not config.norm_affine:
        return []
    width = config.hidden_size
    return [whole((key, "scale"), f"{name}.weight", width), whole((key, "bias"), f"{name}.bias", width)]
