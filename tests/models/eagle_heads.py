"""EAGLE-3 heads as published checkpoints have them: one that knows nothing, and one that is often right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class HeadSizes:
    """What a head's config.json says of its sizes; heads are as wide as keys are together, for `finding_head`."""

    vocab_size: int
    hidden_size: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_hidden_size: int

    def config(self, **more: Any) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 96,
            **more,
        }


def layer_tensors(
    rng: np.random.Generator, prefix: str, sizes: HeadSizes, num_inputs: int, scale: float
) -> dict[str, np.ndarray]:
    """The tensors of a Llama layer whose projections are of so many numbers."""
    width, inner, of_keys = sizes.hidden_size, sizes.inner, sizes.num_kv_heads * sizes.head_dim
    shapes = {
        "self_attn.q_proj": (sizes.num_heads * sizes.head_dim, num_inputs),
        "self_attn.k_proj": (of_keys, num_inputs),
        "self_attn.v_proj": (of_keys, num_inputs),
        "self_attn.o_proj": (width, sizes.num_heads * sizes.head_dim),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    tensors = {f"{prefix}{name}.weight": rng.normal(size=shape) * scale for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = 1 + 0.1 * rng.normal(size=width)
    return tensors


def random_head(sizes: HeadSizes, draft_vocab_size: int, seed: int = 5) -> dict[str, np.ndarray]:
    """A head that knows nothing, and proposes some of the tokens."""
    rng, width = np.random.default_rng(seed), sizes.hidden_size
    ids = np.sort(rng.permutation(sizes.vocab_size)[:draft_vocab_size])
    return {
        "fc.weight": rng.normal(size=(width, 3 * sizes.target_hidden_size)) * 0.3,
        "midlayer.hidden_norm.weight": 1 + rng.random(width),
        "norm.weight": 1 + 0.1 * rng.normal(size=width),
        "embed_tokens.weight": rng.normal(size=(sizes.vocab_size, width)),
        "lm_head.weight": rng.normal(size=(draft_vocab_size, width)),
        "d2t": (ids - np.arange(draft_vocab_size)).astype(np.int64),
        "t2d": np.isin(np.arange(sizes.vocab_size), ids).astype(np.uint8),
        **layer_tensors(rng, "midlayer.", sizes, 2 * width, 0.3),
    }


def finding_head(
    sizes: HeadSizes, embedding: np.ndarray, output: np.ndarray, noise: float = 0.3
) -> dict[str, np.ndarray]:
    """A head whose attention finds the last token, and hands its embedding to the output matrix.

    Each key/value head has a part of the embedding, which its first query head puts back in its place.
    """
    tensors, rng = random_head(sizes, sizes.vocab_size), np.random.default_rng(11)
    width, head_dim, group = sizes.hidden_size, sizes.head_dim, sizes.num_heads // sizes.num_kv_heads
    size = width // sizes.num_kv_heads
    for name, num_heads in (("q", sizes.num_heads), ("k", sizes.num_kv_heads), ("v", sizes.num_kv_heads)):
        kernel = np.zeros((num_heads * head_dim, 2 * width))
        for head in range(num_heads):
            part = (head if name != "q" else head // group) * size
            kernel[head * head_dim : head * head_dim + size, part : part + size] = np.eye(size)
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = kernel * (1.0 if name == "v" else 3.0)
    out = np.zeros((width, sizes.num_heads * head_dim))
    for kv_head in range(sizes.num_kv_heads):
        begin = kv_head * group * head_dim
        out[kv_head * size : (kv_head + 1) * size, begin : begin + size] = np.eye(size)
    tensors["midlayer.self_attn.o_proj.weight"] = out
    tensors["midlayer.input_layernorm.weight"] = tensors["norm.weight"] = np.ones(width)
    tensors["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"] / sizes.hidden_size
    features = 3 * sizes.target_hidden_size
    tensors["fc.weight"] = rng.normal(size=(width, features)) * noise / np.sqrt(features)
    tensors["embed_tokens.weight"], tensors["lm_head.weight"] = np.array(embedding), np.array(output)
    return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Writes a checkpoint in float32; integers stay what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    numbers = {name: each if each.dtype.kind in "iu" else each.astype(np.float32) for name, each in tensors.items()}
    save_file(numbers, folder / "model.safetensors")
    return folder
