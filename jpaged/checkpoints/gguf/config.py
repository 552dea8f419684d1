"""GGUF's metadata -> the config.json that Hugging Face's libraries have for the same model.

Families read it as they read any: `jpaged.models.hf_config`. A key of an architecture that nobody reads here is refused
by name. What llama.cpp knows without being told is known here too: Gemma 3's local rope, the largest Gemmas' scale of
scores, and that Qwen3's chosen experts are weighed by what they have in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jpaged.checkpoints.gguf.blocks import weights_of
from jpaged.checkpoints.gguf.file import GgufFile
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.json_fields import JsonFields

Config = dict[str, Any]
_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "attention.causal", "tensor_data_layout")
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|return|>")
"""Tokens that end a turn: of a chat model the one that ends a text is seldom the one that it says."""
_CONTROL = 3
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose scores are scaled by the width of the hidden state rather than by that of heads."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def hf_config(file: GgufFile) -> Config:
    """The config of a model, in Hugging Face's words.

    Raises:
        Unsupported: its architecture, or a key of it, is not read.
        InvalidArgument: a key is missing or malformed.
    """
    architecture, kind = file.architecture, file.metadata.get("general.type", "model")
    if kind != "model":
        raise Unsupported(f"{file.path}: general.type is {kind!r}; only models are served")
    if architecture not in _READERS:
        raise Unsupported(
            f"{file.path}: of GGUF's architectures {architecture!r} is not read; read: {', '.join(_READERS)}"
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = JsonFields(own, f"{file.path.name} {architecture}")
    fields.only("attention.causal", True, why="only causal attention is served")
    fields.only("tensor_data_layout", "reference", "Meta AI original pth", why="no other order of rows is known")
    fields.ignore(_HARMLESS)
    config = _READERS[architecture](fields, file)
    fields.finish()
    return {**_tokens(file), "dtype": _dtype(file), **config}


def _tokens(file: GgufFile) -> Config:
    ids = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    control = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL}
    ids += [control[token] for token in _ENDS if token in control]
    ends = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    return {"bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": ends or None}


def _dtype(file: GgufFile) -> str:
    """The type of most numbers; what is quantised was made of 16 bits."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.kind] += int(np.prod(tensor.shape))
    return {"F32": "float32", "F16": "float16"}.get(sizes.most_common(1)[0][0] if sizes else "", "bfloat16")


