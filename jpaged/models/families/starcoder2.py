"""StarCoder2 (Lozhkov et al. 2024): rotary positions, layer norms, few key/value heads, a window in every layer."""

from __future__ import annotations

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import name_of_activation, read_activation, read_heads, read_sizes, read_window
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.rope_config import RopeConfig

# Dropout, and leftovers of StarCoder in the published files, which transformers does not read.
_HARMLESS = (
    *("embedding_dropout", "residual_dropout"),
    *("activation_function", "layer_norm_epsilon", "scale_attn_weights"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
)


def _read(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore(_HARMLESS)
    fields.only("norm_type", "layer_norm", why="only layer norm is supported")
    fields.only("mlp_type", "default", why="only a feed-forward without a gate is supported")
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=2)
    max_position_embeddings = fields.integer("max_position_embeddings", 4096)
    has_bias = fields.flag("use_bias", True)
    window = read_window(fields)
    narrow = LayerKind(AttentionKind(heads["head_dim"] ** -0.5, window))
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        **heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=(50256,),
        bos_token_id=50256,
        norm="layer",
        norm_eps=fields.number("norm_epsilon", 1e-5),
        activation=read_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        is_gated=False,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=has_bias,
        ropes=(RopeConfig.from_hf(fields, max_position_embeddings),),
        kinds=() if window is None else (narrow,) * sizes["num_layers"],
    )


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    return {
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": name_of_activation(config.activation),
        "norm_epsilon": config.norm_eps,
        "use_bias": config.attention_bias,
        "sliding_window": config.attention_kinds[0].sliding_window,
        "rope_parameters": config.ropes[0].to_hf(),
    }


ARCHITECTURES = {
    "Starcoder2ForCausalLM": decoder_family(
        "starcoder2", _read, _to_hf, Names(gate_up=("mlp.c_fc",), down="mlp.c_proj")
    ),
}
