"""Mamba-2 in all layers, or in most, and attention in the others: Granite 4 (IBM 2025) and Nemotron-H (NVIDIA 2025).

All layers of Granite have experts or a dense feed-forward. Nemotron-H counts each feed-forward as a layer. Here it is a
part of the layer before it, and some layers have none:

    published    M  -  M  *  -  M  E        M: Mamba-2, *: attention, -: feed-forward, E: experts without gates
    here         M--   M  *--   M--
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import GateFunction, Routing
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, Mixture
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config import MambaShape
from jpaged.models.decoder.config_fields import (
    FULL,
    MAX_EXPERTS,
    TRAINING,
    divided_heads,
    name_of_activation,
    read_activation,
    read_heads,
    read_width,
)
from jpaged.models.decoder.leaves import ExpertNames, layer_leaves
from jpaged.models.family import Modules, model_prefix
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind, StateArray
from jpaged.models.param_specs import Leaf, LogicalAxes, same, transpose, transposed
from jpaged.models.rope_config import RopeConfig

MAMBA, ATTENTION, LINEAR = "mamba", "attention", "linear_attention"
"""Types of layers in published files, and the name of the first one in those of transformers 5."""
_MAX_TAPS = 64


def _read(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore((*TRAINING, "init_method", "logits_to_keep", "mamba_chunk_size", "mamba_expand"))
    fields.only("normalization_function", "rmsnorm", why="granite has RMS norms")
    fields.only("hidden_act", "silu", "swish", why="granite supports only the activation silu")
    fields.only("mamba_proj_bias", False, why="biases in the projections of Mamba are not supported")
    width = fields.integer("hidden_size", maximum=MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", maximum=MAX_WIDTH)
    max_position_embeddings = fields.integer("max_position_embeddings", 2048)
    num_experts = fields.integer("num_local_experts", 8, minimum=0, maximum=MAX_EXPERTS)
    shared_width, has_bias = read_width(fields, "shared_intermediate_size", 1024), fields.flag("attention_bias", False)
    conv_len = fields.integer("mamba_d_conv", 4, minimum=2, maximum=_MAX_TAPS)
    mamba = _read_mamba(fields, width)
    position_type = fields.value("position_embedding_type")
    fields.only("position_embedding_type", "rope", "nope", why="it must be rope or nope")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB_SIZE),
        hidden_size=width,
        intermediate_size=shared_width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads, maximum=MAX_WIDTH),
        head_dim=divided_heads(fields, width, num_heads),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=(2,),
        bos_token_id=1,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        ropes=_read_ropes(fields, max_position_embeddings, rotates=position_type == "rope"),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        embed_scale=fields.number("embedding_multiplier", 1.0),
        scales_given_embeds=True,
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
        conv_len=conv_len,
        mamba=mamba,
        kinds=_read_kinds(fields, num_layers, mamba, conv_len, 0 if position_type == "rope" else None, num_experts > 0),
        mixture=_read_mixture(fields, num_experts, shared_width),
    )


def _read_mamba(fields: JsonFields, width: int) -> MambaShape:
    num_heads = fields.integer("mamba_n_heads", 128, maximum=MAX_WIDTH)
    inner = fields.integer("mamba_expand", 2, maximum=MAX_WIDTH) * width
    if inner % num_heads:
        raise fields.bad("mamba_n_heads", f"is {num_heads}; it must divide mamba_expand * hidden_size, {inner}")
    head_dim = inner // num_heads
    if fields.value("mamba_d_head", "auto") != "auto" and fields.integer("mamba_d_head") != head_dim:
        raise fields.bad("mamba_d_head", f"is {fields.integer('mamba_d_head')}; {num_heads} heads have {head_dim}")
    check_step_limits(fields)
    return MambaShape(
        num_heads,
        head_dim,
        fields.integer("mamba_n_groups", 1, maximum=num_heads),
        fields.integer("mamba_d_state", 256, maximum=MAX_WIDTH),
        fields.flag("mamba_conv_bias", True),
    )


def check_step_limits(fields: JsonFields) -> None:
    """Check that step sizes have no limits.

    Raises:
        Unsupported: they have.
    """
    limits = fields.value("time_step_limit")
    if limits is None:
        return
    # transformers writes infinity as an object, because JSON has none.
    unlimited: tuple[Any, ...] = (math.inf, {"__float__": "Infinity"})
    if not isinstance(limits, list) or len(limits) != 2 or limits[0] != 0 or limits[1] not in unlimited:
        raise Unsupported(f"{fields.name}: time_step_limit is {limits!r}; limits of step sizes are not supported")


def _read_ropes(fields: JsonFields, length: int, *, rotates: bool) -> tuple[RopeConfig, ...]:
    if rotates:
        return (RopeConfig.from_hf(fields, length),)
    fields.ignore(("rope_parameters", "rope_scaling", "rope_theta"))
    return ()


def _read_kinds(
    fields: JsonFields, num_layers: int, mamba: MambaShape, conv_len: int, rope: int | None, is_sparse: bool
) -> tuple[LayerKind, ...]:
    """Return the kinds of layers.

    Raises:
        Unsupported: no layer has attention.
    """
    key = "layers_block_type" if fields.has("layers_block_type") else "layer_types"
    types: Sequence[str] = fields.texts(key, MAMBA, LINEAR, ATTENTION, FULL, count=num_layers)
    if not any(name in (ATTENTION, FULL) for name in types):
        raise Unsupported(f"{fields.name}: no layer has attention; at least one is required")
    attention = AttentionKind(fields.number("attention_multiplier", 1.0))
    full = LayerKind(attention, rope, is_sparse)
    recurrent = LayerKind(attention, None, is_sparse, mamba_states(mamba, conv_len))
    return tuple(full if name in (ATTENTION, FULL) else recurrent for name in types)


def mamba_states(mamba: MambaShape, conv_len: int) -> tuple[StateArray, ...]:
    """Return the arrays of a sequence's state in a layer; matrices are float32."""
    channels, groups, matrices = mamba.get_states(conv_len)
    return StateArray(channels), StateArray(groups), StateArray(matrices, "float32")


