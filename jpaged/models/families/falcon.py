"""Falcon (Almazrouei et al. 2023): parallel attention and feed-forward, and few key/value heads."""

from __future__ import annotations

from collections.abc import Iterable

from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config import Residual
from jpaged.models.decoder.config_fields import divided_heads, name_of_activation, read_activation
from jpaged.models.json_fields import JsonFields
from jpaged.models.rope_config import RopeConfig


def _read(fields: JsonFields, architecture: str) -> DecoderConfig:
    # Falcon 2 has ff_factor in addition to the width.
    fields.ignore(("hidden_dropout", "apply_residual_connection_post_layernorm", "ff_factor"))
    fields.only("alibi", False, why="ALiBi (position biases instead of rotary embedding) is not supported")
    width = fields.integer("n_embed" if fields.has("n_embed") else "hidden_size", maximum=MAX_WIDTH)
    # Names in the first checkpoints.
    num_layers = fields.integer("n_layer" if fields.has("n_layer") else "num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.integer("n_head" if fields.has("n_head") else "num_attention_heads", maximum=MAX_WIDTH)
    has_groups = fields.flag("new_decoder_architecture", False)
    is_multi_query = fields.flag("multi_query", True)
    num_kv_heads = fields.integer("n_head_kv" if fields.has("n_head_kv") else "num_kv_heads", num_heads)
    if not has_groups:
        num_kv_heads = 1 if is_multi_query else num_heads
    max_position_embeddings = fields.integer("max_position_embeddings", 2048)
    has_bias = fields.flag("bias", False)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB_SIZE),
        hidden_size=width,
        intermediate_size=fields.integer("ffn_hidden_size", 4 * width, maximum=4 * MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=divided_heads(fields, width, num_heads),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=(11,),
        bos_token_id=11,
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        residual=_residual(fields, has_groups=has_groups),
        activation=read_activation(fields, "activation", "gelu"),
        is_gated=False,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=has_bias,
        ropes=(RopeConfig.from_hf(fields, max_position_embeddings),),
    )


def _residual(fields: JsonFields, *, has_groups: bool) -> Residual:
    is_parallel = fields.flag("parallel_attn", True)
    num_norms = fields.integer("num_ln_in_parallel_attn", 2 if has_groups else 1, maximum=2)
    if has_groups and not is_parallel:
        raise fields.bad("parallel_attn", "is false; with new_decoder_architecture it must be true")
    if num_norms == 2 and not has_groups:
        raise fields.bad("num_ln_in_parallel_attn", "is 2; it requires new_decoder_architecture")
    if not is_parallel:
        return "sequential"
    return "parallel" if num_norms == 2 else "shared"


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    has_groups = config.residual == "parallel" or 1 < config.num_kv_heads < config.num_heads
    return {
        "ffn_hidden_size": config.intermediate_size,
        "num_kv_heads": config.num_kv_heads,
        "multi_query": config.num_kv_heads == 1,
        "new_decoder_architecture": has_groups,
        "num_ln_in_parallel_attn": (2 if config.residual == "parallel" else 1) if has_groups else None,
        "parallel_attn": config.residual != "sequential",
        "alibi": False,
        "bias": config.attention_bias,
        "activation": name_of_activation(config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "rope_parameters": config.ropes[0].to_hf(),
    }


def _prefix(stored: Iterable[str]) -> str:
    return "transformer."


def _names(config: DecoderConfig) -> Names:
    has_two = config.residual == "parallel"
    return Names(
        embed="word_embeddings",
        norm="ln_f",
        attention_norm="ln_attn" if has_two else "input_layernorm",
        mlp_norm="ln_mlp" if has_two else "post_attention_layernorm",
        qkv=("self_attention.query_key_value",),
        qkv_is_grouped=True,
        out="self_attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )


ARCHITECTURES = {
    "FalconForCausalLM": decoder_family("falcon", _read, _to_hf, _names, name_prefix=_prefix, layers_prefix="h."),
}
