"""GPT-NeoX (Black et al. 2022) and Pythia: a quarter of each head rotated, parallel attention and feed-forward."""

from __future__ import annotations

from collections.abc import Iterable

from jpaged.errors import Unsupported
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import divided_heads, name_of_activation, read_activation, read_sizes
from jpaged.models.json_fields import JsonFields
from jpaged.models.rope_config import RopeConfig


def _read(fields: JsonFields, architecture: str) -> DecoderConfig:
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


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    rope = config.ropes[0]
    return {
        "intermediate_size": config.intermediate_size,
        "hidden_act": name_of_activation(config.activation),
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.residual == "parallel",
        "attention_bias": config.attention_bias,
        "rope_parameters": rope.to_hf() | {"partial_rotary_factor": rope.fraction},
    }


def _prefix(stored: Iterable[str]) -> str:
    return "gpt_neox."


_NAMES = Names(
    embed="embed_in",
    norm="final_layer_norm",
    qkv=("attention.query_key_value",),
    qkv_is_grouped=True,
    out="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)

ARCHITECTURES = {
    "GPTNeoXForCausalLM": decoder_family(
        "gpt_neox",
        _read,
        _to_hf,
        _NAMES,
        name_prefix=_prefix,
        lm_head="embed_out.weight",
        ignored=(".attention.bias", ".attention.masked_bias"),
    ),
}
