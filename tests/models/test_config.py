"""Every setting of a config.json is used, known to be harmless, or refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from jpaged.checkpoints.names import is_ignored
from jpaged.errors import InvalidArgument, JpagedError, Unsupported
from jpaged.models.decoder import DecoderConfig
from jpaged.models.families.opt.config import OptConfig
from jpaged.models.hf_config import from_hf, to_hf
from jpaged.models.layer_kinds import HeadSizes
from jpaged.models.rope_config import RopeConfig
from jpaged.models.sharding import pad_for_sharding
from jpaged.plan.known_models import KNOWN_MODELS
from tests.models.tiny import TinyCase, tiny_case, tiny_cases

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


OPT_13B = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 20480,
    "hidden_size": 5120,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "output_projection": True,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 5120,
}


def config(settings: Mapping[str, object], family: str = "Llama") -> Mapping[str, object]:
    base = {key: value for key, value in tiny_case("llama_mha").config.items() if key != "rope_theta"}
    return {**base, "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), **settings}


def test_a_published_config_is_read_whole() -> None:
    assert from_hf(SMOLLM2) == DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        ropes=(RopeConfig(theta=100000.0, original_max_position_embeddings=8192),),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
        checkpoint_dtype="bfloat16",
    )


def test_a_published_config_of_opt_is_read_whole() -> None:
    assert from_hf(OPT_13B) == OptConfig(
        architecture="OPTForCausalLM",
        vocab_size=50272,
        hidden_size=5120,
        intermediate_size=20480,
        num_layers=40,
        num_heads=40,
        num_kv_heads=40,
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        embed_size=5120,
        activation="relu",
        norm_first=True,
        final_norm=True,
        norm_affine=True,
        use_bias=True,
        eos_token_ids=(2,),
        bos_token_id=2,
        checkpoint_dtype="float16",
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"activation_function": "gelu_new"}, "activation_function is 'gelu_new'; supported: relu, gelu"),
        ({"hidden_act": "silu"}, "unknown setting hidden_act='silu'"),
        ({"num_key_value_heads": 8}, "unknown setting num_key_value_heads=8"),
        ({"rope_theta": 1e4, "rms_norm_eps": 1e-5}, "unknown setting rms_norm_eps=1e-05, rope_theta=10000.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"is_decoder": True}, "is_decoder is True"),
    ],
)
def test_what_opt_does_not_compute_is_refused_by_name(settings: Mapping[str, object], named: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        from_hf({**OPT_13B, **settings})
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ffn_dim": None}, "ffn_dim: is missing"),
        ({"num_attention_heads": 48}, "hidden_size: is 5120; num_attention_heads, 48, must divide it"),
        ({"word_embed_proj_dim": 0}, "word_embed_proj_dim: is 0; it must be an integer of at least 1"),
        ({"enable_bias": "yes"}, "enable_bias: is 'yes'; it must be true or false"),
        ({"eos_token_id": -1}, "eos_token_id: is -1; it must be a token id"),
    ],
)
def test_a_malformed_value_of_opt_is_refused(settings: Mapping[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        from_hf({**OPT_13B, **settings})
    assert named in str(refusal.value)


def test_a_gemma_that_reads_images_is_its_language_model() -> None:
    """What text_config leaves out is transformers' default, and what tells how images come in changes nothing."""
    text: dict[str, object] = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    text |= {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        "mm_tokens_per_image": 256,
        "image_token_index": 262144,
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    read, alone = from_hf(whole), KNOWN_MODELS["gemma-3-4b"].config
    named = dataclasses.replace(read, architecture=alone.architecture, bos_token_id=alone.bos_token_id)
    assert dataclasses.replace(named, eos_token_ids=alone.eos_token_ids) == alone
    assert read.eos_token_ids == (1, 106)
    assert from_hf(to_hf(read)) == read
    with pytest.raises(Unsupported, match="unknown setting audio_config"):
        from_hf({**whole, "audio_config": {}})


def test_a_gemma_4_that_reads_images_is_its_language_model() -> None:
    """Head sizes come by type of layer, as on the hub, or by layer, as transformers writes them."""
    types = ["sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(60)]
    text: dict[str, object] = {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "model_type": "gemma4_text",
        "layer_types": types,
    }
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {},
        "audio_config": {},
        "eoa_token_index": 258883,
        "torch_dtype": "bfloat16",
    }
    read, alone = from_hf(whole), KNOWN_MODELS["gemma-4-31b"].config
    assert dataclasses.replace(read, architecture=alone.architecture) == alone
    assert from_hf(to_hf(read)) == read
    heads = {"head_dim": 512, "num_key_value_heads": 4}
    sections = {str(index): heads for index, name in enumerate(types) if name == "full_attention"}
    by_layer = {**text, "per_layer_config": sections, "global_head_dim": None, "num_global_key_value_heads": None}
    assert from_hf({**whole, "text_config": by_layer}) == read
    by_layer["per_layer_config"] = {**sections, "5": {"head_dim": 128}}
    with pytest.raises(Unsupported, match="per_layer_config must be the same"):
        from_hf({**whole, "text_config": by_layer})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input: must be vocab_size, 131"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers: is 7; no layer before has full_attention"),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True, "num_key_value_heads": 2}, "2 must divide 3"),
        ({"enable_moe_block": True, "hidden_activation": "silu", "num_experts": 2}, "with experts, hidden_activation"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}}, "limit"),
    ],
)
def test_a_gemma_4_that_is_not_supported_is_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises((InvalidArgument, Unsupported)) as refusal:
        from_hf({**tiny_case("gemma4_text").config, **settings})
    assert named in str(refusal.value)


