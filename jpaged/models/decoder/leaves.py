"""The leaves of a decoder's tree and of its experts, under the tensor names of a family's checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jpaged.models.config import Mixture
from jpaged.models.decoder.config import DecoderConfig
from jpaged.models.family import Family, Modules, model_prefix
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.param_specs import (
    LM_HEAD,
    Leaf,
    Linears,
    LogicalAxes,
    embedding,
    head_scales,
    output_matrix,
    qkv_bias,
    qkv_kernel,
    rotated_first,
    same,
    stacked_bias,
    stacked_kernel,
    transpose,
    transposed,
    whole,
)

_Tensors = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Tensor names of a mixture in a family's checkpoints, without `.weight` and `.bias`.

    Attributes:
        router: of a layer, as all that follow.
        choice_bias: the complete name.
        choice_bias_is_row: it is `[1, X]`.
        experts: prefix of the experts' names, before the number.
        gate, up, down: follow the number, which is missing if each tensor has all experts.
        fused: each tensor has all experts, and names are complete. Gates and ups are in the tensor named by `gate`:
            `alternating` along the outputs of `[X, in, out]` (gpt-oss; biases are called `<name>_bias`), or as two
            `halves` of them (Llama 4), or of the outputs of `[X, out, in]` (`rows`, Granite). Empty if each expert has
            tensors.
        shared: prefix of the shared expert's names.
        shared_gate_up, shared_down: follow it; one name of gate and up is that of both, or of the up without gates.
        shared_score: the linear layer whose output weights the shared expert.
    """

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    choice_bias_is_row: bool = False
    experts: str = "mlp.experts."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: Literal["", "alternating", "halves", "rows"] = ""
    shared: str = "mlp.shared_expert."
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_score: str = "mlp.shared_expert_gate"


QWEN_EXPERTS = ExpertNames()


def mixture_leaves(mixture: Mixture, width: int, prefix: str, names: ExpertNames) -> list[Leaf]:
    """Return the leaves of a mixture for hidden states of a width, in a layer with this prefix."""
    num_experts = mixture.routing.num_experts
    router = prefix + names.router
    leaves = [transposed(("mlp", "router", "kernel"), f"{router}.weight", ("embed", None), (width, num_experts))]
    if mixture.router_bias:
        leaves.append(same(("mlp", "router", "bias"), f"{router}.bias", (None,), (num_experts,)))
    if mixture.choice_bias:
        bias = same(("mlp", "router", "choice_bias"), prefix + names.choice_bias, (None,), (num_experts,))
        if names.choice_bias_is_row:
            bias = dataclasses.replace(bias, tensors=((prefix + names.choice_bias, (1, num_experts)),))
        leaves.append(dataclasses.replace(bias, dtype=np.dtype(np.float32)))
    for part in ("gate", "up", "down") if mixture.gate.has_gates else ("up", "down"):
        leaves.append(_kernel(mixture, width, prefix, names, part))
        if mixture.has_biases:
            leaves.append(_bias(mixture, width, prefix, names, part))
    if mixture.shared_width:
        leaves += _shared(mixture, width, prefix, names)
    return leaves


def expert_axes(mixture: Mixture, part: str) -> LogicalAxes:
    """Return the axis names of a kernel: devices split the experts, or the width of each."""
    experts, inner = ("expert_parts", None) if mixture.is_parallel else ("experts", "feed_forward")
    return (experts, inner, "embed") if part == "down" else (experts, "embed", inner)


def _kernel(mixture: Mixture, width: int, prefix: str, names: ExpertNames, part: str) -> Leaf:
    num_experts, inner = mixture.routing.num_experts, mixture.width
    shape = (num_experts, inner, width) if part == "down" else (num_experts, width, inner)
    path, axes = ("mlp", "experts", part, "kernel"), expert_axes(mixture, part)
    if names.fused:
        return _fused(path, axes, shape, f"{prefix}{names.experts}{_fused_name(names, part)}", part, names.fused)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        for tensor, matrix in zip(tensors, leaf, strict=True):
            transpose(tensor, matrix)

    name = getattr(names, part)
    tensors = tuple(
        (f"{prefix}{names.experts}{index}.{name}.weight", (shape[2], shape[1])) for index in range(num_experts)
    )
    return Leaf(path, axes, shape, tensors, pack, (None, 1, 0))


