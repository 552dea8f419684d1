"""GGUF metadata -> the config.json of the same model in Hugging Face's format.

Families parse it like any other config: `jpaged.models.hf_config`. An architecture's key that is not read here is an
error that names it. Values that are built into llama.cpp are built in here too: Gemma 2's caps, Gemma 3's local rope,
the scale of scores of the largest Gemmas, and the normalization of expert weights of Qwen3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jpaged.checkpoints.gguf.blocks import FLOATS, dequantize_blocks
from jpaged.checkpoints.gguf.file import GgufFile
from jpaged.checkpoints.gguf.tokenizer import has_vocabulary, read_vocabulary
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import MAX_LAYERS
from jpaged.models.json_fields import JsonFields

Config = dict[str, Any]
_HARMLESS = ("vocab_size", "rope.scaling.finetuned")
_GEMMA_27B = {2: 46, 3: 62}
"""Numbers of layers of the models whose scores are scaled by the hidden width per head instead of head_dim."""
_UNROTATED = 4
"""Period of the layers without a window, or without rotation, in families for which llama.cpp has it built in."""
_GEMMA4_PERIOD = 6
_NO_ROTATION = 1e29
"""Divisors of frequencies from here on rotate by nothing."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_RMS_EPSILON, _EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def hf_config(file: GgufFile) -> Config:
    """Return the config of a model with Hugging Face's keys.

    Raises:
        Unsupported: its architecture, or a key, is not supported.
        InvalidArgument: a key is missing or malformed.
    """
    architecture, kind = file.architecture, file.metadata.get("general.type", "model")
    if kind != "model":
        raise Unsupported(f"{file.path}: general.type is {kind!r}; only models are supported")
    if architecture not in _READERS:
        raise Unsupported(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(_READERS)}"
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = JsonFields(own, f"{file.path.name} {architecture}")
    fields.only("attention.causal", True, why="only causal attention is supported")
    fields.only("tensor_data_layout", "reference", "Meta AI original pth", why="no other order of rows is supported")
    fields.ignore(_HARMLESS)
    config = _READERS[architecture](fields, file)
    fields.finish()
    return {**_tokens(file), "dtype": _dtype(file), **config}


