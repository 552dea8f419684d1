"""DeepSeek: V2 and V3.

Sources: their reports (arXiv 2405.04434, 2412.19437), and the repository that each one names. V3 is without the
multi-token prediction layer.
"""

from __future__ import annotations

from jpaged.capacity.known_models.known_model import KnownModel, Shape, decoder


def _deepseek(name: str, repository: str, shape: Shape, **settings: object) -> KnownModel:
    """Return a DeepSeek with latents of 512 + 64 numbers; YaRN extends positions from 4096 by a factor of 40."""
    version = settings.pop("version")
    weight = settings.pop("mscale")
    scaling = {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": weight,
        "mscale_all_dim": weight,
        "original_max_position_embeddings": 4096,
    }
    return decoder(
        name,
        f"deepseek-ai/{repository}",
        shape,
        architectures=[f"DeepseekV{version}ForCausalLM"],
        model_type=f"deepseek_v{version}",
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        rope_theta=10000,
        rope_scaling=scaling,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        **settings,
    )


def _deepseek2(name: str, repository: str, shape: Shape, **settings: object) -> KnownModel:
    return _deepseek(
        name,
        repository,
        shape,
        version=2,
        mscale=0.707,
        vocab_size=102400,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        n_group=8,
        topk_group=3,
        bos_token_id=100000,
        eos_token_id=100001,
        **settings,
    )


MODELS = (
    _deepseek2(
        "deepseek-v2-lite",
        "DeepSeek-V2-Lite",
        Shape(27, 2048, 10944, 16, 16),
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        topk_method="greedy",
    ),
    _deepseek2(
        "deepseek-v2",
        "DeepSeek-V2",
        Shape(60, 5120, 12288, 128, 128),
        q_lora_rank=1536,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
    ),
    _deepseek(
        "deepseek-v3",
        "DeepSeek-V3",
        Shape(61, 7168, 18432, 128, 128),
        version=3,
        mscale=1.0,
        vocab_size=129280,
        q_lora_rank=1536,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        first_k_dense_replace=3,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        bos_token_id=0,
        eos_token_id=1,
    ),
)
