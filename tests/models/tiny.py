"""Tiny checkpoints in Hugging Face layout, made from a seed alone: the same bytes with numpy here and torch elsewhere.

Norm weights are 1 + 0.1 randn and linear weights have a standard deviation of 0.05 or more, so that a wrong norm,
rotation or head order shows in the logits.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_NORM = re.compile(
    r"(norm|\.ln_\w+|norms\.\d+)\.weight$|layernorm_\d\.weight$|layer_scalar$|router\.(per_expert_)?scale$"
)
_STDS = {
    "embed_tokens": 0.05,
    "wte": 0.05,
    "embed_in": 0.05,
    "word_embeddings": 0.05,
    "embed_positions": 1.0,
    "wpe": 1.0,
}
_PARALLEL = ("falcon", "gpt_neox", "cohere", "cohere2", "phi")
SPELT_OUT = ("llama", "mistral", "qwen2", "qwen3", "opt")
"""Families whose tensors are named here; those of the others are recorded."""
SHAPES = Path(__file__).parent / "shapes.json"
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True, slots=True)
class TinyCase:
    """One checkpoint and the prompt that its golden answers are for.

    Attributes:
        name: unique; seeds the weights and the prompt.
        config: config.json as a checkpoint would carry it.
        prompt_len: tokens of the prompt.
    """

    name: str
    config: Mapping[str, object]
    prompt_len: int

    def prompt(self) -> list[int]:
        vocab_size = _count(self.config, "vocab_size")
        return _generator(f"{self.name}/prompt").integers(3, vocab_size, self.prompt_len).tolist()


def tiny_cases() -> list[TinyCase]:
    """Every family, tied and untied, 1 to 8 query heads per key/value head, D of 16 to 128, each kind of RoPE.

    Of OPT: the usual form, that of 350M (post-norm, a narrow embedding), and every other switch turned once.
    """
    llama31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama31["original_max_position_embeddings"] = 64
    mscales = {"mscale": 1.0, "mscale_all_dim": 0.6, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    linear, dynamic = {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}
    window = {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}
    return [
        _case("llama_mha", "Llama", (4, 4, 16), 24, rope_theta=10000.0),
        _case("llama_gqa_bias", "Llama", (6, 2, 32), 24, attention_bias=True, mlp_bias=True, head_dim=32),
        _case("llama_mqa_wide", "Llama", (2, 1, 128), 20, head_dim=128, rms_norm_eps=1e-5, torch_dtype="float32"),
        _case("llama3_tied", "Llama", (8, 2, 16), 90, tie_word_embeddings=True, rope_theta=5e5, rope_scaling=llama31),
        _case("llama3_new_style", "Llama", (4, 2, 64), 90, rope_parameters={**llama31, "rope_theta": 5e5}, head_dim=64),
        _case("llama_linear", "Llama", (4, 2, 32), 40, rope_scaling=linear, max_position_embeddings=64),
        _case("llama_dynamic_short", "Llama", (4, 2, 32), 20, rope_scaling=dynamic, max_position_embeddings=64),
        _case("llama_dynamic_long", "Llama", (4, 4, 16), 80, rope_scaling=dynamic, max_position_embeddings=64),
        _case("mistral_mqa", "Mistral", (8, 1, 32), 24, head_dim=32, sliding_window=None, rope_theta=1e6),
        _case("mistral_yarn", "Mistral", (4, 2, 80), 40, head_dim=80, sliding_window=None, rope_scaling=_YARN),
        _case("qwen2", "Qwen2", (7, 1, 16), 24, rope_theta=1e6, **window),
        _case("qwen2_tied_yarn", "Qwen2", (4, 2, 64), 40, tie_word_embeddings=True, rope_scaling={**_YARN, **mscales}),
        _case("qwen3", "Qwen3", (4, 2, 64), 24, head_dim=64, rope_theta=1e6, **window),
        _case("qwen3_tied", "Qwen3", (16, 8, 16), 24, head_dim=16, tie_word_embeddings=True, attention_bias=True),
        _case("qwen3_yarn", "Qwen3", (4, 1, 128), 40, head_dim=128, rope_scaling={**_YARN, "attention_factor": 1.3}),
        _opt("opt", (4, 16), 24),
        _opt("opt_post_norm", (2, 32), 32, do_layer_norm_before=False, word_embed_proj_dim=32),
        _opt(
            "opt_gelu_unbiased", (1, 64), 24, activation_function="gelu", enable_bias=False, tie_word_embeddings=False
        ),
        _opt("opt_no_affine", (4, 16), 24, layer_norm_elementwise_affine=False, word_embed_proj_dim=48),
        _opt("opt_no_final_norm", (4, 16), 20, _remove_final_layer_norm=True, prefix="</s>"),
        *_gemmas(),
        *_decoders(),
        *_variants(),
        *_recurrent(),
    ]


def _gemmas() -> list[TinyCase]:
    """Gemma from its second generation, whose windows hide a part of every prompt."""
    windowed = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 9, "rms_norm_eps": 1e-6}
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    whole_keys: dict[str, object] = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
    whole_keys |= {"hidden_size_per_layer_input": 0, "num_hidden_layers": 6}
    whole_keys["layer_types"] = ["sliding_attention", *["full_attention"] * 2] * 2
    beside = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40}
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    old_names = {"rope_local_base_freq": 2e4, "rope_theta": 5e5, "sliding_window_pattern": 6}
    return [
        _gemma("gemma2", 2, (4, 2), 40, 4, **windowed, attn_logit_softcapping=2.0, rope_theta=1e4),
        _gemma("gemma2_uncapped", 2, (4, 1), 24, 3, **windowed, **uncapped),
        _gemma("gemma3", 3, (4, 2), 40, 8, **windowed, layer_types=_types(8, 3), rope_parameters=nested),
        _gemma4("gemma4_text", (4, 1), 16, num_kv_shared_layers=4, use_double_wide_mlp=True),
        _gemma4("gemma4_keys", (8, 4), 24, **whole_keys),
        _gemma4("gemma4_moe", (8, 4), 24, **whole_keys, **beside),
        _gemma3n("gemma3n_text", 9),
        _gemma("gemma3_old_style", 3, (4, 2), 40, 7, **windowed, **old_names),
    ]


def _decoders() -> list[TinyCase]:
    """The other families, with each switch of theirs turned once; windows hide a part of every prompt."""
    long, short = [1.0 + 0.5 * i for i in range(8)], [1.0 + 0.01 * i for i in range(8)]
    longrope: dict[str, object] = {"type": "longrope", "long_factor": long, "short_factor": short}
    switched = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    whole = {"rope_scaling": longrope, "pad_token_id": 0, "original_max_position_embeddings": 32}
    growing = {**whole, "original_max_position_embeddings": 40}
    halves = {
        "rope_scaling": longrope,
        "pad_token_id": 0,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 128,
    }
    plain_neox = {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}
    chosen: dict[str, object] = {"num_experts_per_tok": 2}
    narrow = {"head_dim": 32, "sliding_window": 9}
    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    many = {**chosen, "num_experts": 6, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    groups: dict[str, object] = {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}
    gpt2 = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256}
    fading = {"n_inner": 88, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}
    return [
        _case("mistral_window", "Mistral", (4, 2, 32), 40, head_dim=32, sliding_window=8),
        _case("qwen2_window", "Qwen2", (4, 2, 16), 40, **switched),
        _case("phi3", "Phi3", (4, 2, 16), 40, pad_token_id=0, sliding_window=11, original_max_position_embeddings=256),
        _case("phi3_long", "Phi3", (4, 2, 16), 40, **whole),
        _case("phi3_short", "Phi3", (4, 4, 32), 40, **halves),
        _other("gpt2", "GPT2LMHead", "gpt2", 24, **gpt2),
        _other("gpt2_fading", "GPT2LMHead", "gpt2", 24, **gpt2, **fading),
        _neox("gpt_neox", 32, rotary_pct=0.25, rotary_emb_base=20000),
        _neox("gpt_neox_sequential", 16, **plain_neox, rope_scaling={"type": "linear", "factor": 2.0}),
        _falcon("falcon_mqa", multi_query=True, bias=True, alibi=False),
        _falcon("falcon_groups", **groups),
        _falcon("falcon_shared_norm", **groups, num_ln_in_parallel_attn=1),
        _falcon("falcon_sequential", multi_query=False, parallel_attn=False, ffn_hidden_size=88),
        _starcoder2("starcoder2", sliding_window=12),
        _case("mixtral", "Mixtral", (4, 2, 16), 24, **chosen, num_local_experts=4, sliding_window=None),
        _other("qwen2_moe", "Qwen2Moe", "qwen2_moe", 24, **sizes, **many, shared_expert_intermediate_size=40),
        _other("qwen3_moe", "Qwen3Moe", "qwen3_moe", 24, **sizes, **many, head_dim=32, norm_topk_prob=True),
        _other("gpt_oss", "GptOss", "gpt_oss", 40, **sizes, **chosen, **narrow, num_local_experts=4),
        _starcoder2("starcoder2_unbiased", use_bias=False, tie_word_embeddings=False, num_key_value_heads=4),
        _deepseek("deepseek_v2", 2, topk_method="group_limited_greedy", routed_scaling_factor=1.5),
        _deepseek("deepseek_v3", 3, q_lora_rank=36, rope_scaling={**_YARN, "mscale": 0.7, "mscale_all_dim": 0.6}),
        _case("phi3_grows", "Phi3", (4, 2, 16), 30, **growing),
    ]


def _variants() -> list[TinyCase]:
    """The families of `jpaged.models.families.variants`, with the switches that set each apart."""
    yarn = {**_YARN, "rope_theta": 1e4, "attention_factor": 1.2}
    two = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    granite = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}
    scaled = {**_YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    stretched = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
    windows = {"sliding_window": 9, "layer_types": _types(4, 4)}
    local: dict[str, object] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    glm = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    glm |= {"moe_intermediate_size": 40}
    ernie = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40}
    llama4: dict[str, object] = {"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96}
    llama4 |= {"no_rope_layer_interval": 2, "floor_scale": 8, "attn_scale": 0.3}
    return [
        _variant("arcee", "Arcee", 24, attention_bias=True),
        _variant("smollm3", "SmolLM3", 24, no_rope_layer_interval=2, num_hidden_layers=4),
        _variant("granite", "Granite", 24, **granite, attention_multiplier=0.3),
        _variant("olmo2", "Olmo2", 24),
        _variant("olmo3", "Olmo3", 40, rope_parameters=two, num_hidden_layers=4, **windows),
        _variant("glm4", "Glm4", 24, head_dim=16),
        _variant("seed_oss", "SeedOss", 24, head_dim=32),
        _variant("exaone4", "Exaone4", 40, num_hidden_layers=4, **windows),
        _variant("hunyuan_v1_dense", "HunYuanDenseV1", 24, head_dim=16, rope_parameters=stretched),
        _variant("cohere", "Cohere", 24, use_qk_norm=True, logit_scale=0.5),
        _variant("cohere2", "Cohere2", 40, num_hidden_layers=4, logit_scale=0.5, **windows),
        _variant("phi", "Phi", 24),
        _variant("stablelm", "StableLm", 24, use_qkv_bias=True, qk_layernorm=True),
        _variant("internlm3", "InternLM3", 24, head_dim=32, qkv_bias=True, bias=True),
        _variant("nemotron", "Nemotron", 24, head_dim=32),
        _variant("apertus", "Apertus", 24),
        _variant("ernie4_5", "Ernie4_5", 24, head_dim=16, use_bias=True),
        _variant("ministral3", "Ministral3", 40, head_dim=32, rope_parameters=scaled),
        _variant("gemma", "Gemma", 24, head_dim=32),
        _variant("stablelm_parallel", "StableLm", 24, use_parallel_residual=True),
        _variant("granitemoe", "GraniteMoe", 24, **granite, **local, attention_multiplier=0.3),
        _variant("glm4_moe", "Glm4Moe", 24, **glm, head_dim=32, use_qk_norm=True, attention_bias=True),
        _variant("minimax_m2", "MiniMaxM2", 24, **local, head_dim=32, rotary_dim=16),
        _variant("ernie4_5_moe", "Ernie4_5_Moe", 24, **ernie),
        _variant(
            "hunyuan_v1_moe", "HunYuanMoEV1", 24, head_dim=16, num_experts=4, moe_topk=2, rope_parameters=stretched
        ),
        _variant("phimoe", "Phimoe", 24, **local, attention_bias=True, lm_head_bias=True, router_jitter_noise=0.3),
        _variant("llama4_text", "Llama4", 26, **llama4, head_dim=32, num_hidden_layers=4),
        _latent("glm4_moe_lite", "Glm4MoeLite", n_group=4, topk_group=2, routed_scaling_factor=1.5),
        _latent("mistral4", "Mistral4", rope_parameters=scaled, routed_scaling_factor=1.5),
    ]


def _recurrent() -> list[TinyCase]:
    """Families with recurrent layers, besides those with attention."""
    granite = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}
    local: dict[str, object] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    conv: dict[str, object] = {
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        "num_hidden_layers": 5,
    }
    conv |= {"intermediate_size": 120, "block_multiple_of": 8}
    conv_experts: dict[str, object] = {
        "layer_types": conv["layer_types"],
        "num_hidden_layers": 5,
        "num_dense_layers": 1,
    }
    conv_experts |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    delta: dict[str, object] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16}
    delta |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "head_dim": 32, "num_hidden_layers": 4}
    delta |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
    delta |= {"shared_expert_intermediate_size": 48}
    hybrid: dict[str, object] = {
        **granite,
        "attention_multiplier": 0.3,
        "num_hidden_layers": 4,
        "shared_intermediate_size": 48,
    }
    hybrid |= {"layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 8, "mamba_d_state": 16}
    dense: dict[str, object] = {**hybrid, "num_local_experts": 0, "mamba_n_groups": 2, "mamba_conv_bias": False}
    dense |= {"position_embedding_type": "rope", "layer_types": ["mamba", "mamba", "attention", "mamba"]}
    pure: dict[str, object] = {"hidden_size": 48, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 12}
    pure |= {"state_size": 16, "expand": 2, "pad_token_id": 0, "tie_word_embeddings": True, "n_groups": 2}
    kimi: dict[str, object] = {"hidden_size": 64, "num_hidden_layers": 4, "num_key_value_heads": 4, "kv_lora_rank": 32}
    kimi |= {"linear_num_heads": 8, "linear_head_dim": 16, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16}
    kimi |= {"layer_types": ["linear_attention", "full_attention"] * 2, "v_head_dim": 20, "num_shared_experts": 2}
    kimi |= {"num_experts": 8, "num_experts_per_token": 3, "moe_intermediate_size": 40}
    kimi |= {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    return [
        _variant("kimi_linear", "KimiLinear", 40, **kimi),
        _variant("lfm2", "Lfm2", 40, **conv),
        _variant("lfm2_moe", "Lfm2Moe", 40, **conv_experts),
        _variant("qwen3_next", "Qwen3Next", 40, **delta),
        _qwen35("qwen3_5_text", "Qwen3_5", **delta),
        _qwen35("qwen3_5_moe_text", "Qwen3_5Moe", **delta),
        _variant("granitemoehybrid", "GraniteMoeHybrid", 40, **hybrid, **local),
        _variant("granitemoehybrid_rope", "GraniteMoeHybrid", 40, **dense),
        _other("mamba2", "Mamba2", "mamba2", 40, **pure),
        _nemotron("nemotron_h", "M-M*-M-MM"),
        _nemotron("nemotron_h_moe", "M-M*EMEMM", **NEMOTRON_EXPERTS),
    ]


NEMOTRON_EXPERTS: dict[str, object] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48,
}


def _nemotron(name: str, pattern: str, **settings: object) -> TinyCase:
    """Layers with and without a feed-forward, which is a layer of its own in checkpoints."""
    types = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    sizes: dict[str, object] = {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 16}
    sizes |= {"hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "max_position_embeddings": 256, "layers_block_type": [types[one] for one in pattern]}
    return _other(name, "NemotronH", "nemotron_h", 40, **sizes, **settings)


def _qwen35(name: str, family: str, **settings: object) -> TinyCase:
    """A successor of Qwen3-Next, whose sections of rotary embedding change nothing for text."""
    rope = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    left_out = {"mlp_only_layers"} | ({key for key in settings if "expert" in key} if name == "qwen3_5_text" else set())
    left_out |= {"moe_intermediate_size"} if name == "qwen3_5_text" else set()
    kept = {key: value for key, value in settings.items() if key not in left_out}
    return _variant(name, family, 40, **kept, rope_parameters=rope)


def _latent(name: str, family: str, **settings: object) -> TinyCase:
    """A successor of DeepSeek-V3; see `_deepseek`."""
    base = _deepseek(name, 3, q_lora_rank=36, first_k_dense_replace=1).config
    groups = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    sizes = {key: value for key, value in base.items() if key not in ("architectures", "model_type")}
    return _other(name, family, name, 40, **{**sizes, **groups, **settings})


def _variant(name: str, family: str, prompt_len: int, **settings: object) -> TinyCase:
    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
    model_type = name.removesuffix("_parallel").removesuffix("_rope")
    return _other(name, family, model_type, prompt_len, **{**sizes, **settings})


def _types(num_layers: int, period: int) -> list[str]:
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]


def _other(name: str, architecture: str, model_type: str, prompt_len: int, **settings: object) -> TinyCase:
    """A config in the family's own words."""
    class_name = f"{architecture}Model" if model_type == "gpt2" else f"{architecture}ForCausalLM"
    config = {"architectures": [class_name], "model_type": model_type, "vocab_size": 131}
    return TinyCase(name, {**config, "bos_token_id": 1, "eos_token_id": 2, **settings}, prompt_len)


