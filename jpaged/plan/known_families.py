"""Well-known models by family: a model, and the fields of config.json that models of a family share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jpaged.checkpoints.names import num_params
from jpaged.models.config import ModelConfig
from jpaged.models.hf_config import from_hf


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A published model.

    Attributes:
        name: in lower case, the size after the last hyphen.
        repository: hub repository of the config.json. OPT-175B's weights are not there, and its fields follow those of
            the other sizes.
        fields: fields of config.json.
    """

    name: str
    repository: str
    fields: Mapping[str, object]

    @property
    def config(self) -> ModelConfig:
        """The parsed fields."""
        return from_hf(self.fields)

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return num_params(self.config)


@dataclass(frozen=True, slots=True)
class FamilyShape:
    """Sizes that differ within a family: L, E, F, H, K."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int


def decoder(name: str, repository: str, shape: FamilyShape, **settings: object) -> KnownModel:
    """Return a model whose config.json has the usual names for its sizes."""
    fields = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "hidden_act": "silu",
    }
    return KnownModel(name, repository, fields | settings)


def gemma2_model(size: str, shape: FamilyShape, head_dim: int, scalar: int) -> KnownModel:
    """Return a model of Gemma 2."""
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


def gemma3_model(size: str, shape: FamilyShape, head_dim: int, scalar: int) -> KnownModel:
    """Return a model of Gemma 3."""
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


GEMMA_3N = decoder(
    "gemma-3n-e4b",
    "google/gemma-3n-E4B",
    FamilyShape(35, 2048, 16384, 8, 2),
    architectures=["Gemma3nForCausalLM"],
    model_type="gemma3n_text",
    hidden_act=None,
    hidden_activation="gelu_pytorch_tanh",
    vocab_size=262400,
    vocab_size_per_layer_input=262144,
    hidden_size_per_layer_input=256,
    head_dim=256,
    sliding_window=512,
    num_kv_shared_layers=15,
    altup_num_inputs=4,
    laurel_rank=64,
    activation_sparsity_pattern=[0.95] * 10 + [0.0] * 25,
    final_logit_softcapping=30.0,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    rope_local_base_freq=10000.0,
    bos_token_id=2,
    eos_token_id=1,
    torch_dtype="bfloat16",
)


def gemma4_model(size: str, shape: FamilyShape, period: int, **settings: object) -> KnownModel:
    """Return a model of Gemma 4."""
    fields: dict[str, object] = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262144,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": [
            "sliding_attention" if (index + 1) % period else "full_attention" for index in range(shape.num_layers)
        ],
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    return decoder(f"gemma-4-{size.lower()}", f"google/gemma-4-{size}", shape, **fields | settings)


GEMMA4_LARGE: Mapping[str, object] = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
}


def phi_model(name: str, repository: str, shape: FamilyShape, **settings: object) -> KnownModel:
    """Return a model of Phi."""
    common = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    return decoder(name, repository, shape, architectures=["Phi3ForCausalLM"], model_type="phi3", **(common | settings))


def gpt2_model(name: str, num_layers: int, num_heads: int, width: int) -> KnownModel:
    """Return a model of GPT-2."""
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


def neox_model(name: str, repository: str, shape: FamilyShape, vocab_size: int, activation: str = "gelu") -> KnownModel:
    """Return a model of GPT-NeoX."""
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


def falcon_model(size: str, num_layers: int, width: int, num_heads: int, num_kv_heads: int) -> KnownModel:
    """Return a model of Falcon."""
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


def lfm2_model(size: str, width: int, inner: int, num_heads: int) -> KnownModel:
    """Return a model of LFM2."""
    return decoder(
        f"lfm2-{size}",
        f"LiquidAI/LFM2-{size.upper()}",
        FamilyShape(16, width, inner, num_heads, 8),
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        vocab_size=65536,
        max_position_embeddings=128000,
        norm_eps=1e-5,
        rope_theta=1000000.0,
        conv_L_cache=3,
        conv_bias=False,
        block_auto_adjust_ff_dim=True,
        block_ffn_dim_multiplier=1.0,
        block_multiple_of=256,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=7,
        torch_dtype="bfloat16",
    )


LFM2_MOE = decoder(
    "lfm2-8b-a1b",
    "LiquidAI/LFM2-8B-A1B",
    FamilyShape(24, 2048, 7168, 32, 8),
    architectures=["Lfm2MoeForCausalLM"],
    model_type="lfm2_moe",
    vocab_size=65536,
    max_position_embeddings=128000,
    moe_intermediate_size=1792,
    num_dense_layers=2,
    num_experts=32,
    num_experts_per_tok=4,
    use_expert_bias=True,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    norm_eps=1e-5,
    rope_theta=1000000.0,
    conv_L_cache=3,
    conv_bias=False,
    layer_types=["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=7,
    torch_dtype="bfloat16",
)


KIMI_LINEAR = decoder(
    "kimi-linear-48b-a3b",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    FamilyShape(27, 2304, 9216, 32, 32),
    architectures=["KimiLinearForCausalLM"],
    model_type="kimi_linear",
    vocab_size=163840,
    head_dim=72,
    model_max_length=1048576,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    mla_use_nope=True,
    linear_attn_config={
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    },
    first_k_dense_replace=1,
    moe_layer_freq=1,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    moe_router_activation_func="sigmoid",
    moe_renormalize=True,
    routed_scaling_factor=2.446,
    use_grouped_topk=True,
    num_expert_group=1,
    topk_group=1,
    num_nextn_predict_layers=0,
    tie_word_embeddings=False,
    bos_token_id=163584,
    eos_token_id=163586,
    torch_dtype="bfloat16",
)


def granite4_model(size: str, shape: FamilyShape, attending: tuple[int, ...], **settings: object) -> KnownModel:
    """Return a model of Granite 4."""
    types = ["attention" if index in attending else "mamba" for index in range(shape.num_layers)]
    fields: dict[str, object] = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "position_embedding_type": "nope",
        "normalization_function": "rmsnorm",
        "layer_types": types,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "torch_dtype": "bfloat16",
    }
    return decoder(f"granite-4.0-h-{size}", f"ibm-granite/granite-4.0-h-{size}", shape, **fields | settings)


def qwen35_model(size: str, shape: FamilyShape, kind: str = "", **settings: object) -> KnownModel:
    """Return a model of Qwen3.5."""
    fields: dict[str, object] = {
        "architectures": [f"Qwen3_5{kind}ForCausalLM"],
        "model_type": f"qwen3_5_{kind.lower()}_text" if kind else "qwen3_5_text",
        "vocab_size": 248320,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "eos_token_id": 248044,
        "torch_dtype": "bfloat16",
    }
    return decoder(f"qwen3.5-{size.lower()}", f"Qwen/Qwen3.5-{size}", shape, **fields | settings)


def nemotron_model(
    name: str, repository: str, pattern: str, shape: FamilyShape, mamba: tuple[int, int], **settings: object
) -> KnownModel:
    """Return a model of Nemotron."""
    fields: dict[str, object] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hybrid_override_pattern": pattern,
        "hidden_act": "relu2",
        "mlp_hidden_act": "relu2",
        "head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": mamba[0],
        "mamba_head_dim": mamba[1],
        "n_groups": 8,
        "ssm_state_size": 128,
        "torch_dtype": "bfloat16",
    }
    return decoder(name, f"nvidia/{repository}", shape, **fields | settings)


def starcoder2_model(size: str, shape: FamilyShape, rope_theta: float) -> KnownModel:
    """Return a model of StarCoder2."""
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
