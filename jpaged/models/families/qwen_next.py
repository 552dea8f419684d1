"""Qwen3-Next (Qwen 2025): the gated delta rule in three of four layers, and attention with gates in the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.config import MAX_WIDTH, Mixture
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config import DeltaShape
from jpaged.models.decoder.config_fields import (
    FULL,
    TRAINING,
    read_choice,
    read_heads,
    read_sizes,
    read_sparse_layers,
    read_width,
)
from jpaged.models.decoder.leaves import layer_leaves
from jpaged.models.family import Modules
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind, StateArray
from jpaged.models.param_specs import Leaf, same, transpose, transposed
from jpaged.models.rope_config import RopeConfig

LINEAR = "linear_attention"
_MAX_TAPS = 64


def _read(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore(TRAINING)
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=2, head_dim=256)
    fields.only("hidden_act", "silu", "swish", why="experts support only the activation silu")
    fields.only("attention_bias", False, why="biases next to gates are not supported")
    max_position_embeddings = fields.integer("max_position_embeddings", 32768)
    num_experts, top_k = read_choice(fields, (512, 10), ("num_experts",))
    delta, conv_len = _read_delta(fields), fields.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=_MAX_TAPS)
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        **heads,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        ropes=(RopeConfig.from_hf(fields, max_position_embeddings, default_fraction=0.25),),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qk_norm="head",
        kinds=_read_kinds(fields, sizes["num_layers"], heads["head_dim"], delta, conv_len),
        mixture=Mixture(
            routing=Routing(num_experts, top_k, normalises=fields.flag("norm_topk_prob", True)),
            width=read_width(fields, "moe_intermediate_size", 512),
            shared_width=read_width(fields, "shared_expert_intermediate_size", 512),
            shared_is_weighed=True,
        ),
        conv_len=conv_len,
        delta=delta,
    )


def _read_delta(fields: JsonFields) -> DeltaShape:
    return DeltaShape(
        fields.integer("linear_num_key_heads", 16, maximum=MAX_WIDTH),
        fields.integer("linear_num_value_heads", 32, maximum=MAX_WIDTH),
        fields.integer("linear_key_head_dim", 128, maximum=MAX_WIDTH),
        fields.integer("linear_value_head_dim", 128, maximum=MAX_WIDTH),
    )


def _read_kinds(
    fields: JsonFields, num_layers: int, head_dim: int, delta: DeltaShape, conv_len: int
) -> tuple[LayerKind, ...]:
    """Return the kinds of layers, from their names or from the interval of those with attention.

    Raises:
        Unsupported: no layer has attention.
    """
    interval = fields.integer("full_attention_interval", 4)
    types: Sequence[str] = fields.texts("layer_types", FULL, LINEAR, count=num_layers)
    types = types or [LINEAR if (index + 1) % interval else FULL for index in range(num_layers)]
    if FULL not in types:
        raise Unsupported(f"{fields.name}: no layer has attention; at least one is required")
    (num_channels,), matrices = delta.states
    states = StateArray((num_channels * (conv_len - 1),)), StateArray(matrices, "float32")
    attention = AttentionKind(head_dim**-0.5)
    full, linear = LayerKind(attention), LayerKind(attention, None, states=states)
    return tuple(
        dataclasses.replace(linear if name == LINEAR else full, is_sparse=is_sparse)
        for name, is_sparse in zip(types, read_sparse_layers(fields, num_layers), strict=True)
    )


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    mixture, delta, kinds = config.mixture, config.delta, config.layer_kinds
    assert mixture is not None
    assert delta is not None
    return {
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": config.ropes[0].to_hf(),
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": config.conv_len,
        "layer_types": [LINEAR if kind.states else FULL for kind in kinds],
        "moe_intermediate_size": mixture.width,
        "shared_expert_intermediate_size": mixture.shared_width,
        "num_experts": mixture.routing.num_experts,
        "num_experts_per_tok": mixture.routing.top_k,
        "norm_topk_prob": mixture.routing.normalises,
        "mlp_only_layers": [index for index, kind in enumerate(kinds) if not kind.is_sparse],
    }


_NAMES = Names()


def _layer_leaves(config: DecoderConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    if kind.states:
        return layer_leaves(config, prefix, kind, _NAMES, attention=_delta_leaves(config, f"{prefix}linear_attn."))
    leaves = layer_leaves(config, prefix, kind, _NAMES)
    return [
        *(_without_gates(leaf, config) if leaf.path == ("attention", "qkv", "kernel") else leaf for leaf in leaves),
        _gates(config, f"{prefix}self_attn.q_proj.weight"),
    ]


def _halves(tensor: np.ndarray, head_dim: int, part: int) -> np.ndarray:
    """Return the rows of queries (0) or gates (1) of a projection that has both for each head."""
    return tensor.reshape(-1, 2, head_dim, *tensor.shape[1:])[:, part].reshape(-1, *tensor.shape[1:])


def _without_gates(leaf: Leaf, config: DecoderConfig) -> Leaf:
    """Return the kernel of queries, keys and values, from a projection of queries that has gates, too."""
    (name, (num_outputs, width)), *others = leaf.tensors

    def pack(tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        leaf.pack([_halves(tensors[0], config.head_dim, 0), *tensors[1:]], out)

    return dataclasses.replace(leaf, tensors=((name, (2 * num_outputs, width)), *others), pack=pack)


def _gates(config: DecoderConfig, name: str) -> Leaf:
    width, num_outputs = config.hidden_size, config.num_heads * config.head_dim

    def pack(tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        transpose(_halves(tensors[0], config.head_dim, 1), out)

    tensors = ((name, (2 * num_outputs, width)),)
    return Leaf(("attention", "gate", "kernel"), ("embed", "heads"), (width, num_outputs), tensors, pack, (1, 0))


def _delta_leaves(config: DecoderConfig, prefix: str) -> list[Leaf]:
    delta, width = config.delta, config.hidden_size
    assert delta is not None
    num_outputs = delta.num_key_heads * (delta.num_channels + delta.value_width)
    num_values = delta.num_value_heads * delta.value_dim
    of_values = ("heads",), (delta.num_value_heads,)
    rates = same(("attention", "log_rate"), f"{prefix}A_log", *of_values)
    biases = same(("attention", "step_bias"), f"{prefix}dt_bias", *of_values)
    return [
        _columns(("attention", "project", "kernel"), f"{prefix}in_proj_qkvz.weight", (width, num_outputs)),
        _columns(("attention", "control", "kernel"), f"{prefix}in_proj_ba.weight", (width, 2 * delta.num_value_heads)),
        _taps(f"{prefix}conv1d.weight", delta, config.conv_len),
        *(dataclasses.replace(leaf, dtype=np.dtype(np.float32)) for leaf in (rates, biases)),
        same(("attention", "norm", "scale"), f"{prefix}norm.weight", (None,), (delta.value_dim,)),
        transposed(("attention", "out", "kernel"), f"{prefix}out_proj.weight", ("heads", "embed"), (num_values, width)),
    ]


def _columns(path: tuple[str, ...], name: str, shape: tuple[int, int]) -> Leaf:
    return transposed(path, name, ("embed", "heads"), shape)


def _taps(name: str, delta: DeltaShape, num_taps: int) -> Leaf:
    """Return the taps of all channels, grouped by key head; the tensor has queries, keys, then values of all heads."""
    num_heads, num_channels = delta.num_key_heads, delta.num_key_heads * delta.num_channels
    ends = num_heads * delta.key_dim, 2 * num_heads * delta.key_dim

    def pack(tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        parts = np.split(tensors[0].reshape(num_channels, num_taps), ends)
        grouped = np.concatenate([part.reshape(num_heads, -1, num_taps) for part in parts], axis=1)
        out[...] = grouped.reshape(num_channels, num_taps)

    tensors = ((name, (num_channels, 1, num_taps)),)
    return Leaf(("attention", "taps"), ("heads", None), (num_channels, num_taps), tensors, pack, (None, None))


def _modules() -> Modules[DecoderConfig]:
    from jpaged.models.decoder.modules import DecoderEnds
    from jpaged.models.decoder.recurrent import DeltaLayer

    return Modules(DecoderEnds, DeltaLayer)


ARCHITECTURES = {
    "Qwen3NextForCausalLM": dataclasses.replace(
        decoder_family("qwen3_next", _read, _to_hf, _NAMES, ignored=("mtp.",)),
        layer_leaves=_layer_leaves,
        modules=_modules,
    ),
}