def _gemma(
    name: str, version: int, heads: tuple[int, int], prompt_len: int, num_layers: int, **settings: object
) -> TinyCase:
    num_heads, num_kv_heads = heads
    sizes = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": num_layers}
    sizes |= {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "max_position_embeddings": 256}
    model_type = "gemma2" if version == 2 else "gemma3_text"
    return _other(name, f"Gemma{version}", model_type, prompt_len, **sizes, **settings)


def _gemma3n(name: str, num_layers: int) -> TinyCase:
    """Two layers with sparse gates, three without keys, and fewer tokens with inputs of layers than tokens."""
    sizes: dict[str, object] = {"hidden_size": 48, "intermediate_size": [88] * num_layers, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
    sizes |= {"activation_sparsity_pattern": [0.9] * 2 + [0.0] * (num_layers - 2), "num_kv_shared_layers": 3}
    sizes |= {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 128, "laurel_rank": 8}
    sizes |= {"sliding_window": 8, "layer_types": _types(num_layers, 3), "max_position_embeddings": 256}
    return _other(name, "Gemma3n", "gemma3n_text", 40, **sizes)


def _gemma4(name: str, heads: tuple[int, int], head_dim: int, **settings: object) -> TinyCase:
    """Layers with a window whose heads are half as large as those of the others."""
    sizes: dict[str, object] = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 9, "pad_token_id": 0}
    sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "max_position_embeddings": 256}
    sizes |= {"head_dim": head_dim, "global_head_dim": 2 * head_dim, "sliding_window": 8, "layer_types": _types(9, 3)}
    sizes |= {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 131, "final_logit_softcapping": 30.0}
    return _other(name, "Gemma4", "gemma4_text", 40, **sizes | settings)


