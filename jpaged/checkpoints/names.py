"""How the tensors of a Hugging Face checkpoint and the leaves of our parameter tree correspond, both ways.

Linear weights are `[out, in]` there and `[in, *out]` here; query, key and value are one kernel here, grouped by
key/value head (see `jpaged.models.layers`), and so are gate and up (see `jpaged.models.llama`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.errors import InternalError
from jpaged.models.config import OPT_POSITION_OFFSET, LlamaConfig, ModelConfig, OptConfig

LM_HEAD = "lm_head.weight"

_STRIP = 64  # rows of a transposed strip: 128 bytes of bfloat16, two cache lines


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of our tree and the checkpoint tensors that it is made of.

    Attributes:
        path: keys from the root of the tree, or of one layer.
        shape: of the leaf.
        tensors: name and shape of each tensor.
        pack: tensors in that order, and an empty leaf that it fills, casting where types differ. A part of the leaf
            along an axis is filled from the parts of the tensors that follow it.
        unpack: the leaf back to tensors, views where possible.
        tensor_axes: for each axis of the leaf the one that follows it in every tensor, in equal steps; None for none.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    pack: Callable[[Sequence[np.ndarray], np.ndarray], None]
    unpack: Callable[[np.ndarray], Sequence[np.ndarray]]
    tensor_axes: tuple[int | None, ...]


def name_prefix(config: ModelConfig, stored: Iterable[str] = ()) -> str:
    """What all names but that of the output matrix begin with, given the names that a checkpoint holds.

    OPT checkpoints that were saved without their head lack the outer `model.`.
    """
    if not isinstance(config, OptConfig):
        return "model."
    is_bare = {name.partition(".")[0] for name in stored} - {"lm_head"} == {"decoder"}
    return "decoder." if is_bare else "model.decoder."


def outer_leaves(config: ModelConfig, prefix: str) -> list[Leaf]:
    """Everything but the layers."""
    match config:
        case LlamaConfig():
            leaves, embed_size = _llama_outer(config, prefix), config.hidden_size
        case OptConfig():
            leaves, embed_size = _opt_outer(config, prefix), config.embed_size
        case _:
            raise InternalError(f"no names for a {type(config).__name__}")
    matrix = (config.vocab_size, embed_size)
    leaves.insert(0, _same(("embed", "embedding"), f"{prefix}embed_tokens.weight", matrix))
    if not config.tie_word_embeddings:
        leaves.append(_same(("lm_head", "kernel"), LM_HEAD, matrix))
    return leaves


def layer_leaves(config: ModelConfig, layer_index: int, prefix: str) -> list[Leaf]:
    """One layer; paths start inside the layer."""
    prefix = f"{prefix}layers.{layer_index}."
    match config:
        case LlamaConfig():
            return _llama_layer(config, prefix)
        case OptConfig():
            return _opt_layer(config, prefix)
    raise InternalError(f"no names for a {type(config).__name__}")


def num_params(config: ModelConfig) -> int:
    """Numbers that the model's parameters are; a tied embedding counts once."""
    prefix = name_prefix(config)
    outer = sum(math.prod(leaf.shape) for leaf in outer_leaves(config, prefix))
    return outer + config.num_layers * sum(math.prod(leaf.shape) for leaf in layer_leaves(config, 0, prefix))


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor that no leaf names is known to be without effect.

    Old checkpoints store the rotary frequencies, which follow from the config; tied ones may repeat the embedding,
    whose equality the loader checks.
    """
    return name.endswith(".rotary_emb.inv_freq") or (name == LM_HEAD and config.tie_word_embeddings)


def _llama_outer(config: LlamaConfig, prefix: str) -> list[Leaf]:
    return [_same(("norm", "scale"), f"{prefix}norm.weight", (config.hidden_size,))]


def _llama_layer(config: LlamaConfig, prefix: str) -> list[Leaf]:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    width, inner = config.hidden_size, config.intermediate_size
    leaves = [
        _same(("attention_norm", "scale"), f"{prefix}input_layernorm.weight", (width,)),
        _same(("mlp_norm", "scale"), f"{prefix}post_attention_layernorm.weight", (width,)),
        _qkv_kernel(config, attention),
        _transposed(
            ("attention", "out", "kernel"), f"{attention}o_proj.weight", config.num_heads * config.head_dim, width
        ),
        _gate_up_kernel(config, mlp),
        _transposed(("mlp", "down", "kernel"), f"{mlp}down_proj.weight", inner, width),
    ]
    if config.attention_bias:
        leaves.append(_qkv_bias(config, attention))
    if config.attention_output_bias:
        leaves.append(_same(("attention", "out", "bias"), f"{attention}o_proj.bias", (width,)))
    if config.qk_norm:
        leaves.append(_same(("attention", "q_norm", "scale"), f"{attention}q_norm.weight", (config.head_dim,)))
        leaves.append(_same(("attention", "k_norm", "scale"), f"{attention}k_norm.weight", (config.head_dim,)))
    if config.mlp_bias:
        leaves.append(_gate_up_bias(config, mlp))
        leaves.append(_same(("mlp", "down", "bias"), f"{mlp}down_proj.bias", (width,)))
    return leaves


def _opt_outer(config: OptConfig, prefix: str) -> list[Leaf]:
    width, embed_size = config.hidden_size, config.embed_size
    positions = (config.max_position_embeddings + OPT_POSITION_OFFSET, width)
    leaves = [_same(("positions", "embedding"), f"{prefix}embed_positions.weight", positions)]
    if embed_size != width:
        leaves.append(_transposed(("project_in", "kernel"), f"{prefix}project_in.weight", embed_size, width))
        leaves.append(_transposed(("project_out", "kernel"), f"{prefix}project_out.weight", width, embed_size))
    if config.final_norm:
        leaves += _layer_norm(config, "norm", f"{prefix}final_layer_norm")
    return leaves


def _opt_layer(config: OptConfig, prefix: str) -> list[Leaf]:
    attention = f"{prefix}self_attn."
    width, inner = config.hidden_size, config.intermediate_size
    leaves = [
        *_layer_norm(config, "attention_norm", f"{prefix}self_attn_layer_norm"),
        *_layer_norm(config, "mlp_norm", f"{prefix}final_layer_norm"),
        _qkv_kernel(config, attention),
        _transposed(("attention", "out", "kernel"), f"{attention}out_proj.weight", width, width),
        _transposed(("mlp", "up", "kernel"), f"{prefix}fc1.weight", width, inner),
        _transposed(("mlp", "down", "kernel"), f"{prefix}fc2.weight", inner, width),
    ]
    if config.use_bias:
        leaves += [
            _qkv_bias(config, attention),
            _same(("attention", "out", "bias"), f"{attention}out_proj.bias", (width,)),
            _same(("mlp", "up", "bias"), f"{prefix}fc1.bias", (inner,)),
            _same(("mlp", "down", "bias"), f"{prefix}fc2.bias", (width,)),
        ]
    return leaves


def _layer_norm(config: OptConfig, key: str, name: str) -> list[Leaf]:
    if not config.norm_affine:
        return []
    shape = (config.hidden_size,)
    return [_same((key, "scale"), f"{name}.weight", shape), _same((key, "bias"), f"{name}.bias", shape)]


def _same(path: tuple[str, ...], name: str, shape: tuple[int, ...]) -> Leaf:
    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0]

    return Leaf(path, shape, ((name, shape),), pack, lambda leaf: [leaf], tuple(range(len(shape))))


def _transposed(path: tuple[str, ...], name: str, width: int, out: int) -> Leaf:
    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        _transpose(tensors[0], leaf)

    return Leaf(path, (width, out), ((name, (out, width)),), pack, lambda leaf: [leaf.T], (1, 0))


def _transpose(tensor: np.ndarray, leaf: np.ndarray) -> None:
    """Writes `[out, in]` as `[in, out]`, in strips that stay in cache: five times as fast as in one assignment."""
    for start in range(0, len(tensor), _STRIP):
        leaf[:, start : start + _STRIP] = tensor[start : start + _STRIP].T


def _qkv_names(prefix: str, suffix: str) -> tuple[str, str, str]:
    return f"{prefix}q_proj.{suffix}", f"{prefix}k_proj.{suffix}", f"{prefix}v_proj.{suffix}"


def _qkv_kernel(config: ModelConfig, prefix: str) -> Leaf:
    """Query `[H*D, E]`, key and value `[K*D, E]` <-> `[E, K, G + 2, D]`."""
    width, num_groups, head_dim = config.hidden_size, config.num_kv_heads, config.head_dim
    group = config.num_heads // num_groups
    q, k, v = _qkv_names(prefix, "weight")
    rows = (num_groups * group * head_dim, width), (num_groups * head_dim, width)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        q_rows = tensors[0].reshape(-1, group, head_dim, width)
        k_rows, v_rows = (tensor.reshape(-1, head_dim, width) for tensor in tensors[1:])
        for index in range(leaf.shape[1]):
            for row, part in enumerate((*q_rows[index], k_rows[index], v_rows[index])):
                _transpose(part, leaf[:, index, row])

    def unpack(leaf: np.ndarray) -> Sequence[np.ndarray]:
        parts = leaf[:, :, :group], leaf[:, :, group], leaf[:, :, group + 1]
        return [np.ascontiguousarray(part).reshape(width, -1).T for part in parts]

    tensors = ((q, rows[0]), (k, rows[1]), (v, rows[1]))
    shape = (width, num_groups, group + 2, head_dim)
    return Leaf(("attention", "qkv", "kernel"), shape, tensors, pack, unpack, (1, 0, None, None))


def _qkv_bias(config: ModelConfig, prefix: str) -> Leaf:
    """Query `[H*D]`, key and value `[K*D]` <-> `[K, G + 2, D]`."""
    num_groups, head_dim = config.num_kv_heads, config.head_dim
    group = config.num_heads // num_groups
    q, k, v = _qkv_names(prefix, "bias")

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[:, :group] = tensors[0].reshape(-1, group, head_dim)
        leaf[:, group] = tensors[1].reshape(-1, head_dim)
        leaf[:, group + 1] = tensors[2].reshape(-1, head_dim)

    def unpack(leaf: np.ndarray) -> Sequence[np.ndarray]:
        return [leaf[:, :group].reshape(-1), leaf[:, group].reshape(-1), leaf[:, group + 1].reshape(-1)]

    rows = (num_groups * group * head_dim,), (num_groups * head_dim,)
    tensors = ((q, rows[0]), (k, rows[1]), (v, rows[1]))
    shape = (num_groups, group + 2, head_dim)
    return Leaf(("attention", "qkv", "bias"), shape, tensors, pack, unpack, (0, None, None))


def _gate_up_kernel(config: LlamaConfig, prefix: str) -> Leaf:
    """Gate and up `[F, E]` <-> `[E, 2, F]`."""
    width, inner = config.hidden_size, config.intermediate_size

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        _transpose(tensors[0], leaf[:, 0])
        _transpose(tensors[1], leaf[:, 1])

    tensors = tuple((f"{prefix}{part}_proj.weight", (inner, width)) for part in ("gate", "up"))

    def unpack(leaf: np.ndarray) -> Sequence[np.ndarray]:
        return [leaf[:, 0].T, leaf[:, 1].T]

    return Leaf(("mlp", "gate_up", "kernel"), (width, 2, inner), tensors, pack, unpack, (1, None, 0))


def _gate_up_bias(config: LlamaConfig, prefix: str) -> Leaf:
    inner = config.intermediate_size

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[0], leaf[1] = tensors

    tensors = tuple((f"{prefix}{part}_proj.bias", (inner,)) for part in ("gate", "up"))
    return Leaf(("mlp", "gate_up", "bias"), (2, inner), tensors, pack, lambda leaf: [leaf[0], leaf[1]], (None, 0))
