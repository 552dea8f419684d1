"""Gemma, Phi, the GPT families, Falcon and StarCoder2.

Sources: the reports of Gemma 2 and 3 (arXiv 2408.00118, 2503.19786), Phi-3 and Phi-4 (2404.14219, 2412.08905), GPT-NeoX
and Pythia (2204.06745, 2304.01373), Falcon (2311.16867), StarCoder2 (2402.19173), GPT-2 (Radford et al. 2019), and
the repository that each one names. Gemma 3 is its language model alone.
"""

from __future__ import annotations

from jpaged.capacity.known_models.known_model import KnownModel, Shape, decoder


def _gemma2(size: str, shape: Shape, head_dim: int, scalar: int) -> KnownModel:
    return decoder(
        f"gemma-2-{size}",
        f"google/gemma-2-{size}",
        shape,
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        vocab_size=256000,
        head_dim=head_dim,
        query_pre_attn_scalar=scalar,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        bos_token_id=2,
        eos_token_id=1,
        torch_dtype="float32",
    )


def _gemma3(size: str, shape: Shape, head_dim: int, scalar: int) -> KnownModel:
    is_small = size == "1b"
    scaling = None if is_small else {"rope_type": "linear", "factor": 8.0}
    return decoder(
        f"gemma-3-{size}",
        f"google/gemma-3-{size}-pt",
        shape,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        vocab_size=262144 if is_small else 262208,
        head_dim=head_dim,
        query_pre_attn_scalar=scalar,
        sliding_window=512 if is_small else 1024,
        sliding_window_pattern=6,
        max_position_embeddings=32768 if is_small else 131072,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rope_scaling=scaling,
        bos_token_id=2,
        eos_token_id=1,
        torch_dtype="bfloat16",
    )


def _phi(name: str, repository: str, shape: Shape, **settings: object) -> KnownModel:
    common = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    return decoder(name, repository, shape, architectures=["Phi3ForCausalLM"], model_type="phi3", **(common | settings))


def _gpt2(name: str, num_layers: int, num_heads: int, width: int) -> KnownModel:
    fields: dict[str, object] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": width,
        "n_layer": num_layers,
        "n_head": num_heads,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    }
    return KnownModel(name, f"openai-community/{name}", fields)


def _neox(name: str, repository: str, shape: Shape, vocab_size: int, activation: str = "gelu") -> KnownModel:
    known = decoder(
        name,
        repository,
        shape,
        architectures=["GPTNeoXForCausalLM"],
        model_type="gpt_neox",
        hidden_act=activation,
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        rotary_pct=0.25,
        rotary_emb_base=10000,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        torch_dtype="float16",
    )
    fields = {key: value for key, value in known.fields.items() if key != "num_key_value_heads"}
    return KnownModel(name, repository, fields)


def _falcon(size: str, num_layers: int, width: int, num_heads: int, num_kv_heads: int) -> KnownModel:
    fields: dict[str, object] = {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": 65024,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "new_decoder_architecture": num_kv_heads > 1,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 11,
        "eos_token_id": 11,
        "torch_dtype": "bfloat16",
    }
    return KnownModel(f"falcon-{size}", f"tiiuae/falcon-{size}", fields)


def _starcoder2(size: str, shape: Shape, rope_theta: float) -> KnownModel:
    return decoder(
        f"starcoder2-{size}",
        f"bigcode/starcoder2-{size}",
        shape,
        architectures=["Starcoder2ForCausalLM"],
        model_type="starcoder2",
        hidden_act="gelu_pytorch_tanh",
        vocab_size=49152,
        max_position_embeddings=16384,
        norm_epsilon=1e-5,
        rope_theta=rope_theta,
        sliding_window=4096,
        use_bias=True,
        tie_word_embeddings=size != "15b",
        bos_token_id=0,
        eos_token_id=0,
        torch_dtype="bfloat16",
    )


_PHI3_ENDS = {"vocab_size": 32064, "bos_token_id": 1, "eos_token_id": 32000, "rope_theta": 10000.0}
_PHI3 = {**_PHI3_ENDS, "max_position_embeddings": 4096, "sliding_window": 2047}
_PHI4_ENDS = {"vocab_size": 100352, "bos_token_id": 100257, "eos_token_id": 100265, "rope_theta": 250000.0}
_PHI4 = {**_PHI4_ENDS, "max_position_embeddings": 16384, "sliding_window": None}

MODELS = (
    _gemma2("2b", Shape(26, 2304, 9216, 8, 4), 256, 256),
    _gemma2("9b", Shape(42, 3584, 14336, 16, 8), 256, 256),
    _gemma2("27b", Shape(46, 4608, 36864, 32, 16), 128, 144),
    _gemma3("1b", Shape(26, 1152, 6912, 4, 1), 256, 256),
    _gemma3("4b", Shape(34, 2560, 10240, 8, 4), 256, 256),
    _gemma3("12b", Shape(48, 3840, 15360, 16, 8), 256, 256),
    _gemma3("27b", Shape(62, 5376, 21504, 32, 16), 128, 168),
    _phi("phi-3-mini-4k", "microsoft/Phi-3-mini-4k-instruct", Shape(32, 3072, 8192, 32, 32), **_PHI3),
    _phi("phi-3-medium-4k", "microsoft/Phi-3-medium-4k-instruct", Shape(40, 5120, 17920, 40, 10), **_PHI3),
    _phi("phi-4", "microsoft/phi-4", Shape(40, 5120, 17920, 40, 10), **_PHI4),
    _gpt2("gpt2", 12, 12, 768),
    _gpt2("gpt2-medium", 24, 16, 1024),
    _gpt2("gpt2-large", 36, 20, 1280),
    _gpt2("gpt2-xl", 48, 25, 1600),
    _neox("gpt-neox-20b", "EleutherAI/gpt-neox-20b", Shape(44, 6144, 24576, 64, 64), 50432, "gelu_fast"),
    _neox("pythia-1b", "EleutherAI/pythia-1b", Shape(16, 2048, 8192, 8, 8), 50304),
    _neox("pythia-2.8b", "EleutherAI/pythia-2.8b", Shape(32, 2560, 10240, 32, 32), 50304),
    _neox("pythia-6.9b", "EleutherAI/pythia-6.9b", Shape(32, 4096, 16384, 32, 32), 50432),
    _neox("pythia-12b", "EleutherAI/pythia-12b", Shape(36, 5120, 20480, 40, 40), 50688),
    _falcon("7b", 32, 4544, 71, 1),
    _falcon("40b", 60, 8192, 128, 8),
    _falcon("180b", 80, 14848, 232, 8),
    _starcoder2("3b", Shape(30, 3072, 12288, 24, 2), 999999.4420358813),
    _starcoder2("7b", Shape(32, 4608, 18432, 36, 4), 1000000.0),
    _starcoder2("15b", Shape(40, 6144, 24576, 48, 4), 100000.0),
)
"""Published models."""