def _bias(mixture: Mixture, width: int, prefix: str, names: ExpertNames, part: str) -> Leaf:
    num_experts = mixture.routing.num_experts
    shape = (num_experts, width if part == "down" else mixture.width)
    path, kernel_axes = ("mlp", "experts", part, "bias"), expert_axes(mixture, part)
    # A bias after a sum over devices is whole on each of them.
    axes: LogicalAxes = (None, "embed") if part == "down" else (kernel_axes[0], kernel_axes[2])
    if names.fused:
        name = f"{prefix}{names.experts}{_fused_name(names, part)}_bias"
        return _fused(path, axes, shape, name, part, names.fused)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        for tensor, bias in zip(tensors, leaf, strict=True):
            bias[...] = tensor

    name = getattr(names, part)
    tensors = tuple((f"{prefix}{names.experts}{index}.{name}.bias", shape[1:]) for index in range(num_experts))
    return Leaf(path, axes, shape, tensors, pack, (None, 0))


def _fused_name(names: ExpertNames, part: str) -> str:
    return names.down if part == "down" else names.gate


def _fused(path: tuple[str, ...], axes: LogicalAxes, shape: tuple[int, ...], name: str, part: str, layout: str) -> Leaf:
    """Return a leaf from a tensor with all experts; see `ExpertNames.fused`."""
    has_rows = layout == "rows"
    axes_of_tensor: tuple[int | None, ...] = (0, 2, 1) if has_rows else tuple(range(len(shape)))

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        array = tensors[0].swapaxes(1, 2) if has_rows else tensors[0]
        if part != "down":
            first = ("gate", "up").index(part)
            array = array[..., first::2] if layout == "alternating" else np.split(array, 2, axis=-1)[first]
        leaf[...] = array

    stored = shape if part == "down" else (*shape[:-1], 2 * shape[-1])
    if part != "down" and layout != "alternating":  # a part of gates is no part of the tensor
        axes_of_tensor = (*axes_of_tensor[:-1], None)
    if has_rows:
        stored = (stored[0], stored[2], stored[1])
    return Leaf(path, axes, shape, ((name, stored),), pack, axes_of_tensor)


def _shared(mixture: Mixture, width: int, prefix: str, names: ExpertNames) -> list[Leaf]:
    inner, into = mixture.shared_width, Linears(tuple(f"{prefix}{names.shared}{name}" for name in names.shared_gate_up))
    down = f"{prefix}{names.shared}{names.shared_down}.weight"
    axis = None if mixture.shared_is_whole else "feed_forward"
    first = stacked_kernel(("mlp", "shared", "gate_up", "kernel"), into, ("embed", None, axis), (width, 2, inner))
    if not mixture.gate.has_gates:
        first = stacked_kernel(("mlp", "shared", "up", "kernel"), into, ("embed", axis), (width, inner))
    leaves = [
        first,
        transposed(("mlp", "shared", "down", "kernel"), down, (axis, "embed"), (inner, width)),
    ]
    if mixture.shared_is_weighed:
        name = f"{prefix}{names.shared_score}.weight"
        leaves.append(transposed(("mlp", "shared", "score", "kernel"), name, ("embed", None), (width, 1)))
    return leaves


@dataclass(frozen=True, slots=True)
class Names:
    """Tensor names of a decoder in a family's checkpoints, without `.weight` and `.bias`.

    Attributes:
        positions: the learned position embedding.
        token_types: the embedding of token types.
        embed_norm: of the sum of the embeddings.
        norm: the last one.
        attention_norm: of a layer, as all that follow.
        qkv: the projections of query, key and value, or the fused one.
        qkv_is_grouped: the fused projection is grouped by key/value head, each with its queries, key and value; else it
            has all queries, then all keys, then all values.
        gate_up: the two projections, or the fused one; a feed-forward without a gate has one.
        experts: of sparse layers.
        q_norm, k_norm: of queries and keys; with `{}` in place of the number of the head, if each has a tensor.
        logit_bias: the complete name.
        xielu: prefix of the parameters of the activation xielu.
        is_transposed: linear weights are `[in, out]`, not `[out, in]`.
    """

    embed: str = "embed_tokens"
    positions: str = ""
    token_types: str = ""
    embed_norm: str = ""
    norm: str = "norm"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_is_grouped: bool = False
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    logit_bias: str = "lm_head.bias"
    xielu: str = "mlp.act_fn."
    is_transposed: bool = False
    experts: ExpertNames = QWEN_EXPERTS


