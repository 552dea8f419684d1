"""gpt-oss (OpenAI 2025): experts in every layer, sinks in attention, a window in every second layer."""

from __future__ import annotations

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import GateFunction, Routing
from jpaged.models.config import Mixture
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import FULL, SLIDING, TRAINING, read_choice, read_heads, read_sizes
from jpaged.models.decoder.leaves import ExpertNames
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.rope_config import RopeConfig

_THETA = 150000.0
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Rope of a config without one."""


def _read(fields: JsonFields, architecture: str) -> DecoderConfig:
    # The published files repeat two numbers under the names of OpenAI's own code.
    fields.ignore((*TRAINING, "experts_per_token", "initial_context_length"))
    fields.only("hidden_act", "silu", "swish", why="the experts' gates always use the sigmoid")
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=8, head_dim=64)
    max_position_embeddings = fields.integer("max_position_embeddings", 131072)
    has_bias = fields.flag("attention_bias", True)
    num_experts, top_k = read_choice(fields, (128, 4))
    gate = GateFunction("clamped", fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        **heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        has_sinks=True,
        ropes=(_rope(fields, max_position_embeddings),),
        kinds=_kinds(fields, sizes["num_layers"], heads["head_dim"]),
        mixture=Mixture(
            routing=Routing(num_experts, top_k, scores="chosen"),
            width=sizes["intermediate_size"],
            gate=gate,
            has_biases=True,
            router_bias=True,
        ),
    )


def _rope(fields: JsonFields, max_position_embeddings: int) -> RopeConfig:
    if fields.mapping("rope_scaling") or fields.has("rope_parameters"):  # an empty rope_scaling counts as missing
        return RopeConfig.from_hf(fields, max_position_embeddings, default_theta=_THETA)
    theta = fields.number("rope_theta", _THETA)
    return RopeConfig.of_section(JsonFields(_ROPE, "config.json rope_parameters"), max_position_embeddings, theta)


def _kinds(fields: JsonFields, num_layers: int, head_dim: int) -> tuple[LayerKind, ...]:
    window = fields.integer("sliding_window", 128)
    types = fields.texts("layer_types", FULL, SLIDING, count=num_layers)
    types = types or tuple(FULL if index % 2 else SLIDING for index in range(num_layers))
    windows = {FULL: None, SLIDING: window}
    return tuple(
        LayerKind(AttentionKind(head_dim**-0.5, sliding_window=windows[name]), is_sparse=True) for name in types
    )


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    mixture, windows = config.mixture, [kind.sliding_window for kind in config.attention_kinds]
    assert mixture is not None
    window = next((window for window in windows if window is not None), None)
    return {
        "intermediate_size": mixture.width,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.attention_bias,
        "rope_parameters": config.ropes[0].to_hf(),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "num_local_experts": mixture.routing.num_experts,
        "num_experts_per_tok": mixture.routing.top_k,
        "swiglu_alpha": mixture.gate.alpha,
        "swiglu_limit": mixture.gate.limit,
    } | ({} if window is None else {"sliding_window": window})


_EXPERTS = ExpertNames(
    router="mlp.router",
    experts="mlp.experts.",
    gate="gate_up_proj",
    up="gate_up_proj",
    down="down_proj",
    fused="alternating",
)

ARCHITECTURES = {"GptOssForCausalLM": decoder_family("gpt_oss", _read, _to_hf, Names(experts=_EXPERTS))}
