"""GPT-2, GPT-NeoX and Falcon, which have layer norms and feed-forwards without gates.

GPT-2 (Radford et al. 2019) has learned positions and transposed weights. GPT-NeoX (Black et al. 2022) and Pythia rotate
a quarter of each head, and have attention and feed-forward in parallel. Falcon (Almazrouei et al. 2023) has both in
parallel, too, and few key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterable

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config import Residual
from jpaged.models.decoder.config_fields import divided_heads, name_of_activation, read_activation, read_sizes
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.rope_config import RopeConfig

# Dropout, and settings of heads other than the language model's.
_HARMLESS = (
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "n_ctx",
    "n_special",
    "output_past",
    "predict_special_tokens",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    # The order of matmuls and casts; attention is in float32 here.
    "reorder_and_upcast_attn",
)


def _either(fields: JsonFields, own: str, usual: str, maximum: int) -> int:
    """Read a size by GPT-2's name, or by the usual one, or by both."""
    size = fields.integer(own if fields.has(own) else usual, maximum=maximum)
    if fields.integer(usual, size, maximum=maximum) != size:
        raise fields.bad(usual, f"is {fields.integer(usual)}, but {own}, another name for it, is {size}")
    return size


def _read_gpt2(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore(_HARMLESS)
    width = _either(fields, "n_embd", "hidden_size", MAX_WIDTH)
    num_layers = _either(fields, "n_layer", "num_hidden_layers", MAX_LAYERS)
    num_heads = _either(fields, "n_head", "num_attention_heads", MAX_WIDTH)
    num_positions = _either(fields, "n_positions", "max_position_embeddings", MAX_VOCAB_SIZE)
    head_dim = divided_heads(fields, width, num_heads)
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    is_fading = fields.flag("scale_attn_by_inverse_layer_idx", False)
    scales = [scale / (index + 1) if is_fading else scale for index in range(num_layers)]
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB_SIZE),
        hidden_size=width,
        intermediate_size=fields.integer("n_inner", 4 * width, maximum=4 * MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=num_positions,
        num_positions=num_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=(50256,),
        bos_token_id=50256,
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        is_gated=False,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        kinds=tuple(LayerKind(AttentionKind(scale), None) for scale in scales),
    )


def _to_hf_gpt2(config: DecoderConfig) -> dict[str, object]:
    scales = [kind.scale for kind in config.attention_kinds]
    return {
        "n_inner": config.intermediate_size,
        "activation_function": name_of_activation(config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": scales[0] != 1,
        "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1,
    }


def _prefix_gpt2(stored: Iterable[str]) -> str:
    """Return the prefix, which is empty for checkpoints saved without their head."""
    return "" if any(name.startswith("h.0.") for name in stored) else "transformer."


_GPT2_NAMES = Names(
    embed="wte",
    positions="wpe",
    norm="ln_f",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    is_transposed=True,
)


def _read_neox(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore(("hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"))
    sizes = read_sizes(fields)
    num_heads = fields.integer("num_attention_heads")
    max_position_embeddings = fields.integer("max_position_embeddings", 2048)
    has_bias = fields.flag("attention_bias", True)
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=divided_heads(fields, sizes["hidden_size"], num_heads),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=(2,),
        bos_token_id=0,
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        residual="parallel" if fields.flag("use_parallel_residual", True) else "sequential",
        activation=read_activation(fields, "hidden_act", "gelu"),
        is_gated=False,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=True,
        ropes=(
            RopeConfig.from_hf(
                fields,
                max_position_embeddings,
                default_theta=_named(fields, "rotary_emb_base", "rope_theta", 10000.0),
                default_fraction=_named(fields, "rotary_pct", "partial_rotary_factor", 0.25),
            ),
        ),
    )


def _named(fields: JsonFields, name: str, usual: str, missing: float) -> float:
    """Read a number by the family's name; the usual name, which transformers does not read, may only repeat it."""
    value = fields.number(name, missing)
    if fields.number(usual, value) != value:
        raise Unsupported(
            f"{fields.name}: {usual} is {fields.number(usual):g}, but {name} is {value:g}; keep only {name}"
        )
    return value


def _to_hf_neox(config: DecoderConfig) -> dict[str, object]:
    rope = config.ropes[0]
    return {
        "intermediate_size": config.intermediate_size,
        "hidden_act": name_of_activation(config.activation),
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.residual == "parallel",
        "attention_bias": config.attention_bias,
        "rope_parameters": rope.to_hf() | {"partial_rotary_factor": rope.fraction},
    }


def _prefix_neox(stored: Iterable[str]) -> str:
    return "gpt_neox."


_NEOX_NAMES = Names(
    embed="embed_in",
    norm="final_layer_norm",
    qkv=("attention.query_key_value",),
    qkv_is_grouped=True,
    out="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def _read_falcon(fields: JsonFields, architecture: str) -> DecoderConfig:
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


def _to_hf_falcon(config: DecoderConfig) -> dict[str, object]:
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


def _prefix_falcon(stored: Iterable[str]) -> str:
    return "transformer."


def _names_falcon(config: DecoderConfig) -> Names:
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
    "GPT2LMHeadModel": decoder_family(
        "gpt2",
        _read_gpt2,
        _to_hf_gpt2,
        _GPT2_NAMES,
        name_prefix=_prefix_gpt2,
        layers_prefix="h.",
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "GPTNeoXForCausalLM": decoder_family(
        "gpt_neox",
        _read_neox,
        _to_hf_neox,
        _NEOX_NAMES,
        name_prefix=_prefix_neox,
        lm_head="embed_out.weight",
        ignored=(".attention.bias", ".attention.masked_bias"),
    ),
    "FalconForCausalLM": decoder_family(
        "falcon", _read_falcon, _to_hf_falcon, _names_falcon, name_prefix=_prefix_falcon, layers_prefix="h."
    ),
}