def decoder_family(
    model_type: str,
    read: Callable[[JsonFields, str], DecoderConfig],
    to_hf: Callable[[DecoderConfig], dict[str, object]],
    names: Names | Callable[[DecoderConfig], Names],
    *,
    name_prefix: Callable[[Iterable[str]], str] = model_prefix,
    layers_prefix: str = "layers.",
    ignored: tuple[str, ...] = (),
    lm_head: str = LM_HEAD,
) -> Family[DecoderConfig]:
    """Return a family of decoders: see `Family`, and `Names`."""

    def modules() -> Modules[DecoderConfig]:
        from jpaged.models.decoder.modules import DecoderEnds, DecoderLayer

        return Modules(DecoderEnds, DecoderLayer)

    names_of = (lambda config: names) if isinstance(names, Names) else names
    return Family(
        model_type,
        read,
        to_hf,
        modules,
        lambda config, prefix: outer_leaves(config, prefix, names_of(config), lm_head),
        lambda config, prefix, kind: layer_leaves(config, prefix, kind, names_of(config)),
        name_prefix,
        layers_prefix,
        ignored,
        lm_head,
    )


def outer_leaves(config: DecoderConfig, prefix: str, names: Names, lm_head: str) -> list[Leaf]:
    """See `Family`."""
    width = config.hidden_size
    leaves = [embedding(config, width, f"{prefix}{names.embed}.weight")]
    if config.num_positions:
        leaves.append(_positions(config, f"{prefix}{names.positions}.weight"))
    if config.num_token_types:
        shape = (config.num_token_types, width)
        leaves.append(same(("token_types", "embedding"), f"{prefix}{names.token_types}.weight", (None, "embed"), shape))
    if config.embed_norm:
        leaves += norm_leaves(config, ("embed_norm",), f"{prefix}{names.embed_norm}")
    if config.logit_bias:
        leaves.append(same(("logit_bias",), names.logit_bias, ("vocab",), (config.vocab_size,)))
    if config.final_norm:
        leaves += norm_leaves(config, ("norm",), f"{prefix}{names.norm}")
    return leaves + output_matrix(config, width, lm_head)


