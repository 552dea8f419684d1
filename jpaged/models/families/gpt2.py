"""GPT-2 (Radford et al. 2019): learned positions, layer norms, transposed weights."""

from __future__ import annotations

from collections.abc import Iterable

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import divided_heads, name_of_activation, read_activation
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind

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


def _read(fields: JsonFields, architecture: str) -> DecoderConfig:
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


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    scales = [kind.scale for kind in config.attention_kinds]
    return {
        "n_inner": config.intermediate_size,
        "activation_function": name_of_activation(config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": scales[0] != 1,
        "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1,
    }


def _prefix(stored: Iterable[str]) -> str:
    """Return the prefix, which is empty for checkpoints saved without their head."""
    return "" if any(name.startswith("h.0.") for name in stored) else "transformer."


_NAMES = Names(
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

ARCHITECTURES = {
    "GPT2LMHeadModel": decoder_family(
        "gpt2",
        _read,
        _to_hf,
        _NAMES,
        name_prefix=_prefix,
        layers_prefix="h.",
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
}