def _read_mixture(fields: JsonFields, num_experts: int, shared_width: int) -> Mixture | None:
    if not num_experts:
        fields.ignore(("num_experts_per_tok", "intermediate_size"))
        return None
    top_k = fields.integer("num_experts_per_tok", 2, maximum=num_experts)
    return Mixture(
        routing=Routing(num_experts, top_k, "chosen", normalises=False),
        width=read_width(fields, "intermediate_size"),
        shared_width=shared_width,
    )


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    mixture, mamba = config.mixture, config.mamba
    assert mamba is not None
    experts: dict[str, object] = {"num_local_experts": 0, "intermediate_size": config.intermediate_size}
    if mixture is not None:
        experts = {
            "num_local_experts": mixture.routing.num_experts,
            "num_experts_per_tok": mixture.routing.top_k,
            "intermediate_size": mixture.width,
        }
    return {
        "num_key_value_heads": config.num_kv_heads,
        "shared_intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "position_embedding_type": "rope" if config.ropes else None,
        **({"rope_parameters": config.ropes[0].to_hf()} if config.ropes else {}),
        "attention_bias": config.attention_bias,
        "attention_multiplier": config.attention_kinds[0].scale,
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1 / config.logit_scale,
        "layer_types": [LINEAR if kind.states else FULL for kind in config.layer_kinds],
        "mamba_n_heads": mamba.num_heads,
        "mamba_d_head": mamba.head_dim,
        "mamba_n_groups": mamba.num_groups,
        "mamba_d_state": mamba.state_dim,
        "mamba_d_conv": config.conv_len,
        "mamba_conv_bias": mamba.has_bias,
        "mamba_expand": mamba.width // config.hidden_size,
    } | experts