def _positions(config: DecoderConfig, name: str) -> Leaf:
    """Return the leaf of the position embedding, without the rows before position 0."""
    shape, offset = (config.num_positions, config.hidden_size), config.position_offset
    leaf = same(("positions", "embedding"), name, (None, "embed"), shape)
    if not offset:
        return leaf

    def pack(tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        out[...] = tensors[0][offset:]

    stored = (config.num_positions + offset, config.hidden_size)
    return Leaf(leaf.path, leaf.axes, shape, ((name, stored),), pack, (None, 1))


def layer_leaves(
    config: DecoderConfig, prefix: str, kind: LayerKind, names: Names, *, attention: list[Leaf] | None = None
) -> list[Leaf]:
    """See `Family`; `attention` replaces the leaves of attention."""
    config = config.of_layer(kind)
    has_norm = config.pre_norms and kind.has_norm
    leaves = norm_leaves(config, ("attention_norm",), prefix + names.attention_norm) if has_norm else []
    if config.residual != "shared" and config.pre_norms and kind.has_feed_forward:
        leaves += norm_leaves(config, ("mlp_norm",), prefix + names.mlp_norm)
    if config.post_norms:
        leaves += norm_leaves(config, ("attention_post_norm",), prefix + names.attention_post_norm)
        leaves += norm_leaves(config, ("mlp_post_norm",), prefix + names.mlp_post_norm)
    leaves += _attention(config, prefix, names) if attention is None else attention
    if not kind.has_feed_forward:
        return leaves
    if kind.is_sparse and config.mixture is not None:
        return leaves + mixture_leaves(config.mixture, config.hidden_size, prefix, names.experts)
    return leaves + feed_forward(config, prefix, names)


def _attention(config: DecoderConfig, prefix: str, names: Names) -> list[Leaf]:
    width, heads, head_dim = config.hidden_size, config.num_heads * config.head_dim, config.head_dim
    linears = Linears(tuple(prefix + name for name in names.qkv), names.is_transposed)
    num_rotated = config.ropes[0].num_rotated(head_dim) if config.ropes else head_dim
    is_plain = num_rotated == head_dim and not config.is_interleaved
    order = None if is_plain else rotated_first(head_dim, num_rotated, is_interleaved=config.is_interleaved)
    out = Linears((prefix + names.out,), names.is_transposed)
    leaves = [
        qkv_kernel(config, linears, is_grouped=names.qkv_is_grouped, order=order),
        stacked_kernel(("attention", "out", "kernel"), out, ("heads", "embed"), (heads, width)),
    ]
    if config.attention_bias:
        leaves.append(qkv_bias(config, linears, is_grouped=names.qkv_is_grouped, order=order))
    if config.attention_output_bias:
        leaves.append(whole(("attention", "out", "bias"), f"{prefix}{names.out}.bias", width))
    if config.qk_norm in ("wide", "layer"):
        leaves.append(head_scales(config, _head_scales(config, prefix, names), order))
    elif config.qk_norm in ("head", "rotated"):
        for part, name in (("q_norm", names.q_norm), ("k_norm", names.k_norm)):
            leaf = same(("attention", part, "scale"), f"{prefix}{name}.weight", (None,), (head_dim,))
            leaves.append(leaf if order is None else _reordered(leaf, order))
    if config.has_sinks:
        leaves.append(same(("attention", "sinks"), prefix + names.sinks, ("heads",), (config.num_heads,)))
    return leaves


def _head_scales(config: DecoderConfig, prefix: str, names: Names) -> _Tensors:
    """Return the tensors with scales of all queries, then of all keys: one for each or for each head."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for name, num_heads in ((names.q_norm, config.num_heads), (names.k_norm, config.num_kv_heads)):
        if "{}" in name:
            numbers = range(num_heads)
            found += [(f"{prefix}{name.format(index)}.weight", (config.head_dim,)) for index in numbers]
        else:
            is_wide = config.qk_norm == "wide"
            shape = (num_heads * config.head_dim,) if is_wide else (num_heads, config.head_dim)
            found.append((f"{prefix}{name}.weight", shape))
    return tuple(found)


def feed_forward(config: DecoderConfig, prefix: str, names: Names) -> list[Leaf]:
    """Return the leaves of a dense feed-forward."""
    width, inner = config.hidden_size, config.intermediate_size
    into = Linears(tuple(prefix + name for name in names.gate_up), names.is_transposed)
    down = Linears((prefix + names.down,), names.is_transposed)
    key: str
    axes: LogicalAxes
    shape: tuple[int, ...]
    if config.is_gated:
        key, axes, shape = "gate_up", ("embed", None, "feed_forward"), (width, 2, inner)
    else:
        key, axes, shape = "up", ("embed", "feed_forward"), (width, inner)
    leaves = [
        stacked_kernel(("mlp", key, "kernel"), into, axes, shape),
        stacked_kernel(("mlp", "down", "kernel"), down, ("feed_forward", "embed"), (inner, width)),
    ]
    if config.mlp_bias:
        leaves.append(stacked_bias(("mlp", key, "bias"), into, axes[1:], shape[1:]))
        leaves.append(whole(("mlp", "down", "bias"), f"{prefix}{names.down}.bias", width))
    if config.activation == "xielu":
        for part, stored in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
            leaf = same(("mlp", "xielu", part), f"{prefix}{names.xielu}{part}", (None,), (1,))
            leaves.append(dataclasses.replace(leaf, tensors=((f"{prefix}{names.xielu}{part}", stored),)))
    return leaves


def norm_leaves(config: DecoderConfig, path: tuple[str, ...], name: str) -> list[Leaf]:
    """Return the leaves of a norm, from tensors with this name."""
    leaves = [whole((*path, "scale"), f"{name}.weight", config.hidden_size)]
    if config.norm == "layer" and config.norm_bias:
        leaves.append(whole((*path, "bias"), f"{name}.bias", config.hidden_size))
    return leaves


def _reordered(leaf: Leaf, order: np.ndarray) -> Leaf:
    def pack(tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        out[...] = tensors[0][order]

    return Leaf(leaf.path, leaf.axes, leaf.shape, leaf.tensors, pack, leaf.tensor_axes)
