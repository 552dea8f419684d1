"""The Llama family: rotary positions, RMS norms, a gated feed-forward; Llama, Mistral, Mixtral, Qwen2, Qwen3 and Phi-3.

MiMo (Xiaomi 2025) is Qwen2 with an MTP layer, which drafts use (`jpaged.models.eagle`). Phi-3 and Phi-4 (Microsoft
2024) have fused projections and LongRoPE.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.config import Mixture
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import (
    FULL,
    SLIDING,
    TRAINING,
    name_of_activation,
    read_activation,
    read_choice,
    read_heads,
    read_sizes,
    read_window,
)
from jpaged.models.decoder.leaves import ExpertNames
from jpaged.models.family import Family
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class LlamaVariant:
    """The differences between the architectures of this family, fixed in code.

    Attributes:
        attention_bias: location of biases: `config` reads `attention_bias` for all four projections, `qkv` means always
            on query, key and value only, `none` never.
        mlp_bias: config.json may set biases in the feed-forward.
        window: how config.json enables a sliding window: `none`, by its length (`length`), or also with the switch
            `use_sliding_window`, for some layers (`switch`).
        default_head_dim: default for config.json; None derives it from hidden_size.
        default_num_kv_heads: default for config.json; None is the number of query heads.
        default_max_position_embeddings: default for config.json.
        ends: default (bos, eos); None has neither.
        mtp_layers: prefix of the tensors of MTP layers, which only drafts use; empty without such layers.
    """

    model_type: str
    attention_bias: Literal["config", "qkv", "none"]
    mlp_bias: bool
    qk_norm: bool
    window: Literal["none", "length", "switch"]
    default_head_dim: int | None
    default_num_kv_heads: int | None
    default_max_position_embeddings: int
    ends: tuple[int, int] | None
    mtp_layers: str = ""

    def read(self, fields: JsonFields, architecture: str) -> DecoderConfig:
        """See `Family`."""
        fields.ignore(("max_sequence_length",))  # in Llama's first checkpoints, next to max_position_embeddings
        if self.mtp_layers:
            fields.ignore(("num_nextn_predict_layers",))
        sizes = read_sizes(fields)
        heads = read_heads(
            fields, sizes["hidden_size"], num_kv_heads=self.default_num_kv_heads, head_dim=self.default_head_dim
        )
        max_position_embeddings = fields.integer("max_position_embeddings", self.default_max_position_embeddings)
        attention_bias, output_bias = self._attention_biases(fields)
        return DecoderConfig(
            architecture=architecture,
            **sizes,
            **heads,
            activation=read_activation(fields, "hidden_act", "silu"),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            ropes=(RopeConfig.from_hf(fields, max_position_embeddings),),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            eos_token_ids=() if self.ends is None else self.ends[1:],
            bos_token_id=None if self.ends is None else self.ends[0],
            attention_bias=attention_bias,
            attention_output_bias=output_bias,
            mlp_bias=self._mlp_bias(fields),
            qk_norm="head" if self.qk_norm else "none",
            kinds=self._kinds(fields, sizes["num_layers"], heads["head_dim"]),
        )

    def to_hf(self, config: DecoderConfig) -> dict[str, object]:
        """See `Family`."""
        result: dict[str, object] = {
            "intermediate_size": config.intermediate_size,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": name_of_activation(config.activation),
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": config.ropes[0].to_hf(),
        }
        if self.attention_bias == "config":
            result["attention_bias"] = config.attention_bias
        if self.mlp_bias:
            result["mlp_bias"] = config.mlp_bias
        windows = [kind.sliding_window for kind in config.attention_kinds]
        window = next((window for window in windows if window is not None), None)
        if self.window == "length":
            result["sliding_window"] = window
        if self.window == "switch":
            result["use_sliding_window"] = window is not None
            if window is not None:
                result |= {
                    "sliding_window": window,
                    "layer_types": [FULL if window is None else SLIDING for window in windows],
                }
        return result

    def _attention_biases(self, fields: JsonFields) -> tuple[bool, bool]:
        """Return (bias on query, key and value; bias on the output)."""
        if self.attention_bias == "config":
            bias = fields.flag("attention_bias", False)
            return bias, bias
        fixed = self.attention_bias == "qkv"
        fields.only("attention_bias", fixed, why=f"{self.model_type} always computes {str(fixed).lower()}")
        return fixed, False

    def _mlp_bias(self, fields: JsonFields) -> bool:
        if self.mlp_bias:
            return fields.flag("mlp_bias", False)
        fields.only("mlp_bias", False, why=f"{self.model_type} has no biases in its feed-forward")
        return False

    def _kinds(self, fields: JsonFields, num_layers: int, head_dim: int) -> tuple[LayerKind, ...]:
        """Return the kinds of layers; empty if no layer has a window."""
        full = AttentionKind(head_dim**-0.5)
        allowed = (FULL,) if self.window == "none" else (FULL, SLIDING)
        types = fields.texts("layer_types", *allowed, count=num_layers)
        if self.window == "none":
            return ()
        # transformers gives Mistral a window of 4096 if the key is missing, and none if it is null.
        window = read_window(fields, 4096)
        if self.window == "length":
            alike = (FULL if window is None else SLIDING,) * num_layers
            if types and types != alike:
                raise Unsupported(
                    f"{fields.name}: layer_types has {', '.join(sorted(set(types)))}, but sliding_window is {window}, "
                    f"so all layers of {self.model_type} must be {alike[0]}"
                )
            types = alike
        else:
            first = fields.integer("max_window_layers", 28, minimum=0)
            is_on = fields.flag("use_sliding_window", False)
            types = types or tuple(SLIDING if index >= first else FULL for index in range(num_layers))
            window = window if is_on else None
        if window is None or SLIDING not in types:
            return ()
        narrow = AttentionKind(full.scale, sliding_window=window)
        return tuple(LayerKind(narrow if name == SLIDING else full) for name in types)


_OF_IMAGES = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("vision_token_id", "image_token_index", "video_token_index"),
)
_OF_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "bos_token_id")
_ROPE_SECTIONS = ("rope_scaling", "rope_parameters")


def _qwen_language(whole: JsonFields) -> JsonFields:
    """Return the fields of the language model of Qwen2.5-VL: in text_config, or next to vision_config."""
    whole.ignore(_OF_IMAGES)
    if not whole.has("text_config"):
        return whole
    text = whole.mapping("text_config")
    given = {key: whole.value(key) for key in _OF_WHOLE if whole.has(key)}
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        whole.only(key, text.get(key), why=f"text_config, which defines the language model, has {text.get(key)}")
    return JsonFields({**text, **given}, f"{whole.name} text_config")


def _read_sectioned(variant: LlamaVariant, fields: JsonFields, architecture: str) -> DecoderConfig:
    """Read a model whose frequencies are in sections, for the positions of time, row and column."""
    section = next((fields.mapping(key) for key in _ROPE_SECTIONS if fields.has(key)), {})
    sections = section.get("mrope_section", [24, 20, 20] if variant.model_type == "qwen3" else [16, 24, 24])
    if not isinstance(sections, list) or not all(isinstance(size, int) for size in sections):
        raise fields.bad("mrope_section", f"is {str(sections)[:80]}; it must be a list of 3 numbers")
    plain = {key: value for key, value in section.items() if key not in ("type", "mrope_section")}
    kind = plain.get("rope_type", section.get("type", "default"))
    plain["rope_type"] = "default" if kind == "mrope" else kind
    has_turns = plain.pop("mrope_interleaved", variant.model_type == "qwen3")
    if has_turns is not (variant.model_type == "qwen3"):
        raise fields.bad("mrope_interleaved", f"is {has_turns}; {architecture} always has {not has_turns}")
    config = variant.read(fields.replaced({"rope_scaling": None, "rope_parameters": plain}), architecture)
    return replace(config, ropes=(replace(config.ropes[0], sections=tuple(sections), has_turns=has_turns),))


def _qwen_images(model_type: str, variant: LlamaVariant) -> Family[DecoderConfig]:
    """Return a model that reads images (Alibaba 2025): Qwen2 or Qwen3, with rotary positions of three axes."""

    def write(config: DecoderConfig) -> dict[str, object]:
        sizes = {
            "model_type": f"{model_type}_text",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": config.max_position_embeddings,
        }
        return {"text_config": sizes | variant.to_hf(config)}

    def prefix(stored: Iterable[str]) -> str:
        is_new = any(name.startswith("model.language_model.") for name in stored)
        return "model.language_model." if is_new else "model."

    read = functools.partial(_read_sectioned, variant)
    family = decoder_family(model_type, read, write, Names(), name_prefix=prefix, ignored=("visual.",))
    return replace(family, language=_qwen_language)


def _family(variant: LlamaVariant) -> Family[DecoderConfig]:
    ignored = (variant.mtp_layers,) if variant.mtp_layers else ()
    return decoder_family(variant.model_type, variant.read, variant.to_hf, Names(), ignored=ignored)


def _read_mixtral(fields: JsonFields, architecture: str) -> DecoderConfig:
    """Read a config of Mixtral (Mistral 2023): experts in every layer, of which each token uses two."""
    fields.ignore(TRAINING)
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=8)
    fields.only("hidden_act", "silu", "swish", why="experts support only the activation silu")
    max_position_embeddings = fields.integer("max_position_embeddings", 131072)
    num_experts, top_k = read_choice(fields, (8, 2))
    routing = Routing(num_experts, top_k, normalises=True)
    attention = AttentionKind(heads["head_dim"] ** -0.5, sliding_window=read_window(fields))
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        **heads,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        ropes=(RopeConfig.from_hf(fields, max_position_embeddings, default_theta=1e6),),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=(2,),
        bos_token_id=1,
        kinds=(LayerKind(attention, is_sparse=True),) * sizes["num_layers"],
        mixture=Mixture(routing=routing, width=sizes["intermediate_size"]),
    )


def _mixtral_to_hf(config: DecoderConfig) -> dict[str, object]:
    assert config.mixture is not None
    return {
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": config.ropes[0].to_hf(),
        "sliding_window": config.attention_kinds[0].sliding_window,
        "num_local_experts": config.mixture.routing.num_experts,
        "num_experts_per_tok": config.mixture.routing.top_k,
    }


_MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts.", gate="w1", up="w3", down="w2"
)


def _read_phi3(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore(("embd_pdrop", "resid_pdrop"))
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"])
    fields.only("attention_bias", False, why="phi3 has no biases in attention")
    fields.only("mlp_bias", False, why="phi3 has no biases in its feed-forward")
    fields.only("full_attn_mod", 1, why="only identical layers are supported")
    fields.only("interpolate_factor", 1, why="positions are scaled only by rope_scaling")
    fields.only("lm_head_bias", False, why="a bias on the logits is not supported")
    max_position_embeddings = fields.integer("max_position_embeddings", 4096)
    rope = _phi3_rope(fields, max_position_embeddings)
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


def _phi3_rope(fields: JsonFields, max_position_embeddings: int) -> RopeConfig:
    rope = RopeConfig.from_hf(fields, max_position_embeddings, default_fraction=1.0, default_original=4096)
    fields.ignore(("original_max_position_embeddings",))
    if rope.kind not in ("default", "longrope"):
        raise Unsupported(f"{fields.name}: the RoPE type is {rope.kind!r}; Phi-3 has default and longrope")
    return rope


def _phi3_to_hf(config: DecoderConfig) -> dict[str, object]:
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
    "LlamaForCausalLM": _family(LlamaVariant("llama", "config", True, False, "none", None, None, 2048, (1, 2))),
    "MistralForCausalLM": _family(LlamaVariant("mistral", "none", False, False, "length", None, 8, 131072, (1, 2))),
    "Qwen2ForCausalLM": _family(LlamaVariant("qwen2", "qkv", False, False, "switch", None, 32, 32768, None)),
    "Qwen2_5_VLForConditionalGeneration": _qwen_images(
        "qwen2_5_vl", LlamaVariant("qwen2", "qkv", False, False, "switch", None, 32, 32768, None)
    ),
    "Qwen3VLForConditionalGeneration": _qwen_images(
        "qwen3_vl", LlamaVariant("qwen3", "config", False, True, "none", 128, 32, 128000, None)
    ),
    "Qwen3ForCausalLM": _family(LlamaVariant("qwen3", "config", False, True, "switch", 128, 32, 32768, None)),
    "MiMoForCausalLM": _family(
        LlamaVariant("mimo", "qkv", False, False, "switch", None, 32, 32768, None, "model.mtp_layers.")
    ),
    "Phi3ForCausalLM": decoder_family(
        "phi3", _read_phi3, _phi3_to_hf, Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    ),
    "MixtralForCausalLM": decoder_family("mixtral", _read_mixtral, _mixtral_to_hf, Names(experts=_MIXTRAL_EXPERTS)),
}