def _neox(name: str, head_dim: int, **settings: object) -> TinyCase:
    sizes = {"hidden_size": 4 * head_dim, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4}
    return _other(name, "GPTNeoX", "gpt_neox", 24, **sizes, max_position_embeddings=256, **settings)


def _falcon(name: str, **settings: object) -> TinyCase:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}
    return _other(name, "Falcon", "falcon", 24, **{**sizes, **settings})


def _starcoder2(name: str, **settings: object) -> TinyCase:
    sizes = {"hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
    return _other(name, "Starcoder2", "starcoder2", 40, **{**sizes, **settings})


def _deepseek(name: str, version: int, **settings: object) -> TinyCase:
    """A dense layer, and two with experts in groups; latents of 32 + 16 numbers."""
    sizes: dict[str, object] = {
        "hidden_size": 48,
        "intermediate_size": 88,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
    }
    return _other(name, f"DeepseekV{version}", f"deepseek_v{version}", 40, **{**sizes, **settings})


def tiny_case(name: str) -> TinyCase:
    return {case.name: case for case in tiny_cases()}[name]


def write_checkpoint(case: TinyCase, folder: Path) -> Path:
    """Writes config.json and model.safetensors, float32, into the folder, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(case.config), indent=2), encoding="utf-8")
    save_file(tensors(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors(case: TinyCase) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint; each has its own stream, so their order does not matter."""
    return {name: tensor(case, name, shape) for name, shape in _shapes(case.config).items()}


def _case(name: str, family: str, heads: tuple[int, int, int], prompt_len: int, **settings: object) -> TinyCase:
    num_heads, num_kv_heads, head_dim = heads
    config: dict[str, object] = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": 131,
        # A width of its own where the config names head_dim, so that E and H * D cannot be mistaken for each other.
        "hidden_size": 48 if "head_dim" in settings else num_heads * head_dim,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }
    return TinyCase(name, {**config, **settings}, prompt_len)


