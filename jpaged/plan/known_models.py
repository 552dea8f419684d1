"""Configurations of well-known models, in the fields of their config.json on the Hugging Face hub.

They allow planning, compiling and simulating without a checkpoint: `KNOWN_MODELS["opt-13b"].config` is the result of
reading the hub's config.json. Sources are the repository that each model names, and these reports:

    dense      OPT (arXiv 2205.01068, table 1), Llama 2 and 3 (2307.09288, 2407.21783), Qwen2.5 and Qwen3
               (2412.15115, 2505.09388)
    decoders   Gemma 2 and 3 (2408.00118, 2503.19786), Phi-3 and Phi-4 (2404.14219, 2412.08905), GPT-NeoX and Pythia
               (2204.06745, 2304.01373), Falcon (2311.16867), StarCoder2 (2402.19173), GPT-2 (Radford et al. 2019)
    experts    Mixtral (2401.04088), Qwen2 and Qwen3 (2407.10671, 2505.09388), gpt-oss (2508.10925)
    DeepSeek   V2 and V3 (2405.04434, 2412.19437)

Gemma 3, 3n and 4 are their language models alone, gpt-oss and Qwen3-MoE have weights of 16 bits, and DeepSeek V3 is
without the multi-token prediction layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from jpaged.plan.known_families import (
    GEMMA4_LARGE,
    GEMMA_3N,
    KIMI_LINEAR,
    LFM2_MOE,
    FamilyShape,
    KnownModel,
    decoder,
    falcon_model,
    gemma2_model,
    gemma3_model,
    gemma4_model,
    gpt2_model,
    granite4_model,
    lfm2_model,
    nemotron_model,
    neox_model,
    phi_model,
    qwen35_model,
    starcoder2_model,
)

_PHI3_ENDS = {"vocab_size": 32064, "bos_token_id": 1, "eos_token_id": 32000, "rope_theta": 10000.0}
_PHI3 = {**_PHI3_ENDS, "max_position_embeddings": 4096, "sliding_window": 2047}
_PHI4_ENDS = {"vocab_size": 100352, "bos_token_id": 100257, "eos_token_id": 100265, "rope_theta": 250000.0}
_PHI4 = {**_PHI4_ENDS, "max_position_embeddings": 16384, "sliding_window": None}

DECODERS_MODELS = (
    gemma2_model("2b", FamilyShape(26, 2304, 9216, 8, 4), 256, 256),
    gemma2_model("9b", FamilyShape(42, 3584, 14336, 16, 8), 256, 256),
    gemma2_model("27b", FamilyShape(46, 4608, 36864, 32, 16), 128, 144),
    gemma3_model("1b", FamilyShape(26, 1152, 6912, 4, 1), 256, 256),
    gemma3_model("4b", FamilyShape(34, 2560, 10240, 8, 4), 256, 256),
    gemma3_model("12b", FamilyShape(48, 3840, 15360, 16, 8), 256, 256),
    gemma3_model("27b", FamilyShape(62, 5376, 21504, 32, 16), 128, 168),
    GEMMA_3N,
    gemma4_model(
        "E2B",
        FamilyShape(35, 1536, 6144, 8, 1),
        5,
        hidden_size_per_layer_input=256,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        sliding_window=512,
        max_position_embeddings=131072,
    ),
    gemma4_model("31B", FamilyShape(60, 5376, 21504, 32, 16), 6, num_global_key_value_heads=4, **GEMMA4_LARGE),
    gemma4_model(
        "26B-A4B",
        FamilyShape(30, 2816, 2112, 16, 8),
        6,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        **GEMMA4_LARGE,
    ),
    phi_model("phi-3-mini-4k", "microsoft/Phi-3-mini-4k-instruct", FamilyShape(32, 3072, 8192, 32, 32), **_PHI3),
    phi_model("phi-3-medium-4k", "microsoft/Phi-3-medium-4k-instruct", FamilyShape(40, 5120, 17920, 40, 10), **_PHI3),
    phi_model("phi-4", "microsoft/phi-4", FamilyShape(40, 5120, 17920, 40, 10), **_PHI4),
    gpt2_model("gpt2", 12, 12, 768),
    gpt2_model("gpt2-medium", 24, 16, 1024),
    gpt2_model("gpt2-large", 36, 20, 1280),
    gpt2_model("gpt2-xl", 48, 25, 1600),
    neox_model("gpt-neox-20b", "EleutherAI/gpt-neox-20b", FamilyShape(44, 6144, 24576, 64, 64), 50432, "gelu_fast"),
    neox_model("pythia-1b", "EleutherAI/pythia-1b", FamilyShape(16, 2048, 8192, 8, 8), 50304),
    neox_model("pythia-2.8b", "EleutherAI/pythia-2.8b", FamilyShape(32, 2560, 10240, 32, 32), 50304),
    neox_model("pythia-6.9b", "EleutherAI/pythia-6.9b", FamilyShape(32, 4096, 16384, 32, 32), 50432),
    neox_model("pythia-12b", "EleutherAI/pythia-12b", FamilyShape(36, 5120, 20480, 40, 40), 50688),
    falcon_model("7b", 32, 4544, 71, 1),
    falcon_model("40b", 60, 8192, 128, 8),
    falcon_model("180b", 80, 14848, 232, 8),
    starcoder2_model("3b", FamilyShape(30, 3072, 12288, 24, 2), 999999.4420358813),
    starcoder2_model("7b", FamilyShape(32, 4608, 18432, 36, 4), 1000000.0),
    starcoder2_model("15b", FamilyShape(40, 6144, 24576, 48, 4), 100000.0),
    lfm2_model("350m", 1024, 6656, 16),
    lfm2_model("1.2b", 2048, 12288, 32),
    LFM2_MOE,
    KIMI_LINEAR,
    qwen35_model("9B", FamilyShape(32, 4096, 12288, 16, 4)),
    qwen35_model("35B-A3B", FamilyShape(40, 2048, 512, 16, 2), "Moe", num_experts=256, num_experts_per_tok=8),
    granite4_model(
        "350m",
        FamilyShape(32, 768, 2048, 12, 4),
        (10, 13, 17, 27),
        shared_intermediate_size=2048,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=48,
        mamba_d_head=32,
        embedding_multiplier=12,
        attention_multiplier=0.015625,
        residual_multiplier=0.246,
        logits_scaling=3,
        max_position_embeddings=32768,
    ),
    granite4_model(
        "tiny",
        FamilyShape(40, 1536, 512, 12, 4),
        (5, 15, 25, 35),
        shared_intermediate_size=1024,
        num_local_experts=64,
        num_experts_per_tok=6,
        mamba_n_heads=48,
        mamba_d_head=64,
        embedding_multiplier=12,
        attention_multiplier=0.0078125,
        residual_multiplier=0.22,
        logits_scaling=6,
        max_position_embeddings=131072,
    ),
    KnownModel(
        "mamba-codestral-7b",
        "mistralai/Mamba-Codestral-7B-v0.1",
        {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "vocab_size": 32768,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "expand": 2,
            "conv_kernel": 4,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
        },
    ),
    nemotron_model(
        "nemotron-nano-9b-v2",
        "NVIDIA-Nemotron-Nano-9B-v2",
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        FamilyShape(56, 4480, 15680, 40, 8),
        (128, 80),
        max_position_embeddings=131072,
    ),
    nemotron_model(
        "nemotron-3-nano-30b-a3b",
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        FamilyShape(52, 2688, 1856, 32, 2),
        (64, 64),
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
        max_position_embeddings=262144,
    ),
    decoder(
        "smollm3-3b",
        "HuggingFaceTB/SmolLM3-3B",
        FamilyShape(36, 2048, 11008, 16, 4),
        architectures=["SmolLM3ForCausalLM"],
        model_type="smollm3",
        vocab_size=128256,
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        rope_theta=5000000.0,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    ),
    decoder(
        "olmo-2-7b",
        "allenai/OLMo-2-1124-7B",
        FamilyShape(32, 4096, 11008, 32, 32),
        architectures=["Olmo2ForCausalLM"],
        model_type="olmo2",
        vocab_size=100352,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=500000,
        tie_word_embeddings=False,
        torch_dtype="float32",
    ),
    decoder(
        "command-r7b",
        "CohereLabs/c4ai-command-r7b-12-2024",
        FamilyShape(32, 4096, 14336, 32, 8),
        architectures=["Cohere2ForCausalLM"],
        model_type="cohere2",
        vocab_size=256000,
        max_position_embeddings=132096,
        layer_norm_eps=1e-5,
        rope_theta=50000,
        sliding_window=4096,
        sliding_window_pattern=4,
        logit_scale=0.25,
        layer_switch=4,
        use_gated_activation=True,
        use_parallel_block=True,
        torch_dtype="bfloat16",
    ),
    decoder(
        "granite-3.1-1b-a400m",
        "ibm-granite/granite-3.1-1b-a400m-base",
        FamilyShape(24, 1024, 512, 16, 8),
        architectures=["GraniteMoeForCausalLM"],
        model_type="granitemoe",
        vocab_size=49155,
        max_position_embeddings=131072,
        num_local_experts=32,
        num_experts_per_tok=8,
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.22,
        logits_scaling=6.0,
        rms_norm_eps=1e-6,
        rope_theta=1500000.0,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    ),
)
"""Published models."""


def _deepseek(name: str, repository: str, shape: FamilyShape, **settings: object) -> KnownModel:
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


def _deepseek2(name: str, repository: str, shape: FamilyShape, **settings: object) -> KnownModel:
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


DEEPSEEK_MODELS = (
    _deepseek2(
        "deepseek-v2-lite",
        "DeepSeek-V2-Lite",
        FamilyShape(27, 2048, 10944, 16, 16),
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        topk_method="greedy",
    ),
    _deepseek2(
        "deepseek-v2",
        "DeepSeek-V2",
        FamilyShape(60, 5120, 12288, 128, 128),
        q_lora_rank=1536,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
    ),
    _deepseek(
        "deepseek-v3",
        "DeepSeek-V3",
        FamilyShape(61, 7168, 18432, 128, 128),
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


def _llama2(size: str, shape: FamilyShape) -> KnownModel:
    return decoder(
        f"llama-2-{size}",
        f"meta-llama/Llama-2-{size}-hf",
        shape,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=32000,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="float16",
    )


def _llama3(name: str, repository: str, shape: FamilyShape, rope_factor: float | None = None) -> KnownModel:
    """Return a Llama 3 of 8192 tokens, or with a rope factor a 3.1 or 3.2; the 3.2 tie their embeddings."""
    scaling = {
        "rope_type": "llama3",
        "factor": rope_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return decoder(
        name,
        f"meta-llama/{repository}",
        shape,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=128256,
        max_position_embeddings=131072 if rope_factor else 8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=scaling if rope_factor else None,
        tie_word_embeddings=name.startswith("llama-3.2"),
        bos_token_id=128000,
        eos_token_id=128001,
        torch_dtype="bfloat16",
    )


def _qwen25(size: str, shape: FamilyShape, vocab_size: int, max_len: int, rms_norm_eps: float) -> KnownModel:
    return decoder(
        f"qwen2.5-{size}",
        f"Qwen/Qwen2.5-{size.upper()}",
        shape,
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        vocab_size=vocab_size,
        max_position_embeddings=max_len,
        rms_norm_eps=rms_norm_eps,
        rope_theta=1000000.0,
        use_sliding_window=False,
        tie_word_embeddings=size in ("0.5b", "1.5b", "3b"),
        bos_token_id=151643,
        eos_token_id=151643,
        torch_dtype="bfloat16",
    )


def _qwen3(size: str, shape: FamilyShape) -> KnownModel:
    return decoder(
        f"qwen3-{size}",
        f"Qwen/Qwen3-{size.upper()}",
        shape,
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=151936,
        head_dim=128,
        attention_bias=False,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_sliding_window=False,
        tie_word_embeddings=size in ("0.6b", "1.7b", "4b"),
        bos_token_id=151643,
        eos_token_id=151645,
        torch_dtype="bfloat16",
    )


def _opt(size: str, num_layers: int, num_heads: int, hidden_size: int) -> KnownModel:
    fields: dict[str, object] = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": hidden_size,
        "word_embed_proj_dim": hidden_size,
        "ffn_dim": 4 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }
    return KnownModel(f"opt-{size}", f"facebook/opt-{size}", fields)


DENSE_MODELS = (
    _llama2("7b", FamilyShape(32, 4096, 11008, 32, 32)),
    _llama2("13b", FamilyShape(40, 5120, 13824, 40, 40)),
    _llama2("70b", FamilyShape(80, 8192, 28672, 64, 8)),
    _llama3("llama-3-8b", "Meta-Llama-3-8B", FamilyShape(32, 4096, 14336, 32, 8)),
    _llama3("llama-3-70b", "Meta-Llama-3-70B", FamilyShape(80, 8192, 28672, 64, 8)),
    _llama3("llama-3.1-8b", "Llama-3.1-8B", FamilyShape(32, 4096, 14336, 32, 8), 8.0),
    _llama3("llama-3.1-70b", "Llama-3.1-70B", FamilyShape(80, 8192, 28672, 64, 8), 8.0),
    _llama3("llama-3.1-405b", "Llama-3.1-405B", FamilyShape(126, 16384, 53248, 128, 8), 8.0),
    _llama3("llama-3.2-1b", "Llama-3.2-1B", FamilyShape(16, 2048, 8192, 32, 8), 32.0),
    _llama3("llama-3.2-3b", "Llama-3.2-3B", FamilyShape(28, 3072, 8192, 24, 8), 32.0),
    decoder(
        "mistral-7b-v0.3",
        "mistralai/Mistral-7B-v0.3",
        FamilyShape(32, 4096, 14336, 32, 8),
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        vocab_size=32768,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        sliding_window=None,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="bfloat16",
    ),
    _qwen25("0.5b", FamilyShape(24, 896, 4864, 14, 2), 151936, 32768, 1e-6),
    _qwen25("1.5b", FamilyShape(28, 1536, 8960, 12, 2), 151936, 131072, 1e-6),
    _qwen25("3b", FamilyShape(36, 2048, 11008, 16, 2), 151936, 32768, 1e-6),
    _qwen25("7b", FamilyShape(28, 3584, 18944, 28, 4), 152064, 131072, 1e-6),
    _qwen25("14b", FamilyShape(48, 5120, 13824, 40, 8), 152064, 131072, 1e-5),
    _qwen25("32b", FamilyShape(64, 5120, 27648, 40, 8), 152064, 131072, 1e-5),
    _qwen25("72b", FamilyShape(80, 8192, 29568, 64, 8), 152064, 131072, 1e-5),
    _qwen3("0.6b", FamilyShape(28, 1024, 3072, 16, 8)),
    _qwen3("1.7b", FamilyShape(28, 2048, 6144, 16, 8)),
    _qwen3("4b", FamilyShape(36, 2560, 9728, 32, 8)),
    _qwen3("8b", FamilyShape(36, 4096, 12288, 32, 8)),
    _qwen3("14b", FamilyShape(40, 5120, 17408, 40, 8)),
    _qwen3("32b", FamilyShape(64, 5120, 25600, 64, 8)),
    _opt("125m", 12, 12, 768),
    _opt("1.3b", 24, 32, 2048),
    _opt("13b", 40, 40, 5120),
    _opt("66b", 64, 72, 9216),
    _opt("175b", 96, 96, 12288),
)
"""Published models."""


def _mixtral(size: str, shape: FamilyShape, vocab_size: int, max_len: int) -> KnownModel:
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


def _qwen2(
    name: str, repository: str, shape: FamilyShape, widths: tuple[int, int], choice: tuple[int, int]
) -> KnownModel:
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


def _qwen3_moe(size: str, repository: str, shape: FamilyShape, width: int) -> KnownModel:
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
        FamilyShape(num_layers, 2880, 2880, 64, 8),
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


EXPERTS_MODELS = (
    _mixtral("8x7b", FamilyShape(32, 4096, 14336, 32, 8), 32000, 32768),
    _mixtral("8x22b", FamilyShape(56, 6144, 16384, 48, 8), 32000, 65536),
    _qwen2("qwen1.5-moe-a2.7b", "Qwen1.5-MoE-A2.7B", FamilyShape(24, 2048, 5632, 16, 16), (1408, 5632), (60, 4)),
    _qwen2("qwen2-57b-a14b", "Qwen2-57B-A14B", FamilyShape(28, 3584, 18944, 28, 4), (2560, 20480), (64, 8)),
    _qwen3_moe("30b-a3b", "Qwen3-30B-A3B", FamilyShape(48, 2048, 6144, 32, 4), 768),
    _qwen3_moe("235b-a22b", "Qwen3-235B-A22B", FamilyShape(94, 4096, 12288, 64, 4), 1536),
    _gpt_oss("20b", 24, 32),
    _gpt_oss("120b", 36, 128),
)
"""Published models."""


KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model for model in (*DENSE_MODELS, *DECODERS_MODELS, *EXPERTS_MODELS, *DEEPSEEK_MODELS)
}
"""Published models by name."""

_SAME_SHAPE = {"hf", "instruct", "chat", "base", "meta", "it", "pt"}
"""Words of hub names that do not affect the shape."""


def find_known(name: str) -> KnownModel | None:
    """Return the model with a name or hub id, ignoring case and words like "instruct"; None if unknown."""
    wanted = _plain(name)
    for model in KNOWN_MODELS.values():
        if wanted in (_plain(model.name), _plain(model.repository), _plain(model.repository.rpartition("/")[2])):
            return model
    return None


def _plain(name: str) -> str:
    """Return the name in lower case, without words that do not affect the shape; the owner stays."""
    owner, slash, own = name.lower().rpartition("/")
    return f"{owner}{slash}" + "-".join(word for word in own.split("-") if word not in _SAME_SHAPE)
