"""The shape of an OPT model: its fields of config.json, and its leaves with their tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from jpaged.errors import Unsupported
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, ModelConfig
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.param_specs import (
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

Activation = Literal["relu", "gelu"]

POSITION_OFFSET = 2
"""Rows of the position embedding before that of position 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptConfig(ModelConfig):
    """An OPT model: learned positions, layer norms, a plain feed-forward, and full multi-head attention.

    Attributes:
        embed_size: width of the embedding; if it differs from hidden_size, projections connect it to the layers.
        activation: between the two matrices of the feed-forward.
        norm_first: norms are before attention and feed-forward; otherwise after each residual sum.
        final_norm: a norm after the last layer.
        norm_affine: norms have scales and biases.
        use_bias: biases in attention and feed-forward.
    """

    embed_size: int
    activation: Activation = "relu"
    norm_first: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    use_bias: bool = True

    @property
    def embed_width(self) -> int:
        """See `ModelConfig`."""
        return self.embed_size


def read(fields: JsonFields, architecture: str) -> OptConfig:
    """See `Family`."""
    # A pipeline's prompt prefix, and a note of the checkpoint's conversion: transformers reads neither.
    fields.ignore(("prefix", "output_projection"))
    hidden_size, num_heads = (
        fields.integer("hidden_size", maximum=MAX_WIDTH),
        fields.integer("num_attention_heads", maximum=MAX_WIDTH),
    )
    if hidden_size % num_heads:
        raise fields.bad("hidden_size", f"is {hidden_size}; num_attention_heads, {num_heads}, must divide it")
    activation = fields.text("activation_function", "relu")
    if activation not in get_args(Activation):
        raise Unsupported(
            f"config.json: activation_function is {activation!r}; supported: {', '.join(get_args(Activation))}"
        )
    norm_first = fields.flag("do_layer_norm_before", True)
    is_removed = fields.flag("_remove_final_layer_norm", False)
    return OptConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("ffn_dim", maximum=MAX_WIDTH),
        num_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=(2,),
        bos_token_id=2,
        embed_size=fields.integer("word_embed_proj_dim", hidden_size, maximum=MAX_WIDTH),
        activation=cast(Activation, activation),
        norm_first=norm_first,
        final_norm=norm_first and not is_removed,
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
        use_bias=fields.flag("enable_bias", True),
    )


def to_hf(config: OptConfig) -> dict[str, object]:
    """See `Family`."""
    return {
        "ffn_dim": config.intermediate_size,
        "word_embed_proj_dim": config.embed_size,
        "activation_function": config.activation,
        "do_layer_norm_before": config.norm_first,
        "_remove_final_layer_norm": not config.final_norm,
        "layer_norm_elementwise_affine": config.norm_affine,
        "enable_bias": config.use_bias,
    }


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