def _opt(name: str, heads: tuple[int, int], prompt_len: int, **settings: object) -> TinyCase:
    num_heads, head_dim = heads
    config: dict[str, object] = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 131,
        "hidden_size": num_heads * head_dim,
        "ffn_dim": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "max_position_embeddings": 256,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "use_cache": True,
    }
    return TinyCase(name, {**config, **settings}, prompt_len)


def _shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers writes them, spelt out apart from the code under test, or as it told them."""
    if config["model_type"] not in SPELT_OUT:
        return recorded_shapes()[shapes_key(config)]
    return _opt_shapes(config) if config["model_type"] == "opt" else _llama_shapes(config)


def shapes_key(config: Mapping[str, object]) -> str:
    """Under which the shapes of a config's tensors are recorded."""
    return json.dumps(config, sort_keys=True)


@functools.cache
def recorded_shapes() -> dict[str, dict[str, tuple[int, ...]]]:
    """What `python -m tests.parity.make shapes` wrote of families that `_shapes` does not spell out."""
    read = json.loads(SHAPES.read_text(encoding="utf-8"))
    return {key: {name: tuple(shape) for name, shape in shapes.items()} for key, shapes in read.items()}


def _opt_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    width, inner, vocab_size = (_count(config, key) for key in ("hidden_size", "ffn_dim", "vocab_size"))
    embed_size = _count(config, "word_embed_proj_dim") if "word_embed_proj_dim" in config else width
    decoder = "model.decoder"
    linears: dict[str, tuple[int, ...]] = {}
    norms: list[str] = []
    if config["do_layer_norm_before"] and not config.get("_remove_final_layer_norm"):
        norms.append(f"{decoder}.final_layer_norm")
    for index in range(_count(config, "num_hidden_layers")):
        layer = f"{decoder}.layers.{index}"
        norms += [f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm"]
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linears[f"{layer}.self_attn.{part}"] = (width, width)
        linears[f"{layer}.fc1"] = (inner, width)
        linears[f"{layer}.fc2"] = (width, inner)
    shapes: dict[str, tuple[int, ...]] = {
        f"{decoder}.embed_tokens.weight": (vocab_size, embed_size),
        f"{decoder}.embed_positions.weight": (_count(config, "max_position_embeddings") + 2, width),
    }
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab_size, embed_size)
    if embed_size != width:
        shapes[f"{decoder}.project_in.weight"] = (width, embed_size)
        shapes[f"{decoder}.project_out.weight"] = (embed_size, width)
    if config.get("layer_norm_elementwise_affine", True):
        shapes |= {f"{name}.{kind}": (width,) for name in norms for kind in ("weight", "bias")}
    for name, shape in linears.items():
        shapes[f"{name}.weight"] = shape
        if config.get("enable_bias", True):
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _llama_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    width, inner, vocab_size = (_count(config, key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    num_heads, num_kv_heads = _count(config, "num_attention_heads"), _count(config, "num_key_value_heads")
    head_dim = _count(config, "head_dim") if "head_dim" in config else width // num_heads
    family = config["model_type"]
    out_bias = config.get("attention_bias", False)
    qkv_bias = out_bias or family == "qwen2"
    rows = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab_size, width)
    for index in range(_count(config, "num_hidden_layers")):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
        for part, out in rows.items():
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (out, width)
            if qkv_bias:
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = (out,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, rows["q"])
        if out_bias:
            shapes[f"{layer}.self_attn.o_proj.bias"] = (width,)
        if family == "qwen3":
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        for part, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            shapes[f"{layer}.mlp.{part}_proj.weight"] = shape
            if config.get("mlp_bias", False):
                shapes[f"{layer}.mlp.{part}_proj.bias"] = shape[:1]
    return shapes


def tensor(case: TinyCase, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor, whose stream its name and the case's begin."""
    if name.endswith((".act_fn.beta", ".act_fn.eps")):
        return np.array(0.5 if name.endswith("beta") else -1e-6, np.float32)
    noise = _generator(f"{case.name}/{name}").standard_normal(shape, dtype=np.float32)
    if _NORM.search(name):
        kind = str(case.config["model_type"])
        is_less_one = kind.startswith(("gemma", "nemotron"))  # stored scales are less 1
        is_less_one = is_less_one and not kind.startswith(("gemma3n", "gemma4"))
        offset = 0 if is_less_one else 1
        return np.float32(offset) + np.float32(0.1) * noise
    if name.endswith(".bias"):
        return np.float32(0.1) * noise
    # A small embedding under layers of unit size keeps tied models from repeating their input, and positions of that
    # size keep them from running in a circle.
    # Where attention and feed-forward stand side by side, a model of few layers runs in a circle all the sooner.
    gain = 3.0 if case.config["model_type"] in _PARALLEL else 1.2
    std = _STDS.get(name.split(".")[-2], max(0.05, gain * shape[-1] ** -0.5))
    return np.float32(std) * noise


def _generator(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))


def _count(config: Mapping[str, object], key: str) -> int:
    value = config[key]
    assert isinstance(value, int)
    return value
