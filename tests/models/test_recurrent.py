"""Models with recurrent layers: their configs as published, their places, and the options that they refuse by name."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jpaged.checkpoints.names import model_leaves
from jpaged.config import EngineConfig
from jpaged.config.speculative import MAX_NUM_SPECULATIVE_TOKENS
from jpaged.device.compilation.lowering import check_recurrent, state_checkpoint_interval
from jpaged.device.context import recurrence_kernel
from jpaged.device.mesh import MODEL_AXIS
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.recurrence import BLOCK_LEN, SHORT_LEN
from jpaged.models.decoder import DecoderConfig
from jpaged.models.decoder.config import DeltaShape, MambaShape
from jpaged.models.families.deepseek.config import DeepseekConfig
from jpaged.models.hf_config import from_hf, to_hf
from jpaged.models.layer_kinds import count_state_bytes, get_stacks, group_kinds
from jpaged.models.registry import find_family
from jpaged.models.sharding import largest_split, pad_for_sharding, with_dp_attention, with_parallel_experts
from jpaged.plan.known_models import KNOWN_MODELS
from tests.models.tiny import tiny_case

LFM2_350M: dict[str, object] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 1024,
    "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 1024,
    "conv_dim_out": 1024,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 16,
    "num_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
QWEN3_NEXT_80B: dict[str, object] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GRANITE_4_H_350M: dict[str, object] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.015625,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 768,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 2048,
    "layer_types": ["attention" if index in (10, 13, 17, 27) else "mamba" for index in range(32)],
    "logits_scaling": 3,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 32768,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.246,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0",
    "use_cache": True,
    "vocab_size": 100352,
}
QWEN35_9B: dict[str, object] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "layer_types": ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(32)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
KIMI_LINEAR_48B: dict[str, object] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
ATTENDING = [2, 5, 8, 10, 12, 14]


def read(name: str = "lfm2", **settings: object) -> DecoderConfig:
    config = from_hf({**tiny_case(name).config, **settings})
    assert isinstance(config, DecoderConfig)
    return config


def test_lfm2_is_read_as_published() -> None:
    config = from_hf(LFM2_350M)
    assert (config.intermediate_size, config.head_dim, config.tie_word_embeddings) == (4608, 64, True)
    assert [index for index, kind in enumerate(config.layer_kinds) if not kind.states] == ATTENDING
    assert (config.num_recurrent_layers, config.num_attention_layers) == (10, 6)
    assert count_state_bytes(config.layer_kinds, np.dtype(np.float16)) == 10 * 1024 * 2 * 2
    assert from_hf(to_hf(config)) == config


def test_qwen3_next_is_read_as_published() -> None:
    config = from_hf(QWEN3_NEXT_80B)
    assert isinstance(config, DecoderConfig)
    assert config.delta == DeltaShape(16, 32, 128, 128)
    assert [index for index, kind in enumerate(config.layer_kinds) if not kind.states] == list(range(3, 48, 4))
    assert {kind.is_sparse for kind in config.layer_kinds} == {True}
    window, matrices = 8192 * 3 * 2, 32 * 128 * 128 * 4
    assert count_state_bytes(config.layer_kinds, np.dtype(np.float16)) == 36 * (window + matrices)
    assert from_hf(to_hf(config)) == config


def test_qwen35_is_read_as_published() -> None:
    """Without the images that it reads: as a language model alone, of which only the name differs."""
    config = from_hf(QWEN35_9B)
    assert isinstance(config, DecoderConfig)
    assert (config.delta, config.ropes[0].fraction) == (DeltaShape(16, 32, 128, 128), 0.25)
    assert (config.mixture, config.eos_token_ids, config.checkpoint_dtype) == (None, (248044,), "bfloat16")
    alone = KNOWN_MODELS["qwen3.5-9b"].config
    assert dataclasses.replace(config, architecture=alone.architecture) == alone
    assert from_hf(to_hf(config)) == config


def test_all_layers_of_qwen35_moe_have_experts() -> None:
    config = KNOWN_MODELS["qwen3.5-35b-a3b"].config
    assert config.mixture is not None
    assert (config.mixture.routing.num_experts, config.mixture.routing.top_k) == (256, 8)
    assert {kind.is_sparse for kind in config.layer_kinds} == {True}
    images = dataclasses.replace(config, architecture="Qwen3_5MoeForConditionalGeneration")
    assert from_hf(to_hf(images)) == images
    assert from_hf(to_hf(config)) == config


def test_kimi_linear_is_read_as_published() -> None:
    """Its layers count from 1, and those with attention have latents; nothing is rotated."""
    config = from_hf(KIMI_LINEAR_48B)
    assert isinstance(config, DeepseekConfig)
    assert (config.delta, config.conv_len) == (DeltaShape(32, 32, 128, 128), 4)
    assert [index for index, kind in enumerate(config.layer_kinds) if not kind.states] == [3, 7, 11, 15, 19, 23, 26]
    assert [kind.is_sparse for kind in config.layer_kinds] == [False] + [True] * 26
    assert (config.head_dim, config.value_dim, config.num_kv_heads, config.ropes) == (576, 512, 1, ())
    assert {kind.scale for kind in config.attention_kinds} == {192**-0.5}
    assert config.mixture is not None
    assert (config.mixture.routing.top_k, config.mixture.routing.scale, config.mixture.shared_width) == (8, 2.446, 1024)
    window, matrices = 3 * 4096 * 3 * 2, 32 * 128 * 128 * 4
    assert count_state_bytes(config.layer_kinds, np.dtype(np.float16)) == 20 * (window + matrices)
    assert from_hf(to_hf(config)) == config == KNOWN_MODELS["kimi-linear-48b-a3b"].config


def test_kimi_linear_as_transformers_writes_it_equals_the_published_file() -> None:
    """Layers by type, the sizes of delta attention outside their section, and standard names."""
    config = from_hf(KIMI_LINEAR_48B)
    renamed: dict[str, object] = {key: value for key, value in KIMI_LINEAR_48B.items() if key != "linear_attn_config"}
    for name, published in (
        ("max_position_embeddings", "model_max_length"),
        ("n_group", "num_expert_group"),
        ("norm_topk_prob", "moe_renormalize"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("num_local_experts", "num_experts"),
        ("n_shared_experts", "num_shared_experts"),
    ):
        renamed[name] = renamed.pop(published)
    types = ["linear_attention" if kind.states else "full_attention" for kind in config.layer_kinds]
    sparse = ["dense"] + ["sparse"] * 26
    renamed |= {"layer_types": types, "mlp_layer_types": sparse, "linear_num_heads": 32, "linear_head_dim": 128}
    assert from_hf(renamed) == config


@pytest.mark.parametrize("part", ["mlp", "block_sparse_moe"])
def test_dense_layers_of_kimi_linear_have_the_names_of_published_files_and_of_transformers(part: str) -> None:
    config = from_hf(KIMI_LINEAR_48B)
    names = {f"model.layers.0.{part}.{name}_proj.weight" for name in ("gate", "up", "down")}
    found = {name for leaf in model_leaves(config, {"model.norm.weight", *names}).layers[0] for name, _ in leaf.tensors}
    assert names < found


def test_data_parallel_attention_is_refused_next_to_recurrent_state() -> None:
    config = with_parallel_experts(read("kimi_linear"))
    with pytest.raises(InvalidArgument, match="enable_dp_attention: is on, but KimiLinearForCausalLM has recurrent"):
        with_dp_attention(config)


def test_feed_forwards_of_nemotron_belong_to_the_layers_before() -> None:
    pattern = "M-M*EMEMM"
    config = from_hf(tiny_case("nemotron_h_moe").config)
    by_pattern = {**tiny_case("nemotron_h_moe").config, "layers_block_type": None, "hybrid_override_pattern": pattern}
    assert from_hf(by_pattern) == config
    assert [(kind.has_feed_forward, kind.is_sparse, bool(kind.states)) for kind in config.layer_kinds] == [
        *((True, False, True), (False, False, True), (True, True, False), (True, True, True)),
        *((False, False, True), (False, False, True)),
    ]
    family, (_, mamba, attention, *_) = find_family(config.architecture), config.layer_kinds
    names = {name for leaf in family.layer_leaves(config, "backbone.layers.2.", attention) for name, _ in leaf.tensors}
    assert {"backbone.layers.3.norm.weight", "backbone.layers.3.mixer.q_proj.weight"} < names
    assert {"backbone.layers.4.mixer.experts.7.up_proj.weight", "backbone.layers.4.norm.weight"} < names
    names = {name for leaf in family.layer_leaves(config, "backbone.layers.1.", mamba) for name, _ in leaf.tensors}
    assert {name.split(".")[2] for name in names} == {"2"}
    written = to_hf(config)
    assert written["num_hidden_layers"] == len(pattern)
    assert from_hf(written) == config


@pytest.mark.parametrize("inner", ["", "language_model."])
def test_tensors_of_qwen35_are_found_alone_and_next_to_images(inner: str) -> None:
    family = find_family("Qwen3_5ForConditionalGeneration")
    assert family.name_prefix([f"model.{inner}embed_tokens.weight", "lm_head.weight"]) == f"model.{inner}"
    config = from_hf(tiny_case("qwen3_5_moe_text").config)
    leaves = family.layer_leaves(config, f"model.{inner}layers.0.", config.layer_kinds[0])
    experts = {name.partition(".experts.")[2] for leaf in leaves for name, _ in leaf.tensors} - {""}
    if inner:
        assert experts == {"gate_up_proj", "down_proj"}
    else:
        assert {"0.gate_proj.weight", "7.up_proj.weight", "7.down_proj.weight"} < experts


def test_projections_apart_equal_those_grouped_by_key_head() -> None:
    """Outputs of Qwen3.5 are grouped by key head, as Qwen3-Next stores them."""
    config = from_hf(tiny_case("qwen3_5_text").config)
    assert isinstance(config, DecoderConfig) and config.delta is not None
    delta, width = config.delta, config.hidden_size
    leaves = find_family(config.architecture).layer_leaves(config, "", config.layer_kinds[0])
    project = next(leaf for leaf in leaves if leaf.path == ("attention", "project", "kernel"))
    tensors = [np.random.default_rng(i).normal(size=shape) for i, (_, shape) in enumerate(project.tensors)]
    out = np.empty(project.shape)
    project.pack(tensors, out)
    qkv, gates = tensors
    q, k, v = np.split(qkv, (4 * delta.key_dim, 8 * delta.key_dim))
    second = [part.reshape(4, -1, width)[1] for part in (q, k, v, gates)]
    np.testing.assert_array_equal(out.reshape(width, 4, -1)[:, 1].T, np.concatenate(second))


def test_the_first_layers_of_lfm2_moe_have_no_experts() -> None:
    config = read("lfm2_moe")
    assert [kind.is_sparse for kind in config.layer_kinds] == [False, True, True, True, True]
    assert [bool(kind.states) for kind in config.layer_kinds] == [True, True, False, True, False]
    assert from_hf(to_hf(config)) == config
    biased = config.mixture
    assert biased is not None
    assert biased.choice_bias
    plain = read("lfm2_moe", use_expert_bias=False, num_dense_layers=0)
    assert plain.mixture == dataclasses.replace(biased, choice_bias=False)
    assert all(kind.is_sparse for kind in plain.layer_kinds)


def test_granite_4_is_read_as_published() -> None:
    config = from_hf(GRANITE_4_H_350M)
    assert isinstance(config, DecoderConfig)
    assert (config.mamba, config.mixture, config.ropes) == (MambaShape(48, 32, 1, 128), None, ())
    assert (config.embed_scale, config.residual_scale, config.logit_scale) == (12, 0.246, 1 / 3)
    assert {kind.scale for kind in config.attention_kinds} == {0.015625}
    assert [index for index, kind in enumerate(config.layer_kinds) if not kind.states] == [10, 13, 17, 27]
    windows, matrices = (1536 + 256) * 3 * 2, 48 * 32 * 128 * 4
    assert count_state_bytes(config.layer_kinds, np.dtype(np.float16)) == 28 * (windows + matrices)
    assert from_hf(to_hf(config)) == config


def test_granite_4_without_mamba_has_no_state() -> None:
    config = read("granitemoehybrid", layer_types=["attention"] * 4, position_embedding_type="rope")
    assert (config.num_recurrent_layers, {kind.rope for kind in config.layer_kinds}) == (0, {0})
    assert from_hf(to_hf(config)) == config


def test_step_sizes_without_limits_are_accepted_as_transformers_writes_them() -> None:
    limits: list[object] = [[0.0, {"__float__": "Infinity"}], [0.0, float("inf")], None]
    configs = {read("granitemoehybrid", time_step_limit=limit) for limit in limits}
    assert len(configs) == 1


def test_devices_divide_the_heads_of_mamba() -> None:
    config = from_hf(tiny_case("granitemoehybrid").config)
    assert largest_split(config, 8) == 4
    with pytest.raises(InvalidArgument, match="8 parts of recurrent layers"):
        pad_for_sharding(config, 16)


def test_devices_divide_the_key_heads_of_the_delta_rule() -> None:
    config = from_hf(tiny_case("qwen3_next").config)
    assert largest_split(config, 8) == 4
    with pytest.raises(InvalidArgument, match="4 query heads, 2 key/value heads, 4 parts of recurrent layers"):
        pad_for_sharding(config, 8)


@pytest.mark.parametrize("in_stacks", [False, True])
def test_only_layers_with_attention_are_in_blocks(in_stacks: bool) -> None:
    kinds = from_hf(LFM2_350M).layer_kinds
    units = list(get_stacks(kinds).values()) if in_stacks else None
    groups = group_kinds(kinds, 1000, units)
    assert (groups.windows, groups.num_layers) == ((None,), 6)
    assert sorted(groups.places[index] for index in ATTENDING) == [(0, index) for index in range(6)]
    others = [place for index, place in enumerate(groups.places) if index not in ATTENDING]
    assert others == [(0, index) for index in range(10)]
    for unit in units or ():
        indices = [groups.places[layer][1] for layer in unit]
        assert len(set(np.diff(indices).tolist())) <= 1


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("lfm2", {"conv_bias": True}, "conv_bias is True"),
        ("lfm2", {"use_pos_enc": False}, "use_pos_enc is False"),
        ("lfm2", {"layer_types": ["conv"] * 5}, "no layer has attention"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_next", {"full_attention_interval": 5}, "no layer has attention"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is False"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "all layers have experts, or none"),
        ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ("nemotron_h", {"layers_block_type": ["mlp", "full_attention"]}, "a feed-forward must follow"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp"]}, "no layer has attention"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M*X"}, "it must have the letters"),
        ("nemotron_h", {"residual_in_fp32": True}, "residual_in_fp32 is True"),
        ("nemotron_h_moe", {"moe_latent_size": 16}, "moe_latent_size is 16"),
        ("nemotron_h_moe", {"mlp_hidden_act": "relu"}, "only the activation relu2"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False"),
        ("kimi_linear", {"layer_types": ["linear_attention"] * 4}, "no layer has attention"),
        ("kimi_linear", {"model_max_length": 128}, "max_position_embeddings: is 256, but model_max_length is 128"),
        ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "unknown setting gate_lower_bound"),
        ("kimi_linear", {"linear_attn_config": {"use_full_rank_gate": True}}, "use_full_rank_gate is True"),
        ("kimi_linear", {"linear_attn_config": {"short_conv_kernel_size": 1}}, "is 1; it must be from 2 to 64"),
        (
            "kimi_linear",
            {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [4]}, "layer_types": None},
            "kda_layers: and full_attn_layers must name",
        ),
        ("kimi_linear", {"use_grouped_topk": False}, "use_grouped_topk is False; experts are chosen from 4 groups"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "scored by a sigmoid"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, "no layer has attention"),
        ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        ("mamba2", {"use_bias": True}, "use_bias is True"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("mamba2", {"rms_norm": False}, "rms_norm is False"),
        ("granitemoehybrid", {"mamba_n_heads": 7}, "mamba_n_heads: is 7; it must divide"),
        ("granitemoehybrid", {"mamba_d_head": 32}, "mamba_d_head: is 32; 8 heads have 16"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "num_groups: is 3; it must divide 8"),
        ("granitemoehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(
    name: str, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises((Unsupported, InvalidArgument), match=problem):
        read(name, **settings)


def test_the_width_of_the_feed_forward_follows_its_settings() -> None:
    assert read(intermediate_size=120, block_multiple_of=8).intermediate_size == 80
    assert read(intermediate_size=120, block_multiple_of=64).intermediate_size == 128
    assert read(intermediate_size=120, block_ffn_dim_multiplier=None).intermediate_size == 80
    assert read(intermediate_size=120, block_auto_adjust_ff_dim=False).intermediate_size == 120


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"kv_policy": "reserve-max"}, "kv_policy"),
        ({"role": "prefill"}, "role"),
        ({"kv_disk_space": 1.0, "kv_disk_dir": "/tmp/blocks"}, "kv_disk_space"),
        ({"kv_events_endpoint": "tcp://*:5557"}, "kv_events_endpoint"),
        ({"lossy_kv_window": 64}, "lossy_kv_window"),
    ],
)
def test_options_that_recurrent_state_does_not_support_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    rule = "requires (1|paged|both)|does not support the option"
    with pytest.raises(InvalidArgument, match=f"Lfm2ForCausalLM has recurrent state, which ({rule})$") as error:
        EngineConfig.load(options).check_recurrent("Lfm2ForCausalLM")
    assert error.value.field == name


def test_prefixes_are_not_cached_and_blocks_not_swapped() -> None:
    """If the prefix cache is off: else there is a slot for the keys and values that take as much memory."""

    def interval(state_bytes: int, **options: Any) -> int:
        return state_checkpoint_interval(EngineConfig.load(options).cache, state_bytes, 1000, 16)

    assert interval(100_000, enable_prefix_caching=False) == 0
    assert interval(100_001) == 16 * 101
    assert interval(900) == 128
    assert interval(900, state_checkpoint_interval=20) == 32
    assert interval(0) == 0
    assert state_checkpoint_interval(EngineConfig.load({}).cache, 900, 0, 16) == 2048  # without keys and values


@pytest.mark.parametrize(("platform", "kernel"), [("gpu", ("blocks", True)), ("tpu", ("blocks", False))])
def test_accelerators_run_blocks_of_tokens_and_gpus_a_fixed_number(platform: str, kernel: tuple[str, bool]) -> None:
    device = SimpleNamespace(platform=platform, process_index=0)
    mesh: Any = SimpleNamespace(devices=np.array([device], object), shape={MODEL_AXIS: 1})
    for fields in (LFM2_350M, QWEN3_NEXT_80B, GRANITE_4_H_350M):
        check_recurrent(from_hf(fields), EngineConfig(), mesh)
    found = recurrence_kernel(mesh)
    assert (found.backend, found.has_static_loops) == kernel


@pytest.mark.parametrize("num_drafts", [0, SHORT_LEN - 1, SHORT_LEN, MAX_NUM_SPECULATIVE_TOKENS])
def test_a_sequence_with_drafts_is_computed_all_at_once(num_drafts: int) -> None:
    mesh: Any = SimpleNamespace(
        devices=np.array([SimpleNamespace(platform="tpu", process_index=0)], object), shape={MODEL_AXIS: 1}
    )
    length = recurrence_kernel(mesh, num_drafts).short_len
    assert num_drafts < length <= num_drafts + SHORT_LEN
    assert length % SHORT_LEN == 0
    assert length <= BLOCK_LEN
