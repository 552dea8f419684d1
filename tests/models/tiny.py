"""Tiny checkpoints in Hugging Face layout, made from a seed alone: the same bytes with numpy here and torch elsewhere.

Norm weights are 1 + 0.1 randn and linear weights have a standard deviation of 0.05 or more, so that a wrong norm,
rotation or head order shows in the logits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True, slots=True)
class TinyCase:
    """One checkpoint and the prompt that its golden answers are for.

    Attributes:
        name: unique; seeds the weights and the prompt.
        config: config.json as a checkpoint would carry it.
        prompt_len: tokens of the prompt.
    """

    name: str
    config: Mapping[str, object]
    prompt_len: int

    def prompt(self) -> list[int]:
        vocab_size = _count(self.config, "vocab_size")
        return _generator(f"{self.name}/prompt").integers(3, vocab_size, self.prompt_len).tolist()


def tiny_cases() -> list[TinyCase]:
    """Every family, tied and untied, 1 to 8 query heads per key/value head, D of 16 to 128, each kind of RoPE.

    Of OPT: the usual form, that of 350M (post-norm, a narrow embedding), and every other switch turned once.
    """
    llama31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama31["original_max_position_embeddings"] = 64
    mscales = {"mscale": 1.0, "mscale_all_dim": 0.6, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    linear, dynamic = {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}
    window = {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}
    return [
        _case("llama_mha", "Llama", (4, 4, 16), 24, rope_theta=10000.0),
        _case("llama_gqa_bias", "Llama", (6, 2, 32), 24, attention_bias=True, mlp_bias=True, head_dim=32),
        _case("llama_mqa_wide", "Llama", (2, 1, 128), 20, head_dim=128, rms_norm_eps=1e-5, torch_dtype="float32"),
        _case("llama3_tied", "Llama", (8, 2, 16), 90, tie_word_embeddings=True, rope_theta=5e5, rope_scaling=llama31),
        _case("llama3_new_style", "Llama", (4, 2, 64), 90, rope_parameters={**llama31, "rope_theta": 5e5}, head_dim=64),
        _case("llama_linear", "Llama", (4, 2, 32), 40, rope_scaling=linear, max_position_embeddings=64),
        _case("llama_dynamic_short", "Llama", (4, 2, 32), 20, rope_scaling=dynamic, max_position_embeddings=64),
        _case("llama_dynamic_long", "Llama", (4, 4, 16), 80, rope_scaling=dynamic, max_position_embeddings=64),
        _case("mistral_mqa", "Mistral", (8, 1, 32), 24, head_dim=32, sliding_window=None, rope_theta=1e6),
        _case("mistral_yarn", "Mistral", (4, 2, 80), 40, head_dim=80, sliding_window=None, rope_scaling=_YARN),
        _case("qwen2", "Qwen2", (7, 1, 16), 24, rope_theta=1e6, **window),
        _case("qwen2_tied_yarn", "Qwen2", (4, 2, 64), 40, tie_word_embeddings=True, rope_scaling={**_YARN, **mscales}),
        _case("qwen3", "Qwen3", (4, 2, 64), 24, head_dim=64, rope_theta=1e6, **window),
        _case("qwen3_tied", "Qwen3", (16, 8, 16), 24, head_dim=16, tie_word_embeddings=True, attention_bias=True),
        _case("qwen3_yarn", "Qwen3", (4, 1, 128), 40, head_dim=128, rope_scaling={**_YARN, "attention_factor": 1.3}),
        _opt("opt", (4, 16), 24),
        _opt("opt_post_norm", (2, 32), 32, do_layer_norm_before=False, word_embed_proj_dim=32),
        _opt(
            "opt_gelu_unbiased", (1, 64), 24, activation_function="gelu", enable_bias=False, tie_word_embeddings=False
        ),
        _opt("opt_no_affine", (4, 16), 24, layer_norm_elementwise_affine=False, word_embed_proj_dim=48),
        _opt("opt_no_final_norm", (4, 16), 20, _remove_final_layer_norm=True, prefix="</s>"),
    ]


def tiny_case(name: str) -> TinyCase:
    return {case.name: case for case in tiny_cases()}[name]


def write_checkpoint(case: TinyCase, folder: Path) -> Path:
    """Writes config.json and model.safetensors, float32, into the folder, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(case.config), indent=2), encoding="utf-8")
    save_file(tensors(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors(case: TinyCase) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint; each has its own stream, so their order does not matter."""
    return {name: _tensor(case, name, shape) for name, shape in _shapes(case.config).items()}


def _case(name: str, family: str, heads: tuple[int, int, int], prompt_len: int, **settings: object) -> TinyCase:
    num_heads, num_kv_heads, head_dim = heads
    config: dict[str, object] = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": 131,
        # A width of its own where the config names head_dim, so that E and H * D cannot be mistaken for each other.
        "hidden_size": 48 if "head_dim" in settings else num_heads * head_dim,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }
    return TinyCase(name, {**config, **settings}, prompt_len)


def _opt(name: str, heads: tuple[int, int], prompt_len: int, **settings: object) -> TinyCase:
    num_heads, head_dim = heads
    config: dict[str, object] = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 131,
        "hidden_size": num_heads * head_dim,
        "ffn_dim": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "max_position_embeddings": 256,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "use_cache": True,
    }
    return TinyCase(name, {**config, **settings}, prompt_len)


def _shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers writes them, spelt out apart from the code under test."""
    return _opt_shapes(config) if config["model_type"] == "opt" else _llama_shapes(config)


def _opt_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    width, inner, vocab_size = (_count(config, key) for key in ("hidden_size", "ffn_dim", "vocab_size"))
    embed_size = _count(config, "word_embed_proj_dim") if "word_embed_proj_dim" in config else width
    decoder = "model.decoder"
    linears: dict[str, tuple[int, ...]] = {}
    norms: list[str] = []
    if config["do_layer_norm_before"] and not config.get("_remove_final_layer_norm"):
        norms.append(f"{decoder}.final_layer_norm")
    for index in range(_count(config, "num_hidden_layers")):
        layer = f"{decoder}.layers.{index}"
        norms += [f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm"]
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linears[f"{layer}.self_attn.{part}"] = (width, width)
        linears[f"{layer}.fc1"] = (inner, width)
        linears[f"{layer}.fc2"] = (width, inner)
    shapes: dict[str, tuple[int, ...]] = {
        f"{decoder}.embed_tokens.weight": (vocab_size, embed_size),
        f"{decoder}.embed_positions.weight": (_count(config, "max_position_embeddings") + 2, width),
    }
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab_size, embed_size)
    if embed_size != width:
        shapes[f"{decoder}.project_in.weight"] = (width, embed_size)
        shapes[f"{decoder}.project_out.weight"] = (embed_size, width)
    if config.get("layer_norm_elementwise_affine", True):
        shapes |= {f"{name}.{kind}": (width,) for name in norms for kind in ("weight", "bias")}
    for name, shape in linears.items():
        shapes[f"{name}.weight"] = shape
        if config.get("enable_bias", True):
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _llama_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    width, inner, vocab_size = (_count(config, key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    num_heads, num_kv_heads = _count(config, "num_attention_heads"), _count(config, "num_key_value_heads")
    head_dim = _count(config, "head_dim") if "head_dim" in config else width // num_heads
    family = config["model_type"]
    out_bias = config.get("attention_bias", False)
    qkv_bias = out_bias or family == "qwen2"
    rows = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab_size, width)
    for index in range(_count(config, "num_hidden_layers")):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
        for part, out in rows.items():
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = (out, width)
            if qkv_bias:
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = (out,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, rows["q"])
        if out_bias:
            shapes[f"{layer}.self_attn.o_proj.bias"] = (width,)
        if family == "qwen3":
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        for part, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            shapes[f"{layer}.mlp.{part}_proj.weight"] = shape
            if config.get("mlp_bias", False):
                shapes[f"{layer}.mlp.{part}_proj.bias"] = shape[:1]
    return shapes


def _tensor(case: TinyCase, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = _generator(f"{case.name}/{name}").standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return np.float32(1) + np.float32(0.1) * noise
    if name.endswith(".bias"):
        return np.float32(0.1) * noise
    # A small embedding under layers of unit size keeps tied models from repeating their input, and positions of that
    # size keep them from running in a circle.
    stds = {"embed_tokens.weight": 0.05, "embed_positions.weight": 1.0}
    std = stds.get(".".join(name.split(".")[-2:]), max(0.05, 1.2 * shape[-1] ** -0.5))
    return np.float32(std) * noise


def _generator(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))


def _count(config: Mapping[str, object], key: str) -> int:
    value = config[key]
    assert isinstance(value, int)
    return value
