"""GGUF files of tiny checkpoints, as llama.cpp's converter writes them: names by the `gguf` package's own tables.

What the converter changes is spelt out here apart from the code under test, which undoes it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from tests.models.tiny import tensors, tiny_case

Tensors = dict[str, np.ndarray]
Config = dict[str, Any]
Undo = Callable[[np.ndarray], Tensors]
Kinds = Callable[[str, tuple[int, ...]], str]
ARCHITECTURES = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_moe": "QWEN3MOE",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "phi3": "PHI3",
    "starcoder2": "STARCODER2",
    "gpt2": "GPT2",
    "gpt_neox": "GPTNEOX",
    "arcee": "ARCEE",
    "smollm3": "SMOLLM3",
    "granite": "GRANITE",
    "olmo2": "OLMO2",
    "olmo3": "OLMO2",
    "glm4": "GLM4",
    "seed_oss": "SEED_OSS",
    "exaone4": "EXAONE4",
    "hunyuan_v1_dense": "HUNYUAN_DENSE",
    "cohere": "COMMAND_R",
    "cohere2": "COHERE2",
    "stablelm": "STABLELM",
    "nemotron": "NEMOTRON",
    "ernie4_5": "ERNIE4_5",
    "lfm2": "LFM2",
    "gpt_oss": "GPT_OSS",
    "gemma4_text": "GEMMA4",
    "qwen3_next": "QWEN3NEXT",
    "qwen3_5_text": "QWEN35",
    "qwen3_5_moe_text": "QWEN35MOE",
}
"""The package's names, by those that Hugging Face has for types of models."""
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,)} | {
    **dict.fromkeys(("IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), (0,)),
    "NVFP4": (),
}
"""Types that the package cannot make: where in a block the float16 are that everything is multiplied by."""


_DEFAULTS: dict[str, tuple[float, float, float]] = {
    "arcee": (1e-5, 1e4, 1.0),
    "smollm3": (1e-6, 2e6, 1.0),
    "olmo2": (1e-5, 1e4, 1.0),
    "olmo3": (1e-5, 1e4, 1.0),
    "glm4": (1.5625e-07, 1e4, 0.5),
    "exaone4": (1e-5, 1e4, 1.0),
    "hunyuan_v1_dense": (1e-5, 1e4, 1.0),
    "cohere": (1e-5, 5e5, 1.0),
    "stablelm": (1e-5, 1e4, 0.25),
    "nemotron": (1e-5, 1e4, 0.5),
    "ernie4_5": (1e-5, 5e5, 1.0),
    "lfm2": (1e-5, 1e6, 1.0),
    "mixtral": (1e-5, 1e6, 1.0),
    "phi3": (1e-5, 1e4, 1.0),
    "gpt_oss": (1e-5, 1.5e5, 1.0),
    "qwen3_next": (1e-6, 1e4, 0.25),
}
"""What a config without them means: the epsilon of norms, the base of rotations, and the part of heads rotated."""
_SAME = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "conv_L_cache": "shortconv.l_cache",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
"""Keys of an architecture that are those of a config under other names."""


def of_kind(kind: str) -> Kinds:
    """Matrices of one type; norms, biases and routers in float32, as they always are."""

    def choose(name: str, shape: tuple[int, ...]) -> str:
        return kind if len(shape) > 1 and not re.search(r"norm|ffn_gate_inp|position", name) else "F32"

    return choose


def checkpoint(name: str, **settings: object) -> tuple[Config, Tensors]:
    """A tiny checkpoint that a file can say all of: experts in all layers, and scores as llama.cpp scales them."""
    case = tiny_case(name)
    case = dataclasses.replace(case, config={**case.config, **settings})
    config: Config = dict(case.config)
    found = tensors(case)
    if config["model_type"] == "smollm3":
        config["no_rope_layer_interval"] = 4
    if config["model_type"] == "olmo3":
        config["rope_parameters"]["full_attention"].pop("attention_factor")
    if config["model_type"] == "lfm2":
        config["conv_L_cache"] = 3
    if config["model_type"] in ("gemma2", "gemma3_text"):
        config["query_pre_attn_scalar"] = config["head_dim"]
    if config.get("mlp_only_layers"):
        config["mlp_only_layers"] = []
        found = {key: tensor for key, tensor in found.items() if not key.startswith("model.layers.1.mlp.")}
        first = {key: tensor for key, tensor in found.items() if key.startswith("model.layers.0.mlp.")}
        found |= {key.replace("layers.0", "layers.1"): tensor[..., ::-1].copy() for key, tensor in first.items()}
    return config, found


def write_plain(config: Config, found: Tensors, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in found.items()}, folder / "model.safetensors")
    return folder


def write_gguf(
    model: tuple[Config, Tensors],
    path: Path,
    kinds: Kinds,
    *,
    more: Mapping[str, Any] | None = None,
    split_max_tensors: int = 0,
) -> Tensors:
    """Writes a file, and returns the checkpoint that it stands for: its tensors as they were rounded.

    Args:
        kinds: the type of each tensor of the file, by its name and shape.
        more: metadata besides what the config makes, which it replaces; None leaves a key out.
        split_max_tensors: of each part, for a file in several.
    """
    config, found = model
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split_max_tensors)
    for key, value in {**metadata(config), **(more or {})}.items():
        if value is not None:
            _add(writer, key, value)
    plain = {}
    for name, (stored, undo) in _stored(config, found, architecture).items():
        kind = kinds(name, stored.shape)
        data = _blocks(name, stored, kind)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        plain.update(undo(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float32)))
    factors = _llama3_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name in ("long", "short"):
        if config.get("rope_scaling") and f"{name}_factor" in config["rope_scaling"]:
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(config["rope_scaling"][f"{name}_factor"], "f"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(key)


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an architecture, from its config.json."""
    kind = config["model_type"]
    prefix = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[ARCHITECTURES[kind]]]
    usual = ("max_position_embeddings", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    sizes: list[Any] = [config.get(key) for key in usual]
    if kind == "gpt2":
        sizes = [config[key] for key in ("n_positions", "n_embd", "n_layer", "n_embd", "n_head")]
        sizes[3] = config.get("n_inner") or 4 * config["n_embd"]
    width: int = sizes[1]
    names = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    own: dict[str, Any] = dict(zip(names, sizes, strict=True))
    head_dim = config.get("head_dim", width // sizes[-1])
    if kind in ("gpt2", "gpt_neox", "starcoder2", "cohere", "cohere2", "stablelm", "nemotron"):
        eps = next((config[key] for key in ("layer_norm_epsilon", "norm_epsilon") if key in config), 1e-5)
        own["attention.layer_norm_epsilon"] = eps
    else:
        default = _DEFAULTS.get(kind, (1e-6,))[0]
        own["attention.layer_norm_rms_epsilon"] = config.get("rms_norm_eps", default)
    if kind not in ("gpt2", "gpt_neox", "starcoder2"):
        own |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind not in ("gpt2", "gpt_neox"):
        own["attention.head_count_kv"] = config["num_key_value_heads"]
    if "num_experts" in config or "num_local_experts" in config:
        own["expert_count"] = config.get("num_experts", config.get("num_local_experts"))
        own["expert_used_count"] = config.get("num_experts_per_tok")
    if "moe_intermediate_size" in config:
        own["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in config:
        own["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if config.get("use_sliding_window", True) and config.get("sliding_window"):
        own["attention.sliding_window"] = config["sliding_window"]
    own |= {name: config[key] for key, name in _SAME.items() if key in config}
    if kind in ("olmo3", "exaone4"):
        own["attention.sliding_window_pattern"] = [name == "sliding_attention" for name in config["layer_types"]]
    if kind == "stablelm":
        own["use_parallel_residual"] = config.get("use_parallel_residual", True)
    if kind == "lfm2":
        heads = config["num_key_value_heads"]
        own["attention.head_count_kv"] = [0 if name == "conv" else heads for name in config["layer_types"]]
        inner, multiple = config["intermediate_size"] * 2 // 3, config["block_multiple_of"]
        own["feed_forward_length"] = -(-inner // multiple) * multiple
    if kind == "gemma3_text":
        own["attention.sliding_window_pattern"] = config["layer_types"].index("full_attention") + 1
    if kind == "gemma2":
        caps = {f"{name}_logit_softcapping": cap for name, cap in (("attn", 50.0), ("final", 30.0))}
        own |= {key: config.get(key, cap) for key, cap in caps.items()}
    if "linear_value_head_dim" in config:
        own["ssm.inner_size"] = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        own["full_attention_interval"] = config.get("full_attention_interval", 4)
    if "mrope_section" in config.get("rope_parameters", {}):
        own["rope.dimension_sections"] = [*config["rope_parameters"]["mrope_section"], 0]
    if kind == "gemma4_text":
        own |= _gemma4_metadata(config)
    if kind == "gpt_neox":
        own["use_parallel_residual"] = config.get("use_parallel_residual", True)
    own = _rope(config, head_dim) | own if kind == "gemma4_text" else own | _rope(config, head_dim)
    return {f"{prefix}.{key}": value for key, value in own.items()}


def _gemma4_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, inner = config["num_hidden_layers"], config["intermediate_size"]
    is_windowed = [name == "sliding_attention" for name in config["layer_types"]]
    num_shared, head_dim, full = config.get("num_kv_shared_layers", 0), config["head_dim"], config["global_head_dim"]
    own: dict[str, Any] = {
        "attention.shared_kv_layers": num_shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.sliding_window_pattern": is_windowed,
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        own |= {name: full, f"{name}_swa": head_dim}
    if config.get("use_double_wide_mlp"):
        own["feed_forward_length"] = [inner * (1 + (index >= num_layers - num_shared)) for index in range(num_layers)]
    if "num_global_key_value_heads" in config:
        few, many = config["num_global_key_value_heads"], config["num_key_value_heads"]
        own["attention.head_count_kv"] = [many if has_window else few for has_window in is_windowed]
    if "top_k_experts" in config:
        own["expert_used_count"] = config["top_k_experts"]
    return own


def _rope(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    if config["model_type"] == "gpt2":
        return {}
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if config["model_type"] == "gpt_oss":
        scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    _, default, part = _DEFAULTS.get(config["model_type"], (0.0, 10000.0, 1.0))
    theta = config.get("rope_theta", config.get("rotary_emb_base", scaling.get("rope_theta", default)))
    if "full_attention" in scaling:
        scaling = scaling["full_attention"]
        theta = scaling["rope_theta"]
    fraction = config.get("partial_rotary_factor", config.get("rotary_pct", part))
    fraction = scaling.get("partial_rotary_factor", fraction)
    if "alpha" in scaling:
        theta *= scaling["alpha"] ** (head_dim / (head_dim - 2))
    keys: dict[str, Any] = {"rope.freq_base": float(theta), "rope.dimension_count": int(head_dim * fraction)}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        ratio = config["max_position_embeddings"] / original
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = 1.0 if ratio <= 1 else float(np.sqrt(1 + np.log(ratio) / np.log(original)))
    return keys


def _llama3_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """What Llama 3's formula divides the frequency of each pair by; pairs that Gemma 4 does not rotate have 1e30."""
    if config["model_type"] == "gemma4_text":
        return np.repeat(np.array([1, 1e30], np.float32), np.array([1, 3]) * config["global_head_dim"] // 8)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    theta = config.get("rope_theta", rope.get("rope_theta", 10000.0))
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, original = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _stored(config: Config, model: Tensors, architecture: gguf.MODEL_ARCH) -> dict[str, tuple[np.ndarray, Undo]]:
    """The tensors of a file by their names, and what makes a checkpoint's of them."""
    names = gguf.get_tensor_name_map(architecture, 16)
    found: dict[str, tuple[np.ndarray, Undo]] = {}
    experts: dict[str, list[tuple[str, np.ndarray]]] = {}
    if config["model_type"] == "gpt_oss":
        model, pairs = _without_pairs(model)
        found |= pairs
    if config["model_type"] == "qwen3_next":
        model, halves = _without_joint(config, model)
        found |= halves
    for name, tensor in model.items():
        if "linear_attn" in name:
            own, stored, undo = _delta(config, name, tensor)
            found[own] = stored, undo
            continue
        if numbered := re.search(r"(experts\.|layernorm\.norms\.)\d+\.", name):
            joint = name.replace(numbered[0], numbered[1].replace("norms.", ""))
            experts.setdefault(joint, []).append((name, tensor))
            continue
        if name.endswith(("router.scale", "per_expert_scale")):
            layer, stem = name.split(".")[2], "ffn_gate_inp" if "router.scale" in name else "ffn_down_exps"
            found[f"blk.{layer}.{stem}.scale"] = _changed(config, name, tensor)
            continue
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        # The package's tables are older than the draft layers of Qwen3.5, which are named as those of GLM 4.5.
        mapped = mapped or gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 16).get_name(name, (".weight",))
        assert mapped is not None, name
        if name.endswith(("layer_scalar", "gate_up_proj", "experts.down_proj")):
            mapped += ".weight"
        found[mapped] = _changed(config, name, tensor)
    for name, stack in experts.items():
        mapped = names.get_name(name, try_suffixes=(".weight",))
        assert mapped is not None, name
        found[mapped] = np.stack([tensor for _, tensor in stack]), _unstack([each for each, _ in stack])
    return found


def _without_pairs(model: Tensors) -> tuple[Tensors, dict[str, tuple[np.ndarray, Undo]]]:
    """The other tensors of gpt-oss, and those of its experts by their names in a file: gates and ups apart."""
    others, found = dict[str, np.ndarray](), dict[str, tuple[np.ndarray, Undo]]()
    kept: dict[str, dict[int, np.ndarray]] = {}

    def undo_swap(name: str) -> Undo:
        return lambda stored: {name: stored.swapaxes(stored.ndim > 1, -1)}

    def undo_half(name: str, half: int) -> Undo:
        def undo(stored: np.ndarray) -> Tensors:
            halves = kept.setdefault(name, {})
            halves[half] = stored.swapaxes(1, -1)
            both = np.stack([halves.get(index, halves[half]) for index in range(2)], axis=-1)
            return {name: both.reshape(*both.shape[:-2], -1)}

        return undo

    for name, tensor in model.items():
        part = re.fullmatch(r"model\.layers\.(\d+)\.(mlp\.experts\.(gate_up|down)_proj(_bias)?|self_attn\.sinks)", name)
        if part is None:
            others[name] = tensor
            continue
        end, turned = ("bias" if part[4] else "weight"), np.ascontiguousarray(tensor.swapaxes(tensor.ndim > 1, -1))
        if part[3] is None:
            found[f"blk.{part[1]}.attn_sinks.weight"] = tensor, undo_swap(name)
        elif part[3] == "down":
            found[f"blk.{part[1]}.ffn_down_exps.{end}"] = turned, undo_swap(name)
        else:
            for half, kind in enumerate(("gate", "up")):
                own = np.ascontiguousarray(turned[:, half::2])
                found[f"blk.{part[1]}.ffn_{kind}_exps.{end}"] = own, undo_half(name, half)
    return others, found


_OF_DELTA = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def _delta(config: Config, name: str, tensor: np.ndarray) -> tuple[str, np.ndarray, Undo]:
    """A tensor of the delta rule: Qwen3.5's value heads are stored with the first of each key head in front."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.linear_attn\.(.*)", name)
    assert found is not None
    part, shape = found[2], tensor.shape
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    is_around = config["model_type"] != "qwen3_next" and part != "norm.weight"
    first = 2 * num_keys * config["linear_key_head_dim"] if part in ("in_proj_qkv.weight", "conv1d.weight") else 0

    def moved(given: np.ndarray, groups: tuple[int, int]) -> np.ndarray:
        given = given.T if part == "out_proj.weight" else given
        values = given[first:]
        values = values.reshape(*groups, -1, *given.shape[1:]).swapaxes(0, 1).reshape(values.shape)
        whole = np.concatenate([given[:first], values])
        return np.ascontiguousarray(whole.T if part == "out_proj.weight" else whole)

    def undo(stored: np.ndarray) -> Tensors:
        stored = moved(stored, (num_values // num_keys, num_keys)) if is_around else stored
        return {name: np.log(-stored) if part == "A_log" else stored.reshape(shape)}

    changed = -np.exp(tensor) if part == "A_log" else tensor.squeeze()
    changed = moved(changed, (num_keys, num_values // num_keys)) if is_around else changed
    return f"blk.{found[1]}.{_OF_DELTA[part]}", changed, undo


def _without_joint(config: Config, model: Tensors) -> tuple[Tensors, dict[str, tuple[np.ndarray, Undo]]]:
    """The other tensors of Qwen3-Next, and its joint projections: queries, keys and values apart from gates."""
    others, found = dict[str, np.ndarray](), dict[str, tuple[np.ndarray, Undo]]()
    kept: dict[str, dict[str, np.ndarray]] = {}
    num_keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    inner = config["linear_num_value_heads"] // num_keys * config["linear_value_head_dim"]
    ends = np.cumsum([width, width, inner])

    def undo_part(name: str, stem: str) -> Undo:
        def undo(stored: np.ndarray) -> Tensors:
            halves = kept.setdefault(name, {})
            halves[stem] = stored
            if len(halves) < 2:
                return {}
            each = [*np.split(halves["attn_qkv"], ends[:-1] * num_keys), halves["attn_gate"]]
            grouped = [part.reshape(num_keys, -1, part.shape[1]) for part in each]
            return {name: np.concatenate(grouped, axis=1).reshape(-1, stored.shape[1])}

        return undo

    for name, tensor in model.items():
        if "in_proj_qkvz" not in name:
            others[name] = tensor
            continue
        parts = np.split(tensor.reshape(num_keys, -1, tensor.shape[1]), ends, axis=1)
        flat = [part.reshape(-1, tensor.shape[1]) for part in parts]
        number = re.search(r"layers\.(\d+)", name)
        assert number is not None
        for stem, rows in (("attn_qkv", flat[:3]), ("attn_gate", flat[3:])):
            found[f"blk.{number[1]}.{stem}.weight"] = np.concatenate(rows), undo_part(name, stem)
    return others, found


def _unstack(names: list[str]) -> Undo:
    return lambda tensor: dict(zip(names, tensor, strict=True))


def _changed(config: Mapping[str, Any], name: str, tensor: np.ndarray) -> tuple[np.ndarray, Undo]:
    kind = config["model_type"]
    heads = config.get("num_attention_heads", 0)
    if kind in ("llama", "mistral", "mixtral", "arcee", "smollm3", "granite") and re.search(r"[qk]_proj", name):
        count = heads if "q_proj" in name else config["num_key_value_heads"]
        rows = tensor.reshape(count, 2, -1, *tensor.shape[1:])
        return rows.swapaxes(1, 2).reshape(tensor.shape), lambda stored: {
            name: stored.reshape(count, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        }
    if kind == "gpt_neox" and "query_key_value" in name:
        groups = tensor.reshape(heads, 3, -1, *tensor.shape[1:])
        return groups.swapaxes(0, 1).reshape(tensor.shape), lambda stored: {
            name: stored.reshape(3, heads, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)
        }
    if kind == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
        return np.ascontiguousarray(tensor.T), lambda stored: {name: stored.T}
    if "conv.conv" in name:
        return tensor[:, 0], lambda stored: {name: stored[:, None]}
    is_moved = kind.startswith(("gemma", "nemotron", "qwen3_next", "qwen3_5")) and kind != "gemma4_text"
    if is_moved and name.endswith("norm.weight"):
        return tensor + 1, lambda stored: {name: stored - 1}
    if "shared_expert_gate" in name:
        return tensor[0], lambda stored: {name: stored[None]}
    return tensor, lambda stored: {name: stored}


def _blocks(name: str, tensor: np.ndarray, kind: str) -> np.ndarray:
    """A tensor in a type; of types that the package cannot make blocks at random, with sane scales."""
    if kind not in _SCALES:
        data: np.ndarray = gguf.quants.quantize(np.ascontiguousarray(tensor), gguf.GGMLQuantizationType[kind])
        return data
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(len(name) + tensor.size)
    blocks = rng.integers(0, 256, (*tensor.shape[:-1], tensor.shape[-1] // size, num_bytes), np.uint8)
    for at in _SCALES[kind]:
        scales = rng.uniform(0.5e-4, 1.5e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*tensor.shape[:-1], -1)
