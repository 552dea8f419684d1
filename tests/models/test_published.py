"""Published config.json files, and others that transformers saves, are read whole, and as transformers reads them.

The files are written again from memory of what their repositories hold, the keys that say nothing to us among them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import DecoderConfig
from jpaged.models.hf_config import from_hf, to_hf
from tests.models.tiny import tiny_case

Fields = Mapping[str, object]


def sizes(width: int, inner: int, num_layers: int, num_heads: int, num_kv_heads: int, vocab_size: int) -> Fields:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
    }


def named(architecture: str, model_type: str, *parts: Fields, **settings: object) -> Fields:
    result: dict[str, object] = {"architectures": [architecture], "model_type": model_type}
    for part in parts:
        result |= part
    return result | settings


def gemma_of_images(text: Fields, **settings: object) -> Fields:
    marks = {"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144}
    return named(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        marks,
        mm_tokens_per_image=256,
        initializer_range=0.02,
        text_config={"model_type": "gemma3_text", "sliding_window": 1024, **text},
        torch_dtype="bfloat16",
        vision_config={"model_type": "siglip_vision_model", "hidden_size": 1152},
        **settings,
    )


REMOTE = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
CAPPED = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
GEMMA = {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0, "rms_norm_eps": 1e-6}
GEMMA_4B = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
STRETCHED = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
PHI = {"attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-5}
LONG = {"long_factor": [1.5] * 48, "short_factor": [1.1] * 48, "type": "longrope"}
GPT2: Fields = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-5,
    "n_ctx": 1024,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
FALCON: Fields = {"alibi": False, "bias": False, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5, "vocab_size": 65024}
LLAMA = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
STARCODER = {"activation_function": "gelu", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True}

PUBLISHED: Mapping[str, Fields] = {
    "huggyllama-7b": named(
        "LlamaForCausalLM", "llama", sizes(4096, 11008, 32, 32, 32, 32000), LLAMA, max_sequence_length=2048
    ),
    "mistral-7b": named(
        "MistralForCausalLM", "mistral", sizes(4096, 14336, 32, 32, 8, 32000), LLAMA, sliding_window=4096
    ),
    "mixtral-8x7b": named(
        "MixtralForCausalLM",
        "mixtral",
        sizes(4096, 14336, 32, 32, 8, 32000),
        LLAMA,
        num_experts_per_tok=2,
        num_local_experts=8,
        router_aux_loss_coef=0.02,
        sliding_window=None,
    ),
    "gemma-2-9b": named(
        "Gemma2ForCausalLM",
        "gemma2",
        sizes(3584, 14336, 42, 16, 8, 256000),
        {**GEMMA, **CAPPED},
        cache_implementation="hybrid",
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        sliding_window=4096,
        sliding_window_size=4096,
    ),
    "gemma-3-1b": named(
        "Gemma3ForCausalLM",
        "gemma3_text",
        sizes(1152, 6912, 26, 4, 1, 262144),
        GEMMA,
        cache_implementation="hybrid",
        eos_token_id=[1, 106],
        head_dim=256,
        max_position_embeddings=32768,
        rope_local_base_freq=10000,
        rope_theta=1000000,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "gemma-3-4b": gemma_of_images({**GEMMA_4B, **STRETCHED}, eos_token_id=[1, 106]),
    "gemma-3-4b, tuned": gemma_of_images(
        {
            **GEMMA_4B,
            **STRETCHED,
            "cache_implementation": "hybrid",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
        boi_token_id=255999,
        eoi_token_id=256000,
        image_token_id=262144,
        hidden_size=2560,
        pad_token_id=0,
    ),
    "phi-3-mini-128k": named(
        "Phi3ForCausalLM",
        "phi3",
        sizes(3072, 8192, 32, 32, 32, 32064),
        PHI,
        auto_map=REMOTE,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling=LONG,
        sliding_window=262144,
    ),
    "phi-4-mini": named(
        "Phi3ForCausalLM",
        "phi3",
        sizes(3072, 8192, 32, 24, 8, 200064),
        PHI,
        auto_map=REMOTE,
        bos_token_id=199999,
        eos_token_id=199999,
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        max_position_embeddings=131072,
        mlp_bias=False,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        rope_scaling=LONG,
        sliding_window=262144,
        tie_word_embeddings=True,
    ),
    "gpt2-medium": named(
        "GPT2LMHeadModel",
        "gpt2",
        GPT2,
        {"n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True},
    ),
    "gpt2-xl": named("GPT2LMHeadModel", "gpt2", GPT2, n_embd=1600, n_head=25, n_layer=48, output_past=True),
    "gpt2, both names": named("GPT2LMHeadModel", "gpt2", GPT2, n_embd=768, hidden_size=768, n_head=12, n_layer=12),
    "gpt-neox-20b": named(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {"hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64, "num_hidden_layers": 44},
        attention_probs_dropout_prob=0,
        bos_token_id=0,
        eos_token_id=0,
        hidden_act="gelu_fast",
        hidden_dropout_prob=0,
        rotary_emb_base=10000,
        rotary_pct=0.25,
        vocab_size=50432,
    ),
    "falcon-40b": named(
        "FalconForCausalLM",
        "falcon",
        FALCON,
        {"hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8},
        apply_residual_connection_post_layernorm=False,
        auto_map=REMOTE,
        new_decoder_architecture=True,
    ),
    "falcon-11b": named(
        "FalconForCausalLM",
        "falcon",
        FALCON,
        {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8},
        ff_factor=4,
        ffn_hidden_size=16384,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
        rope_theta=500042.0,
        tie_word_embeddings=False,
    ),
    "starcoder2-7b": named(
        "Starcoder2ForCausalLM",
        "starcoder2",
        sizes(4608, 18432, 32, 36, 4, 49152),
        STARCODER,
        attention_softmax_in_fp32=True,
        hidden_act="gelu_pytorch_tanh",
        mlp_type="default",
        norm_type="layer_norm",
        scale_attention_softmax_in_fp32=True,
        sliding_window=4096,
    ),
    "qwen2, bare": named(
        "Qwen2ForCausalLM",
        "qwen2",
        {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 64, "num_hidden_layers": 2},
        num_key_value_heads=None,
        vocab_size=131,
    ),
    "qwen3, bare": named(
        "Qwen3ForCausalLM",
        "qwen3",
        {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 64, "num_hidden_layers": 2},
        vocab_size=131,
    ),
    "opt-125m": tiny_case("opt").config,
    "gpt-oss, empty rope_scaling": {**tiny_case("gpt_oss").config, "rope_scaling": {}},
    "phi3, shorter than 4096": {**tiny_case("phi3_long").config, "original_max_position_embeddings": None},
}


_NULLS = ("num_key_value_heads", "sliding_window")
"""Keys whose null means something."""


def as_transformers(config: Fields) -> Any:
    from transformers import AutoConfig

    given = {
        key: value for key, value in config.items() if key != "architectures" and (value is not None or key in _NULLS)
    }
    return AutoConfig.for_model(**copy.deepcopy(given))  # which writes into the sections that it is given


def test_the_length_of_phi_that_a_config_leaves_out_is_that_of_transformers() -> None:
    given = {name: value for name, value in PUBLISHED["phi-3-mini-128k"].items() if name != "max_position_embeddings"}
    assert from_hf(given) == from_hf({**given, "max_position_embeddings": 4096})


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    from transformers import GenerationConfig

    ours = from_hf(PUBLISHED[name])
    whole = as_transformers(PUBLISHED[name])
    text, generation = whole.get_text_config(), GenerationConfig.from_model_config(whole)
    ends, begin = generation.eos_token_id, generation.bos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    assert list(ours.eos_token_ids) == [token_id for token_id in ends if token_id < ours.vocab_size]
    assert ours.bos_token_id == (begin if begin is None or begin < ours.vocab_size else None)
    assert ours.tie_word_embeddings == whole.tie_word_embeddings
    kv_heads = [getattr(text, key) for key in ("num_key_value_heads", "num_kv_heads") if hasattr(text, key)]
    assert [ours.num_kv_heads] == (kv_heads or [text.num_attention_heads])
    assert (ours.hidden_size, ours.num_layers) == (text.hidden_size, text.num_hidden_layers)
    assert _windows(ours) == _their_windows(text, ours.max_model_len)
    if isinstance(ours, DecoderConfig) and ours.ropes:
        rope = text.rope_parameters.get("full_attention", text.rope_parameters)
        assert (ours.ropes[0].kind, ours.ropes[0].theta) == (rope["rope_type"], rope["rope_theta"])
    assert from_hf(to_hf(ours)) == ours


def _windows(config: ModelConfig) -> list[int | None]:
    return [kind.sliding_window for kind in config.attention_kinds]


def _their_windows(text: Any, max_model_len: int) -> list[int | None]:
    window = getattr(text, "sliding_window", None)
    window = window if window and window < max_model_len else None
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return [window if name == "sliding_attention" else None for name in types]


@pytest.mark.parametrize("settings", [{}, {"rope_scaling": {**LONG, "original_max_position_embeddings": 8192}}])
def test_the_length_that_phi_3_was_trained_at_is_4096_unless_it_is_told_outside(settings: Fields) -> None:
    named_length = PUBLISHED["phi-3-mini-128k"]
    unnamed = {key: value for key, value in named_length.items() if key != "original_max_position_embeddings"}
    read = from_hf({**unnamed, **settings})
    assert isinstance(read, DecoderConfig)
    want = as_transformers({**unnamed, **settings}).rope_parameters["original_max_position_embeddings"]
    assert read.ropes[0].original_max_position_embeddings == want == 4096
    assert read == from_hf(named_length)


def test_what_a_gemma_that_reads_images_is_comes_from_text_config_alone() -> None:
    """But for token ids, the type of weights and whether its embedding is tied."""
    plain = from_hf(PUBLISHED["gemma-3-4b"])
    tuned = from_hf(PUBLISHED["gemma-3-4b, tuned"])
    assert tuned.checkpoint_dtype == plain.checkpoint_dtype == "bfloat16"
    assert (tuned.tie_word_embeddings, tuned.eos_token_ids, tuned.bos_token_id) == (True, (1,), 2)
    untied = from_hf({**PUBLISHED["gemma-3-4b"], "tie_word_embeddings": False})
    assert not untied.tie_word_embeddings


def test_every_default_of_generation_is_passed_over() -> None:
    from transformers import GenerationConfig

    defaults = GenerationConfig._get_default_generation_params()
    assert from_hf({**PUBLISHED["mistral-7b"], **defaults}) == from_hf(PUBLISHED["mistral-7b"])
    assert {"num_beams", "typical_p", "suppress_tokens"} <= set(defaults)
    harmless = {
        "gradient_checkpointing": False,
        "pruned_heads": {},
        "use_bfloat16": False,
        "_num_labels": 1,
        "custom_pipelines": {},
        "tf_legacy_loss": False,
        "sep_token_id": 1,
        "decoder_start_token_id": 0,
        "_experts_implementation": "eager",
    }
    assert from_hf({**PUBLISHED["mistral-7b"], **harmless}) == from_hf(PUBLISHED["mistral-7b"])


def test_ids_that_are_missing_are_the_class_s_own_and_null_is_none() -> None:
    ends = {"eos_token_id": None, "bos_token_id": None}
    bare = {key: value for key, value in tiny_case("llama_mha").config.items() if key not in ends}
    assert (from_hf(bare).eos_token_ids, from_hf(bare).bos_token_id) == ((2,), 1)
    assert from_hf(bare, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert (from_hf({**bare, **ends}).eos_token_ids, from_hf({**bare, **ends}).bos_token_id) == ((), None)


def test_an_id_beyond_the_vocabulary_is_left_out() -> None:
    config = tiny_case("starcoder2").config
    read = from_hf({**config, "eos_token_id": [2, 50256], "bos_token_id": 50256})
    assert (read.eos_token_ids, read.bos_token_id) == ((2,), None)
    assert from_hf({**config, "eos_token_id": 131}).eos_token_ids == ()


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim"])
def test_a_zero_mscale_is_a_missing_one(key: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    mscales = {"mscale": 1.0, "mscale_all_dim": 0.6}
    other = {name: value for name, value in mscales.items() if name != key}
    config = tiny_case("llama_mha").config
    zero, missing = (
        from_hf({**config, "rope_theta": None, "rope_parameters": {**yarn, **some}})
        for some in ({**mscales, key: 0}, other)
    )
    assert zero == missing


NESTED = {"full_attention": {"rope_type": "yarn", "factor": 8.0, "truncate": False}}


@pytest.mark.parametrize(
    ("name", "settings", "refusal"),
    [
        (
            "phi-3-mini-128k",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "the RoPE type is 'linear'; Phi-3 has",
        ),
        ("phi-3-mini-128k", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "the RoPE type is 'yarn'; Phi-3 has"),
        ("phi-4-mini", {"interpolate_factor": 2}, "interpolate_factor is 2; positions are scaled only by rope_scaling"),
        ("gemma-3-4b", {"sliding_window": 512}, "config.json: unknown setting sliding_window=512"),
        ("gemma-3-4b", {"rope_theta": 5.0}, "config.json: unknown setting rope_theta=5.0"),
        ("gemma-3-4b", {"hidden_size": 64}, "config.json: hidden_size is 64; hidden_size is 2560 in text_config"),
        (
            "gemma-3-4b",
            {"text_config": {**GEMMA_4B, "final_logit_softcapping": 30.0}},
            "text_config: final_logit_softcapping is 30.0; transformers applies no soft cap to logits",
        ),
        ("gemma-3-4b", {"text_config": {**GEMMA_4B, "scale": 2}}, "config.json text_config: unknown setting scale=2"),
        (
            "gemma-3-1b",
            {"sliding_window_pattern": None, "_sliding_window_pattern": 3},
            "_sliding_window_pattern is 3, but layer_types is missing",
        ),
        (
            "gemma-3-1b",
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            "rope_scaling: type is 'linear'; transformers",
        ),
        ("gemma-3-1b", {"rope_parameters": NESTED}, "rope_parameters full_attention: truncate is False; transformers"),
        ("gemma-2-9b", {"sliding_window_size": 512}, "sliding_window_size is 512; the model uses sliding_window, 4096"),
        (
            "mistral-7b",
            {"layer_types": ["full_attention", "sliding_attention"] * 16},
            "layer_types has full_attention, sliding_attention, but sliding_window is 4096, so all layers of mistral "
            "must be",
        ),
        (
            "mistral-7b",
            {"layer_types": ["sliding_attention"] * 32, "sliding_window": None},
            "sliding_window is None, so all layers of mistral must be full_attention",
        ),
        ("gpt-neox-20b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but rotary_pct is 0.25"),
        ("gpt-neox-20b", {"rope_theta": 50000}, "rope_theta is 50000, but rotary_emb_base is 10000"),
        ("mistral-7b", {"pruned_heads": {"0": [1]}}, "pruned_heads is {'0': [1]}"),
        ("mistral-7b", {"chunk_size_feed_forward": 1}, "chunk_size_feed_forward is 1"),
    ],
)
def test_what_transformers_reads_otherwise_is_refused_by_name(name: str, settings: Fields, refusal: str) -> None:
    with pytest.raises(Unsupported) as raised:
        from_hf({**PUBLISHED[name], **settings})
    assert refusal in str(raised.value)


def test_experts_of_qwen2_are_counted_by_their_own_name_alone() -> None:
    config = {key: value for key, value in tiny_case("qwen2_moe").config.items() if key != "num_experts"}
    with pytest.raises(Unsupported, match="num_local_experts is 6; qwen2_moe uses the name num_experts, which is 60"):
        from_hf({**config, "num_local_experts": 6})
    assert from_hf({**config, "num_local_experts": 6, "num_experts": 6}) == from_hf(tiny_case("qwen2_moe").config)


def test_sizes_by_two_names_must_be_equal() -> None:
    with pytest.raises(InvalidArgument, match="hidden_size: is 64, but n_embd, another name for it, is 768"):
        from_hf({**PUBLISHED["gpt2, both names"], "hidden_size": 64})


def test_layers_of_mistral_are_listed_as_they_are() -> None:
    config = PUBLISHED["mistral-7b"]
    assert from_hf({**config, "layer_types": ["sliding_attention"] * 32}) == from_hf(config)
    full = {"layer_types": ["full_attention"] * 32, "sliding_window": None}
    assert _windows(from_hf({**config, **full})) == [None] * 32
