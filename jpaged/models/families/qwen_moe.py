"""Qwen2-MoE, Qwen3-MoE and gpt-oss: experts in most layers, in Qwen2-MoE also one that all tokens share.

gpt-oss (OpenAI 2025) has sinks in attention, and a window in every second layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import GateFunction, Routing
from jpaged.models.config import Mixture
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import (
    FULL,
    NUM_EXPERTS,
    SLIDING,
    TRAINING,
    read_choice,
    read_heads,
    read_sizes,
    read_sparse_layers,
    read_width,
    read_window,
)
from jpaged.models.decoder.leaves import ExpertNames
from jpaged.models.family import Family
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class QwenMoe:
    """The differences between the two, fixed in code.

    Attributes:
        has_shared_expert: there is a shared expert, weighted by a score (Qwen2-MoE); otherwise heads are normalized
            (Qwen3-MoE).
        width: of an expert; default for config.json.
        choice: experts, and experts per token; default for config.json.
        num_kv_heads: default for config.json.
    """

    model_type: str
    has_shared_expert: bool
    width: int
    choice: tuple[int, int]
    num_kv_heads: int

    def read(self, fields: JsonFields, architecture: str) -> DecoderConfig:
        """See `Family`."""
        fields.ignore(TRAINING)
        sizes = read_sizes(fields)
        heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=self.num_kv_heads)
        fields.only("hidden_act", "silu", "swish", why="experts support only the activation silu")
        max_position_embeddings = fields.integer("max_position_embeddings", 32768)
        bias = fields.flag("qkv_bias", True) if self.has_shared_expert else fields.flag("attention_bias", False)
        return DecoderConfig(
            architecture=architecture,
            **sizes,
            **heads,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            ropes=(RopeConfig.from_hf(fields, max_position_embeddings),),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=bias,
            attention_output_bias=bias and not self.has_shared_expert,
            qk_norm="none" if self.has_shared_expert else "head",
            kinds=self._kinds(fields, sizes["num_layers"], heads["head_dim"]),
            mixture=self._mixture(fields),
        )

    def to_hf(self, config: DecoderConfig) -> dict[str, object]:
        """See `Family`."""
        mixture, kinds = config.mixture, config.layer_kinds
        assert mixture is not None
        windows = [kind.attention.sliding_window for kind in kinds]
        window = next((window for window in windows if window is not None), None)
        result: dict[str, object] = {
            "intermediate_size": config.intermediate_size,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": config.ropes[0].to_hf(),
            "moe_intermediate_size": mixture.width,
            "num_experts": mixture.routing.num_experts,
            "num_experts_per_tok": mixture.routing.top_k,
            "norm_topk_prob": mixture.routing.normalises,
            "mlp_only_layers": [index for index, kind in enumerate(kinds) if not kind.is_sparse],
            "use_sliding_window": window is not None,
            "sliding_window": window,
        }
        if self.has_shared_expert:
            result |= {"shared_expert_intermediate_size": mixture.shared_width, "qkv_bias": config.attention_bias}
            result["layer_types"] = [FULL if window is None else SLIDING for window in windows]
        else:
            result["attention_bias"] = config.attention_bias
        return result

    def _mixture(self, fields: JsonFields) -> Mixture:
        # Qwen3-MoE accepts either name; for Qwen2-MoE transformers ignores the other one and uses its default.
        names = ("num_experts",) if self.has_shared_expert else NUM_EXPERTS
        num_experts, top_k = read_choice(fields, self.choice, names)
        fields.only(
            "num_local_experts", num_experts, why=f"{self.model_type} uses the name num_experts, which is {num_experts}"
        )
        shared = read_width(fields, "shared_expert_intermediate_size", 5632) if self.has_shared_expert else 0
        return Mixture(
            routing=Routing(num_experts, top_k, normalises=fields.flag("norm_topk_prob", False)),
            width=read_width(fields, "moe_intermediate_size", self.width),
            shared_width=shared,
            shared_is_weighed=self.has_shared_expert,
        )

    def _kinds(self, fields: JsonFields, num_layers: int, head_dim: int) -> tuple[LayerKind, ...]:
        is_sparse = read_sparse_layers(fields, num_layers)
        window = None
        if fields.flag("use_sliding_window", False):
            window = read_window(fields, 4096)
        else:
            fields.ignore(("sliding_window",))  # transformers writes it as 0
        if self.has_shared_expert:
            # transformers: every other one of the first layers.
            num_narrow = fields.integer("max_window_layers", 28, minimum=0)
            types = fields.texts("layer_types", FULL, SLIDING, count=num_layers)
            types = types or tuple(SLIDING if i < num_narrow and i % 2 == 0 else FULL for i in range(num_layers))
        else:
            fields.ignore(("max_window_layers", "layer_types"))  # the window of transformers applies to all layers
            types = (SLIDING,) * num_layers
        full, narrow = (AttentionKind(head_dim**-0.5, sliding_window=width) for width in (None, window))
        return tuple(
            LayerKind(narrow if name == SLIDING else full, is_sparse=sparse)
            for name, sparse in zip(types, is_sparse, strict=True)
        )


def _family(variant: QwenMoe) -> Family[DecoderConfig]:
    return decoder_family(variant.model_type, variant.read, variant.to_hf, Names())


_GPT_OSS_THETA = 150000.0
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Rope of a config without one."""


