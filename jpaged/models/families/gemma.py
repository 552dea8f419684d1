"""Gemma 1 and 2, and the language models of Gemma 3: norms with an offset, and a large embedding scale.

Gemma 2 (Gemma team 2024) has norms before and after each part, caps scores and logits, and has a window in every second
layer; Gemma 3 (2025) normalizes queries and keys instead, has
five layers with a window per layer without one, and separate ropes for the two kinds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.config import Activation
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import (
    FULL,
    SLIDING,
    name_of_activation,
    read_activation,
    read_heads,
    read_sizes,
)
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.rope_config import RopeConfig

_LENGTHS = {1: 8192, 2: 8192, 3: 131072}
_KV_HEADS = {1: 16, 2: 4, 3: 4}
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
_PERIODS = {2: 2, 3: 6}
"""Period of layers; the last layer of each has full attention."""


def _read(fields: JsonFields, architecture: str, version: int) -> DecoderConfig:
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=_KV_HEADS[version], head_dim=256)
    max_position_embeddings = fields.integer("max_position_embeddings", _LENGTHS[version])
    fields.only("attention_bias", False, why="this family has no published checkpoint with projection biases")
    if version < 3:
        fields.only("use_bidirectional_attention", False, why="only Gemma 3 has encoders")
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        **heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=(1,),
        bos_token_id=2,
        activation=_activation(fields, version),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        post_norms=version > 1,
        qk_norm="head" if version == 3 else "none",
        embed_scale=sizes["hidden_size"] ** 0.5,
        logit_cap=_cap(fields, "final_logit_softcapping", 30.0 if version == 2 else None),
        ropes=_ropes(fields, max_position_embeddings, version),
        kinds=_kinds(fields, sizes["num_layers"], version) if version > 1 else (),
    )


def _activation(fields: JsonFields, version: int) -> Activation:
    if version == 1:
        # transformers reads only `hidden_act`, and gelu in old files means its approximation.
        fields.ignore(("hidden_activation",))
        activation = read_activation(fields, "hidden_act", "gelu_pytorch_tanh")
        return "gelu_tanh" if activation == "gelu" else activation
    fields.ignore(("hidden_act",))  # in old checkpoints of Gemma 2; transformers does not read it
    return read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")


def _cap(fields: JsonFields, key: str, missing: float | None) -> float | None:
    """Read a soft cap; null means none."""
    return None if fields.value(key, missing) is None else fields.number(key, missing)


def _kinds(fields: JsonFields, num_layers: int, version: int) -> tuple[LayerKind, ...]:
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    if version == 3:
        fields.only("attn_logit_softcapping", why="transformers ignores soft caps in Gemma 3")
    cap = _cap(fields, "attn_logit_softcapping", 50.0 if version == 2 else None)
    window = published = fields.integer("sliding_window", 4096)
    is_causal = not fields.flag("use_bidirectional_attention", False)
    if not is_causal:  # of EmbeddingGemma: half of it on each side
        window = 1 + 2 * (published // 2)
    fields.only("sliding_window_size", published, why=f"the model uses sliding_window, {published}")
    types = _types(fields, num_layers, version)
    kinds = {
        FULL: LayerKind(AttentionKind(scale, soft_cap=cap, is_causal=is_causal)),
        SLIDING: LayerKind(AttentionKind(scale, window, cap, is_causal=is_causal), version - 2),
    }
    return tuple(kinds[name] for name in types)


def _types(fields: JsonFields, num_layers: int, version: int) -> tuple[str, ...]:
    """Return the attention kind of each layer: as listed, or by a period."""
    types = fields.texts("layer_types", FULL, SLIDING, count=num_layers)
    period = fields.integer("sliding_window_pattern", _PERIODS[version])
    if version == 2 and period != _PERIODS[2]:
        raise Unsupported(f"{fields.name}: sliding_window_pattern is {period}; in Gemma 2 it is {_PERIODS[2]}")
    written = fields.integer("_sliding_window_pattern", period)  # written by transformers, next to layer_types
    if written != period and not types:
        raise Unsupported(
            f"{fields.name}: _sliding_window_pattern is {written}, but layer_types is missing; transformers reads "
            "only sliding_window_pattern"
        )
    return types or tuple(SLIDING if (index + 1) % period else FULL for index in range(num_layers))


def _ropes(fields: JsonFields, max_position_embeddings: int, version: int) -> tuple[RopeConfig, ...]:
    """Read the rope of layers with full attention, and for Gemma 3 that of the others."""
    if version < 3:
        return (RopeConfig.from_hf(fields, max_position_embeddings),)
    sections = fields.mapping("rope_parameters")
    if not sections:
        theta = fields.number("rope_theta", _GLOBAL_THETA)
        stretched = JsonFields(fields.mapping("rope_scaling"), f"{fields.name} rope_scaling")
        if not stretched.has("rope_type"):
            stretched.only("type", "default", why="transformers reads only rope_type in Gemma 3; rename it")
        local = fields.number("rope_local_base_freq", _LOCAL_THETA)
        plain = JsonFields({}, fields.name)
        return _rope(stretched, max_position_embeddings, theta), _rope(plain, max_position_embeddings, local)
    if unknown := sorted(set(sections) - {FULL, SLIDING}):
        raise Unsupported(f"{fields.name} rope_parameters: unknown setting {', '.join(unknown)}")
    fields.only("rope_scaling", why="rope_parameters contains it for each kind of layer")
    thetas = {
        FULL: fields.number("rope_theta", _GLOBAL_THETA),
        SLIDING: fields.number("rope_local_base_freq", _LOCAL_THETA),
    }
    nested = JsonFields(sections, f"{fields.name} rope_parameters")
    return tuple(
        _rope(JsonFields(nested.mapping(name), f"{nested.name} {name}"), max_position_embeddings, theta)
        for name, theta in thetas.items()
    )


def _rope(section: JsonFields, max_position_embeddings: int, theta: float) -> RopeConfig:
    section.only("truncate", True, why="transformers reads it next to the kinds of layers, not inside one")
    return RopeConfig.of_section(section, max_position_embeddings, theta)


def _to_hf_of_first(config: DecoderConfig) -> dict[str, object]:
    return {
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": name_of_activation(config.activation),
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": config.ropes[0].to_hf(),
    }


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    windows = [kind.sliding_window for kind in config.attention_kinds]
    is_third = len(config.ropes) == 2
    sections = {name: rope.to_hf() for name, rope in zip((FULL, SLIDING), config.ropes, strict=False)}
    window = next((window for window in windows if window is not None), None)
    if config.is_encoder and window is not None:
        window -= 1
    return {
        "use_bidirectional_attention": config.is_encoder,
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_activation": name_of_activation(config.activation),
        "rms_norm_eps": config.norm_eps,
        "query_pre_attn_scalar": _whole(config.attention_kinds[0].scale ** -2),
        "attn_logit_softcapping": config.attention_kinds[0].soft_cap,
        "final_logit_softcapping": config.logit_cap,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "rope_parameters": sections if is_third else config.ropes[0].to_hf(),
    } | ({} if window is None else {"sliding_window": window})


def _whole(number: float) -> float:
    """Round a number to an integer if it is close, because transformers requires an integer."""
    return round(number) if math.isclose(number, round(number), rel_tol=1e-9) else number


_NAMES = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

# Settings for image inputs.
_OF_IMAGES = (
    *("vision_config", "mm_tokens_per_image"),
    *("boi_token_index", "eoi_token_index", "image_token_index"),
    *("boi_token_id", "eoi_token_id", "image_token_id"),
)
# Keys that transformers reads at the top level only; and those of either level, the top level first.
_OF_WHOLE, _OF_EITHER = ("dtype", "torch_dtype", "tie_word_embeddings"), ("eos_token_id", "bos_token_id")
# Defaults of transformers for text_config: checkpoints omit values that equal them.
_SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}


def _language(whole: JsonFields) -> JsonFields:
    """Return the fields of the language model of a multimodal Gemma 3, from text_config and the top level."""
    text = whole.mapping("text_config")
    given = {key: whole.value(key) for key in (*_OF_WHOLE, *_OF_EITHER) if whole.has(key)}
    whole.ignore(_OF_IMAGES)
    for key, missing in _SIZES.items():
        size = text.get(key, missing)
        whole.only(key, size, why=f"{key} is {size} in text_config, which defines the language model")
    fields = JsonFields(
        {**_SIZES, **{key: value for key, value in text.items() if key not in _OF_WHOLE}, **given},
        f"{whole.name} text_config",
    )
    fields.only(
        "final_logit_softcapping", why="transformers applies no soft cap to logits in Gemma 3 models that read images"
    )
    return fields


def _language_prefix(stored: Iterable[str]) -> str:
    """Return the prefix of checkpoints on the hub, or that of transformers since version 5."""
    is_old = any(name.startswith("language_model.model.") for name in stored)
    return "language_model.model." if is_old else "model.language_model."


def _to_hf_of_whole(config: DecoderConfig) -> dict[str, object]:
    sizes = {
        "model_type": "gemma3_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }
    return {"text_config": sizes | _to_hf(config)}


_IMAGES = decoder_family(
    "gemma3",
    functools.partial(_read, version=3),
    _to_hf_of_whole,
    _NAMES,
    name_prefix=_language_prefix,
    ignored=("vision_tower.", "multi_modal_projector."),
)

_FAMILIES = {
    "GemmaForCausalLM": decoder_family("gemma", functools.partial(_read, version=1), _to_hf_of_first, Names()),
    "Gemma2ForCausalLM": decoder_family("gemma2", functools.partial(_read, version=2), _to_hf, _NAMES),
    "Gemma3ForCausalLM": decoder_family("gemma3_text", functools.partial(_read, version=3), _to_hf, _NAMES),
    "Gemma3TextModel": decoder_family("gemma3_text", functools.partial(_read, version=3), _to_hf, _NAMES),
    "Gemma3ForConditionalGeneration": dataclasses.replace(_IMAGES, language=_language),
}
# The sums of layers exceed 65504 (google/gemma_pytorch and vLLM reject float16 for the same reason).
ARCHITECTURES = {name: dataclasses.replace(family, overflows_float16=True) for name, family in _FAMILIES.items()}
