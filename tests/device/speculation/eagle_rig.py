"""A small Llama and heads for it, as published checkpoints have them, and an executor of both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.checkpoints.weights import load_params, read_head
from jpaged.config import EngineConfig
from jpaged.device.executor import JaxExecutor
from jpaged.device.speculation.by_head import HeadProposer
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from tests.device import tiny_model
from tests.device.speculation.eagle_oracle import Head, Llama, Shape, Tensors

VOCAB_SIZE, WIDTH, INNER, NUM_LAYERS = tiny_model.CONFIG.vocab_size, 32, 48, 4
SHAPE = Shape(num_heads=4, num_kv_heads=2, head_dim=16, eps=1e-5)
WATCHED = (0, 2, 4)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": SHAPE.num_heads,
    "num_key_value_heads": SHAPE.num_kv_heads,
    "head_dim": SHAPE.head_dim,
    "rms_norm_eps": SHAPE.eps,
    "rope_theta": SHAPE.theta,
    "max_position_embeddings": 96,
    "eos_token_id": None,
}
HEAD = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": VOCAB_SIZE,
    "eagle_aux_hidden_state_layer_ids": list(WATCHED),
}


def layer_tensors(rng: np.random.Generator, prefix: str, width: int, scale: float) -> dict[str, np.ndarray]:
    """The tensors of a layer whose projections are of so many numbers."""
    shapes = {
        "self_attn.q_proj": (SHAPE.num_heads * SHAPE.head_dim, width),
        "self_attn.k_proj": (SHAPE.num_kv_heads * SHAPE.head_dim, width),
        "self_attn.v_proj": (SHAPE.num_kv_heads * SHAPE.head_dim, width),
        "self_attn.o_proj": (WIDTH, SHAPE.num_heads * SHAPE.head_dim),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }
    tensors = {f"{prefix}{name}.weight": rng.normal(size=shape) * scale for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = 1 + 0.1 * rng.normal(size=WIDTH)
    return tensors


def llama_tensors(scale: float = 0.02) -> dict[str, np.ndarray]:
    """A model that goes by its last token, and a little by what is in front of it."""
    rng = np.random.default_rng(3)
    tensors = {
        "model.embed_tokens.weight": rng.normal(size=(VOCAB_SIZE, WIDTH)),
        "model.norm.weight": np.ones(WIDTH),
        "lm_head.weight": rng.normal(size=(VOCAB_SIZE, WIDTH)),
    }
    for layer in range(NUM_LAYERS):
        tensors |= layer_tensors(rng, f"model.layers.{layer}.", WIDTH, scale)
    return tensors


def random_head(seed: int = 5, draft_vocab_size: int = 60) -> dict[str, np.ndarray]:
    """A head that knows nothing, and proposes some of the tokens."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.permutation(VOCAB_SIZE)[:draft_vocab_size])
    return {
        "fc.weight": rng.normal(size=(WIDTH, 3 * WIDTH)) * 0.3,
        "midlayer.hidden_norm.weight": 1 + rng.random(WIDTH),
        "norm.weight": 1 + 0.1 * rng.normal(size=WIDTH),
        "embed_tokens.weight": rng.normal(size=(VOCAB_SIZE, WIDTH)),
        "lm_head.weight": rng.normal(size=(draft_vocab_size, WIDTH)),
        "d2t": (ids - np.arange(draft_vocab_size)).astype(np.int64),
        "t2d": np.isin(np.arange(VOCAB_SIZE), ids).astype(np.uint8),
        **layer_tensors(rng, "midlayer.", 2 * WIDTH, 0.3),
    }


