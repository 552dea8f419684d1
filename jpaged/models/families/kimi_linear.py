"""Kimi-Linear (Kimi Team 2025, arXiv 2510.26692): Kimi Delta Attention in three of four layers, latents in the others.

No layer rotates queries and keys. The experts are chosen as in DeepSeek-V3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.config import MAX_LAYERS, MAX_WIDTH, Mixture
from jpaged.models.decoder import DecoderConfig, Names
from jpaged.models.decoder.config import DeltaShape
from jpaged.models.decoder.config_fields import FULL, MAX_EXPERTS, TRAINING, read_sizes, read_width
from jpaged.models.decoder.leaves import ExpertNames, layer_leaves, outer_leaves
from jpaged.models.families.deepseek.config import DeepseekConfig, attention_leaves
from jpaged.models.families.qwen_next import LINEAR, MAX_TAPS, grouped_columns, grouped_taps
from jpaged.models.family import Family, Modules
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind, StateArray
from jpaged.models.param_specs import LM_HEAD, Leaf, Linears, same, stacked_kernel, transposed

_NO_EFFECT = ("head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters", *TRAINING)
"""Keys without effect: heads have other sizes, and nothing is rotated."""
_LATER_LAYERS = ("num_nextn_predict_layers",)
_DELTA = "linear_attn_config"
_GROUPS, _LENGTH = ("num_expert_group", "n_group"), ("model_max_length", "max_position_embeddings")


def _read(fields: JsonFields, architecture: str) -> DeepseekConfig:
    fields.ignore((*_NO_EFFECT, *_LATER_LAYERS))
    sizes = read_sizes(fields)
    num_heads, num_layers = fields.integer("num_attention_heads", maximum=MAX_WIDTH), sizes["num_layers"]
    _refuse(fields, num_heads)
    latent_dim, rope_dim = read_width(fields, "kv_lora_rank", 512), read_width(fields, "qk_rope_head_dim", 64)
    nope_dim = read_width(fields, "qk_nope_head_dim", 128)
    has_rank = fields.value("q_lora_rank") is not None
    delta, conv_len, is_linear = _read_delta(fields, num_layers)
    (num_channels,), matrices = delta.states
    states = StateArray((num_channels * (conv_len - 1),)), StateArray(matrices, "float32")
    attention = AttentionKind((nope_dim + rope_dim) ** -0.5)
    is_sparse = _read_sparse_layers(fields, num_layers)
    mixture = _read_mixture(fields)
    return DeepseekConfig(
        architecture=architecture,
        **sizes,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=latent_dim + rope_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        max_position_embeddings=_integer(fields, _LENGTH, 1048576),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=(163586,),
        bos_token_id=163584,
        kinds=tuple(
            LayerKind(attention, None, is_sparse=has_experts, states=states if has_states else ())
            for has_experts, has_states in zip(is_sparse, is_linear, strict=True)
        ),
        mixture=mixture if any(is_sparse) else None,
        query_rank=read_width(fields, "q_lora_rank") if has_rank else None,
        latent_dim=latent_dim,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_head_dim=read_width(fields, "v_head_dim", 128),
        conv_len=conv_len,
        delta=delta,
    )


def _refuse(fields: JsonFields, num_heads: int) -> None:
    """Refuse settings that are not supported."""
    fields.only("hidden_act", "silu", "swish", why="experts support only the activation silu")
    fields.only("num_key_value_heads", num_heads, why="all query heads share the same latents")
    fields.only("attention_bias", False, why="biases in attention are not supported")
    fields.only("mla_use_nope", True, why="rotary embedding is not supported next to delta attention")
    fields.only("mla_use_output_gate", False, why="gates of latent attention are not supported")
    fields.only("moe_layer_freq", 1, why="every layer after the dense ones has experts")
    fields.only("moe_router_activation_func", "sigmoid", why="experts are scored by a sigmoid")
    fields.only("topk_method", "noaux_tc", why="experts are chosen with a bias")


def _integer(
    fields: JsonFields, names: Sequence[str], default: int, *, minimum: int = 1, maximum: int = 2**31 - 1
) -> int:
    """Read a number that has two names: that of published files, and that of transformers.

    Raises:
        InvalidArgument: both are present, and they differ.
    """
    found = {name: fields.integer(name, minimum=minimum, maximum=maximum) for name in names if fields.has(name)}
    if len(set(found.values())) > 1:
        raise fields.bad(names[1], f"is {found[names[1]]}, but {names[0]} is {found[names[0]]}")
    return next(iter(found.values()), default)


def _read_delta(fields: JsonFields, num_layers: int) -> tuple[DeltaShape, int, list[bool]]:
    """Return the heads of delta attention, the taps of convolutions, and True for each layer that has it.

    Raises:
        InvalidArgument: the lists of layers do not name each layer once.
        Unsupported: no layer has attention.
    """
    section = JsonFields(fields.mapping(_DELTA), f"{fields.name} {_DELTA}")
    section.only("use_full_rank_gate", False, why="gates have two factors of low rank")
    num_heads, head_dim, num_taps = (
        section.integer(key, fields.integer(other, default, maximum=MAX_WIDTH), maximum=MAX_WIDTH)
        for key, other, default in (
            ("num_heads", "linear_num_heads", 32),
            ("head_dim", "linear_head_dim", 128),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        )
    )
    if not 2 <= num_taps <= MAX_TAPS:
        raise section.bad("short_conv_kernel_size", f"is {num_taps}; it must be from 2 to {MAX_TAPS}")
    listed = [section.value(key) for key in ("kda_layers", "full_attn_layers")]
    section.finish()
    types: Sequence[str] = fields.texts("layer_types", FULL, LINEAR, count=num_layers)
    if not types and listed != [None, None]:
        linear, full = (found if isinstance(found, list) else [] for found in listed)
        if sorted(map(str, (*linear, *full))) != sorted(map(str, range(1, num_layers + 1))):
            raise section.bad("kda_layers", f"and full_attn_layers must name each of {num_layers} layers once, from 1")
        types = [LINEAR if index + 1 in linear else FULL for index in range(num_layers)]
    types = types or [FULL if index and index % 4 == 0 else LINEAR for index in range(num_layers)]
    if FULL not in types:
        raise Unsupported(f"{fields.name}: no layer has attention; at least one is required")
    return DeltaShape(num_heads, num_heads, head_dim, head_dim), num_taps, [name == LINEAR for name in types]


def _read_sparse_layers(fields: JsonFields, num_layers: int) -> list[bool]:
    """Return True for each layer with experts."""
    num_dense = fields.integer("first_k_dense_replace", 1, minimum=0, maximum=MAX_LAYERS)
    types = fields.texts("mlp_layer_types", "dense", "sparse", count=num_layers)
    return [name == "sparse" for name in types] or [index >= num_dense for index in range(num_layers)]


def _read_mixture(fields: JsonFields) -> Mixture:
    num_experts = _integer(fields, ("num_experts", "num_local_experts"), 256, maximum=MAX_EXPERTS)
    width = read_width(fields, "moe_intermediate_size", 1024)
    num_shared = _integer(fields, ("num_shared_experts", "n_shared_experts"), 1, minimum=0)
    num_groups = _integer(fields, _GROUPS, 1)
    if num_groups > 1:
        fields.only("use_grouped_topk", True, why=f"experts are chosen from {num_groups} groups")
    fields.ignore(("use_grouped_topk",))
    return Mixture(
        routing=Routing(
            num_experts,
            _integer(fields, ("num_experts_per_token", "num_experts_per_tok"), 8, maximum=num_experts),
            "sigmoid",
            normalises=fields.flag("moe_renormalize", fields.flag("norm_topk_prob", True)),
            scale=fields.number("routed_scaling_factor", 2.446),
            num_groups=num_groups,
            top_groups=fields.integer("topk_group", 1),
            num_best=2,
        ),
        width=width,
        choice_bias=True,
        shared_width=num_shared * width,
    )


def _to_hf(config: DeepseekConfig) -> dict[str, object]:
    delta, mixture, kinds = config.delta, config.mixture, config.layer_kinds
    assert delta is not None
    own: dict[str, object] = {}
    if mixture is not None:
        routing = mixture.routing
        own = {
            "moe_intermediate_size": mixture.width,
            "num_shared_experts": mixture.shared_width // mixture.width,
            "num_experts": routing.num_experts,
            "num_experts_per_token": routing.top_k,
            "moe_renormalize": routing.normalises,
            "routed_scaling_factor": routing.scale,
            "num_expert_group": routing.num_groups,
            "topk_group": routing.top_groups,
        }
    return own | {
        "pad_token_id": None,  # otherwise transformers' default exceeds a small vocabulary
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "q_lora_rank": config.query_rank,
        "kv_lora_rank": config.latent_dim,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.v_head_dim,
        "linear_num_heads": delta.num_key_heads,
        "linear_head_dim": delta.key_dim,
        "linear_conv_kernel_dim": config.conv_len,
        "layer_types": [LINEAR if kind.states else FULL for kind in kinds],
        "mlp_layer_types": ["sparse" if kind.is_sparse else "dense" for kind in kinds],
    }


_DENSE, _MIXTURE = ".mlp.", "block_sparse_moe."
"""Parts of the names of tensors; transformers saves those of dense layers with the second one, too."""
_NAMES = Names(
    experts=ExpertNames(
        router=f"{_MIXTURE}gate",
        choice_bias=f"{_MIXTURE}gate.e_score_correction_bias",
        experts=f"{_MIXTURE}experts.",
        gate="w1",
        up="w3",
        down="w2",
        shared=f"{_MIXTURE}shared_experts.",
    )
)


def _layer_leaves(config: DeepseekConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    make = _delta_leaves if kind.states else attention_leaves
    return layer_leaves(config, prefix, kind, _NAMES, attention=make(config, f"{prefix}self_attn."))


def _delta_leaves(config: DecoderConfig, prefix: str) -> list[Leaf]:
    delta, width = config.delta, config.hidden_size
    assert delta is not None
    num_heads, rank = delta.num_key_heads, delta.key_dim
    outputs = num_heads * rank
    downs = Linears((f"{prefix}f_a_proj", f"{prefix}g_a_proj"))
    rates, biases = ("attention", "log_rate"), ("attention", "step_bias")
    leaves = [
        Leaf(rates, ("heads",), (num_heads,), ((f"{prefix}A_log", (1, 1, num_heads, 1)),), _flatten, (2,)),
        same(biases, f"{prefix}dt_bias", ("heads",), (outputs,)),
    ]
    return [
        grouped_columns(config, "project", {f"{prefix}{part}_proj.weight": (outputs,) for part in "qkv"}),
        transposed(
            ("attention", "control", "kernel"), f"{prefix}b_proj.weight", ("embed", "heads"), (width, num_heads)
        ),
        stacked_kernel(("attention", "down", "kernel"), downs, ("embed", None, None), (width, 2, rank)),
        transposed(("attention", "decay", "kernel"), f"{prefix}f_b_proj.weight", (None, "heads"), (rank, outputs)),
        transposed(("attention", "gate", "kernel"), f"{prefix}g_b_proj.weight", (None, "heads"), (rank, outputs)),
        grouped_taps([f"{prefix}{part}_conv1d.weight" for part in "qkv"], delta, config.conv_len),
        *(dataclasses.replace(leaf, dtype=np.dtype(np.float32)) for leaf in leaves),
        same(("attention", "norm", "scale"), f"{prefix}o_norm.weight", (None,), (delta.value_dim,)),
        transposed(("attention", "out", "kernel"), f"{prefix}o_proj.weight", ("heads", "embed"), (outputs, width)),
    ]


def _flatten(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
    leaf[...] = tensors[0].reshape(-1)


def _modules() -> Modules[DeepseekConfig]:
    from jpaged.models.decoder.modules import DecoderEnds
    from jpaged.models.families.deepseek.modules import LatentDeltaLayer

    return Modules(DecoderEnds, LatentDeltaLayer)


ARCHITECTURES = {
    "KimiLinearForCausalLM": Family(
        "kimi_linear",
        _read,
        _to_hf,
        _modules,
        lambda config, prefix: outer_leaves(config, prefix, _NAMES, LM_HEAD),
        _layer_leaves,
        other_names=((_DENSE, f".{_MIXTURE}"),),
        ignores_later_layers=True,
    )
}