def _read_gpt_oss(fields: JsonFields, architecture: str) -> DecoderConfig:
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
        ropes=(_gpt_oss_rope(fields, max_position_embeddings),),
        kinds=_gpt_oss_kinds(fields, sizes["num_layers"], heads["head_dim"]),
        mixture=Mixture(
            routing=Routing(num_experts, top_k, scores="chosen"),
            width=sizes["intermediate_size"],
            gate=gate,
            has_biases=True,
            router_bias=True,
        ),
    )


def _gpt_oss_rope(fields: JsonFields, max_position_embeddings: int) -> RopeConfig:
    if fields.mapping("rope_scaling") or fields.has("rope_parameters"):  # an empty rope_scaling counts as missing
        return RopeConfig.from_hf(fields, max_position_embeddings, default_theta=_GPT_OSS_THETA)
    theta = fields.number("rope_theta", _GPT_OSS_THETA)
    return RopeConfig.of_section(
        JsonFields(_GPT_OSS_ROPE, "config.json rope_parameters"), max_position_embeddings, theta
    )


def _gpt_oss_kinds(fields: JsonFields, num_layers: int, head_dim: int) -> tuple[LayerKind, ...]:
    window = fields.integer("sliding_window", 128)
    types = fields.texts("layer_types", FULL, SLIDING, count=num_layers)
    types = types or tuple(FULL if index % 2 else SLIDING for index in range(num_layers))
    windows = {FULL: None, SLIDING: window}
    return tuple(
        LayerKind(AttentionKind(head_dim**-0.5, sliding_window=windows[name]), is_sparse=True) for name in types
    )


def _gpt_oss_to_hf(config: DecoderConfig) -> dict[str, object]:
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


_GPT_OSS_EXPERTS = ExpertNames(
    router="mlp.router",
    experts="mlp.experts.",
    gate="gate_up_proj",
    up="gate_up_proj",
    down="down_proj",
    fused="alternating",
)


ARCHITECTURES = {
    "Qwen2MoeForCausalLM": _family(QwenMoe("qwen2_moe", True, 1408, (60, 4), 16)),
    "Qwen3MoeForCausalLM": _family(QwenMoe("qwen3_moe", False, 768, (128, 8), 4)),
    "GptOssForCausalLM": decoder_family("gpt_oss", _read_gpt_oss, _gpt_oss_to_hf, Names(experts=_GPT_OSS_EXPERTS)),
}