def test_a_gemma_3n_that_reads_images_is_its_language_model() -> None:
    """A width and a sparsity come for each layer, or for all; what text_config leaves out is transformers' default."""
    text: dict[str, object] = {"intermediate_size": [16384] * 35, "model_type": "gemma3n_text"}
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
        "vision_config": {},
        "audio_config": {},
        "audio_soft_tokens_per_image": 188,
        "torch_dtype": "bfloat16",
    }
    read, alone = from_hf(whole), KNOWN_MODELS["gemma-3n-e4b"].config
    assert dataclasses.replace(read, architecture=alone.architecture) == alone
    assert from_hf(to_hf(read)) == read
    nested = from_hf({**whole, "text_config": {**text, "intermediate_size": [8192] * 10 + [16384] * 25}})
    assert [kind.inner for kind in nested.layer_kinds] == [8192] * 10 + [None] * 25
    assert from_hf(to_hf(nested)) == nested


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx is 1"),
        ({"altup_correct_scale": False}, "altup_correct_scale is False"),
        ({"intermediate_size": [88] * 8}, "intermediate_size: has 8 numbers; there are 9 layers"),
        ({"intermediate_size": [88.5] * 9}, "widths must be integers"),
        ({"activation_sparsity_pattern": [1.0] * 9}, "shares must be at least 0 and below 1"),
        ({"activation_sparsity_pattern": ["most"] * 9}, "it must have numbers"),
        ({"vocab_size_per_layer_input": 132}, "vocab_size_per_layer_input"),
    ],
)
def test_a_gemma_3n_that_is_not_supported_is_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises((InvalidArgument, Unsupported)) as refusal:
        from_hf({**tiny_case("gemma3n_text").config, **settings})
    assert named in str(refusal.value)


def test_heads_that_the_pool_holds_in_parts_take_fewer_as_devices_repeat_heads() -> None:
    config = KNOWN_MODELS["gemma-4-26b-a4b"].config
    for num_parts, num_kv_heads, num_places in ((1, 2, 4), (2, 2, 4), (4, 4, 2), (8, 8, 1)):
        padded = pad_for_sharding(config, num_parts)
        assert isinstance(padded, DecoderConfig)
        sizes = {kind.heads for kind in padded.layer_kinds if kind.heads is not None}
        assert (padded.num_kv_heads, sizes) == (num_kv_heads, {HeadSizes(8, 256, num_places)})
        assert padded.num_attention_layers == 5 + 25 * num_places


def test_keys_of_layers_that_attend_to_others_keys_are_not_loaded() -> None:
    config = from_hf(tiny_case("gemma4_text").config)
    own, shared = (f"model.layers.{index}.self_attn.k_proj.weight" for index in (4, 5))
    assert [kind.kv_source for kind in config.layer_kinds] == [None] * 5 + [2, 4, 4, 2]
    assert (is_ignored(own, config), is_ignored(shared, config)) == (False, True)
    assert not is_ignored(shared.replace("k_proj", "q_proj"), config)


