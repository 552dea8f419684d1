"""Families that are rows of a table: what each reads of a config, what it refuses, and names that no other test has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.checkpoints.names import model_leaves, num_params
from jpaged.checkpoints.weights import load_params
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.experts import route
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.decoder import DecoderConfig
from jpaged.models.decoder.config import QueryScale
from jpaged.models.decoder.shared_kv import _as_large
from jpaged.models.hf_config import from_hf, to_hf
from jpaged.models.model import Model
from jpaged.models.registry import find_family
from jpaged.models.rope import inverse_frequencies
from tests.models import dense
from tests.models.tiny import TinyCase, tensors, tiny_case


def sizes(
    num_layers: int, width: int, inner: int, num_heads: int, num_kv_heads: int, vocab_size: int
) -> dict[str, object]:
    return {
        "num_hidden_layers": num_layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "use_cache": True,
    }


def read(name: str, **settings: object) -> DecoderConfig:
    config = from_hf({**tiny_case(name).config, **settings})
    assert isinstance(config, DecoderConfig)
    return config


def test_the_correction_bias_of_ernie_is_a_row() -> None:
    config = read("ernie4_5_moe")
    leaves = find_family(config.architecture).layer_leaves(config, "model.layers.1.", config.layer_kinds[1])
    (bias,) = (leaf for leaf in leaves if leaf.path[-1] == "choice_bias")
    assert bias.tensors == (("model.layers.1.mlp.moe_statics.e_score_correction_bias", (1, 8)),)


def test_layers_without_rotation_are_those_of_the_list_or_of_the_interval() -> None:
    def rotating(**settings: object) -> list[bool]:
        return [kind.rope is not None for kind in read("smollm3", **settings).layer_kinds]

    assert rotating() == [True, False, True, False]
    assert rotating(no_rope_layer_interval=4) == [True, True, True, False]
    assert rotating(no_rope_layers=[0, 1, 1, 0]) == [False, True, True, False]
    with pytest.raises(InvalidArgument, match="must be a list of 4 numbers, 0 or 1"):
        rotating(no_rope_layers=[0, 1])


def test_layers_with_a_window_have_another_rotation() -> None:
    hybrid: set[tuple[int | None, int | None]] = {(9, 0), (None, None)}
    for name, ropes in (("olmo3", {(9, 1), (None, 0)}), ("exaone4", hybrid), ("cohere2", hybrid)):
        assert {(kind.attention.sliding_window, kind.rope) for kind in read(name).layer_kinds} == ropes
    whole = read("exaone4", sliding_window=None, layer_types=["full_attention"] * 4)
    assert {(kind.attention.sliding_window, kind.rope) for kind in whole.layer_kinds} == {(None, 0)}
    with pytest.raises(Unsupported, match="there is no sliding_window"):
        read("exaone4", sliding_window=None)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("arcee", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ("olmo3", {"rope_parameters": {"full_attention": {}, "other": {}}}, "unknown setting other"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval is 2"),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index is 1"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 1, 2]}, "moe_topk differs between layers"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "a dense layer after a sparse one"),
        ("granite", {"new_scale_factor": 2.0}, "new_scale_factor=2.0"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1; the limit is 1e-06"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list has other numbers than 1"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias is False"),
        ("hunyuan_v1_moe", {"n_group": 2}, "n_group is 2; hunyuan_v1_moe supports only False or 1"),
        ("hunyuan_v1_moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor is 2.0"),
        ("stablelm", {"rope_pct": 0.75}, "rope_pct=0.75"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(
    name: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        read(name, **settings)


def test_llama_4_is_limited_to_the_length_of_its_chunks_and_to_one_expert() -> None:
    config = read("llama4_text", max_position_embeddings=10485760, attention_chunk_size=8192)
    assert config.max_model_len == 8192
    assert config.query_scale == QueryScale(0.3, 8, offset=1, is_global=True)
    for off in (False, 0):
        assert read("llama4_text", attn_temperature_tuning=off).query_scale is None
    assert read("llama4_text", attn_temperature_tuning=4) == read("llama4_text")
    with pytest.raises(InvalidArgument, match="attn_temperature_tuning: is 'yes'"):
        read("llama4_text", attn_temperature_tuning="yes")
    with pytest.raises(InvalidArgument, match="only one expert per token"):
        read("llama4_text", num_experts_per_tok=2)


def test_the_period_of_windows_has_two_names_and_counts_only_without_a_list() -> None:
    types = tiny_case("cohere2").config["layer_types"]
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        windows = [kind.sliding_window for kind in read("cohere2", layer_types=None, **{name: 2}).attention_kinds]
        assert [window is None for window in windows] == [index % 2 == 1 for index in range(len(windows))]
        assert read("cohere2", layer_types=types, **{name: 2}) == read("cohere2")


@pytest.mark.parametrize("name", ["ministral3", "mistral4"])
def test_a_language_model_with_images_has_the_shape_of_its_own_class(name: str) -> None:
    """The config and the leaves are those of the model alone, under another prefix."""
    inner = {key: value for key, value in tiny_case(name).config.items() if key != "architectures"}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": inner}
    config = from_hf(whole)
    assert from_hf(to_hf(config)) == config
    assert dataclasses.replace(config, architecture=read(name).architecture) == read(name)
    alone, inside = model_leaves(read(name)), model_leaves(config)
    for mine, theirs in zip(inside.layers, alone.layers, strict=True):
        assert [leaf.path for leaf in mine] == [leaf.path for leaf in theirs]


def test_the_length_of_command_r_is_not_that_of_its_pretraining() -> None:
    assert read("cohere", model_max_length=131072).max_model_len == 131072


def test_phi_moe_has_its_length_of_pretraining_in_either_place() -> None:
    pairs = read("phimoe").head_dim // 2
    factors = {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    section = {"rope_type": "longrope", "short_mscale": 1.2, "long_mscale": 1.2, **factors}
    outside = read("phimoe", rope_parameters=section, original_max_position_embeddings=8)
    assert outside == read("phimoe", rope_parameters={**section, "original_max_position_embeddings": 8})
    assert outside.ropes[0].original_max_position_embeddings == 8
    with pytest.raises(Unsupported, match=r"long_mscale is 1\.2; it must equal short_mscale, 1\.1"):
        read("phimoe", rope_parameters={**section, "short_mscale": 1.1})


def test_a_rope_of_llama_3_without_a_blend_has_long_and_short_wavelengths_only() -> None:
    """As published with Llama 4 Scout, whose two factors are equal."""
    section = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    config = read("llama4_text", rope_parameters={**section, "original_max_position_embeddings": 64})
    plain = inverse_frequencies(read("llama4_text").ropes[0], config.head_dim)
    is_long = 2 * np.pi / plain > 64
    assert 0 < is_long.sum() < len(plain)
    got = inverse_frequencies(config.ropes[0], config.head_dim)
    np.testing.assert_array_equal(got, np.where(is_long, plain / np.float32(16), plain))


def test_multipliers_survive_being_written() -> None:
    config = read("granite", logits_scaling=6.0)
    written = to_hf(config)
    assert config.logit_scale == pytest.approx(1 / 6)
    assert (written["embedding_multiplier"], written["residual_multiplier"]) == (3.0, 0.7)
    assert (written["logits_scaling"], written["attention_multiplier"]) == (pytest.approx(6.0), pytest.approx(0.3))


def test_sparsemixer_gives_each_expert_the_share_among_those_close_to_it() -> None:
    """The softmax is over logits within twice the jitter of the best that is left, relative to the larger."""
    logits = np.array([[4.0, 3.9, 1.0, 3.5], [-1.0, -1.05, -3.0, -2.0]], np.float32)
    routes = route(jnp.asarray(logits), Routing(4, 2, "sparsemixer", jitter=0.05), jnp.int32(2))
    assert routes.ids_tk.tolist() == [[0, 1], [0, 1]]
    want = []
    for row in logits.astype(np.float64):
        left, weights = row.copy(), []
        for _ in range(2):
            best = left.max()
            near = (best - row) / np.maximum(np.abs(row), best) <= 0.1
            shares = np.where(near, np.exp(left - best), 0.0)
            weights.append(shares[left.argmax()] / shares.sum())
            left[left.argmax()] = -np.inf
        want.append(weights)
    np.testing.assert_allclose(routes.weights_tk, want, rtol=1e-6)


def as_internlm2(case: TinyCase) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A Llama's config and tensors under the names of InternLM 2, which has grouped queries, keys and values."""
    config = {**case.config, "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    heads = int(str(config["num_key_value_heads"]))
    names = {
        "embed_tokens": "tok_embeddings",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "lm_head": "output",
    }
    stored = tensors(case)
    renamed: dict[str, np.ndarray] = {}
    for name, tensor in stored.items():
        if "self_attn" not in name or "o_proj" in name:
            old = next((old for old in names if old in name), "")
            renamed[name.replace(old, names[old]) if old else name] = tensor
        elif "q_proj" in name:
            parts = (stored[name.replace("q_proj", f"{part}_proj")] for part in "qkv")
            width = tensor.shape[1]
            grouped = np.concatenate([part.reshape(heads, -1, width) for part in parts], axis=1)
            renamed[name.replace("self_attn.q_proj", "attention.wqkv")] = grouped.reshape(-1, width)
    return config, renamed


def test_internlm_2_is_a_llama_under_other_names(tmp_path: Path) -> None:
    """transformers has no class for it; its own code computes what a Llama does."""
    case = tiny_case("llama3_tied")
    case = TinyCase(case.name, {**case.config, "tie_word_embeddings": False}, case.prompt_len)
    config, renamed = as_internlm2(case)
    for folder, written, stored in ((tmp_path / "a", config, renamed), (tmp_path / "b", case.config, tensors(case))):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(written)), encoding="utf-8")
        save_file(stored, folder / "model.safetensors")
    ids = np.array(case.prompt()[:9], np.int32)
    got, want = (
        dense.logits(model, load_params(model, folder, "loop"), ids, len(ids))
        for model, folder in (
            (Model(from_hf(config), np.dtype(np.float32)), tmp_path / "a"),
            (Model(from_hf(case.config), np.dtype(np.float32)), tmp_path / "b"),
        )
    )
    np.testing.assert_array_equal(got, want)


LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
PUBLISHED: dict[str, dict[str, object]] = {
    "kimi-k2": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **sizes(61, 7168, 18432, 64, 64, 163840),
        **LATENTS,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536,
        "rope_scaling": {
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "noaux_tc",
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **sizes(46, 4096, 10944, 96, 8, 151552),
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
        "rope_scaling": None,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        **sizes(62, 3072, 1536, 48, 8, 200064),
        "attn_type_list": [1] * 62,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "mtp_transformer_layers": 1,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "ernie-4.5-21b-a3b": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        **sizes(28, 2560, 12288, 20, 4, 103424),
        "max_position_embeddings": 131072,
        "moe_capacity": [64, 64, 64],
        "moe_gate": "topk",
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_end_index": 27,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_use_aux_free": True,
        "num_nextn_predict_layers": 1,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "llama-4-scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "vision_config": {"hidden_size": 1408},
        "text_config": {
            **sizes(48, 5120, 8192, 40, 8, 202048),
            "model_type": "llama4_text",
            "_attn_implementation_autoset": True,
            "attention_bias": False,
            "attention_chunk_size": 8192,
            "attn_scale": 0.1,
            "attn_temperature_tuning": 4,
            "cache_implementation": "hybrid",
            "floor_scale": 8192,
            "for_llm_compressor": False,
            "head_dim": 128,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 10485760,
            "moe_layers": [*range(48)],
            "no_rope_layers": [1, 1, 1, 0] * 12,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "use_qk_norm": True,
        },
    },
    "phi-3.5-moe": {
        "architectures": ["PhiMoEForCausalLM"],
        "model_type": "phimoe",
        **sizes(32, 4096, 6400, 32, 8, 32064),
        "attention_bias": True,
        "hidden_dropout": 0.0,
        "input_jitter_noise": 0.01,
        "lm_head_bias": True,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_local_experts": 16,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "long_factor": [2.0] * 64,
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 64,
            "short_mscale": 1.243163121016122,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "router_jitter_noise": 0.01,
        "sliding_window": 131072,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        **sizes(36, 2048, 11008, 16, 4, 128256),
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "pretraining_tp": 2,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "hunyuan-a13b": {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "model_type": "hunyuan_v1_moe",
        **sizes(32, 4096, 3072, 32, 8, 128167),
        "add_classification_head": False,
        "attention_head_dim": 128,
        "cla_share_factor": 2,
        "class_num": 0,
        "dense_list": [4096, 0],
        "group_limited_greedy": False,
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "moe_drop_tokens": False,
        "moe_intermediate_size": [3072] * 32,
        "moe_layer_num_skipped": 0,
        "moe_random_routing_dropped_token": False,
        "moe_topk": [8] * 32,
        "n_group": False,
        "norm_topk_prob": True,
        "norm_type": "rms",
        "num_experts": 64,
        "num_shared_expert": [1] * 32,
        "pool_type": "last",
        "position_embedding_xdrope": False,
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"},
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "topk_group": False,
        "use_cla": False,
        "use_mixed_mlp_moe": True,
        "use_mla": False,
        "use_qk_norm": True,
    },
    "command-r": {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        **sizes(40, 8192, 22528, 64, 64, 256000),
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "model_max_length": 131072,
        "pretraining_tp": 1,
        "rope_theta": 8000000.0,
        "use_qk_norm": False,
    },
    "yi-6b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes(32, 4096, 11008, 32, 4, 64000),
        "max_position_embeddings": 4096,
        "rope_theta": 5000000.0,
    },
}
NUM_PARAMS = {
    "kimi-k2": 1026,
    "glm-4.5-air": 106,
    "minimax-m2": 228,
    "ernie-4.5-21b-a3b": 21,
    "llama-4-scout": 107,
    "phi-3.5-moe": 41,
    "smollm3": 3,
    "hunyuan-a13b": 80,
    "command-r": 34,
    "yi-6b": 6,
}
"""In billions, rounded down."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_whole(name: str) -> None:
    assert num_params(from_hf(PUBLISHED[name])) // 10**9 == NUM_PARAMS[name]


def test_each_row_is_scaled_to_the_size_of_its_own_row():
    rows_te, like_te = (np.random.default_rng(seed).normal(size=(3, 8)).astype(np.float32) for seed in range(2))
    like_te *= np.array([[1], [10], [100]], np.float32)
    scaled_te = np.asarray(_as_large(jnp.asarray(rows_te), jnp.asarray(like_te)))
    np.testing.assert_allclose(np.square(scaled_te).mean(axis=1), np.square(like_te).mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(scaled_te / rows_te, (scaled_te / rows_te)[:, :1].repeat(8, axis=1), rtol=1e-5)
