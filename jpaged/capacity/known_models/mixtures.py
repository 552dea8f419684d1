"""Mixtral, Qwen2-MoE and Qwen3-MoE.

Sources: their reports (arXiv 2401.04088, 2407.10671, 2505.09388), and the repository that each one names.
"""

from __future__ import annotations

from jpaged.capacity.known_models.known_model import KnownModel, Shape, decoder


def _mixtral(size: str, repository: str, shape: Shape, vocab_size: int, max_len: int) -> KnownModel:
    return decoder(
        f"mixtral-{size}",
        f"mistralai/{repository}",
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


def _qwen3_moe(size: str, shape: Shape, expert_width: int) -> KnownModel:
    return decoder(
        f"qwen3-{size}",
        f"Qwen/Qwen3-{size.upper()}",
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
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=expert_width,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=151643,
        eos_token_id=151645,
        torch_dtype="bfloat16",
    )


MODELS = (
    _mixtral("8x7b", "Mixtral-8x7B-v0.1", Shape(32, 4096, 14336, 32, 8), 32000, 32768),
    _mixtral("8x22b", "Mixtral-8x22B-v0.1", Shape(56, 6144, 16384, 48, 8), 32000, 65536),
    decoder(
        "qwen1.5-moe-a2.7b",
        "Qwen/Qwen1.5-MoE-A2.7B",
        Shape(24, 2048, 5632, 16, 16),
        architectures=["Qwen2MoeForCausalLM"],
        model_type="qwen2_moe",
        vocab_size=151936,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_sliding_window=False,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        norm_topk_prob=False,
        tie_word_embeddings=False,
        bos_token_id=151643,
        eos_token_id=151643,
        torch_dtype="bfloat16",
    ),
    _qwen3_moe("30b-a3b", Shape(48, 2048, 6144, 32, 4), 768),
    _qwen3_moe("235b-a22b", Shape(94, 4096, 12288, 64, 4), 1536),
)