def test_only_a_dynamic_rope_limits_shared_prefixes() -> None:
    dynamic = config({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    assert from_hf(dynamic).max_prefix_len == 256
    assert from_hf(config({})).max_prefix_len is None
    assert from_hf(OPT_13B).max_prefix_len is None


@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
def test_a_config_survives_being_written_and_read(case: TinyCase) -> None:
    read = from_hf(case.config)
    again = from_hf(to_hf(read))
    assert again == read
    assert hash(again) == hash(read)


def test_both_styles_of_rope_settings_are_the_same_model() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    old = config({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}})
    new = config({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}})
    assert from_hf(old) == from_hf(new)


@pytest.mark.parametrize(
    ("rope", "max_model_len"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 2.5}, 640),
        ({"rope_type": "dynamic", "factor": 2}, 512),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}, 256),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_the_rope_sets_the_longest_sequence(rope: Mapping[str, object], max_model_len: int) -> None:
    assert from_hf(config({"rope_parameters": rope})).max_model_len == max_model_len


def test_generation_config_names_the_tokens_that_end_a_sequence() -> None:
    assert from_hf(config({"eos_token_id": [5, 6]})).eos_token_ids == (5, 6)
    assert from_hf(config({"eos_token_id": 5}), {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert from_hf(config({"eos_token_id": 5}), {"temperature": 0.6}).eos_token_ids == (5,)
    assert from_hf(config({"eos_token_id": None})).eos_token_ids == ()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "'BloomForCausalLM' is not supported; supported: LlamaForCausalLM"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'; supported: silu, swish"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"sliding_window": 64}, "unknown setting sliding_window=64"),
        ({"attn_logit_softcapping": 50.0, "query_scale": 2}, "attn_logit_softcapping=50.0, query_scale=2"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "RoPE type 'ntk' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "unknown setting beta_fast=3"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
            "original_max_position_embeddings is 64 and max_position_embeddings 256",
        ),
    ],
)
def test_what_the_model_code_does_not_compute_is_refused_by_name(settings: Mapping[str, object], named: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        from_hf(config(settings))
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Mistral", {"sliding_window": 64}),
        ("Mistral", {}),  # transformers' default is a window of 4096: here longer than any sequence
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 256}),
        ("Qwen3", {"layer_types": ["full_attention"] * 3, "sliding_window": 64}),
    ],
)
def test_a_layer_has_a_sliding_window_exactly_where_it_would_hide_a_token(
    family: str, settings: Mapping[str, object]
) -> None:
    from transformers import AutoConfig

    hf = config(settings, family)
    theirs = AutoConfig.for_model(**{key: value for key, value in hf.items() if key != "architectures"})
    layer_types = theirs.layer_types if family.startswith("Qwen") else ["sliding_attention"] * 3
    has_window = theirs.sliding_window is not None and theirs.sliding_window < 256
    windows = [theirs.sliding_window if name == "sliding_attention" and has_window else None for name in layer_types]
    ours = from_hf(hf)
    assert [kind.sliding_window for kind in ours.attention_kinds] == windows
    assert from_hf(to_hf(ours)) == ours


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden_size": 0}, "hidden_size: is 0; it must be an integer of at least 1"),
        ({"hidden_size": 2**40}, "hidden_size: is 1099511627776; the limit is 1048576"),
        ({"hidden_size": 10**400}, "...; the limit is 1048576"),
        ({"hidden_size": -1}, "hidden_size: is -1; it must be an integer of at least 1"),
        ({"hidden_size": 64.0}, "hidden_size: is 64.0; it must be an integer of at least 1"),
        ({"hidden_size": "64"}, "hidden_size: is '64'; it must be an integer of at least 1"),
        ({"hidden_size": True}, "hidden_size: is True; it must be an integer of at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: is 1000000000; the limit is 4096"),
        ({"vocab_size": 2**40}, "vocab_size: is 1099511627776; the limit is 16777216"),
        ({"intermediate_size": 2**40}, "intermediate_size: is 1099511627776; the limit is"),
        ({"num_attention_heads": 2**40}, "num_attention_heads: is 1099511627776; the limit is"),
        ({"num_key_value_heads": 2**40}, "num_key_value_heads: is 1099511627776; the limit is"),
        ({"head_dim": 2**40}, "head_dim: is 1099511627776; the limit is"),
        ({"max_position_embeddings": 10**400}, "...; the limit is 2147483647"),
        ({"rms_norm_eps": 10**400}, "...; it must be a finite number above 0"),
        ({"eos_token_id": 10**400}, "...; it must be a token id"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor: is 1e+300; it must be from 1 to 1048576"),
        ({"vocab_size": None}, "vocab_size: is missing"),
        ({"num_hidden_layers": True}, "num_hidden_layers: is True"),
        ({"num_key_value_heads": 3}, "num_kv_heads: is 3; it must divide num_heads, 4"),
        ({"num_attention_heads": 6}, "hidden_size: is 64; without head_dim"),
        ({"head_dim": 15}, "head_dim: is 15"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: is nan"),
        ({"rope_theta": -1}, "rope_theta: is -1"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: is 1; it must be true or false"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id: is [2, 'x']"),
        ({"bos_token_id": -1}, "bos_token_id: is -1; it must be an integer of at least 0"),
        ({"architectures": []}, "architectures: is []"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling factor: is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling factor: is 0.5"),
        ({"rope_scaling": [2.0]}, "rope_scaling: is [2.0]; it must be an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling: and rope_parameters are both given and differ",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq_factor: is 1",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}}, "beta_fast: is 1"),
    ],
)
def test_a_malformed_value_is_refused_with_its_field_value_and_limit(
    settings: Mapping[str, object], named: str
) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        from_hf(config(settings))
    assert named in str(refusal.value)


@pytest.mark.parametrize(("family", "bias"), [("Qwen2", False), ("Mistral", True)])
def test_a_family_with_fixed_biases_refuses_a_config_that_says_otherwise(family: str, bias: bool) -> None:
    with pytest.raises(Unsupported, match="attention_bias is"):
        from_hf(config({"attention_bias": bias, "sliding_window": None}, family))


def test_a_rope_that_starts_from_the_length_of_pretraining_must_be_told_it() -> None:
    with pytest.raises(InvalidArgument, match="original_max_position_embeddings: is 0; yarn requires"):
        RopeConfig(kind="yarn", factor=4.0)


def test_a_gemma_3_whose_scores_are_capped_is_refused_by_name() -> None:
    """transformers reads the key, and computes scores without it."""
    settings = tiny_case("gemma3").config
    assert from_hf({**settings, "final_logit_softcapping": 30.0}).max_model_len
    with pytest.raises(
        Unsupported, match=r"attn_logit_softcapping is 50\.0; transformers ignores soft caps in Gemma 3"
    ):
        from_hf({**settings, "attn_logit_softcapping": 50.0})


QWEN3_CODER_480B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 262144,
    "max_window_layers": 62,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 2560,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_keys_that_restate_what_a_family_computes_change_nothing() -> None:
    restating = ("qkv_bias", "use_qk_norm", "shared_expert_intermediate_size")
    plain = {key: value for key, value in QWEN3_CODER_480B.items() if key not in restating}
    assert from_hf(QWEN3_CODER_480B) == from_hf(plain)
    for other in ({"qkv_bias": True}, {"use_qk_norm": False}, {"shared_expert_intermediate_size": 5632}):
        ((key, value),) = other.items()
        with pytest.raises(Unsupported, match=f"unknown setting {key}={value}"):
            from_hf({**QWEN3_CODER_480B, **other})


@pytest.mark.parametrize(
    ("same", "other"),
    [
        ({"qk_norm": False}, {"qk_norm": True}),
        ({"use_bias": False}, {"use_bias": True}),
        ({"num_experts": 0}, {"num_experts": 8}),
        ({"sliding_window": 0}, {"sliding_window": 64}),
        ({"use_sliding_window": False}, {"use_sliding_window": True}),
        ({"n_layer": 3}, {"n_layer": 4}),
        ({"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": 1}),
        ({"position_embedding_type": "rope"}, {"position_embedding_type": "absolute"}),
        ({"embedding_multiplier": 1}, {"embedding_multiplier": 12.0}),
        ({"use_parallel_residual": False}, {"use_parallel_residual": 0}),
    ],
)
def test_a_restating_key_is_accepted_at_the_computed_value_alone(
    same: Mapping[str, object], other: Mapping[str, object]
) -> None:
    assert from_hf(config(same)) == from_hf(config({}))
    with pytest.raises(Unsupported, match="unknown setting"):
        from_hf(config(other))


def test_private_and_training_keys_are_reported_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    private: dict[str, object] = {
        "my_training_notes": "three nights",
        "train_batch_size": 8,
        "attention_dropout_rate": 0.1,
        "dtype": "auto",
        "wandb_run": {"id": 7},
        "license": "mit",
    }
    assert from_hf(config(private)) == from_hf(config({}))
    (record,) = caplog.records
    assert record.getMessage() == (
        "config.json: ignored keys that no model code reads: "
        "attention_dropout_rate, license, my_training_notes, train_batch_size, wandb_run"
    )
    from_hf(config(private))
    assert len(caplog.records) == 1


def test_what_classes_of_other_models_read_is_refused_in_ours() -> None:
    """A key that a class of transformers reads could change the output, whatever its name."""
    from transformers import AutoConfig

    others = ("olmo2", "granite", "cohere2", "glm4_moe", "qwen3_next", "ernie4_5_moe", "nemotron", "jamba", "falcon_h1")
    taken = set(AutoConfig.for_model("llama").to_dict()) | set(to_hf(from_hf(config({}))))
    keys = {key for name in others for key in AutoConfig.for_model(name).to_dict()} - taken
    harmless = set()
    for key in keys:
        try:
            from_hf(config({key: "a value of another model"}))
            harmless.add(key)
        except (Unsupported, InvalidArgument):
            pass
    assert harmless <= {
        *("aux_loss_coef", "mlp_dropout", "attn_dropout", "hidden_dropout", "resid_pdrop", "router_aux_loss_coef"),
        *("output_router_logits", "initializer_range", "z_loss_coefficient"),
    }
    assert len(keys) > 60


@pytest.mark.parametrize(
    ("given", "architecture"),
    [
        ({"architectures": None}, "LlamaForCausalLM"),
        ({"architectures": ["LlamaModel"]}, "LlamaForCausalLM"),
        ({"architectures": ["MyLlama", "LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ],
)
def test_the_class_is_found_by_the_type_of_the_model(given: Mapping[str, object], architecture: str) -> None:
    assert from_hf(config(given)).architecture == architecture
    assert from_hf({**GPT2_NAMES, "architectures": ["GPT2Model"]}).architecture == "GPT2LMHeadModel"


GPT2_NAMES: Mapping[str, object] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 99,
}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"architectures": ["Qwen4NextForCausalLM"]}, "the closest is Qwen3"),
        ({"architectures": ["LlamaForTokenClassification"]}, "the closest is LlamaForCausalLM; docs/models.md"),
        ({"architectures": None, "model_type": "qwen4_next"}, "model_type 'qwen4_next' is not supported; supported: "),
    ],
)
def test_an_unsupported_model_is_refused_with_the_closest_one(given: Mapping[str, object], named: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        from_hf(config(given))
    assert named in str(refusal.value)


ENCODER: Mapping[str, object] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}
PUBLISHED_NOMIC: Mapping[str, object] = {
    "vocab_size": 99,
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 8192,
    "max_trained_positions": 2048,
    "activation_function": "swiglu",
    "causal": False,
    "rotary_emb_base": 1000,
}


@pytest.mark.parametrize(
    ("given", "max_model_len", "windows"),
    [
        ({"architectures": ["BertModel"], **ENCODER}, 66, [None] * 4),
        ({"architectures": ["XLMRobertaForSequenceClassification"], **ENCODER, "pad_token_id": 1}, 64, [None] * 4),
        ({"architectures": ["NomicBertModel"], **PUBLISHED_NOMIC}, 2048, [None] * 4),
        ({"architectures": ["ModernBertModel"], **ENCODER, "local_attention": 8}, 66, [None, 9, 9, None]),
        (
            {"architectures": ["Gemma3TextModel"], **ENCODER, "use_bidirectional_attention": True, "sliding_window": 8},
            66,
            [9, 9, 9, 9],
        ),
    ],
)
def test_encoders_are_read_and_written(
    given: Mapping[str, object], max_model_len: int, windows: list[int | None]
) -> None:
    """A window has half of the published length on each side."""
    found = from_hf(given)
    assert found.is_encoder and found.num_attention_layers == 1
    assert found.max_model_len == max_model_len
    assert [kind.sliding_window for kind in found.attention_kinds] == windows
    assert from_hf(to_hf(found)) == found


def test_nomic_models_of_other_forms_are_refused_by_name() -> None:
    others = {
        "prenorm": True,
        "use_rms_norm": True,
        "rotary_emb_fraction": 0.5,
        "rotary_emb_interleaved": True,
        "rotary_emb_scale_base": 512,
        "rotary_scaling_factor": 2,
        "qkv_proj_bias": True,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "parallel_block": True,
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": False,
        "activation_function": "gelu",
    }
    for name, value in others.items():
        with pytest.raises(JpagedError, match=name):
            from_hf({"architectures": ["NomicBertModel"], **PUBLISHED_NOMIC, name: value})