def likely_head(llama: Tensors, noise: float = 0.3) -> dict[str, np.ndarray]:
    """A head that is often right: it finds a token by its embedding, and tells what the model makes of it."""
    tensors, rng = random_head(), np.random.default_rng(11)
    size = WIDTH // SHAPE.num_kv_heads
    for name, (rows, columns) in {"q": (64, 64), "k": (32, 64), "v": (32, 64)}.items():
        kernel = np.zeros((rows, columns))
        for head in range(rows // SHAPE.head_dim):
            of_kv = head if rows == WIDTH else head // (SHAPE.num_heads // SHAPE.num_kv_heads)
            begin = of_kv * size
            kernel[head * SHAPE.head_dim : head * SHAPE.head_dim + size, begin : begin + size] = np.eye(size)
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = kernel * (1.0 if name == "v" else 3.0)
    out = np.zeros((WIDTH, SHAPE.num_heads * SHAPE.head_dim))
    for kv_head in range(SHAPE.num_kv_heads):
        begin = kv_head * (SHAPE.num_heads // SHAPE.num_kv_heads) * SHAPE.head_dim
        out[kv_head * size : (kv_head + 1) * size, begin : begin + size] = np.eye(size)
    tensors["midlayer.self_attn.o_proj.weight"] = out
    tensors["midlayer.input_layernorm.weight"] = np.ones(WIDTH)
    tensors["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"] * 0.1
    tensors["fc.weight"] = rng.normal(size=(WIDTH, 3 * WIDTH)) * noise / np.sqrt(3 * WIDTH)
    tensors["norm.weight"] = np.ones(WIDTH)
    tensors["embed_tokens.weight"] = np.array(llama["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = np.array(llama["lm_head.weight"])
    return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Writes a checkpoint; integers stay what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    numbers = {name: each if each.dtype.kind in "iu" else each.astype(np.float32) for name, each in tensors.items()}
    save_file(numbers, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Served:
    """An executor of a head, its oracles, and what was proposed.

    Attributes:
        proposals: of each round (tokens that each row had sampled before, what was proposed), of whole programs.
    """

    executor: JaxExecutor
    llama: Llama
    head: Head
    proposals: list[tuple[np.ndarray, np.ndarray]]
    watched: tuple[int, ...] = WATCHED


def serve(
    folder: Path,
    tensors: Tensors,
    options: EngineConfig,
    config: dict[str, Any] | None = None,
    *,
    mode: LayerMode = "loop",
    layer_name: str = "midlayer.",
    watched: tuple[int, ...] = WATCHED,
) -> Served:
    """An executor of the small Llama with a head.

    Args:
        mode: of the Llama's layers.
        layer_name: what the head's layer is called in the checkpoint.
        watched: the layers that its configuration names.
    """
    llama = llama_tensors()
    model = Model(from_hf(LLAMA), jnp.dtype("float32"))
    params = load_params(model, write(folder / "llama", LLAMA, llama), mode)
    config = {**HEAD, "draft_vocab_size": len(tensors["lm_head.weight"]), **(config or {})}
    stored = {name.replace("midlayer.", layer_name): tensor for name, tensor in tensors.items()}
    found = write(folder / "head", config, stored)
    head = Model(read_head(found), jnp.dtype("float32"))
    of_head = load_params(head, found, "loop")
    proposals: list[tuple[np.ndarray, np.ndarray]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HeadProposer, "propose", telling(proposals))
        executor = JaxExecutor.create(model, params, options, draft=(head, of_head))
        executor.warm_up(tiny_model.quiet)
    shared = {"embed_tokens.weight": llama["model.embed_tokens.weight"]}
    oracle = Head(rounded({**shared, **tensors}), SHAPE, bool(config.get("norm_before_residual")))
    return Served(executor, Llama(rounded(llama), SHAPE, NUM_LAYERS), oracle, proposals, watched)


def rounded(tensors: Tensors) -> dict[str, np.ndarray]:
    """The numbers as the checkpoint holds them, in float64."""
    return {name: tensor.astype(np.float32).astype(np.float64) for name, tensor in tensors.items()}


def telling(into: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Proposals that are told of when they are made."""
    plain = HeadProposer.propose

    def propose(self: HeadProposer, kept: Any, reached: Any) -> Any:
        proposals_rk, kept = plain(self, kept, reached)
        jax.debug.callback(
            lambda done, proposed: into.append((np.array(done), np.array(proposed))), reached.num_done_r, proposals_rk
        )
        return proposals_rk, kept

    return propose
