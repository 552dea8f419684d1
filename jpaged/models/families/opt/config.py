"""The shape of an OPT model, as in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from jpaged.errors import Unsupported
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, ModelConfig
from jpaged.models.json_fields import JsonFields

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
