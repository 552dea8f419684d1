"""Phi-3 and Phi-4 (Microsoft 2024): a Llama with fused projections and LongRoPE."""

from __future__ import annotations

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import name_of_activation, read_activation, read_heads, read_sizes, read_window
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.rope_config import RopeConfig


def _read(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore(("embd_pdrop", "resid_pdrop"))
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"])
    fields.only("attention_bias", False, why="phi3 has no biases in attention")
    fields.only("mlp_bias", False, why="phi3 has no biases in its feed-forward")
    fields.only("full_attn_mod", 1, why="only identical layers are supported")
    fields.only("interpolate_factor", 1, why="positions are scaled only by rope_scaling")
    fields.only("lm_head_bias", False, why="a bias on the logits is not supported")
    max_position_embeddings = fields.integer("max_position_embeddings", 4096)
    rope = _rope(fields, max_position_embeddings)
    window = read_window(fields)
    narrow = LayerKind(AttentionKind(heads["head_dim"] ** -0.5, window))
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        **heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        activation=read_activation(fields, "hidden_act", "silu"),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        eos_token_ids=(32000,),
        bos_token_id=1,
        ropes=(rope,),
        outgrows_keys=rope.kind == "longrope",
        kinds=() if window is None else (narrow,) * sizes["num_layers"],
    )


def _rope(fields: JsonFields, max_position_embeddings: int) -> RopeConfig:
    rope = RopeConfig.from_hf(fields, max_position_embeddings, default_fraction=1.0, default_original=4096)
    fields.ignore(("original_max_position_embeddings",))
    if rope.kind not in ("default", "longrope"):
        raise Unsupported(f"{fields.name}: the RoPE type is {rope.kind!r}; Phi-3 has default and longrope")
    return rope


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    (rope,) = config.ropes
    length: dict[str, object] = {"original_max_position_embeddings": rope.original_max_position_embeddings}
    return {
        "pad_token_id": None,  # otherwise transformers' default exceeds a small vocabulary
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": name_of_activation(config.activation),
        "rms_norm_eps": config.norm_eps,
        "sliding_window": config.attention_kinds[0].sliding_window,
        "rope_parameters": rope.to_hf(),
    } | (length if rope.kind == "longrope" else {})


ARCHITECTURES = {
    "Phi3ForCausalLM": decoder_family(
        "phi3", _read, _to_hf, Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    ),
}
