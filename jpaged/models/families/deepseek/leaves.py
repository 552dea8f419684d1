"""The leaves of latent attention, and their tensors in a checkpoint.

Checkpoints have heads' keys and values as one projection of latents. Here it is two: that of keys is applied to
queries, and that of values to the output of attention, so that neither is computed for any token.

    kv_b_proj [H * (N + V), R]  ->  key_up [H, N, R]      q k = q (key_up c) = (q key_up) c
                                    value_up [H, R, V]    sum of p v = (sum of p c) value_up
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpaged.models.decoder import Names
from jpaged.models.decoder import leaves as decoder
from jpaged.models.experts.leaves import ExpertNames
from jpaged.models.families.deepseek.config import DeepseekConfig
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.leaves import Leaf, same, transpose, transposed

NAMES = Names(experts=ExpertNames(shared="mlp.shared_experts."))


def layer_leaves(config: DeepseekConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    """See `Family`."""
    return decoder.layer_leaves(config, prefix, kind, NAMES, attention=_attention(config, f"{prefix}self_attn."))


def _attention(config: DeepseekConfig, prefix: str) -> list[Leaf]:
    width, rank, values = config.hidden_size, config.query_rank, config.num_heads * config.v_head_dim
    leaves = [
        _queries(config, f"{prefix}{'q_proj' if rank is None else 'q_b_proj'}.weight", rank or width),
        _latents(config, f"{prefix}kv_a_proj_with_mqa.weight"),
        _norm("kv_norm", f"{prefix}kv_a_layernorm.weight", config.latent_dim),
        *_ups(config, f"{prefix}kv_b_proj.weight"),
        transposed(("attention", "out", "kernel"), f"{prefix}o_proj.weight", ("heads", "embed"), (values, width)),
    ]
    if rank is not None:
        down = ("attention", "q_down", "kernel")
        leaves.append(transposed(down, f"{prefix}q_a_proj.weight", ("embed", None), (width, rank)))
        leaves.append(_norm("q_norm", f"{prefix}q_a_layernorm.weight", rank))
    return leaves


def _norm(part: str, name: str, width: int) -> Leaf:
    return same(("attention", part, "scale"), name, (None,), (width,))


def _queries(config: DeepseekConfig, name: str, width: int) -> Leaf:
    """Return the projection of queries `[H * (N + R), width]` -> `[width, H * (N + R)]`."""
    num_heads, dim = config.num_heads, config.nope_dim + config.rope_dim
    order = _rotated_by_halves(config, config.nope_dim)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        for index, rows in enumerate(tensors[0].reshape(-1, dim, tensors[0].shape[1])):
            transpose(rows[order], leaf[:, index * dim : (index + 1) * dim])

    axes = (None if config.query_rank else "embed", "heads")
    tensors = ((name, (num_heads * dim, width)),)
    return Leaf(("attention", "q", "kernel"), axes, (width, num_heads * dim), tensors, pack, (1, 0))


def _latents(config: DeepseekConfig, name: str) -> Leaf:
    """Return the projection of latents `[D, E]` -> `[E, D]`."""
    width, order = config.hidden_size, _rotated_by_halves(config, config.latent_dim)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        transpose(tensors[0][order], leaf)

    tensors = ((name, (config.head_dim, width)),)
    path = ("attention", "kv_down", "kernel")
    return Leaf(path, ("embed", None), (width, config.head_dim), tensors, pack, (1, None))


def _ups(config: DeepseekConfig, name: str) -> list[Leaf]:
    """Return the two leaves of one tensor."""
    num_heads, rank, nope, v_dim = config.num_heads, config.latent_dim, config.nope_dim, config.v_head_dim
    tensors, axes = ((name, (num_heads * (nope + v_dim), rank)),), ("heads", None, None)

    def pack_keys(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0].reshape(-1, nope + v_dim, rank)[:, :nope]

    def pack_values(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0].reshape(-1, nope + v_dim, rank)[:, nope:].swapaxes(1, 2)

    key, value = ("attention", "key_up"), ("attention", "value_up")
    return [
        Leaf(key, axes, (num_heads, nope, rank), tensors, pack_keys, (0, None, 1)),
        Leaf(value, axes, (num_heads, rank, v_dim), tensors, pack_values, (0, 1, None)),
    ]


def _rotated_by_halves(config: DeepseekConfig, first: int) -> np.ndarray:
    """Return an order of dimensions in which those from `first` on rotate half against half; see `rotated_first`."""
    rotated = np.arange(config.rope_dim)
    if config.is_interleaved:
        rotated = np.concatenate((rotated[::2], rotated[1::2]))
    return np.concatenate((np.arange(first), first + rotated))
