"""Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss, the last two with weights of 16 bits.

Sources: the reports of Mixtral (arXiv 2401.04088), Qwen2 and Qwen3 (2407.10671, 2505.09388) and gpt-oss (2508.10925),
and the repository that each one names.
"""

from __future__ import annotations

from jpaged.capacity.known_models.known_model import KnownModel, Shape, decoder


def _mixtral(size: str, shape: Shape, vocab_size: int, max_len: int) -> KnownModel:
    return decoder(
        f"mixtral-{size}",
        f"mistralai/Mixtral-{size.upper().replace('X', 'x')}-v0.1",
        shape,
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        vocab_size=vocab_size,
        max_position_embeddings=max_len,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="bfloat16",
    )


def _qwen2(name: str, repository: str, shape: Shape, widths: tuple[int, int], choice: tuple[int, int]) -> KnownModel:
    """Return a Qwen2-MoE.

    `widths` are those of an expert and of the shared expert; `choice` is the number of experts, and of those per token.
    """
    (width, shared), (num_experts, top_k) = widths, choice
    return decoder(
        name,
        f"Qwen/{repository}",
        shape,
        architectures=["Qwen2MoeForCausalLM"],
        model_type="qwen2_moe",
        vocab_size=151936,
        max_position_embeddings=8192 if "1.5" in name else 32768,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_sliding_window=False,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=shared,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
        bos_token_id=151643,
        eos_token_id=151643,
        torch_dtype="bfloat16",
    )


def _qwen3(size: str, repository: str, shape: Shape, width: int) -> KnownModel:
    return decoder(
        f"qwen3-{size}",
        f"Qwen/{repository}",
        shape,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        vocab_size=151936,
        head_dim=128,
        attention_bias=False,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_sliding_window=False,
        moe_intermediate_size=width,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        bos_token_id=151643,
        eos_token_id=151645,
        torch_dtype="bfloat16",
    )


def _gpt_oss(size: str, num_layers: int, num_experts: int) -> KnownModel:
    return decoder(
        f"gpt-oss-{size}",
        f"openai/gpt-oss-{size}",
        Shape(num_layers, 2880, 2880, 64, 8),
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        vocab_size=201088,
        head_dim=64,
        attention_bias=True,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        sliding_window=128,
        num_local_experts=num_experts,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
        eos_token_id=200002,
        torch_dtype="bfloat16",
    )


MODELS = (
    _mixtral("8x7b", Shape(32, 4096, 14336, 32, 8), 32000, 32768),
    _mixtral("8x22b", Shape(56, 6144, 16384, 48, 8), 32000, 65536),
    _qwen2("qwen1.5-moe-a2.7b", "Qwen1.5-MoE-A2.7B", Shape(24, 2048, 5632, 16, 16), (1408, 5632), (60, 4)),
    _qwen2("qwen2-57b-a14b", "Qwen2-57B-A14B", Shape(28, 3584, 18944, 28, 4), (2560, 20480), (64, 8)),
    _qwen3("30b-a3b", "Qwen3-30B-A3B", Shape(48, 2048, 6144, 32, 4), 768),
    _qwen3("235b-a22b", "Qwen3-235B-A22B", Shape(94, 4096, 12288, 64, 4), 1536),
    _gpt_oss("20b", 24, 32),
    _gpt_oss("120b", 36, 128),
)
"""Published models."""