def _tokens(file: GgufFile) -> Config:
    if has_vocabulary(file):
        vocabulary = read_vocabulary(file)
        return {"bos_token_id": vocabulary.ids.get("bos"), "eos_token_id": list(vocabulary.ends) or None}
    first, *ends = (file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot", "eom"))
    return {"bos_token_id": first, "eos_token_id": [token_id for token_id in ends if token_id is not None] or None}


def _dtype(file: GgufFile) -> str:
    """Return the type of most numbers; quantized tensors count as 16 bits."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.kind] += int(np.prod(tensor.shape))
    return {"F32": "float32", "F16": "float16"}.get(sizes.most_common(1)[0][0] if sizes else "", "bfloat16")


def _sizes(fields: JsonFields, file: GgufFile, inner: int = 0) -> Config:
    """Return the sizes that all architectures have.

    Args:
        inner: width of feed-forwards; 0 to read it.
    """
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidArgument(str(file.path), "tensor token_embd.weight is missing")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": inner or fields.integer(_inner(fields)),
        "num_hidden_layers": fields.integer("block_count", maximum=MAX_LAYERS),
        "num_attention_heads": fields.integer("attention.head_count"),
        "max_position_embeddings": fields.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _inner(fields: JsonFields) -> str:
    """Return the key of the width of feed-forwards; models whose layers all have experts may have only theirs."""
    keys = ("feed_forward_length", "expert_feed_forward_length")
    return next((key for key in keys if fields.has(key)), keys[0])


def _decoder(fields: JsonFields, file: GgufFile) -> Config:
    """Return the sizes, heads and norms of decoders with rotary positions."""
    config = _heads(fields, file) | {"rms_norm_eps": fields.number(_RMS_EPSILON)}
    fields.ignore((_EPSILON,))
    return config


def _heads(fields: JsonFields, file: GgufFile) -> Config:
    """Return the sizes and heads of decoders with rotary positions."""
    sizes = _sizes(fields, file)
    heads = sizes["num_attention_heads"]
    head_dim = fields.integer("attention.key_length", max(1, sizes["hidden_size"] // heads))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise Unsupported(f"{fields.name}: attention.value_length is not attention.key_length, {head_dim}")
    return sizes | {"num_key_value_heads": _kv_heads(fields, heads), "head_dim": head_dim}


def _kv_heads(fields: JsonFields, num_heads: int) -> int:
    """Return the number of key-value heads of all layers with attention; other layers have 0 of them."""
    key = "attention.head_count_kv"
    counts = fields.value(key, num_heads)
    if not isinstance(counts, list):
        return fields.integer(key, num_heads)
    others = {count for count in counts if count != 0}
    if len(others) != 1:
        raise Unsupported(f"{fields.name}: {key} differs between layers with attention")
    return JsonFields({key: others.pop()}, fields.name).integer(key)


def _rope(fields: JsonFields, file: GgufFile, config: Config, *, may_be_partial: bool = False) -> Config:
    """Return `rope_parameters`."""
    num_rotated = fields.integer("rope.dimension_count", config["head_dim"])
    rope: Config = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 10000.0)}
    if num_rotated != config["head_dim"]:
        if not may_be_partial:
            raise Unsupported(
                f"{fields.name}: rope.dimension_count is {num_rotated}; only fully rotated heads are supported"
            )
        rope["partial_rotary_factor"] = num_rotated / config["head_dim"]
    factors = _factors(file)
    return rope | (_listed(fields, config, factors) if factors else _scaled(fields, config))


def _scaling(fields: JsonFields) -> tuple[str, float]:
    """Return the type of scaling and its factor; without a type it is linear, and a factor of 0 is none."""
    key = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"
    fields.ignore(("rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length"))
    factor = 1.0 if fields.value(key) == 0 else fields.number(key, 1.0)
    return fields.text("rope.scaling.type", "linear"), factor


def _scaled(fields: JsonFields, config: Config) -> Config:
    """Return the rope parameters of a scaling formula."""
    kind, factor = _scaling(fields)
    fields.only("rope.scaling.attn_factor", 1.0, why="a separate attention factor is not supported")
    if kind == "yarn":
        fields.only("rope.scaling.yarn_attn_factor", 1.0, why="a separate attention factor is not supported")
        fields.only("rope.scaling.yarn_ext_factor", 1.0, -1.0, why="only full extrapolation, 1.0, is supported")
        length = fields.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
        betas = [name for name in ("beta_fast", "beta_slow") if fields.has(f"rope.scaling.yarn_{name}")]
        yarn: Config = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length}
        return yarn | {name: fields.number(f"rope.scaling.yarn_{name}") for name in betas}
    if kind not in ("none", "linear"):
        raise Unsupported(f"{fields.name}: rope.scaling.type is {kind!r}, but there is no tensor of factors")
    if factor == 1:
        return {}
    if kind == "none":
        raise Unsupported(f"{fields.name}: rope.scaling.factor is {factor}, but rope.scaling.type is none")
    return {"rope_type": kind, "factor": factor}


def _factors(file: GgufFile) -> dict[str, list[float]]:
    """Return the divisors of the frequencies, by tensor name; empty if a formula defines them."""
    found = {}
    for name in ("rope_freqs", "rope_factors_short", "rope_factors_long"):
        tensor = file.tensors.get(f"{name}.weight")
        if tensor is not None:
            if len(tensor.shape) > 1 or tensor.kind not in FLOATS:
                problem = f"tensor {name}.weight is {tensor.kind} {list(tensor.shape)}; it must be a vector of "
                raise InvalidArgument(str(tensor.path), problem + ", ".join(FLOATS))
            found[name] = [
                float(str(factor)) for factor in dequantize_blocks(tensor.kind, tensor.read()).astype(np.float32)
            ]
    return found


def _listed(fields: JsonFields, config: Config, factors: Mapping[str, list[float]]) -> Config:
    """Return the rope parameters of listed factors: Phi-3's, or precomputed ones of Llama 3's formula."""
    length = config["max_position_embeddings"]
    kind, factor = _scaling(fields)
    kinds = ("none", "linear") if "rope_freqs" in factors else ("none", "linear", "longrope")
    if kind not in kinds or factor != 1:
        raise Unsupported(
            f"{fields.name}: rope.scaling.type is {kind!r} with a factor of {factor}, in addition to the tensor "
            f"{next(iter(factors))}.weight; only the tensor is supported"
        )
    if "rope_freqs" in factors:
        short = long = factors["rope_freqs"]
    else:
        if len(factors) < 2:
            raise InvalidArgument(fields.name, f"has only {', '.join(factors)} of the factors for short and long texts")
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
    """Return the window of all layers; 0 is none."""
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
        config = dense(fields, file)
        num_used, whole_width = fields.integer("expert_used_count"), config["intermediate_size"]
        width = fields.integer("expert_feed_forward_length", 0, minimum=0) or whole_width // num_used
        fields.only("expert_weights_scale", 0.0, 1.0, why="scaled expert weights are not supported")
        config |= {
            "num_experts": fields.integer("expert_count"),
            "num_experts_per_tok": num_used,
            "moe_intermediate_size": width,
            "norm_topk_prob": fields.flag("expert_weights_norm", model_type == "qwen3_moe"),
        }
        if model_type == "qwen2_moe":
            shared_width = fields.integer("expert_shared_feed_forward_length", 0, minimum=0) or whole_width
            config["shared_expert_intermediate_size"] = shared_width
            config["qkv_bias"] = _has(file, "attn_q.bias")
        else:
            fields.only("expert_shared_feed_forward_length", 0, why="Qwen3 has no shared expert")
        return config

    return read


def _qwen35(architecture: str, model_type: str) -> Callable[[JsonFields, GgufFile], Config]:
    """Return the reader of Qwen3.5, also for Qwen3-Next, whose language model is the same."""

    def read(fields: JsonFields, file: GgufFile) -> Config:
        config = _decoder(fields, file) | {"architectures": [architecture], "model_type": model_type}
        num_layers = config["num_hidden_layers"] - fields.integer("nextn_predict_layers", 0, minimum=0)
        num_values, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
        # The sections of positions differ only for images, and tensors show which layers have attention.
        fields.ignore(("rope.dimension_sections", "full_attention_interval"))
        config |= {
            "num_hidden_layers": num_layers,
            "rope_parameters": {"partial_rotary_factor": 1.0} | _rope(fields, file, config, may_be_partial=True),
            "linear_num_key_heads": fields.integer("ssm.group_count"),
            "linear_num_value_heads": num_values,
            "linear_key_head_dim": fields.integer("ssm.state_size"),
            "linear_value_head_dim": max(1, inner // num_values),
            "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
            "layer_types": [
                _FULL if f"blk.{index}.attn_q.weight" in file.tensors else "linear_attention"
                for index in range(num_layers)
            ],
        }
        if not fields.has("expert_count"):
            return config
        fields.only("expert_weights_scale", 0.0, 1.0, why="scaled expert weights are not supported")
        fields.only("expert_weights_norm", True, why="weights of experts add up to 1")
        fields.only("expert_gating_func", 1, why="experts are weighted by a softmax")
        width = fields.integer("expert_feed_forward_length")
        return config | {
            "num_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length", width),
        }

    return read


def _gemma(config: Config, version: int, period: int) -> Config:
    """Return the common config of Gemma 2 and 3; the last of every `period` layers has full attention."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    is_largest = num_layers == _GEMMA_27B[version]
    return config | {
        "architectures": [f"Gemma{version}ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_largest else head_dim,
        "layer_types": [_SLIDING if (index + 1) % period else _FULL for index in range(num_layers)],
    }


def _gemma2(fields: JsonFields, file: GgufFile) -> Config:
    config = _decoder(fields, file)
    rope = _rope(fields, file, config)
    theta = rope["rope_theta"]
    fields.only("rope.freq_base_swa", theta, why=f"all layers of Gemma 2 use rope.freq_base, {theta}")
    return _gemma(config, 2, fields.integer("attention.sliding_window_pattern", 2)) | {
        "model_type": "gemma2",
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "sliding_window": fields.integer("attention.sliding_window", 4096),
        "rope_parameters": rope,
    }


def _gemma3(fields: JsonFields, file: GgufFile) -> Config:
    config = _decoder(fields, file)
    window = _window(fields)
    period = fields.integer("attention.sliding_window_pattern", 6)
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
    caps = {name: fields.number(name) for name in _CAPS if fields.has(name)}
    return _gemma(config, 3, 1 if window is None else period) | {
        "model_type": "gemma3_text",
        "sliding_window": window,
        "rope_parameters": {_FULL: _rope(fields, file, config), _SLIDING: local},
        **caps,
    }


def _gemma4(fields: JsonFields, file: GgufFile) -> Config:
    """Read Gemma 4. Sizes of layers with a window have a suffix; lists have a value for each layer."""
    widths = _each(fields, "feed_forward_length", fields.integer("block_count", maximum=MAX_LAYERS))
    sizes = _sizes(fields, file, widths[0])
    types = _types(fields, sizes, _GEMMA4_PERIOD)
    kv_heads = {name: _of_type(fields, "attention.head_count_kv", types, name) for name in dict.fromkeys(types)}
    head_dim = fields.integer("attention.key_length")
    own_dim = fields.integer("attention.key_length_swa", head_dim)
    for end, size in (("", head_dim), ("_swa", own_dim)):
        fields.only(f"attention.value_length{end}", size, why=f"keys have {size} numbers")
        fields.only(f"rope.dimension_count{end}", size, why="all pairs of a head are rotated, by the tensor rope_freqs")
    full = next(index for index, name in enumerate(types) if name == _FULL)
    config = sizes | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_key_value_heads": kv_heads.get(_SLIDING, kv_heads[_FULL]),
        "num_global_key_value_heads": kv_heads[_FULL],
        "head_dim": own_dim,
        "global_head_dim": head_dim,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": fields.integer("attention.shared_kv_layers", 0, minimum=0),
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", 0, minimum=0),
        "rms_norm_eps": fields.number(_RMS_EPSILON),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": fields.number(_CAPS[1]) if fields.has(_CAPS[1]) else None,
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": types,
        "rope_parameters": _gemma4_ropes(fields, file, head_dim),
    }
    if "per_layer_token_embd.weight" in file.tensors:
        config["vocab_size_per_layer_input"] = file.tensors["per_layer_token_embd.weight"].shape[0]
    if fields.has("expert_count"):
        config |= {
            "enable_moe_block": True,
            "num_experts": fields.integer("expert_count"),
            "top_k_experts": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        }
    return config


def _gemma4_ropes(fields: JsonFields, file: GgufFile, head_dim: int) -> Config:
    """Return the ropes of Gemma 4: full attention rotates the first pairs, whose divisor is 1, and no others."""
    factors = _factors(file).get("rope_freqs", [1.0] * (head_dim // 2))
    num_rotated = next((index for index, factor in enumerate(factors) if factor != 1), len(factors))
    if any(factor < _NO_ROTATION for factor in factors[num_rotated:]):
        raise Unsupported(f"{fields.name}: rope_freqs.weight has divisors of pairs other than 1 and {_NO_ROTATION:g}")
    return {
        _FULL: {
            "rope_type": "proportional",
            "rope_theta": fields.number("rope.freq_base"),
            "partial_rotary_factor": 2 * num_rotated / head_dim,
        },
        _SLIDING: {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)},
    }


def _each(fields: JsonFields, key: str, num_layers: int) -> list[int]:
    """Return a number of each layer; a single one applies to all of them."""
    given = fields.value(key)
    if not isinstance(given, list):
        return [fields.integer(key)] * num_layers
    if len(given) != num_layers:
        raise InvalidArgument(fields.name, f"{key} has {len(given)} values for {num_layers} layers")
    return [JsonFields({key: value}, fields.name).integer(key) for value in given]


def _of_type(fields: JsonFields, key: str, types: list[str], name: str) -> int:
    """Return the number of the layers of one type.

    Raises:
        Unsupported: they differ.
    """
    found = {value for value, own in zip(_each(fields, key, len(types)), types, strict=True) if own == name}
    if len(found) != 1:
        raise Unsupported(f"{fields.name}: {key} differs between the layers of {name}")
    return found.pop()


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


Own = Callable[[JsonFields, GgufFile, Config], Config]
"""Reads what sets a family apart, given the config so far."""


def _variant(
    architecture: str,
    model_type: str,
    own: Own,
    *,
    epsilon: str = "rms_norm_eps",
    has_mean: bool = False,
    may_be_partial: bool = False,
) -> Callable[[JsonFields, GgufFile], Config]:
    """Return the reader of a family that differs from Llama in switches.

    Args:
        epsilon: its key in config.json.
        has_mean: norms subtract the mean.
        may_be_partial: heads may be rotated in part.
    """

    def read(fields: JsonFields, file: GgufFile) -> Config:
        config = _heads(fields, file)
        config |= {"architectures": [architecture], "model_type": model_type}
        config[epsilon] = fields.number(_EPSILON if has_mean else _RMS_EPSILON)
        fields.ignore((_EPSILON, _RMS_EPSILON))
        rope = _rope(fields, file, config, may_be_partial=may_be_partial)
        config["rope_parameters"] = {"partial_rotary_factor": 1.0} | rope if may_be_partial else rope
        return config | own(fields, file, config)

    return read


def _types(fields: JsonFields, config: Config, period: int) -> list[str]:
    """Return the kinds of layers: as listed by the window pattern, or full attention in each `period`th."""
    key, num_layers = "attention.sliding_window_pattern", config["num_hidden_layers"]
    pattern = fields.value(key, period)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise InvalidArgument(fields.name, f"{key} has {len(pattern)} values for {num_layers} layers")
        return [_SLIDING if has_window else _FULL for has_window in pattern]
    period = fields.integer(key, period)
    return [_SLIDING if (index + 1) % period else _FULL for index in range(num_layers)]


def _attention_biases(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    return {"attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_up.bias")}


def _smollm3(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    return _attention_biases(fields, file, config) | {"no_rope_layer_interval": _UNROTATED}


def _granite(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    return _attention_biases(fields, file, config) | {
        "attention_multiplier": fields.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


def _olmo2(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    """Read OLMo 2, or OLMo 3 if there are windows: its layers with a window have unscaled positions."""
    bias, window = {"attention_bias": _has(file, "attn_q.bias")}, _window(fields)
    if window is None:
        return bias
    rope = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return bias | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _types(fields, config, _UNROTATED),
        "rope_parameters": {_FULL: rope, _SLIDING: local},
    }


def _one_bias(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    return {"attention_bias": _has(file, "attn_q.bias")}


def _seed_oss(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    return _attention_biases(fields, file, config) | {"attention_out_bias": _has(file, "attn_output.bias")}


def _exaone4(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    window = _window(fields)
    return {} if window is None else {"sliding_window": window, "layer_types": _types(fields, config, _UNROTATED)}


def _cohere(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    return {
        "logit_scale": fields.number("logit_scale"),
        "use_qk_norm": _has(file, "attn_q_norm.weight"),
        "attention_bias": _has(file, "attn_q.bias"),
    }


def _cohere2(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    return {
        "logit_scale": fields.number("logit_scale"),
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": _types(fields, config, _UNROTATED),
    }


def _stablelm(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    # Converters write `use_parallel_residual` with a default that the files of StableLM 2 contradict.
    fields.ignore(("use_parallel_residual",))
    return {
        "use_qkv_bias": _has(file, "attn_q.bias"),
        "qk_layernorm": _has(file, "attn_q_norm.weight"),
        "use_parallel_residual": not _has(file, "ffn_norm.weight"),
    }


def _ernie4_5(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    return {"use_bias": _has(file, "attn_q.bias")}


def _lfm2(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    counts = fields.value("attention.head_count_kv")
    if not isinstance(counts, list) or len(counts) != config["num_hidden_layers"]:
        raise InvalidArgument(fields.name, "attention.head_count_kv must have a number for each layer")
    return {
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": [_FULL if count else "conv" for count in counts],
    }


def _gpt_oss(fields: JsonFields, file: GgufFile, config: Config) -> Config:
    # Files do not have that the corners of YaRN are not rounded, nor which layers have windows: every second.
    fields.only("expert_gating_func", 3, why="experts of gpt-oss are weighted by a softmax of the chosen")
    rope = config["rope_parameters"]
    return {
        "intermediate_size": fields.integer("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "attention_bias": _has(file, "attn_q.bias"),
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": _types(fields, config, 2),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
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
    "qwen35": _qwen35("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": _qwen35("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "qwen3next": _qwen35("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "phi3": _phi3,
    "starcoder2": _starcoder2,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "arcee": _variant("ArceeForCausalLM", "arcee", _attention_biases),
    "smollm3": _variant("SmolLM3ForCausalLM", "smollm3", _smollm3),
    "granite": _variant("GraniteForCausalLM", "granite", _granite),
    "olmo2": _variant("Olmo2ForCausalLM", "olmo2", _olmo2),
    "glm4": _variant("Glm4ForCausalLM", "glm4", _one_bias, may_be_partial=True),
    "seed_oss": _variant("SeedOssForCausalLM", "seed_oss", _seed_oss),
    "exaone4": _variant("Exaone4ForCausalLM", "exaone4", _exaone4),
    "hunyuan-dense": _variant("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _one_bias),
    "command-r": _variant("CohereForCausalLM", "cohere", _cohere, epsilon="layer_norm_eps", has_mean=True),
    "cohere2": _variant("Cohere2ForCausalLM", "cohere2", _cohere2, epsilon="layer_norm_eps", has_mean=True),
    "stablelm": _variant(
        "StableLmForCausalLM", "stablelm", _stablelm, epsilon="layer_norm_eps", has_mean=True, may_be_partial=True
    ),
    "nemotron": _variant(
        "NemotronForCausalLM", "nemotron", _attention_biases, epsilon="norm_eps", has_mean=True, may_be_partial=True
    ),
    "ernie4_5": _variant("Ernie4_5ForCausalLM", "ernie4_5", _ernie4_5),
    "lfm2": _variant("Lfm2ForCausalLM", "lfm2", _lfm2, epsilon="norm_eps"),
    "gpt-oss": _variant("GptOssForCausalLM", "gpt_oss", _gpt_oss),
}