_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.",
    gate="input_linear.weight",
    down="output_linear.weight",
    fused="rows",
    shared="shared_mlp.",
    shared_gate_up=("input_linear",),
    shared_down="output_linear",
)
_NAMES = Names(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear", experts=_EXPERTS)


def _layer_leaves(config: DecoderConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    attention = mamba_leaves(config, f"{prefix}mamba.") if kind.states else None
    return layer_leaves(config, prefix, kind, _NAMES, attention=attention)


def mamba_leaves(config: DecoderConfig, prefix: str) -> list[Leaf]:
    """Return the leaves of Mamba-2 in a layer.

    One projection of the checkpoint has gates, channels, groups and step sizes, and one convolution has channels and
    groups. Channels are split over devices, and groups are not.
    """
    mamba, width = config.mamba, config.hidden_size
    assert mamba is not None
    inner, num_groups, num_heads = mamba.width, mamba.group_width, mamba.num_heads
    name, num_outputs = f"{prefix}in_proj.weight", 2 * inner + num_groups + num_heads

    def pack_project(tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        for part in range(2):
            transpose(tensors[0][part * inner : (part + 1) * inner], out[:, part])

    def pack_control(tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        transpose(tensors[0][2 * inner :], out)

    tensors = ((name, (num_outputs, width)),)
    project, control = ("attention", "project", "kernel"), ("attention", "control", "kernel")
    heads: LogicalAxes = ("heads",)
    of_heads = [
        same(("attention", leaf), f"{prefix}{stored}", heads, (num_heads,))
        for leaf, stored in (("log_rate", "A_log"), ("step_bias", "dt_bias"), ("skip", "D"))
    ]
    return [
        Leaf(project, ("embed", None, "heads"), (width, 2, inner), tensors, pack_project, (1, None, None)),
        Leaf(control, ("embed", None), (width, num_groups + num_heads), tensors, pack_control, (1, None)),
        *_convolution(config, prefix, "channels", heads, slice(inner)),
        *_convolution(config, prefix, "groups", (None,), slice(inner, inner + num_groups)),
        *(dataclasses.replace(leaf, dtype=np.dtype(np.float32)) for leaf in of_heads),
        same(("attention", "scale"), f"{prefix}norm.weight", heads, (inner,)),
        transposed(("attention", "out", "kernel"), f"{prefix}out_proj.weight", ("heads", "embed"), (inner, width)),
    ]


def _convolution(config: DecoderConfig, prefix: str, path: str, axes: LogicalAxes, channels: slice) -> list[Leaf]:
    """Return taps, and the biases if there are any, of some channels of the checkpoint's convolution."""
    mamba, num_taps = config.mamba, config.conv_len
    assert mamba is not None
    num_all = mamba.width + mamba.group_width
    num_own = len(range(*channels.indices(num_all)))

    def pack(tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        out[...] = tensors[0][channels].reshape(out.shape)

    taps = ((f"{prefix}conv1d.weight", (num_all, 1, num_taps)),)
    bias = ((f"{prefix}conv1d.bias", (num_all,)),)
    leaves = [Leaf(("attention", path, "taps"), (*axes, None), (num_own, num_taps), taps, pack, (None, None))]
    if mamba.has_bias:
        leaves.append(Leaf(("attention", path, "bias"), axes, (num_own,), bias, pack, (None,)))
    return leaves


def _modules() -> Modules[DecoderConfig]:
    from jpaged.models.decoder.modules import DecoderEnds
    from jpaged.models.decoder.recurrent import MambaLayer

    return Modules(DecoderEnds, MambaLayer)


MLP, MOE = "mlp", "moe"
_OF_PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
"""Types of layers of Nemotron-H, by their letters in `hybrid_override_pattern`."""
_WITHOUT_EFFECT = (
    *("chunk_size", "mamba_chunk_size", "expand", "mamba_expand", "num_hidden_layers", "num_logits_to_keep"),
    *("use_mamba_kernels", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
    *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "hidden_dropout"),
    *("moe_shared_expert_overlap", "output_router_logits", "time_step_rank"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "hidden_act"),
)
"""Keys about kernels, initialization and drafts, and about rotary embedding, which no layer has."""
_OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group"),
    *("norm_topk_prob", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
)


def _read_nemotron(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore(_WITHOUT_EFFECT)
    fields.only("mamba_hidden_act", "silu", "swish", why="Mamba supports only the activation silu")
    fields.only("mamba_ssm_cache_dtype", "float32", why="matrices of states are float32")
    fields.only("residual_in_fp32", False, why="sums in float32 are not supported")
    for key in ("use_bias", "mamba_proj_bias"):
        fields.only(key, False, why="biases in the projections of Mamba are not supported")
    fields.only("sliding_window", None, why="windows are not supported next to Mamba")
    check_step_limits(fields)
    width = fields.integer("hidden_size", 4096, maximum=MAX_WIDTH)
    heads = read_heads(fields, width, num_kv_heads=8, head_dim=128)
    conv_len = fields.integer("conv_kernel", 4, minimum=2, maximum=_MAX_TAPS)
    num_mamba_heads = fields.integer("mamba_num_heads", 128, maximum=MAX_WIDTH)
    mamba = MambaShape(
        num_mamba_heads,
        fields.integer("mamba_head_dim", 64, maximum=MAX_WIDTH),
        fields.integer("n_groups", 8, maximum=num_mamba_heads),
        fields.integer("ssm_state_size", 128, maximum=MAX_WIDTH),
        fields.flag("use_conv_bias", True),
    )
    kinds = _join_layers(_read_pattern(fields), AttentionKind(heads["head_dim"] ** -0.5), mamba_states(mamba, conv_len))
    has_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 131072, maximum=MAX_VOCAB_SIZE),
        hidden_size=width,
        intermediate_size=fields.integer("intermediate_size", 21504, maximum=MAX_WIDTH),
        num_layers=len(kinds),
        **heads,
        max_position_embeddings=fields.integer("max_position_embeddings", 4096),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=(2,),
        bos_token_id=1,
        norm_eps=_read_eps(fields),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        activation=read_activation(fields, "mlp_hidden_act", "relu2"),
        is_gated=False,
        conv_len=conv_len,
        mamba=mamba,
        kinds=kinds,
        mixture=_read_experts(fields) if any(kind.is_sparse for kind in kinds) else None,
    )


def _read_eps(fields: JsonFields) -> float:
    """Return the number that norms add; files on the hub have it under several names."""
    found = {fields.number(key) for key in ("layer_norm_epsilon", "rms_norm_eps", "norm_eps") if fields.has(key)}
    if len(found) > 1:
        raise fields.bad("layer_norm_epsilon", f"is one of {sorted(found)}; rms_norm_eps and norm_eps must be equal")
    return found.pop() if found else 1e-5


def _read_experts(fields: JsonFields) -> Mixture:
    fields.only("moe_latent_size", None, why="experts of projected states are not supported")
    fields.only("mlp_hidden_act", "relu2", why="experts without gates support only the activation relu2")
    fields.only("mlp_bias", False, why="biases in experts are not supported")
    fields.integer("n_shared_experts", 1)
    num_experts = fields.integer("n_routed_experts", 8, maximum=MAX_EXPERTS)
    return Mixture(
        routing=Routing(
            num_experts,
            fields.integer("num_experts_per_tok", 2, maximum=num_experts),
            "sigmoid",
            normalises=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
            num_groups=fields.integer("n_group", 1),
            top_groups=fields.integer("topk_group", 1),
            num_best=2,
        ),
        width=read_width(fields, "moe_intermediate_size", 7688),
        gate=GateFunction("relu2"),
        choice_bias=True,
        shared_width=read_width(fields, "moe_shared_expert_intermediate_size", 7688),
    )


def _read_pattern(fields: JsonFields) -> Sequence[str]:
    """Return the types of the published layers.

    Raises:
        Unsupported: no layer has attention.
        InvalidArgument: an unknown letter.
    """
    key, names = "layers_block_type", (*_OF_PATTERN.values(), MAMBA, ATTENTION)
    listed = fields.value(key)
    types: Sequence[str] = fields.texts(key, *names, count=len(listed) if isinstance(listed, list) else 0)
    if not types and fields.has("hybrid_override_pattern"):
        key = "hybrid_override_pattern"
        pattern = fields.text(key)
        if not set(pattern) <= set(_OF_PATTERN):
            raise fields.bad(key, f"is {pattern!r}; it must have the letters {', '.join(_OF_PATTERN)}")
        types = [_OF_PATTERN[letter] for letter in pattern]
    fields.ignore(("hybrid_override_pattern",))
    types = [{MAMBA: LINEAR, ATTENTION: FULL}.get(name, name) for name in types]
    if MOE not in types:
        fields.ignore(_OF_EXPERTS)
    if FULL not in types:
        raise Unsupported(f"{fields.name}: no layer has attention; at least one is required")
    return types


def _join_layers(
    types: Sequence[str], attention: AttentionKind, states: tuple[StateArray, ...]
) -> tuple[LayerKind, ...]:
    """Return the kinds of layers, each with the feed-forward that follows it.

    Raises:
        Unsupported: a feed-forward does not follow attention or Mamba.
    """
    kinds: list[LayerKind] = []
    for name in types:
        if name not in (MLP, MOE):
            kinds.append(LayerKind(attention, None, states=states if name == LINEAR else (), has_feed_forward=False))
        elif kinds and not kinds[-1].has_feed_forward:
            kinds[-1] = dataclasses.replace(kinds[-1], has_feed_forward=True, is_sparse=name == MOE)
        else:
            raise Unsupported("layers_block_type: a feed-forward must follow attention or Mamba")
    return tuple(kinds)


def _nemotron_to_hf(config: DecoderConfig) -> dict[str, object]:
    mamba = config.mamba
    assert mamba is not None
    types = [
        name for kind in config.layer_kinds for name in (LINEAR if kind.states else FULL, *_feed_forward_types(kind))
    ]
    mixture = config.mixture
    experts: dict[str, object] = {}
    if mixture is not None:
        experts = {
            "n_routed_experts": mixture.routing.num_experts,
            "num_experts_per_tok": mixture.routing.top_k,
            "norm_topk_prob": mixture.routing.normalises,
            "routed_scaling_factor": mixture.routing.scale,
            "n_group": mixture.routing.num_groups,
            "topk_group": mixture.routing.top_groups,
            "moe_intermediate_size": mixture.width,
            "moe_shared_expert_intermediate_size": mixture.shared_width,
        }
    return experts | {
        "num_hidden_layers": len(types),
        "layers_block_type": types,
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "mlp_hidden_act": name_of_activation(config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "n_groups": mamba.num_groups,
        "ssm_state_size": mamba.state_dim,
        "conv_kernel": config.conv_len,
        "use_conv_bias": mamba.has_bias,
    }


def _feed_forward_types(kind: LayerKind) -> tuple[str, ...]:
    """Return the published layer after attention or Mamba, if there is one."""
    if not kind.has_feed_forward:
        return ()
    return (MOE,) if kind.is_sparse else (MLP,)


_OF_NEMOTRON = Names(embed="embeddings", norm="norm_f")


def _nemotron_leaves(config: DecoderConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    """Return the leaves of a layer, whose feed-forward has the next number in checkpoints."""
    before, index = prefix.removesuffix(".").rsplit(".", 1)
    number = sum(1 + one.has_feed_forward for one in config.layer_kinds[: int(index)])
    own, after = f"{number}.", f"{number + 1}."
    names = Names(
        attention_norm=f"{own}norm",
        qkv=tuple(f"{own}mixer.{part}_proj" for part in "qkv"),
        out=f"{own}mixer.o_proj",
        mlp_norm=f"{after}norm",
        gate_up=(f"{after}mixer.up_proj",),
        down=f"{after}mixer.down_proj",
        experts=ExpertNames(
            router=f"{after}mixer.gate",
            choice_bias=f"{after}mixer.gate.e_score_correction_bias",
            experts=f"{after}mixer.experts.",
            shared=f"{after}mixer.shared_experts.",
            shared_gate_up=("up_proj",),
        ),
    )
    attention = mamba_leaves(config, f"{before}.{own}mixer.") if kind.states else None
    return layer_leaves(config, f"{before}.", kind, names, attention=attention)


def _nemotron_prefix(stored: Iterable[str]) -> str:
    """Return the prefix of published checkpoints, or that of transformers since version 5."""
    return "backbone." if any(name.startswith("backbone.") for name in stored) else model_prefix(stored)


_POSITIONS = 131072
"""Longest sequence of a model without attention: it has no positions, so only block tables limit it."""
_UNREAD_DIM = 64
"""Head dimension of the KV pool's only layer, which no layer of such a model reads."""


def _read_pure(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore((*_WITHOUT_EFFECT[:5], *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank")))
    # Sums are in the model's type. transformers reads neither norm_before_gate nor intermediate_size.
    fields.ignore(("rescale_prenorm_residual", "residual_in_fp32", "norm_before_gate", "intermediate_size"))
    fields.only("rms_norm", True, why="outputs of Mamba are always normalized")
    fields.only("hidden_act", "silu", "swish", why="Mamba supports only the activation silu")
    fields.only("use_bias", False, why="biases in the projections of Mamba are not supported")
    check_step_limits(fields)
    width = fields.integer("hidden_size", 4096, maximum=MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", 64, maximum=MAX_LAYERS)
    conv_len = fields.integer("conv_kernel", 4, minimum=2, maximum=_MAX_TAPS)
    num_heads = fields.integer("num_heads", 128, maximum=MAX_WIDTH)
    mamba = MambaShape(
        num_heads,
        fields.integer("head_dim", 64, maximum=MAX_WIDTH),
        fields.integer("n_groups", 8, maximum=num_heads),
        fields.integer("state_size", 128, maximum=MAX_WIDTH),
        fields.flag("use_conv_bias", True),
    )
    kind = LayerKind(AttentionKind(1.0), None, states=mamba_states(mamba, conv_len), has_feed_forward=False)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 32768, maximum=MAX_VOCAB_SIZE),
        hidden_size=width,
        intermediate_size=mamba.width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=_UNREAD_DIM,
        max_position_embeddings=fields.integer("max_position_embeddings", _POSITIONS),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=(2,),
        bos_token_id=0,
        norm_eps=_read_eps(fields),
        conv_len=conv_len,
        mamba=mamba,
        kinds=(kind,) * num_layers,
    )


def _pure_to_hf(config: DecoderConfig) -> dict[str, object]:
    mamba = config.mamba
    assert mamba is not None
    return {
        "num_heads": mamba.num_heads,
        "head_dim": mamba.head_dim,
        "n_groups": mamba.num_groups,
        "state_size": mamba.state_dim,
        "expand": mamba.width // config.hidden_size,
        "conv_kernel": config.conv_len,
        "use_conv_bias": mamba.has_bias,
        "layer_norm_epsilon": config.norm_eps,
    }


def _pure_leaves(config: DecoderConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    return layer_leaves(config, prefix, kind, _OF_PURE, attention=mamba_leaves(config, f"{prefix}mixer."))


def _pure_prefix(stored: Iterable[str]) -> str:
    return "backbone."


_OF_PURE = dataclasses.replace(_OF_NEMOTRON, attention_norm="norm")
_PURE = decoder_family("mamba2", _read_pure, _pure_to_hf, _OF_PURE, name_prefix=_pure_prefix)
_NEMOTRON = decoder_family(
    "nemotron_h", _read_nemotron, _nemotron_to_hf, _OF_NEMOTRON, name_prefix=_nemotron_prefix, ignored=("mtp.",)
)
ARCHITECTURES = {
    "GraniteMoeHybridForCausalLM": dataclasses.replace(
        decoder_family("granitemoehybrid", _read, _to_hf, _NAMES), layer_leaves=_layer_leaves, modules=_modules
    ),
    "Mamba2ForCausalLM": dataclasses.replace(_PURE, layer_leaves=_pure_leaves, modules=_modules),
    "NemotronHForCausalLM": dataclasses.replace(_NEMOTRON, layer_leaves=_nemotron_leaves, modules=_modules),
}
