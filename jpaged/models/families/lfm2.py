"""LFM2 (Liquid AI 2025): most layers are short convolutions between two gates, and the others have attention.

All but the first layers of LFM2-MoE have experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.config import MAX_LAYERS, MAX_WIDTH, Mixture
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import FULL, TRAINING, divided_heads, read_choice, read_width
from jpaged.models.decoder.leaves import ExpertNames, layer_leaves
from jpaged.models.family import Family, Modules
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind, StateArray
from jpaged.models.param_specs import Leaf, Linears, stacked_kernel, transposed
from jpaged.models.rope_config import RopeConfig

CONV = "conv"
_TRAINING = (
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
    *("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads", "theta"),
)
"""Keys about initialization, and old names of keys that follow."""
_MAX_TAPS = 64


def _read_dense(fields: JsonFields, architecture: str) -> DecoderConfig:
    return _read(fields, architecture, _read_inner(fields))


def _read(fields: JsonFields, architecture: str, inner: int) -> DecoderConfig:
    """Read the config, without experts; `inner` is the width of the feed-forward."""
    fields.ignore(_TRAINING)
    fields.only("conv_bias", False, why="biases in convolutions are not supported")
    fields.only("block_use_swiglu", True, why="lfm2 always has a gate")
    fields.only("use_pos_enc", True, why="lfm2 always rotates queries and keys")
    width = fields.integer("hidden_size", 2560, maximum=MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", 32, maximum=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", 32, maximum=MAX_WIDTH)
    head_dim = divided_heads(fields, width, num_heads)
    max_position_embeddings = fields.integer("max_position_embeddings", 128_000)
    conv_len = fields.integer("conv_L_cache", 3, minimum=2, maximum=_MAX_TAPS)
    attention = AttentionKind(head_dim**-0.5)
    conv = LayerKind(attention, None, states=(StateArray((width * (conv_len - 1),)),))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 65536),
        hidden_size=width,
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 8, maximum=MAX_WIDTH),
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
        eos_token_ids=(2,),
        bos_token_id=1,
        norm_eps=fields.number("norm_eps", 1e-5),
        ropes=(RopeConfig.from_hf(fields, max_position_embeddings, default_theta=1e6),),
        qk_norm="head",
        conv_len=conv_len,
        kinds=tuple(conv if name == CONV else LayerKind(attention) for name in _read_types(fields, num_layers)),
    )


def _read_sparse(fields: JsonFields, architecture: str) -> DecoderConfig:
    """Read the config of LFM2-MoE, whose first layers have no experts."""
    fields.ignore(TRAINING)
    config = _read(fields, architecture, fields.integer("intermediate_size", 7168, maximum=MAX_WIDTH))
    num_dense = fields.integer("num_dense_layers", 2, minimum=0, maximum=config.num_layers - 1)
    num_experts, top_k = read_choice(fields, (32, 4), ("num_experts",))
    mixture = Mixture(
        routing=Routing(
            num_experts,
            top_k,
            "sigmoid",
            normalises=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        width=read_width(fields, "moe_intermediate_size", 1792),
        choice_bias=fields.flag("use_expert_bias", True),
    )
    kinds = (dataclasses.replace(kind, is_sparse=i >= num_dense) for i, kind in enumerate(config.layer_kinds))
    return dataclasses.replace(config, kinds=tuple(kinds), mixture=mixture)


def _read_inner(fields: JsonFields) -> int:
    """Return the width of the feed-forward: two thirds of the config's, times a factor, rounded up to a multiple."""
    inner = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288), maximum=MAX_WIDTH)
    factor = (
        None
        if fields.value("block_ffn_dim_multiplier", 1.0) is None
        else fields.number("block_ffn_dim_multiplier", 1.0)
    )
    multiple = fields.integer("block_multiple_of", 256, maximum=MAX_WIDTH)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    return inner if factor is None else multiple * -(-int(factor * inner) // multiple)


def _read_types(fields: JsonFields, num_layers: int) -> Sequence[str]:
    """Return the type of each layer, by name or by the indices of those with attention.

    Raises:
        Unsupported: no layer has attention.
    """
    indices = fields.value("full_attn_idxs")
    types: Sequence[str] = fields.texts("layer_types", FULL, CONV, count=num_layers)
    if not types:
        chosen = range(num_layers) if not isinstance(indices, list) else indices
        types = [FULL if index in chosen else CONV for index in range(num_layers)]
    if FULL not in types:
        raise Unsupported(f"{fields.name}: no layer has attention; at least one is required")
    return types


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    mixture = config.mixture
    own: dict[str, object] = {"block_auto_adjust_ff_dim": False}
    if mixture is not None:
        own = {
            "num_dense_layers": [kind.is_sparse for kind in config.layer_kinds].index(True),
            "num_experts": mixture.routing.num_experts,
            "num_experts_per_tok": mixture.routing.top_k,
            "norm_topk_prob": mixture.routing.normalises,
            "routed_scaling_factor": mixture.routing.scale,
            "moe_intermediate_size": mixture.width,
            "use_expert_bias": mixture.choice_bias,
        }
    return own | {
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "norm_eps": config.norm_eps,
        "conv_L_cache": config.conv_len,
        "rope_parameters": config.ropes[0].to_hf(),
        "layer_types": [CONV if kind.states else FULL for kind in config.layer_kinds],
    }


_EXPERTS = ExpertNames(
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    experts="feed_forward.experts.",
    gate="w1",
    up="w3",
    down="w2",
)
_NAMES = Names(
    norm="embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    out="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    experts=_EXPERTS,
)


def _layer_leaves(config: DecoderConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    if not kind.states:
        return layer_leaves(config, prefix, kind, _NAMES)
    width, linears = config.hidden_size, Linears((f"{prefix}conv.in_proj",))
    conv = [
        stacked_kernel(("attention", "project", "kernel"), linears, ("embed", None, "heads"), (width, 3, width)),
        taps(f"{prefix}conv.conv.weight", width, config.conv_len),
        transposed(("attention", "out", "kernel"), f"{prefix}conv.out_proj.weight", ("heads", "embed"), (width, width)),
    ]
    return layer_leaves(config, prefix, kind, _NAMES, attention=conv)


def taps(name: str, width: int, num_taps: int) -> Leaf:
    """Return the weights of a depthwise convolution, `[E, K]`, from `[E, 1, K]`."""

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0].reshape(leaf.shape)

    tensors = ((name, (width, 1, num_taps)),)
    return Leaf(("attention", "taps"), ("heads", None), (width, num_taps), tensors, pack, (0, None))


def _modules() -> Modules[DecoderConfig]:
    from jpaged.models.decoder.modules import DecoderEnds
    from jpaged.models.decoder.recurrent import ConvolutionLayer

    return Modules(DecoderEnds, ConvolutionLayer)


def _family(model_type: str, read: Callable[[JsonFields, str], DecoderConfig]) -> Family[DecoderConfig]:
    family = decoder_family(model_type, read, _to_hf, _NAMES)
    return dataclasses.replace(family, layer_leaves=_layer_leaves, modules=_modules)


ARCHITECTURES = {
    "Lfm2ForCausalLM": _family("lfm2", _read_dense),
    "Lfm2MoeForCausalLM": _family("lfm2_moe", _read_sparse),
}
