"""Configs with experts: what is read of those that are published, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.config import Mixture
from jpaged.models.hf_config import from_hf, to_hf
from jpaged.models.sharding import pad_for_sharding, with_parallel_experts

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN15_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.39.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {"mixtral": MIXTRAL_8X7B, "qwen2": QWEN15_MOE, "qwen3": QWEN3_30B}


@pytest.mark.parametrize(
    ("name", "mixture"),
    [
        ("mixtral", Mixture(routing=Routing(8, 2, normalises=True), width=14336)),
        ("qwen2", Mixture(routing=Routing(60, 4), width=1408, shared_width=5632, shared_is_weighed=True)),
        ("qwen3", Mixture(routing=Routing(128, 8, normalises=True), width=768)),
    ],
)
def test_a_published_config_is_read_whole(name: str, mixture: Mixture) -> None:
    config = from_hf(PUBLISHED[name])
    assert config.mixture == mixture
    assert all(kind.is_sparse and kind.attention.sliding_window is None for kind in config.layer_kinds)
    assert from_hf(to_hf(config)) == config


def test_layers_are_sparse_by_a_step_and_a_list() -> None:
    config = from_hf({**QWEN3_30B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [kind.is_sparse for kind in config.layer_kinds] == [False, True, False, False, False, True]
    assert from_hf(to_hf(config)) == config


def test_windows_are_those_of_transformers() -> None:
    windowed = {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    for fields, windows in (
        ({**QWEN15_MOE, **windowed}, [64, None, 64, None, None]),
        ({**QWEN3_30B, **windowed}, [64] * 5),
        ({**MIXTRAL_8X7B, "num_hidden_layers": 2, "sliding_window": 64}, [64] * 2),
    ):
        config = from_hf(fields)
        assert [kind.sliding_window for kind in config.attention_kinds] == windows
        assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok: is 9; the limit is 8"),
        ("mixtral", {"num_experts": 4}, "num_experts: is 4, but num_local_experts is 8"),
        ("qwen3", {"num_experts": 0}, "num_experts: is 0; it must be an integer of at least 1"),
        ("qwen3", {"moe_intermediate_size": "wide"}, "moe_intermediate_size: is 'wide'"),
        ("qwen2", {"mlp_only_layers": "all"}, "mlp_only_layers: is 'all'; it must be a list of layers"),
        ("qwen2", {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size: is -1"),
    ],
)
def test_a_malformed_value_is_refused(name: str, settings: Mapping[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        from_hf({**PUBLISHED[name], **settings})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; experts support only the activation silu"),
        ("qwen3", {"decoder_sparse_step": 49}, "leave no layer with experts"),
        ("qwen3", {"num_shared_experts": 2}, "unknown setting num_shared_experts=2"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name: str, settings: Mapping[str, object], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        from_hf({**PUBLISHED[name], **settings})


def test_experts_are_split_by_their_width_or_by_their_number() -> None:
    config = from_hf(QWEN15_MOE)
    with pytest.raises(InvalidArgument, match="an expert's width of 1410 and a shared width of 5632"):
        pad_for_sharding(dataclasses.replace(config, mixture=_wide(config.mixture, 1410)), 4)
    assert pad_for_sharding(config, 8).mixture == config.mixture
    with pytest.raises(InvalidArgument, match=r"8 does not divide .* 60 experts and a shared width .*; 1, 2, 4 work"):
        pad_for_sharding(with_parallel_experts(config), 8)
    assert pad_for_sharding(with_parallel_experts(config), 4).mixture is not None


def _wide(mixture: Mixture | None, width: int) -> Mixture:
    assert mixture is not None
    return dataclasses.replace(mixture, width=width)


def test_a_model_without_experts_cannot_have_them_parallel() -> None:
    dense = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 88, "vocab_size": 131}
    config = from_hf({**dense, "num_hidden_layers": 2, "num_attention_heads": 4, "model_type": "llama"})
    with pytest.raises(InvalidArgument, match="enable_expert_parallel: is on, but LlamaForCausalLM has no experts"):
        with_parallel_experts(config)
