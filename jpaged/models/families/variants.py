"""Families that differ from Llama in switches only: a row of `_VARIANTS` each.

A row has the switches that the code of a family fixes, the keys of config.json that set others, and the defaults of
missing keys, which are those of transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jpaged.errors import Unsupported
from jpaged.models.config import MAX_LAYERS, MAX_WIDTH
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config import QueryScale
from jpaged.models.decoder.config_fields import (
    FULL,
    SLIDING,
)
from jpaged.models.decoder.leaves import ExpertNames, outer_leaves
from jpaged.models.families import deepseek, llama
from jpaged.models.families.deepseek.config import DeepseekConfig
from jpaged.models.families.switches import DecoderVariant, ExpertKeys, Key, Layers
from jpaged.models.family import AnyFamily, Family, Modules
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.param_specs import LM_HEAD, Leaf
from jpaged.models.rope_config import RopeConfig


def _two_ropes(fields: JsonFields, length: int, head_dim: int) -> tuple[RopeConfig, ...]:
    """Read the ropes of OLMo 3: scaling applies only to layers without a window."""
    sections = fields.mapping("rope_parameters")
    theta = fields.number("rope_theta", 500000.0)
    if not {FULL, SLIDING} & set(sections):
        scaled = JsonFields(fields.mapping("rope_scaling") or sections, f"{fields.name} rope_scaling")
        plain = JsonFields({}, fields.name)
        return RopeConfig.of_section(scaled, length, theta), RopeConfig.of_section(plain, length, theta)
    if unknown := sorted(set(sections) - {FULL, SLIDING}):
        raise Unsupported(f"{fields.name} rope_parameters: unknown setting {', '.join(unknown)}")
    nested = JsonFields(sections, f"{fields.name} rope_parameters")
    full, narrow = (JsonFields(nested.mapping(name), f"{nested.name} {name}") for name in (FULL, SLIDING))
    return RopeConfig.of_section(full, length, theta), RopeConfig.of_section(narrow, length, theta)


def _hunyuan_ropes(fields: JsonFields, length: int, head_dim: int) -> tuple[RopeConfig, ...]:
    """Read the rope of Hunyuan: `dynamic` with an `alpha` stretches the base, whatever the length of a sequence."""
    key = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    section = JsonFields(fields.mapping(key), f"{fields.name} {key}")
    if not section.has("alpha"):
        return (RopeConfig.from_hf(fields, length),)
    alpha, theta = section.number("alpha"), section.number("rope_theta", fields.number("rope_theta", 10000.0))
    section.only("factor", 1, 1.0, why="positions are scaled only by alpha")
    section.ignore(("type", "rope_type", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
    section.finish()
    theta *= alpha ** (head_dim / (head_dim - 2))
    return (RopeConfig(theta=theta, original_max_position_embeddings=length),)


_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _apertus_ropes(fields: JsonFields, length: int, head_dim: int) -> tuple[RopeConfig, ...]:
    """Read the rope of Apertus, which is scaled by default."""
    theta = 12000000.0
    if fields.mapping("rope_scaling") or fields.has("rope_parameters"):
        return (RopeConfig.from_hf(fields, length, default_theta=theta),)
    section = JsonFields(_LLAMA3_ROPE | {"original_max_position_embeddings": 8192}, f"{fields.name} rope_parameters")
    return (RopeConfig.of_section(section, length, fields.number("rope_theta", theta)),)


_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _ministral_section(fields: JsonFields) -> JsonFields:
    section = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or _MINISTRAL_ROPE
    rope = JsonFields(section, f"{fields.name} rope_parameters")
    rope.ignore(("llama_4_scaling_beta", "max_position_embeddings"))
    return rope


def _ministral_ropes(fields: JsonFields, length: int, head_dim: int) -> tuple[RopeConfig, ...]:
    """Read the rope of Ministral 3, which has the scale of queries in its section."""
    return (RopeConfig.of_section(_ministral_section(fields), length, fields.number("rope_theta", 1e6)),)


def _ministral_scale(fields: JsonFields) -> dict[str, Any]:
    """Read the scale of queries of Ministral 3."""
    rope = _ministral_section(fields)
    if not rope.has("llama_4_scaling_beta"):
        return {}
    beta, length = rope.number("llama_4_scaling_beta"), rope.integer("original_max_position_embeddings")
    return {"query_scale": QueryScale(beta, length)}


def _phimoe_ropes(fields: JsonFields, length: int, head_dim: int) -> tuple[RopeConfig, ...]:
    """Read the rope of Phi-3.5-MoE, which scales the attention of short and of long sequences by one factor."""
    key = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    section = JsonFields(fields.mapping(key), f"{fields.name} {key}")
    theta, outer = fields.number("rope_theta", 1e6), fields.value("original_max_position_embeddings")
    original = None
    if outer is not None and not section.has("original_max_position_embeddings"):
        original = fields.integer("original_max_position_embeddings")
    if not section.has("short_mscale"):
        return (RopeConfig.of_section(section, length, theta, original=original),)
    factor = section.number("short_mscale")
    section.only("long_mscale", factor, why=f"it must equal short_mscale, {factor:g}")
    rope = RopeConfig.of_section(section, length, theta, original=original)
    return (dataclasses.replace(rope, attention_factor=factor),)


def _minimax_ropes(fields: JsonFields, length: int, head_dim: int) -> tuple[RopeConfig, ...]:
    """Read the rope of MiniMax-M2, whose config has the number of rotated dimensions."""
    fraction = fields.integer("rotary_dim", head_dim, maximum=head_dim) / head_dim
    return (RopeConfig.from_hf(fields, length, default_theta=5e6, default_fraction=fraction),)


_MAX_NORM_MIN = 1e-6
"""Largest lower bound of the sum of weights that has no effect."""


def _check_ernie(fields: JsonFields) -> dict[str, Any]:
    """Check that the last layer has experts, and that their weights sum to 1."""
    if (bound := fields.number("moe_norm_min", 1e-12)) > _MAX_NORM_MIN:
        raise Unsupported(f"{fields.name}: moe_norm_min is {bound:g}; the limit is {_MAX_NORM_MIN:g}")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    fields.only("moe_layer_end_index", -1, num_layers - 1, why="all layers after the first with experts must have them")
    return {}


def _check_minimax(fields: JsonFields) -> dict[str, Any]:
    """Check that attention in all layers is the usual one."""
    kinds = fields.value("attn_type_list", [])
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise Unsupported(f"{fields.name}: attn_type_list has other numbers than 1; only full attention is supported")
    return {}


def _cohere_length(fields: JsonFields) -> dict[str, Any]:
    """Read the length of Command R: `max_position_embeddings` has that of pretraining."""
    return {"max_position_embeddings": fields.integer("model_max_length")} if fields.has("model_max_length") else {}


def _llama4_own(fields: JsonFields) -> dict[str, Any]:
    """Read the width of dense layers, the scale of queries, and the length up to which attention is not chunked."""
    own: dict[str, Any] = {"intermediate_size": fields.integer("intermediate_size_mlp", 16384, maximum=MAX_WIDTH)}
    length = fields.integer("max_position_embeddings", 131072)
    if fields.value("attention_chunk_size", 8192) is not None:
        length = min(length, fields.integer("attention_chunk_size", 8192))
    own["max_position_embeddings"] = length
    # The published files have a number: 0 is false.
    tunes = fields.value("attn_temperature_tuning", True)
    if not isinstance(tunes, int):
        raise fields.bad("attn_temperature_tuning", f"is {tunes!r}; it must be true, false or an integer")
    if tunes:
        beta, period = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
        own["query_scale"] = QueryScale(beta, period, offset=1, is_global=True)
    fields.ignore(("attn_scale", "floor_scale", "layer_types", "for_llm_compressor"))
    return own


def _llama4_to_hf(config: DecoderConfig) -> dict[str, object]:
    assert config.mixture is not None
    scale = config.query_scale
    result: dict[str, object] = {
        "intermediate_size": config.mixture.width,
        "intermediate_size_mlp": config.intermediate_size,
        "attention_chunk_size": config.max_position_embeddings,
        "attn_temperature_tuning": scale is not None,
    }
    return result if scale is None else result | {"attn_scale": scale.beta, "floor_scale": scale.length}


def _rms(eps: float = 1e-6, activation: str = "silu") -> dict[str, Key]:
    """Return the keys that nearly all families with RMS norms share."""
    return {"norm_eps": Key("rms_norm_eps", eps), "activation": Key("hidden_act", activation)}


def _layer(eps: float = 1e-5, activation: str = "silu", name: str = "layer_norm_eps") -> dict[str, Key]:
    """Return the keys that families with layer norms share."""
    return {"norm_eps": Key(name, eps), "activation": Key("hidden_act", activation)}


def _tied(default: bool) -> dict[str, Key]:
    return {"tie_word_embeddings": Key("tie_word_embeddings", default)}


def _biases(name: str = "attention_bias", *, default: bool = False, mlp: str = "") -> dict[str, Key]:
    """Return the keys of biases of all four projections, and of the feed-forward."""
    found = {field: Key(name, default) for field in ("attention_bias", "attention_output_bias")}
    return found | ({"mlp_bias": Key(mlp, default)} if mlp else {})


_AFTER = Names(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
"""Names of families whose norms follow attention and feed-forward."""
_UNGATED = Names(gate_up=("mlp.up_proj",))
_INTERNLM2 = Names(
    embed="tok_embeddings",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
    qkv=("attention.wqkv",),
    qkv_is_grouped=True,
    out="attention.wo",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
_PHI = Names(norm="final_layernorm", out="self_attn.dense", gate_up=("mlp.fc1",), down="mlp.fc2")
_GLM4 = Names(
    attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm", gate_up=("mlp.gate_up_proj",)
)
_STABLELM = Names(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")
_HUNYUAN = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
_APERTUS = Names(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm", gate_up=("mlp.up_proj",))
_COHERE = {"norm": "layer", "norm_bias": False, "residual": "shared", "is_interleaved": True}
_COHERE_KEYS = _layer() | _tied(True) | _biases() | {"logit_scale": Key("logit_scale", 0.0625)}
_OLMO = {"qk_norm": "wide", "pre_norms": False, "post_norms": True}
_SHARED_EXPERTS = ExpertNames(shared="mlp.shared_experts.")
_MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    choice_bias="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.experts.",
    gate="w1",
    up="w3",
    down="w2",
)
_GRANITE_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.",
    gate="input_linear.weight",
    down="output_linear.weight",
    fused="rows",
)
_ERNIE_EXPERTS = ExpertNames(
    choice_bias="mlp.moe_statics.e_score_correction_bias", choice_bias_is_row=True, shared="mlp.shared_experts."
)
_LLAMA4_EXPERTS = ExpertNames(
    router="feed_forward.router",
    experts="feed_forward.experts.",
    gate="gate_up_proj",
    fused="halves",
    shared="feed_forward.shared_expert.",
)
_LLAMA4 = Names(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj", experts=_LLAMA4_EXPERTS
)
_HUNYUAN_ONLY = {
    "use_qk_norm": True,
    "use_cla": False,
    "use_mla": False,
    "mlp_bias": False,
    "norm_type": "rms",
    "position_embedding_xdrope": False,
}
_HUNYUAN_IGNORED = (
    *("cla_share_factor", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "mask_init_id"),
    *("org_vocab_size", "pad_id", "text_end_id", "text_start_id", "use_rotary_pos_emb"),
    *("add_classification_head", "class_num", "dense_list", "pool_type"),
    *("image_token_id", "num_media_embeds", "skip_cls_token", "vit_add_patchemb_bias", "vit_input_resolution"),
    *("vit_mapping_type", "vit_norm_type", "vit_patch", "vit_token", "vit_used_rms_norm"),
)
"""Ids of tokens, and keys of classification and images."""
_GRANITE_KEYS = {
    "embed_scale": Key("embedding_multiplier", 1.0),
    "residual_scale": Key("residual_multiplier", 1.0),
    "logit_scale": Key("logits_scaling", 1.0, is_divisor=True),
}

_VARIANTS = {
    "ArceeForCausalLM": DecoderVariant(
        model_type="arcee",
        names=_UNGATED,
        length=4096,
        ends=(128000, (128001,)),
        keys=_rms(1e-5, "relu2") | _tied(False) | _biases(mlp="mlp_bias"),
        fixed={"is_gated": False},
    ),
    "SmolLM3ForCausalLM": DecoderVariant(
        model_type="smollm3",
        num_kv_heads=4,
        length=32768,
        theta=2e6,
        ends=(128000, (128001,)),
        keys=_rms() | _tied(True) | _biases(mlp="mlp_bias"),
        layers=Layers(has_list=True),
        only={"use_sliding_window": False},
        ignored=("sliding_window", "layer_types", "max_window_layers"),
    ),
    "GraniteForCausalLM": DecoderVariant(
        model_type="granite",
        keys=_rms() | _tied(False) | _biases(mlp="mlp_bias") | _GRANITE_KEYS,
        fixed={"scales_given_embeds": True},
        scale="attention_multiplier",
    ),
    "Olmo2ForCausalLM": DecoderVariant(
        model_type="olmo2",
        names=_AFTER,
        ends=(None, (50279,)),
        keys=_rms(1e-5) | _tied(False) | _biases(),
        fixed=_OLMO,
    ),
    "Olmo3ForCausalLM": DecoderVariant(
        model_type="olmo3",
        names=_AFTER,
        ropes=_two_ropes,
        ends=(None, (50279,)),
        keys=_rms(1e-5) | _tied(False) | _biases(),
        fixed=_OLMO,
        layers=Layers("types", 4096, ropes=(0, 1)),
    ),
    "Glm4ForCausalLM": DecoderVariant(
        model_type="glm4",
        names=_GLM4,
        num_kv_heads=2,
        head_dim=128,
        length=131072,
        fraction=0.5,
        ends=(None, (151329, 151336, 151338)),
        keys=_rms(1.5625e-07) | _tied(False) | {"attention_bias": Key("attention_bias", True)},
        fixed={"post_norms": True, "is_interleaved": True},
    ),
    "SeedOssForCausalLM": DecoderVariant(
        model_type="seed_oss",
        num_kv_heads=8,
        head_dim=128,
        length=524288,
        ends=(0, (2,)),
        keys={
            **_rms(),
            **_tied(False),
            "attention_bias": Key("attention_bias", True),
            "attention_output_bias": Key("attention_out_bias", False),
            "mlp_bias": Key("mlp_bias", False),
        },
        ignored=("residual_dropout",),
    ),
    "Exaone4ForCausalLM": DecoderVariant(
        model_type="exaone4",
        names=_AFTER,
        num_kv_heads=32,
        ends=(0, (2,)),
        keys=_rms(1e-5) | _tied(False),
        fixed={"qk_norm": "head", "pre_norms": False, "post_norms": True},
        layers=Layers("types", 4096, ropes=(None, 0)),
    ),
    "HunYuanDenseV1ForCausalLM": DecoderVariant(
        model_type="hunyuan_v1_dense",
        names=_HUNYUAN,
        ropes=_hunyuan_ropes,
        keys=_rms(1e-5) | _tied(False) | _biases(),
        fixed={"qk_norm": "rotated"},
        only=_HUNYUAN_ONLY | {"num_experts": 1},
        ignored=_HUNYUAN_IGNORED,
    ),
    "CohereForCausalLM": DecoderVariant(
        model_type="cohere",
        length=8192,
        theta=500000.0,
        ends=(5, (255001,)),
        own=_cohere_length,
        keys=_COHERE_KEYS | {"qk_norm": Key("use_qk_norm", False, ("none", "layer"))},
        fixed=_COHERE,
    ),
    "Cohere2ForCausalLM": DecoderVariant(
        model_type="cohere2",
        length=8192,
        ends=(5, (255001,)),
        own=_cohere_length,
        keys=_COHERE_KEYS,
        fixed=_COHERE,
        layers=Layers("types", 4096, ropes=(None, 0)),
        only={"use_qk_norm": False, "rotary_pct": 1.0, "use_parallel_block": True, "use_gated_activation": True},
        ignored=(
            *("layer_switch", "order_of_interleaved_layers", "position_embedding_type"),
            *("use_embedding_sharing", "use_parallel_embedding"),
        ),
    ),
    "PhiForCausalLM": DecoderVariant(
        model_type="phi",
        names=_PHI,
        fraction=0.5,
        keys=_layer(activation="gelu_new") | _tied(False),
        fixed={
            "norm": "layer",
            "residual": "shared",
            "is_gated": False,
            "logit_bias": True,
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
        },
        only={"qk_layernorm": False},
        ignored=("embd_pdrop", "resid_pdrop"),
    ),
    "StableLmForCausalLM": DecoderVariant(
        model_type="stablelm",
        names=_STABLELM,
        num_kv_heads=32,
        length=4096,
        fraction=0.25,
        ends=(0, (0,)),
        keys={
            **_layer(),
            **_tied(False),
            "attention_bias": Key("use_qkv_bias", False),
            "qk_norm": Key("qk_layernorm", False, ("none", "layer")),
            "residual": Key("use_parallel_residual", False, ("sequential", "shared")),
        },
        fixed={"norm": "layer"},
        ignored=("hidden_dropout",),
    ),
    "InternLM2ForCausalLM": DecoderVariant(
        model_type="internlm2",
        names=_INTERNLM2,
        keys=_rms() | _tied(False) | _biases("bias", default=True),
        lm_head="output.weight",
    ),
    "InternLM3ForCausalLM": DecoderVariant(
        model_type="internlm3",
        num_kv_heads=2,
        head_dim=128,
        length=32768,
        keys={
            **_rms(1e-5),
            **_tied(False),
            "attention_bias": Key("qkv_bias", False, synonym="attention_bias"),
            "attention_output_bias": Key("bias", False, synonym="mlp_bias"),
            "mlp_bias": Key("bias", False, synonym="mlp_bias"),
        },
    ),
    "NemotronForCausalLM": DecoderVariant(
        model_type="nemotron",
        names=_UNGATED,
        length=4096,
        fraction=0.5,
        ends=(2, (3,)),
        keys=_layer(activation="relu2", name="norm_eps") | _tied(False) | _biases(mlp="mlp_bias"),
        fixed={"norm": "layer", "norm_offset": 1.0, "is_gated": False},
    ),
    "Ministral3ForCausalLM": DecoderVariant(
        model_type="ministral3",
        num_kv_heads=8,
        head_dim=128,
        length=262144,
        ropes=_ministral_ropes,
        own=_ministral_scale,
        keys=_rms(1e-5) | _tied(False),
        layers=Layers("all"),
    ),
    "Starcoder2ForCausalLM": DecoderVariant(
        model_type="starcoder2",
        names=Names(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        num_kv_heads=2,
        length=4096,
        ends=(50256, (50256,)),
        keys={
            **_layer(activation="gelu_pytorch_tanh", name="norm_epsilon"),
            **_tied(True),
            **_biases("use_bias", default=True, mlp="use_bias"),
        },
        fixed={"norm": "layer", "is_gated": False},
        layers=Layers("all"),
        only={"norm_type": "layer_norm", "mlp_type": "default"},
        # Leftovers of StarCoder in the published files, which transformers does not read.
        ignored=(
            *("embedding_dropout", "residual_dropout", "activation_function", "layer_norm_epsilon"),
            *("scale_attn_weights", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        ),
    ),
    "ApertusForCausalLM": DecoderVariant(
        model_type="apertus",
        names=_APERTUS,
        length=65536,
        ropes=_apertus_ropes,
        keys=_rms(1e-5, "xielu") | _tied(False) | _biases(),
        fixed={"qk_norm": "head", "is_gated": False},
        only={"mlp_bias": False, "post_norm": False, "qk_norm": True},
    ),
    "Ernie4_5ForCausalLM": DecoderVariant(
        model_type="ernie4_5",
        num_kv_heads=2,
        head_dim=128,
        length=131072,
        theta=500000.0,
        keys=_rms(1e-5) | _tied(True) | _biases("use_bias", mlp="use_bias"),
        fixed={"is_interleaved": True},
        ignored=("fuse_rms_norm",),
    ),
}

_VARIANTS |= {
    "GraniteMoeForCausalLM": DecoderVariant(
        model_type="granitemoe",
        names=Names(experts=_GRANITE_EXPERTS),
        keys=_rms() | _tied(False) | _biases() | _GRANITE_KEYS,
        fixed={"scales_given_embeds": True},
        scale="attention_multiplier",
        experts=ExpertKeys(
            num_experts=("num_local_experts", 8), top_k=("num_experts_per_tok", 2), scores="chosen", normalises=False
        ),
    ),
    "Glm4MoeForCausalLM": DecoderVariant(
        model_type="glm4_moe",
        names=Names(experts=_SHARED_EXPERTS),
        num_kv_heads=8,
        length=131072,
        fraction=0.5,
        ends=(None, ()),
        keys={
            **_rms(1e-5),
            **_tied(False),
            "attention_bias": Key("attention_bias", False),
            "qk_norm": Key("use_qk_norm", False, ("none", "head")),
        },
        experts=ExpertKeys(
            num_experts=("n_routed_experts", 128),
            width=("moe_intermediate_size", 1408),
            num_shared=("n_shared_experts", 1),
            first=("first_k_dense_replace", 1),
            scores="sigmoid",
            choice_bias=True,
            has_key=True,
            scale="routed_scaling_factor",
            has_groups=True,
        ),
        ignored=("num_nextn_predict_layers", "num_mtp_layers"),
        ignores_later_layers=True,
    ),
    "MiniMaxM2ForCausalLM": DecoderVariant(
        model_type="minimax_m2",
        names=Names(experts=_MIXTRAL_EXPERTS),
        num_kv_heads=8,
        head_dim=128,
        length=196608,
        ropes=_minimax_ropes,
        ends=(200034, (200020,)),
        keys=_rms() | _tied(False),
        fixed={"qk_norm": "wide"},
        experts=ExpertKeys(num_experts=("num_local_experts", 256), scores="sigmoid", choice_bias=True),
        only={
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "use_routing_bias": True,
        },
        own=_check_minimax,
        ignored=("num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
        ignores_later_layers=True,
    ),
    "Ernie4_5_MoeForCausalLM": DecoderVariant(
        model_type="ernie4_5_moe",
        names=Names(experts=_ERNIE_EXPERTS),
        num_kv_heads=4,
        length=131072,
        theta=500000.0,
        keys=_rms(1e-5) | _tied(True),
        fixed={"is_interleaved": True},
        experts=ExpertKeys(
            num_experts=("moe_num_experts", 64),
            top_k=("moe_k", 6),
            width=("moe_intermediate_size", 1536),
            num_shared=("moe_num_shared_experts", 2),
            first=("moe_layer_start_index", 1),
            choice_bias=True,
        ),
        only={"use_bias": False, "moe_layer_interval": 1, "moe_use_aux_free": True, "moe_gate": "topk"},
        own=_check_ernie,
        ignored=("moe_capacity", "num_nextn_predict_layers", "fuse_rms_norm"),
        ignored_tensors=("model.mtp_",),
    ),
    "HunYuanMoEV1ForCausalLM": DecoderVariant(
        model_type="hunyuan_v1_moe",
        names=dataclasses.replace(_HUNYUAN, experts=ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp.")),
        ropes=_hunyuan_ropes,
        keys=_rms(1e-5) | _tied(False) | _biases(),
        fixed={"qk_norm": "rotated"},
        experts=ExpertKeys(num_experts=("num_experts", 1), top_k=("moe_topk", 1), num_shared=1),
        only=_HUNYUAN_ONLY
        | {
            "use_mixed_mlp_moe": True,
            "moe_layer_num_skipped": 0,
            "group_limited_greedy": False,
            "n_group": (False, 1),
            "topk_group": (False, 1),
            "norm_topk_prob": True,
            "routed_scaling_factor": (1, 1.0),
        },
        ignored=(
            *_HUNYUAN_IGNORED,
            *("num_shared_expert", "moe_intermediate_size", "moe_drop_tokens", "moe_random_routing_dropped_token"),
        ),
    ),
    "PhimoeForCausalLM": DecoderVariant(
        model_type="phimoe",
        names=Names(experts=_MIXTRAL_EXPERTS),
        num_kv_heads=8,
        length=131072,
        ropes=_phimoe_ropes,
        keys={
            **_layer(name="rms_norm_eps"),
            **_tied(False),
            **_biases(),
            "logit_bias": Key("lm_head_bias", False),
        },
        fixed={"norm": "layer", "outgrows_keys": True},
        layers=Layers("all"),
        experts=ExpertKeys(
            num_experts=("num_local_experts", 16),
            top_k=("num_experts_per_tok", 2),
            scores="sparsemixer",
            normalises=False,
            jitter="router_jitter_noise",
        ),
        ignored=("hidden_dropout", "input_jitter_noise"),
    ),
    "Llama4ForCausalLM": DecoderVariant(
        model_type="llama4_text",
        names=_LLAMA4,
        num_kv_heads=8,
        head_dim=128,
        length=131072,
        theta=500000.0,
        own=_llama4_own,
        write_own=_llama4_to_hf,
        keys={
            **_rms(1e-5),
            **_tied(False),
            **_biases(),
            "qk_norm": Key("use_qk_norm", True, ("none", "unit")),
        },
        fixed={"is_interleaved": True},
        layers=Layers(has_list=True),
        experts=ExpertKeys(
            num_experts=("num_local_experts", 16),
            top_k=("num_experts_per_tok", 1),
            num_shared=1,
            step=("interleave_moe_layer_step", 1),
            scores="sigmoid",
            normalises=False,
            weighs_inputs=True,
        ),
    ),
}

_BY_TEXT: dict[str, AnyFamily] = {
    "mistral": llama.ARCHITECTURES["MistralForCausalLM"],
    "ministral3": _VARIANTS["Ministral3ForCausalLM"].family(),
    "mistral4": deepseek.ARCHITECTURES["Mistral4ForCausalLM"],
    "llama4_text": _VARIANTS["Llama4ForCausalLM"].family(),
}
_OF_IMAGES = (
    *("vision_config", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index"),
    *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"),
    *("vision_feature_select_strategy", "image_seq_length"),
)
"""Keys for image inputs of multimodal models."""
_OF_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "bos_token_id")
"""Keys that apply to the language model; those of `text_config` are the default."""

_RESTATED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def _language(whole: JsonFields) -> JsonFields:
    """Return the fields of the language model of a multimodal model, from text_config and the top level."""
    whole.ignore(_OF_IMAGES)
    given = {key: whole.value(key) for key in _OF_WHOLE if whole.has(key)}
    for key in _RESTATED:
        size = whole.mapping("text_config").get(key)
        whole.only(key, size, why=f"{key} is {size} in text_config, which defines the language model")
    return JsonFields({**whole.mapping("text_config"), **given}, f"{whole.name} text_config")


def _language_prefix(stored: Iterable[str]) -> str:
    """Return the prefix of checkpoints on the hub, or that of transformers since version 5."""
    is_old = any(name.startswith("language_model.model.") for name in stored)
    return "language_model.model." if is_old else "model.language_model."


def _with_images(model_type: str, *text_types: str, names: Names) -> Family[DecoderConfig]:
    """Return a multimodal family, of which the language model is served, of one of these types."""

    def read(fields: JsonFields, architecture: str) -> DecoderConfig:
        text_type = fields.text("model_type", text_types[0])
        if text_type not in text_types:
            raise Unsupported(f"{fields.name}: model_type is {text_type!r}; supported: {', '.join(text_types)}")
        config: DecoderConfig = _BY_TEXT[text_type].read(fields, architecture)
        return config

    def get_text_type(config: DecoderConfig) -> str:
        if len(text_types) == 1:
            return text_types[0]
        if isinstance(config, DeepseekConfig):
            return "mistral4"
        return "mistral" if config.query_scale is None else "ministral3"

    def write(config: DecoderConfig) -> dict[str, object]:
        text_type = get_text_type(config)
        sizes = {
            "model_type": text_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": config.max_position_embeddings,
        }
        return {"text_config": sizes | _BY_TEXT[text_type].to_hf(config)}

    def outer(config: DecoderConfig, prefix: str) -> list[Leaf]:
        is_inside = prefix.startswith("language_model.")
        return outer_leaves(config, prefix, names, f"language_model.{LM_HEAD}" if is_inside else LM_HEAD)

    def modules() -> Modules[DecoderConfig]:
        families = {text_type: _BY_TEXT[text_type].modules() for text_type in text_types}
        return Modules(
            families[text_types[0]].ends,
            lambda config, *given: families[get_text_type(config)].layer(config, *given),
        )

    def layer(config: DecoderConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
        leaves: list[Leaf] = _BY_TEXT[get_text_type(config)].layer_leaves(config, prefix, kind)
        return leaves

    ignored = ("vision_tower.", "vision_model.", "multi_modal_projector.")
    family = decoder_family(model_type, read, write, names, name_prefix=_language_prefix, ignored=ignored)
    return dataclasses.replace(family, outer_leaves=outer, layer_leaves=layer, modules=modules, language=_language)


ARCHITECTURES = {name: variant.family() for name, variant in _VARIANTS.items()} | {
    "Mistral3ForConditionalGeneration": _with_images("mistral3", "mistral", "ministral3", "mistral4", names=Names()),
    "LlavaForConditionalGeneration": _with_images("llava", "mistral", names=Names()),
    "Llama4ForConditionalGeneration": _with_images("llama4", "llama4_text", names=_LLAMA4),
}
