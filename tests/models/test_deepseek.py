"""DeepSeek-V2 and V3: what is read of their config.json, and what becomes of it in the pool."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jpaged.checkpoints.conversion import ConversionOptions, convert_folder
from jpaged.checkpoints.names import is_ignored
from jpaged.checkpoints.weights import load_params, open_tensors
from jpaged.config import EngineConfig
from jpaged.device.compilation.lowering import sized_step
from jpaged.device.kv_scales import measure_scales
from jpaged.device.mesh import build_mesh
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.families.deepseek.config import DeepseekConfig
from jpaged.models.hf_config import from_hf, to_hf
from jpaged.models.model import Model
from jpaged.models.sharding import pad_for_sharding
from tests.models.tiny import tensors, tiny_case, write_checkpoint

SIZES: dict[str, object] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.6,
}


def read(version: int, **settings: object) -> DeepseekConfig:
    names = {"architectures": [f"DeepseekV{version}ForCausalLM"], "model_type": f"deepseek_v{version}"}
    config = from_hf({**SIZES, **names, **settings})
    assert isinstance(config, DeepseekConfig)
    return config


@pytest.mark.parametrize(("version", "width"), [(2, 1407), (3, 2048)])
def test_the_default_width_of_an_expert_is_the_one_of_transformers(version: int, width: int) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "moe_intermediate_size"}
    names = {"architectures": [f"DeepseekV{version}ForCausalLM"], "model_type": f"deepseek_v{version}"}
    config = from_hf({**sizes, **names})
    assert isinstance(config, DeepseekConfig)
    assert config.mixture is not None
    assert config.mixture.width == width
    assert getattr(transformers, f"DeepseekV{version}Config")().moe_intermediate_size == width


def test_all_heads_see_one_latent_that_begins_with_what_values_are_made_of() -> None:
    config = read(3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim) == (4, 1, 48, 32)
    assert config.kv_width == 48
    assert config.query_width == 4 * (48 + 32) // 2
    assert [kind.is_sparse for kind in config.layer_kinds] == [False, True, True]
    assert {kind.attention.scale for kind in config.layer_kinds} == {40**-0.5}


def test_yarn_stretches_scores_by_the_square_of_its_scale() -> None:
    (scale,) = {kind.attention.scale for kind in read(3, rope_scaling=YARN).layer_kinds}
    assert scale == pytest.approx(40**-0.5 * (0.1 * 0.6 * math.log(4) + 1) ** 2)


@pytest.mark.parametrize(
    ("version", "settings", "routing"),
    [
        (2, {"routed_scaling_factor": 16.0}, Routing(8, 3, scale=16.0)),
        (2, {"topk_method": "group_limited_greedy"}, Routing(8, 3, num_groups=4, top_groups=2)),
        (3, {}, Routing(8, 3, "sigmoid", True, 2.5, num_groups=4, top_groups=2, num_best=2)),
        (3, {"norm_topk_prob": False}, Routing(8, 3, "sigmoid", False, 2.5, num_groups=4, top_groups=2, num_best=2)),
    ],
)
def test_experts_are_chosen_as_the_version_does(version: int, settings: dict[str, object], routing: Routing) -> None:
    mixture = read(version, **settings).mixture
    assert mixture is not None
    assert mixture.routing == routing
    assert (mixture.width, mixture.shared_width, mixture.choice_bias) == (40, 80, version == 3)


@pytest.mark.parametrize(
    ("version", "settings", "named"),
    [
        (2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported: greedy, group_limited_greedy"),
        (2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (2, {"mlp_bias": True}, "mlp_bias"),
        (2, {"scoring_func": "sigmoid"}, "scoring_func"),
        (3, {"topk_method": "greedy"}, "topk_method"),
        (3, {"attention_bias": True}, "attention_bias"),
        (3, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (3, {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(version: int, settings: dict[str, object], named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        read(version, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 15, "kv_lora_rank": 33}, "15 of 15 dimensions are rotated"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"n_group": 3}, "num_groups: is 3; it must divide 8 experts"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        read(3, **settings)


@pytest.mark.parametrize(
    ("version", "settings"),
    [
        (2, {"topk_method": "group_limited_greedy", "rope_scaling": YARN}),
        (2, {"q_lora_rank": 36, "first_k_dense_replace": 0}),
        (3, {"q_lora_rank": 36, "rope_scaling": YARN}),
        (3, {"rope_interleave": False}),
        (3, {"first_k_dense_replace": 3}),
    ],
)
def test_a_config_that_we_write_reads_as_it_was(version: int, settings: dict[str, object]) -> None:
    config = read(version, **settings)
    assert from_hf(to_hf(config)) == config


def test_layers_that_draft_are_left_where_they_are() -> None:
    config = read(3, num_nextn_predict_layers=1)
    assert is_ignored("model.layers.3.embed_tokens.weight", config)
    assert is_ignored("model.layers.61.mlp.gate.weight", config)
    assert not is_ignored("model.layers.2.mlp.other.weight", config)
    assert not is_ignored("model.layersX.weight", config)


# --- in the pool ------------------------------------------------------------------------------------------------------


def options(**cache: Any) -> EngineConfig:
    default = EngineConfig()
    return dataclasses.replace(
        default,
        model=dataclasses.replace(default.model, max_model_len=64),
        cache=dataclasses.replace(default.cache, block_size=8, **cache),
    )


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_every_device_keeps_the_whole_latent(num_parts: int) -> None:
    model = Model(read(3), np.dtype(jnp.float32))
    step, geometry = sized_step(model, options(), "loop", 4, build_mesh(jax.devices()[:num_parts]))
    assert step.layout.token_shape == (num_parts, 48)
    assert step.layout.local.token_shape == (1, 48)
    assert geometry.bytes_per_block == 3 * 8 * 48 * 4 * num_parts
    assert pad_for_sharding(model.config, num_parts).num_kv_heads == num_parts


@pytest.mark.long
def test_the_scale_of_a_latent_in_8_bits_is_one_for_both_of_its_uses() -> None:
    model = Model(read(2, num_hidden_layers=1), np.dtype(jnp.float32))
    step, _ = sized_step(model, options(kv_cache_dtype="fp8"), "loop", 4, build_mesh(jax.devices()[:1]))
    scales_lk2 = measure_scales(step, model.init_params(jax.random.key(0), "loop"))
    assert scales_lk2.shape == (1, 1, 2)
    np.testing.assert_array_equal(scales_lk2[..., 0], scales_lk2[..., 1])
    assert (scales_lk2 > 0).all()


def test_what_is_added_to_choices_keeps_its_digits_in_bfloat16(tmp_path: Path) -> None:
    """Scores of experts differ by less than what bfloat16 tells apart."""
    case = tiny_case("deepseek_v3")
    folder = write_checkpoint(case, tmp_path / "model")
    model = Model(from_hf(case.config), np.dtype(jnp.bfloat16))
    params = load_params(model, folder, "loop")
    stored = tensors(case)["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(params["layers"][1]["mlp"]["router"]["choice_bias"], stored)
    assert params["layers"][1]["mlp"]["router"]["kernel"].dtype == jnp.bfloat16
    convert_folder(folder, tmp_path / "narrow", ConversionOptions("safetensors", dtype="bfloat16"))
    with open_tensors(tmp_path / "narrow") as files:
        assert {name for name in files.names if files.dtype(name) == np.float32} == {
            name for name in files.names if name.endswith("e_score_correction_bias")
        }
