"""The configurations of well-known models, in the fields of their config.json on the Hugging Face hub.

They are for planning, compiling and simulating without a checkpoint at hand: `KNOWN_MODELS["opt-13b"].config` is what
reading the hub's config.json gives. Sources: the OPT paper's table 1 (arXiv 2205.01068), the Llama 2 and Llama 3
papers' tables of architectures (arXiv 2307.09288, 2407.21783), Qwen2.5's and Qwen3's reports (arXiv 2412.15115,
2505.09388), and the repository that each one names.
"""

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
        repository: whose config.json on the hub the fields are of; OPT-175B's weights are not there, and its fields
            follow those of the other sizes.
        fields: of config.json.
    """

    name: str
    repository: str
    fields: Mapping[str, object]

    @property
    def config(self) -> ModelConfig:
        """The fields, parsed."""
        return from_hf(self.fields)

    @property
    def num_params(self) -> int:
        """Numbers that its parameters are; a tied embedding counts once."""
        return num_params(self.config)


_SAME_SHAPE = {"hf", "instruct", "chat", "base", "meta"}
"""Words of hub names that say nothing of the shape."""


def find_known(name: str) -> KnownModel | None:
    """The well-known model that a name means: its own, or a hub id, in any case, tuned for chat or not; else None."""
    wanted = _plain(name)
    for model in KNOWN_MODELS.values():
        if wanted in (_plain(model.name), _plain(model.repository), _plain(model.repository.rpartition("/")[2])):
            return model
    return None


def _plain(name: str) -> str:
    """Returns the name in lower case, without words that say nothing of the shape; a repository's owner stays."""
    owner, slash, own = name.lower().rpartition("/")
    return f"{owner}{slash}" + "-".join(word for word in own.split("-") if word not in _SAME_SHAPE)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What differs between the sizes of a family: L, E, F, H, K."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int


def _decoder(name: str, repository: str, shape: _Shape, **settings: object) -> KnownModel:
    fields = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "hidden_act": "silu",
    }
    return KnownModel(name, repository, fields | settings)


def _llama2(size: str, shape: _Shape) -> KnownModel:
    return _decoder(
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


def _llama3(name: str, repository: str, shape: _Shape, rope_factor: float | None = None) -> KnownModel:
    """A Llama 3, up to 8192 tokens, or with a rope factor a 3.1 or 3.2; the 3.2 tie their embeddings."""
    scaling = {
        "rope_type": "llama3",
        "factor": rope_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _decoder(
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


def _qwen25(size: str, shape: _Shape, vocab_size: int, max_len: int, rms_norm_eps: float) -> KnownModel:
    return _decoder(
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


def _qwen3(size: str, shape: _Shape) -> KnownModel:
    return _decoder(
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


def _deepseek(name: str, repository: str, shape: _Shape, **settings: object) -> KnownModel:
    """A DeepSeek of latents of 512 + 64 numbers; positions are stretched from 4096 by 40."""
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
    return _decoder(
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


def _deepseek2(name: str, repository: str, shape: _Shape, **settings: object) -> KnownModel:
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


_MODELS = (
    _llama2("7b", _Shape(32, 4096, 11008, 32, 32)),
    _llama2("13b", _Shape(40, 5120, 13824, 40, 40)),
    _llama2("70b", _Shape(80, 8192, 28672, 64, 8)),
    _llama3("llama-3-8b", "Meta-Llama-3-8B", _Shape(32, 4096, 14336, 32, 8)),
    _llama3("llama-3-70b", "Meta-Llama-3-70B", _Shape(80, 8192, 28672, 64, 8)),
    _llama3("llama-3.1-8b", "Llama-3.1-8B", _Shape(32, 4096, 14336, 32, 8), 8.0),
    _llama3("llama-3.1-70b", "Llama-3.1-70B", _Shape(80, 8192, 28672, 64, 8), 8.0),
    _llama3("llama-3.1-405b", "Llama-3.1-405B", _Shape(126, 16384, 53248, 128, 8), 8.0),
    _llama3("llama-3.2-1b", "Llama-3.2-1B", _Shape(16, 2048, 8192, 32, 8), 32.0),
    _llama3("llama-3.2-3b", "Llama-3.2-3B", _Shape(28, 3072, 8192, 24, 8), 32.0),
    _decoder(
        "mistral-7b-v0.3",
        "mistralai/Mistral-7B-v0.3",
        _Shape(32, 4096, 14336, 32, 8),
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
    _qwen25("0.5b", _Shape(24, 896, 4864, 14, 2), 151936, 32768, 1e-6),
    _qwen25("1.5b", _Shape(28, 1536, 8960, 12, 2), 151936, 131072, 1e-6),
    _qwen25("3b", _Shape(36, 2048, 11008, 16, 2), 151936, 32768, 1e-6),
    _qwen25("7b", _Shape(28, 3584, 18944, 28, 4), 152064, 131072, 1e-6),
    _qwen25("14b", _Shape(48, 5120, 13824, 40, 8), 152064, 131072, 1e-5),
    _qwen25("32b", _Shape(64, 5120, 27648, 40, 8), 152064, 131072, 1e-5),
    _qwen25("72b", _Shape(80, 8192, 29568, 64, 8), 152064, 131072, 1e-5),
    _qwen3("0.6b", _Shape(28, 1024, 3072, 16, 8)),
    _qwen3("1.7b", _Shape(28, 2048, 6144, 16, 8)),
    _qwen3("4b", _Shape(36, 2560, 9728, 32, 8)),
    _qwen3("8b", _Shape(36, 4096, 12288, 32, 8)),
    _qwen3("14b", _Shape(40, 5120, 17408, 40, 8)),
    _qwen3("32b", _Shape(64, 5120, 25600, 64, 8)),
    _deepseek2(
        "deepseek-v2-lite",
        "DeepSeek-V2-Lite",
        _Shape(27, 2048, 10944, 16, 16),
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        topk_method="greedy",
    ),
    _deepseek2(
        "deepseek-v2",
        "DeepSeek-V2",
        _Shape(60, 5120, 12288, 128, 128),
        q_lora_rank=1536,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
    ),
    _deepseek(
        "deepseek-v3",
        "DeepSeek-V3",
        _Shape(61, 7168, 18432, 128, 128),
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
    _opt("125m", 12, 12, 768),
    _opt("1.3b", 24, 32, 2048),
    _opt("13b", 40, 40, 5120),
    _opt("66b", 64, 72, 9216),
    _opt("175b", 96, 96, 12288),
)

KNOWN_MODELS: Mapping[str, KnownModel] = {model.name: model for model in _MODELS}
"""Published models by name."""