def _sizes(fields: JsonFields, file: GgufFile) -> Config:
    """Sizes that all architectures have."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidArgument(str(file.path), "tensor token_embd.weight is missing")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": fields.integer("attention.head_count"),
        "max_position_embeddings": fields.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _decoder(fields: JsonFields, file: GgufFile) -> Config:
    """Sizes, heads and norms of decoders with rotary positions."""
    sizes = _sizes(fields, file)
    heads = sizes["num_attention_heads"]
    head_dim = fields.integer("attention.key_length", max(1, sizes["hidden_size"] // heads))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise Unsupported(f"{fields.name}: attention.value_length is not attention.key_length, {head_dim}")
    return sizes | {
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
    }


def _rope(fields: JsonFields, file: GgufFile, config: Config, *, may_be_partial: bool = False) -> Config:
    """`rope_parameters`."""
    num_rotated = fields.integer("rope.dimension_count", config["head_dim"])
    rope: Config = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 10000.0)}
    if num_rotated != config["head_dim"]:
        if not may_be_partial:
            raise Unsupported(f"{fields.name}: rope.dimension_count is {num_rotated}; only whole heads are rotated")
        rope["partial_rotary_factor"] = num_rotated / config["head_dim"]
    kind = fields.text("rope.scaling.type", "none")
    factors = _factors(file)
    if factors:
        return rope | _listed(fields, config, factors)
    if kind == "none":
        fields.only("rope.scaling.factor", 0.0, 1.0, why="rope.scaling.type says none")
        fields.ignore(("rope.scaling.original_context_length",))
        return rope
    if kind not in ("linear", "yarn"):
        raise Unsupported(f"{fields.name}: rope.scaling.type is {kind!r}, without a tensor of factors")
    rope |= {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    fields.only("rope.scaling.attn_factor", 1.0, why="its own factor of attention is not supported here")
    if kind == "linear":
        fields.ignore(("rope.scaling.original_context_length",))
        return rope
    rope["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if fields.has(f"rope.scaling.yarn_{name}"):
            rope[name] = fields.number(f"rope.scaling.yarn_{name}")
    return rope


def _factors(file: GgufFile) -> dict[str, list[float]]:
    """What divides the frequencies of pairs, by the names of its tensors; empty where it is a formula."""
    found = {}
    for name in ("rope_freqs", "rope_factors_short", "rope_factors_long"):
        tensor = file.tensors.get(f"{name}.weight")
        if tensor is not None:
            found[name] = [float(str(factor)) for factor in weights_of(tensor.kind, tensor.data).astype(np.float32)]
    return found


def _listed(fields: JsonFields, config: Config, factors: Mapping[str, list[float]]) -> Config:
    """A rope whose factors are listed: Phi-3's, or what became of Llama 3's formula."""
    length = config["max_position_embeddings"]
    fields.ignore(("rope.scaling.factor",))
    if "rope_freqs" in factors:
        fields.ignore(("rope.scaling.original_context_length",))
        short = long = factors["rope_freqs"]
    else:
        if len(factors) < 2:
            raise InvalidArgument(fields.name, f"has {', '.join(factors)} alone, of factors for short and long texts")
        short, long = factors["rope_factors_short"], factors["rope_factors_long"]
        length = fields.integer("rope.scaling.original_context_length", length)
    return {
        "rope_type": "longrope",
        "factor": max(1.0, config["max_position_embeddings"] / length),
        "original_max_position_embeddings": length,
        "attention_factor": fields.number("rope.scaling.attn_factor", 1.0),
        "short_factor": short,
        "long_factor": long,
    }


def _has(file: GgufFile, stem: str) -> bool:
    return f"blk.0.{stem}" in file.tensors


def _window(fields: JsonFields) -> int | None:
    """The window of all layers; 0 is none."""
    return fields.integer("attention.sliding_window", 0, minimum=0) or None


def _llama(fields: JsonFields, file: GgufFile) -> Config:
    config = _decoder(fields, file)
    config["rope_parameters"] = _rope(fields, file, config)
    num_experts = fields.integer("expert_count", 0, minimum=0)
    if num_experts:
        return config | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": num_experts,
            "num_experts_per_tok": fields.integer("expert_used_count"),
            "sliding_window": _window(fields),
        }
    fields.ignore(("expert_used_count",))
    window = _window(fields)
    if window is not None:
        own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        return config | own
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": _has(file, "attn_q.bias"),
        "mlp_bias": _has(file, "ffn_up.bias"),
    }


def _qwen(name: str, model_type: str) -> Callable[[JsonFields, GgufFile], Config]:
    def read(fields: JsonFields, file: GgufFile) -> Config:
        config = _decoder(fields, file) | {"architectures": [f"{name}ForCausalLM"], "model_type": model_type}
        config["rope_parameters"] = _rope(fields, file, config)
        return config

    return read


def _qwen_moe(name: str, model_type: str) -> Callable[[JsonFields, GgufFile], Config]:
    dense = _qwen(name, model_type)

    def read(fields: JsonFields, file: GgufFile) -> Config:
        width = fields.integer("expert_feed_forward_length")
        config = dense(fields, file)
        fields.only("expert_weights_scale", 0.0, 1.0, why="scaled weights of experts are not known here")
        config |= {
            "num_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
            "moe_intermediate_size": width,
            "norm_topk_prob": fields.flag("expert_weights_norm", model_type == "qwen3_moe"),
        }
        if model_type == "qwen2_moe":
            config["shared_expert_intermediate_size"] = fields.integer("expert_shared_feed_forward_length")
            config["qkv_bias"] = _has(file, "attn_q.bias")
        return config

    return read


def _gemma(version: int) -> Callable[[JsonFields, GgufFile], Config]:
    architecture = f"gemma{version}"

    def read(fields: JsonFields, file: GgufFile) -> Config:
        config = _decoder(fields, file)
        heads, head_dim = config["num_attention_heads"], config["head_dim"]
        is_largest = config["num_hidden_layers"] == _GEMMA_27B[architecture]
        rope = _rope(fields, file, config)
        period = fields.integer("attention.sliding_window_pattern", 2 if version == 2 else 6)
        types = [_SLIDING if (index + 1) % period else _FULL for index in range(config["num_hidden_layers"])]
        local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
        names = [f"{name}_logit_softcapping" for name in ("attn", "final")]
        caps = {name: fields.number(name) if fields.has(name) else None for name in names}
        return (
            config
            | caps
            | {
                "architectures": [f"Gemma{version}ForCausalLM"],
                "model_type": "gemma2" if version == 2 else "gemma3_text",
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": config["hidden_size"] // heads if is_largest else head_dim,
                "sliding_window": fields.integer("attention.sliding_window"),
                "layer_types": types,
                "rope_parameters": rope if version == 2 else {_FULL: rope, _SLIDING: local},
            }
        )

    return read


def _phi3(fields: JsonFields, file: GgufFile) -> Config:
    config = _decoder(fields, file)
    rope = _rope(fields, file, config, may_be_partial=True)
    return config | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "pad_token_id": None,
        "sliding_window": _window(fields),
        "original_max_position_embeddings": rope.get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        ),
        "rope_parameters": rope,
    }


def _starcoder2(fields: JsonFields, file: GgufFile) -> Config:
    sizes = _sizes(fields, file)
    heads = sizes["num_attention_heads"]
    config = sizes | {
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": max(1, sizes["hidden_size"] // heads),
    }
    return config | {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "norm_epsilon": fields.number("attention.layer_norm_epsilon"),
        "use_bias": _has(file, "attn_q.bias"),
        "sliding_window": _window(fields),
        "rope_parameters": _rope(fields, file, config),
    }


def _gpt2(fields: JsonFields, file: GgufFile) -> Config:
    sizes = _sizes(fields, file)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": sizes["vocab_size"],
        "n_embd": sizes["hidden_size"],
        "n_inner": sizes["intermediate_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"],
        "n_positions": sizes["max_position_embeddings"],
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": sizes["tie_word_embeddings"],
    }


def _gptneox(fields: JsonFields, file: GgufFile) -> Config:
    sizes = _sizes(fields, file)
    head_dim = max(1, sizes["hidden_size"] // sizes["num_attention_heads"])
    rope = _rope(fields, file, sizes | {"head_dim": head_dim}, may_be_partial=True)
    return sizes | {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "layer_norm_eps": fields.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": fields.flag("use_parallel_residual", True),
        "attention_bias": _has(file, "attn_qkv.bias"),
        "rope_parameters": {"partial_rotary_factor": 1.0} | rope,
    }


_READERS: Mapping[str, Callable[[JsonFields, GgufFile], Config]] = {
    "llama": _llama,
    "qwen2": _qwen("Qwen2", "qwen2"),
    "qwen3": _qwen("Qwen3", "qwen3"),
    "qwen2moe": _qwen_moe("Qwen2Moe", "qwen2_moe"),
    "qwen3moe": _qwen_moe("Qwen3Moe", "qwen3_moe"),
    "gemma2": _gemma(2),
    "gemma3": _gemma(3),
    "phi3": _phi3,
    "starcoder2": _starcoder2,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
}
