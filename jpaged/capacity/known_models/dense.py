"""Llama, Mistral, Qwen and OPT.

Sources: the OPT paper's table 1 (arXiv 2205.01068), the Llama 2 and Llama 3 papers' tables of architectures (arXiv
2307.09288, 2407.21783), Qwen2.5's and Qwen3's reports (arXiv 2412.15115, 2505.09388), and the repository that each one
names.
"""

from __future__ import annotations

from jpaged.capacity.known_models.known_model import KnownModel, Shape, decoder


def _llama2(size: str, shape: Shape) -> KnownModel:
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


def _llama3(name: str, repository: str, shape: Shape, rope_factor: float | None = None) -> KnownModel:
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


def _qwen25(size: str, shape: Shape, vocab_size: int, max_len: int, rms_norm_eps: float) -> KnownModel:
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


def _qwen3(size: str, shape: Shape) -> KnownModel:
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


MODELS = (
    _llama2("7b", Shape(32, 4096, 11008, 32, 32)),
    _llama2("13b", Shape(40, 5120, 13824, 40, 40)),
    _llama2("70b", Shape(80, 8192, 28672, 64, 8)),
    _llama3("llama-3-8b", "Meta-Llama-3-8B", Shape(32, 4096, 14336, 32, 8)),
    _llama3("llama-3-70b", "Meta-Llama-3-70B", Shape(80, 8192, 28672, 64, 8)),
    _llama3("llama-3.1-8b", "Llama-3.1-8B", Shape(32, 4096, 14336, 32, 8), 8.0),
    _llama3("llama-3.1-70b", "Llama-3.1-70B", Shape(80, 8192, 28672, 64, 8), 8.0),
    _llama3("llama-3.1-405b", "Llama-3.1-405B", Shape(126, 16384, 53248, 128, 8), 8.0),
    _llama3("llama-3.2-1b", "Llama-3.2-1B", Shape(16, 2048, 8192, 32, 8), 32.0),
    _llama3("llama-3.2-3b", "Llama-3.2-3B", Shape(28, 3072, 8192, 24, 8), 32.0),
    decoder(
        "mistral-7b-v0.3",
        "mistralai/Mistral-7B-v0.3",
        Shape(32, 4096, 14336, 32, 8),
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
    _qwen25("0.5b", Shape(24, 896, 4864, 14, 2), 151936, 32768, 1e-6),
    _qwen25("1.5b", Shape(28, 1536, 8960, 12, 2), 151936, 131072, 1e-6),
    _qwen25("3b", Shape(36, 2048, 11008, 16, 2), 151936, 32768, 1e-6),
    _qwen25("7b", Shape(28, 3584, 18944, 28, 4), 152064, 131072, 1e-6),
    _qwen25("14b", Shape(48, 5120, 13824, 40, 8), 152064, 131072, 1e-5),
    _qwen25("32b", Shape(64, 5120, 27648, 40, 8), 152064, 131072, 1e-5),
    _qwen25("72b", Shape(80, 8192, 29568, 64, 8), 152064, 131072, 1e-5),
    _qwen3("0.6b", Shape(28, 1024, 3072, 16, 8)),
    _qwen3("1.7b", Shape(28, 2048, 6144, 16, 8)),
    _qwen3("4b", Shape(36, 2560, 9728, 32, 8)),
    _qwen3("8b", Shape(36, 4096, 12288, 32, 8)),
    _qwen3("14b", Shape(40, 5120, 17408, 40, 8)),
    _qwen3("32b", Shape(64, 5120, 25600, 64, 8)),
    _opt("125m", 12, 12, 768),
    _opt("1.3b", 24, 32, 2048),
    _opt("13b", 40, 40, 5120),
    _opt("66b", 64, 72, 9216),
    _opt("175b", 96, 96, 12288),
)
"""Published models."""
