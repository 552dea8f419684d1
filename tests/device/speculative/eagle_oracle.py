"""EAGLE-3 in NumPy, in float64: a Llama with what a head watches of it, and a head, both by the names of checkpoints.

The head is written after vLLM's `llama_eagle3.py` and SpecForge's `llama3_eagle.py`, without a cache: each proposal
runs everything in front of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    """What both have of a config.json."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float = 10000.0


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotated(x_thd: np.ndarray, theta: float) -> np.ndarray:
    num_tokens, _, head_dim = x_thd.shape
    angles = np.arange(num_tokens)[:, None] * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x_thd, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(x_te: np.ndarray, tensors: Tensors, prefix: str, shape: Shape) -> np.ndarray:
    num_tokens, group = len(x_te), shape.num_heads // shape.num_kv_heads
    q, k, v = (
        (x_te @ tensors[f"{prefix}self_attn.{name}_proj.weight"].T).reshape(num_tokens, -1, shape.head_dim)
        for name in "qkv"
    )
    q, k = rotated(q, shape.theta), rotated(k, shape.theta)
    k, v = (np.repeat(each, group, axis=1) for each in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(shape.head_dim)
    scores = np.where(np.tril(np.ones((num_tokens, num_tokens), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(num_tokens, -1) @ tensors[f"{prefix}self_attn.o_proj.weight"].T


def mlp(x_te: np.ndarray, tensors: Tensors, prefix: str) -> np.ndarray:
    gate, up = (x_te @ tensors[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{prefix}mlp.down_proj.weight"].T


@dataclass(frozen=True)
class Llama:
    """The model that proposals are made for."""

    tensors: Tensors
    shape: Shape
    num_layers: int

    def features(self, ids: Sequence[int], watched: Sequence[int]) -> np.ndarray:
        """The inputs of some layers side by side, `[T, F]`."""
        x, seen, tensors, eps = self.tensors["model.embed_tokens.weight"][list(ids)], [], self.tensors, self.shape.eps
        for layer in range(self.num_layers):
            seen.append(x)
            prefix = f"model.layers.{layer}."
            x = x + attention(rms(x, tensors[f"{prefix}input_layernorm.weight"], eps), tensors, prefix, self.shape)
            x = x + mlp(rms(x, tensors[f"{prefix}post_attention_layernorm.weight"], eps), tensors, prefix)
        return np.concatenate([[*seen, x][layer] for layer in watched], axis=-1)


@dataclass(frozen=True)
class Head:
    """Proposes tokens, the likeliest ones.

    Attributes:
        skips_norm, shifts: what a faulty head leaves out: the norm of states; that tokens are those behind them.
    """

    tensors: Tensors
    shape: Shape
    norm_before_residual: bool = False
    skips_norm: bool = False
    shifts: bool = True

    def propose(self, ids: Sequence[int], features_tf: np.ndarray, count: int) -> list[int]:
        """So many tokens behind those, of which all but the last have features."""
        proposed: list[int] = []
        states = features_tf @ self.tensors["fc.weight"].T
        for _ in range(count):
            tokens = [*ids, *proposed]
            hidden = self._layer(tokens[1:] if self.shifts else tokens[:-1], states)
            states = np.concatenate([states, hidden[-1:]])
            logits = rms(hidden[-1], self.tensors["norm.weight"], self.shape.eps) @ self.tensors["lm_head.weight"].T
            proposed.append(self._id(int(np.argmax(logits))))
        return proposed

    def _layer(self, ids: Sequence[int], states_te: np.ndarray) -> np.ndarray:
        tensors, eps, prefix = self.tensors, self.shape.eps, "midlayer."
        embedded = rms(tensors["embed_tokens.weight"][list(ids)], tensors[f"{prefix}input_layernorm.weight"], eps)
        normed = states_te if self.skips_norm else rms(states_te, tensors[f"{prefix}hidden_norm.weight"], eps)
        x = normed if self.norm_before_residual else states_te
        x = x + attention(np.concatenate([embedded, normed], axis=-1), tensors, prefix, self.shape)
        return x + mlp(rms(x, tensors[f"{prefix}post_attention_layernorm.weight"], eps), tensors, prefix)

    def _id(self, draft_id: int) -> int:
        return draft_id + int(self.tensors["d2t"][draft_id]) if "d2t" in self.tensors else draft_id
