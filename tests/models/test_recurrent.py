"""Models with recurrent layers: their configs as published, their places, and the options that they refuse by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.decoder import DecoderConfig
from jpaged.models.hf_config import from_hf, to_hf
from jpaged.models.layer_kinds import count_state_bytes, get_stacks, group_kinds
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
ATTENDING = [2, 5, 8, 10, 12, 14]


def read(**settings: object) -> DecoderConfig:
    config = from_hf({**tiny_case("lfm2").config, **settings})
    assert isinstance(config, DecoderConfig)
    return config


def test_lfm2_is_read_as_published() -> None:
    config = from_hf(LFM2_350M)
    assert (config.intermediate_size, config.head_dim, config.tie_word_embeddings) == (4608, 64, True)
    assert [index for index, kind in enumerate(config.layer_kinds) if not kind.states] == ATTENDING
    assert (config.num_recurrent_layers, config.num_attention_layers) == (10, 6)
    assert count_state_bytes(config.layer_kinds, np.dtype(np.float16)) == 10 * 1024 * 2 * 2
    assert from_hf(to_hf(config)) == config


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
    ("settings", "problem"),
    [
        ({"conv_bias": True}, "conv_bias is True"),
        ({"use_pos_enc": False}, "use_pos_enc is False"),
        ({"layer_types": ["conv"] * 5}, "no layer has attention"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(Unsupported, match=problem):
        read(**settings)


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
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}, "speculative_config"),
        ({"enable_lora": True}, "enable_lora"),
        ({"role": "prefill"}, "role"),
        ({"kv_disk_space": 1.0, "kv_disk_dir": "/tmp/blocks"}, "kv_disk_space"),
        ({"kv_events_endpoint": "tcp://*:5557"}, "kv_events_endpoint"),
        ({"lossy_kv_window": 64}, "lossy_kv_window"),
    ],
)
def test_options_that_recurrent_state_does_not_support_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match="Lfm2ForCausalLM has recurrent state") as error:
        EngineConfig.load(options).for_recurrent("Lfm2ForCausalLM")
    assert error.value.field == name


def test_prefixes_are_not_cached_and_blocks_not_swapped() -> None:
    options = EngineConfig.load({}).for_recurrent("Lfm2ForCausalLM")
    assert (options.cache.enable_prefix_caching, options.cache.swap_space) == (False, 0.0)
