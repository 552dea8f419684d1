"""Gemma 1 and 2, and the language models of Gemma 3 and 4, which have a large embedding scale.

Gemma 2 (Gemma team 2024) has norms before and after each part, caps scores and logits, and has a window in every second
layer; Gemma 3 (2025) normalizes queries and keys instead, has
five layers with a window per layer without one, and separate ropes for the two kinds. In Gemma 4 (2026) these kinds
have heads of different sizes, and late layers attend to the keys of earlier ones (`decoder/shared_kv.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import GateFunction, Routing
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, Activation, Mixture
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import (
    FULL,
    MAX_EXPERTS,
    SLIDING,
    name_of_activation,
    read_activation,
    read_heads,
    read_sizes,
    read_width,
)
from jpaged.models.decoder.leaves import ExpertNames, feed_forward, layer_leaves, outer_leaves
from jpaged.models.family import Modules
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import HeadSizes, LayerKind
from jpaged.models.param_specs import LM_HEAD, Leaf, Linears, same, stacked_kernel, transposed, whole
from jpaged.models.rope_config import RopeConfig

_LENGTHS = {1: 8192, 2: 8192, 3: 131072, 4: 131072}
_KV_HEADS = {1: 16, 2: 4, 3: 4}
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
_PERIODS = {2: 2, 3: 6}
"""Period of layers; the last layer of each has full attention."""


def _read(fields: JsonFields, architecture: str, version: int) -> DecoderConfig:
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=_KV_HEADS[version], head_dim=256)
    max_position_embeddings = fields.integer("max_position_embeddings", _LENGTHS[version])
    fields.only("attention_bias", False, why="this family has no published checkpoint with projection biases")
    if version < 3:
        fields.only("use_bidirectional_attention", False, why="only Gemma 3 has encoders")
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        **heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=(1,),
        bos_token_id=2,
        activation=_activation(fields, version),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        post_norms=version > 1,
        qk_norm="head" if version == 3 else "none",
        embed_scale=sizes["hidden_size"] ** 0.5,
        scales_given_embeds=version < 3,
        logit_cap=_cap(fields, "final_logit_softcapping", 30.0 if version == 2 else None),
        ropes=_ropes(fields, max_position_embeddings, version),
        kinds=_kinds(fields, sizes["num_layers"], version) if version > 1 else (),
    )


def _read_fourth(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.only("attention_bias", False, why="this family has no published checkpoint with projection biases")
    fields.only("use_bidirectional_attention", None, "vision", why="only causal attention between texts is supported")
    mixture = _read_mixture(fields) if fields.flag("enable_moe_block", False) else None
    fields.ignore(("num_experts", "top_k_experts", "moe_intermediate_size"))
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=4, head_dim=256)
    max_position_embeddings = fields.integer("max_position_embeddings", _LENGTHS[4])
    layer_inputs = fields.integer("hidden_size_per_layer_input", 256, minimum=0, maximum=MAX_WIDTH)
    if layer_inputs:
        size = sizes["vocab_size"]
        missing = 262144 if size == 262144 else None
        if fields.integer("vocab_size_per_layer_input", missing) != size:
            raise fields.bad("vocab_size_per_layer_input", f"must be vocab_size, {size}")
    else:
        fields.ignore(("vocab_size_per_layer_input",))
    types = fields.texts("layer_types", FULL, SLIDING, count=sizes["num_layers"])
    types = types or tuple(SLIDING if (index + 1) % _PERIODS[3] else FULL for index in range(sizes["num_layers"]))
    types = (*types[:-1], FULL)  # as in transformers, whatever the last one is
    values_are_keys = fields.flag("attention_k_eq_v", False)
    own = HeadSizes(heads["num_kv_heads"], heads["head_dim"])
    of_type = {SLIDING: own, FULL: _global_heads(fields, types, own, values_are_keys=values_are_keys)}
    if SLIDING not in types:
        of_type[SLIDING] = of_type[FULL]
    num_kv_heads = min(size.num_kv_heads for size in of_type.values())
    head_dim = max(size.head_dim for size in of_type.values())
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        num_heads=heads["num_heads"],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=(1,),
        bos_token_id=2,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        post_norms=True,
        qk_norm="head",
        value_norm=True,
        values_are_keys=values_are_keys,
        layer_inputs=layer_inputs,
        layer_scales=True,
        mixture=mixture,
        embed_scale=sizes["hidden_size"] ** 0.5,
        logit_cap=_cap(fields, "final_logit_softcapping", None),
        ropes=_ropes(fields, max_position_embeddings, 4),
        kinds=tuple(
            dataclasses.replace(kind, is_sparse=mixture is not None)
            for kind in _sharing_kinds(
                fields, types, of_type, HeadSizes(num_kv_heads, head_dim), sizes["intermediate_size"]
            )
        ),
    )


def _read_nested(fields: JsonFields, architecture: str) -> DecoderConfig:
    """Read the config of Gemma 3n, named after its nested smaller models."""
    fields.ignore(("altup_coef_clip",))  # in training only
    fields.only("attention_bias", False, why="this family has no published checkpoint with projection biases")
    fields.only("altup_active_idx", 0, why="layers compute the first hidden state")
    fields.only("altup_correct_scale", True, why="the computed state is always scaled")
    width = fields.integer("hidden_size", 2048, maximum=MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", 35, maximum=MAX_LAYERS)
    vocab_size = fields.integer("vocab_size", 262400, maximum=MAX_VOCAB_SIZE)
    heads = read_heads(fields, width, num_kv_heads=2, head_dim=256)
    max_position_embeddings = fields.integer("max_position_embeddings", 32768)
    layer_vocab_size = fields.integer("vocab_size_per_layer_input", 262144, maximum=vocab_size)
    widths = _read_per_layer(fields, "intermediate_size", num_layers, 16384)
    if any(one != int(one) or not 1 <= one <= MAX_WIDTH for one in widths):
        raise fields.bad("intermediate_size", f"is {widths}; widths must be integers from 1 to {MAX_WIDTH}")
    num_sparse = 10 if num_layers > 10 else 0
    missing = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    sparsity = _read_per_layer(fields, "activation_sparsity_pattern", num_layers, missing)
    if any(not 0 <= one < 1 for one in sparsity):
        raise fields.bad("activation_sparsity_pattern", f"is {sparsity}; shares must be at least 0 and below 1")
    types = fields.texts("layer_types", FULL, SLIDING, count=num_layers)
    types = types or tuple(FULL if (index + 1) % 5 == 0 else SLIDING for index in range(num_layers))
    pool, inner = HeadSizes(heads["num_kv_heads"], heads["head_dim"]), int(max(widths))
    kinds = _sharing_kinds(fields, types, dict.fromkeys((FULL, SLIDING), pool), pool, inner, num_shared=15)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=inner,
        num_layers=num_layers,
        **heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        eos_token_ids=(1,),
        bos_token_id=2,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        post_norms=True,
        qk_norm="head",
        value_norm=True,
        layer_inputs=fields.integer("hidden_size_per_layer_input", 256, maximum=MAX_WIDTH),
        layer_vocab_size=layer_vocab_size,
        num_states=fields.integer("altup_num_inputs", 4, minimum=2, maximum=64),
        laurel_rank=fields.integer("laurel_rank", 64, maximum=MAX_WIDTH),
        embed_scale=width**0.5,
        logit_cap=_cap(fields, "final_logit_softcapping", 30.0),
        ropes=_ropes(fields, max_position_embeddings, 3),
        kinds=tuple(
            dataclasses.replace(kind, inner=None if one == inner else int(one), sparsity=share)
            for kind, one, share in zip(kinds, widths, sparsity, strict=True)
        ),
    )


def _read_per_layer(fields: JsonFields, key: str, num_layers: int, missing: object) -> Sequence[float]:
    """Read a number of each layer, or one for all of them.

    Raises:
        InvalidArgument: another number of them, or something else.
    """
    value = fields.value(key, missing)
    given, found = value if isinstance(value, list) else [value] * num_layers, []
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int | float):
            raise fields.bad(key, f"is {value!r}; it must have numbers")
        found.append(one)
    if len(found) != num_layers:
        raise fields.bad(key, f"has {len(found)} numbers; there are {num_layers} layers")
    return found


def _nested_to_hf(config: DecoderConfig) -> dict[str, object]:
    kinds, inner = config.layer_kinds, config.intermediate_size
    windows = [kind.attention.sliding_window for kind in kinds]
    return {
        "intermediate_size": [kind.inner or inner for kind in kinds],
        "activation_sparsity_pattern": [kind.sparsity for kind in kinds],
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_kv_shared_layers": sum(kind.kv_source is not None for kind in kinds),
        "hidden_size_per_layer_input": config.layer_inputs,
        "vocab_size_per_layer_input": config.layer_vocab_size,
        "altup_num_inputs": config.num_states,
        "laurel_rank": config.laurel_rank,
        "hidden_activation": name_of_activation(config.activation),
        "rms_norm_eps": config.norm_eps,
        "final_logit_softcapping": config.logit_cap,
        "layer_types": [SLIDING if kind.rope else FULL for kind in kinds],
        "rope_parameters": {name: rope.to_hf() for name, rope in zip((FULL, SLIDING), config.ropes, strict=True)},
        "sliding_window": next((window for window in windows if window is not None), None),
    }


def _read_mixture(fields: JsonFields) -> Mixture:
    if read_activation(fields, "hidden_activation", "gelu_pytorch_tanh") != "gelu_tanh":
        raise Unsupported(f"{fields.name}: with experts, hidden_activation must be gelu_pytorch_tanh")
    num_experts = fields.integer("num_experts", maximum=MAX_EXPERTS)
    return Mixture(
        routing=Routing(num_experts, fields.integer("top_k_experts", maximum=num_experts), normalises=True),
        width=read_width(fields, "moe_intermediate_size", None),
        gate=GateFunction("gelu_tanh"),
        is_beside=True,
    )


def _global_heads(fields: JsonFields, types: Sequence[str], own: HeadSizes, *, values_are_keys: bool) -> HeadSizes:
    """Read the key/value heads of layers without a window, in the layout of either the hub or transformers.

    Raises:
        Unsupported: layers of one type have different heads.
        InvalidArgument: a number of heads that does not divide, or is not divided by, that of the other layers.
    """
    sections = fields.mapping("per_layer_config")
    if sections:
        full = {str(index) for index, name in enumerate(types) if name == FULL}
        given = [sections[key] for key in sorted(sections)]
        if set(sections) != full or any(section != given[0] for section in given):
            raise Unsupported(
                f"{fields.name}: per_layer_config must be the same for all layers of {FULL}, and only those"
            )
        section = JsonFields(fields.mapping("per_layer_config"), f"{fields.name} per_layer_config")
        section = JsonFields(section.mapping(min(full, key=int)), section.name)
        sizes = HeadSizes(
            section.integer("num_key_value_heads", own.num_kv_heads, maximum=MAX_WIDTH),
            section.integer("head_dim", own.head_dim, maximum=MAX_WIDTH),
        )
        section.finish()
        fields.ignore(("global_head_dim", "num_global_key_value_heads"))
    else:
        num_kv_heads = own.num_kv_heads
        if values_are_keys and fields.value("num_global_key_value_heads") is not None:
            num_kv_heads = fields.integer("num_global_key_value_heads", maximum=MAX_WIDTH)
        fields.ignore(("num_global_key_value_heads",))
        sizes = HeadSizes(num_kv_heads, fields.integer("global_head_dim", 512, maximum=MAX_WIDTH))
    fewer, more = sorted((own.num_kv_heads, sizes.num_kv_heads))
    if more % fewer:
        raise fields.bad("num_global_key_value_heads", f"is {sizes.num_kv_heads}; {fewer} must divide {more}")
    return sizes


def _sharing_kinds(
    fields: JsonFields,
    types: Sequence[str],
    of_type: Mapping[str, HeadSizes],
    pool: HeadSizes,
    inner: int,
    num_shared: int = 0,
) -> tuple[LayerKind, ...]:
    """Return the kinds of layers; the last ones compute no keys.

    Raises:
        InvalidArgument: no earlier layer of a type has keys.
    """
    num_own = len(types) - fields.integer("num_kv_shared_layers", num_shared, minimum=0, maximum=len(types) - 1)
    wide = 2 * inner if fields.flag("use_double_wide_mlp", False) else None
    window, kinds = None if fields.value("sliding_window", 512) is None else fields.integer("sliding_window", 512), {}
    for name, sizes in of_type.items():
        places = sizes.num_kv_heads // pool.num_kv_heads
        heads = None if sizes == pool else dataclasses.replace(sizes, num_places=places)
        attention = AttentionKind(1.0, window if name == SLIDING else None)
        kinds[name] = LayerKind(attention, int(name == SLIDING), heads=heads)
    found = [kinds[name] for name in types[:num_own]]
    for name in types[num_own:]:
        if name not in types[:num_own]:
            raise fields.bad("num_kv_shared_layers", f"is {len(types) - num_own}; no layer before has {name}")
        source = num_own - 1 - types[:num_own][::-1].index(name)
        found.append(dataclasses.replace(kinds[name], kv_source=source, inner=wide))
    return tuple(found)


def _activation(fields: JsonFields, version: int) -> Activation:
    if version == 1:
        # transformers reads only `hidden_act`, and gelu in old files means its approximation.
        fields.ignore(("hidden_activation",))
        activation = read_activation(fields, "hidden_act", "gelu_pytorch_tanh")
        return "gelu_tanh" if activation == "gelu" else activation
    fields.ignore(("hidden_act",))  # in old checkpoints of Gemma 2; transformers does not read it
    return read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")


def _cap(fields: JsonFields, key: str, missing: float | None) -> float | None:
    """Read a soft cap; null means none."""
    return None if fields.value(key, missing) is None else fields.number(key, missing)


def _kinds(fields: JsonFields, num_layers: int, version: int) -> tuple[LayerKind, ...]:
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    if version == 3:
        fields.only("attn_logit_softcapping", why="transformers ignores soft caps in Gemma 3")
    cap = _cap(fields, "attn_logit_softcapping", 50.0 if version == 2 else None)
    window = published = fields.integer("sliding_window", 4096)
    is_causal = not fields.flag("use_bidirectional_attention", False)
    if not is_causal:  # of EmbeddingGemma: half of it on each side
        window = 1 + 2 * (published // 2)
    fields.only("sliding_window_size", published, why=f"the model uses sliding_window, {published}")
    types = _types(fields, num_layers, version)
    kinds = {
        FULL: LayerKind(AttentionKind(scale, soft_cap=cap, is_causal=is_causal)),
        SLIDING: LayerKind(AttentionKind(scale, window, cap, is_causal=is_causal), version - 2),
    }
    return tuple(kinds[name] for name in types)


def _types(fields: JsonFields, num_layers: int, version: int) -> tuple[str, ...]:
    """Return the attention kind of each layer: as listed, or by a period."""
    types = fields.texts("layer_types", FULL, SLIDING, count=num_layers)
    period = fields.integer("sliding_window_pattern", _PERIODS[version])
    if version == 2 and period != _PERIODS[2]:
        raise Unsupported(f"{fields.name}: sliding_window_pattern is {period}; in Gemma 2 it is {_PERIODS[2]}")
    written = fields.integer("_sliding_window_pattern", period)  # written by transformers, next to layer_types
    if written != period and not types:
        raise Unsupported(
            f"{fields.name}: _sliding_window_pattern is {written}, but layer_types is missing; transformers reads "
            "only sliding_window_pattern"
        )
    return types or tuple(SLIDING if (index + 1) % period else FULL for index in range(num_layers))


def _ropes(fields: JsonFields, max_position_embeddings: int, version: int) -> tuple[RopeConfig, ...]:
    """Read the rope of layers with full attention, and for Gemma 3 that of the others."""
    if version < 3:
        return (RopeConfig.from_hf(fields, max_position_embeddings),)
    sections = fields.mapping("rope_parameters") or (_FOURTH_ROPES if version == 4 else {})
    if not sections:
        theta = fields.number("rope_theta", _GLOBAL_THETA)
        stretched = JsonFields(fields.mapping("rope_scaling"), f"{fields.name} rope_scaling")
        if not stretched.has("rope_type"):
            stretched.only("type", "default", why="transformers reads only rope_type in Gemma 3; rename it")
        local = fields.number("rope_local_base_freq", _LOCAL_THETA)
        plain = JsonFields({}, fields.name)
        return _rope(stretched, max_position_embeddings, theta), _rope(plain, max_position_embeddings, local)
    if unknown := sorted(set(sections) - {FULL, SLIDING}):
        raise Unsupported(f"{fields.name} rope_parameters: unknown setting {', '.join(unknown)}")
    fields.only("rope_scaling", why="rope_parameters contains it for each kind of layer")
    thetas = {
        FULL: fields.number("rope_theta", _GLOBAL_THETA),
        SLIDING: fields.number("rope_local_base_freq", _LOCAL_THETA),
    }
    nested = JsonFields(sections, f"{fields.name} rope_parameters")
    return tuple(
        _rope(JsonFields(nested.mapping(name), f"{nested.name} {name}"), max_position_embeddings, theta)
        for name, theta in thetas.items()
    )


_FOURTH_ROPES: Mapping[str, object] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": _GLOBAL_THETA},
    SLIDING: {"rope_type": "default", "rope_theta": _LOCAL_THETA},
}
"""Defaults of Gemma 4."""


def _rope(section: JsonFields, max_position_embeddings: int, theta: float) -> RopeConfig:
    section.only("truncate", True, why="transformers reads it next to the kinds of layers, not inside one")
    fraction = 1.0
    if section.value("rope_type") == "proportional":
        fraction = section.number("partial_rotary_factor", 1.0)
        if fraction > 1:
            raise section.bad("partial_rotary_factor", f"is {fraction:g}; the limit is 1")
    return RopeConfig.of_section(section, max_position_embeddings, theta, fraction=fraction)


def _to_hf_of_first(config: DecoderConfig) -> dict[str, object]:
    return {
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": name_of_activation(config.activation),
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": config.ropes[0].to_hf(),
    }


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    windows = [kind.sliding_window for kind in config.attention_kinds]
    is_third = len(config.ropes) == 2
    sections = {name: rope.to_hf() for name, rope in zip((FULL, SLIDING), config.ropes, strict=False)}
    window = next((window for window in windows if window is not None), None)
    if config.is_encoder and window is not None:
        window -= 1
    return {
        "use_bidirectional_attention": config.is_encoder,
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_activation": name_of_activation(config.activation),
        "rms_norm_eps": config.norm_eps,
        "query_pre_attn_scalar": _whole(config.attention_kinds[0].scale ** -2),
        "attn_logit_softcapping": config.attention_kinds[0].soft_cap,
        "final_logit_softcapping": config.logit_cap,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "rope_parameters": sections if is_third else config.ropes[0].to_hf(),
    } | ({} if window is None else {"sliding_window": window})


def _fourth_to_hf(config: DecoderConfig) -> dict[str, object]:
    kinds, inner = config.layer_kinds, config.intermediate_size
    pool = HeadSizes(config.num_kv_heads, config.head_dim)
    sizes = {kind.rope: kind.heads or pool for kind in kinds}
    full, own = sizes[0], sizes.get(1, sizes[0])
    windows = [kind.attention.sliding_window for kind in kinds]
    return {
        "intermediate_size": inner,
        "num_key_value_heads": own.num_kv_heads,
        "head_dim": own.head_dim,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads if config.values_are_keys else None,
        "attention_k_eq_v": config.values_are_keys,
        "num_kv_shared_layers": sum(kind.kv_source is not None for kind in kinds),
        "use_double_wide_mlp": any(kind.inner is not None for kind in kinds),
        "enable_moe_block": config.mixture is not None,
        "num_experts": config.mixture and config.mixture.routing.num_experts,
        "top_k_experts": config.mixture and config.mixture.routing.top_k,
        "moe_intermediate_size": config.mixture and config.mixture.width,
        "hidden_size_per_layer_input": config.layer_inputs,
        "vocab_size_per_layer_input": config.vocab_size,
        "hidden_activation": name_of_activation(config.activation),
        "rms_norm_eps": config.norm_eps,
        "final_logit_softcapping": config.logit_cap,
        "layer_types": [SLIDING if kind.rope else FULL for kind in kinds],
        "rope_parameters": {name: rope.to_hf() for name, rope in zip((FULL, SLIDING), config.ropes, strict=True)},
        "sliding_window": next((window for window in windows if window is not None), None),
    }


def _whole(number: float) -> float:
    """Round a number to an integer if it is close, because transformers requires an integer."""
    return round(number) if math.isclose(number, round(number), rel_tol=1e-9) else number


_NAMES = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


_FOURTH_NAMES = dataclasses.replace(
    _NAMES,
    experts=ExpertNames("router.proj", experts="experts.", gate="gate_up_proj", down="down_proj", fused="rows"),
)


def _fourth_outer(config: DecoderConfig, prefix: str) -> list[Leaf]:
    """Return the leaves around the layers, with those of the layers' inputs."""
    leaves, inner = outer_leaves(config, prefix, _NAMES, LM_HEAD), config.layer_inputs
    if not inner:
        return leaves
    width, path = config.num_layers * inner, "layer_inputs"
    table, project, norm = (
        f"{prefix}{name}.weight"
        for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
    )
    own = [
        same(
            (path, "embed", "embedding"), table, ("vocab", None), (config.layer_vocab_size or config.vocab_size, width)
        ),
        transposed((path, "project", "kernel"), project, ("embed", None), (config.hidden_size, width)),
        same((path, "norm", "scale"), norm, (None,), (inner,)),
    ]
    return [*leaves[:1], *own, *leaves[1:]]


def _fourth_layer(config: DecoderConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    """Return the leaves of a layer, with its inputs and its factor; attention may have no keys."""
    width, own, inner = config.hidden_size, config.of_layer(kind), config.layer_inputs
    names, attention, head = _FOURTH_NAMES, None, f"{prefix}self_attn."
    if kind.kv_source is not None:
        queries = own.num_heads * own.head_dim
        attention = [
            transposed(("attention", "query", "kernel"), f"{head}q_proj.weight", ("embed", "heads"), (width, queries)),
            same(("attention", "q_norm", "scale"), f"{head}q_norm.weight", (None,), (own.head_dim,)),
            transposed(("attention", "out", "kernel"), f"{head}o_proj.weight", ("heads", "embed"), (queries, width)),
        ]
    elif config.values_are_keys and kind.attention.sliding_window is None and kind.rope == 0:
        names = dataclasses.replace(names, qkv=(*names.qkv[:2], names.qkv[1]))
    leaves = layer_leaves(config, prefix, kind, names, attention=attention)
    if names is not _FOURTH_NAMES:  # columns of values repeat those of keys
        num_repeated = own.num_kv_heads * own.head_dim * width
        leaves = [
            dataclasses.replace(leaf, num_unused=num_repeated) if leaf.path[1:] == ("qkv", "kernel") else leaf
            for leaf in leaves
        ]
    if kind.is_sparse and config.mixture is not None:
        leaves += _beside_leaves(own, config.mixture.routing.num_experts, prefix)
    if inner:
        gate, out = f"{prefix}per_layer_input_gate.weight", f"{prefix}per_layer_projection.weight"
        leaves += [
            transposed(("layer_input", "gate", "kernel"), gate, ("embed", None), (width, inner)),
            transposed(("layer_input", "out", "kernel"), out, (None, "embed"), (inner, width)),
            whole(("layer_input", "norm", "scale"), f"{prefix}post_per_layer_input_norm.weight", width),
        ]
    if config.layer_scales:
        leaves.append(same(("factor",), f"{prefix}layer_scalar", (None,), (1,)))
    return leaves


def _nested_outer(config: DecoderConfig, prefix: str) -> list[Leaf]:
    """Return the leaves around the layers, with the matrices of further hidden states."""
    width, num_others = config.hidden_size, config.num_states - 1
    begins, ends = (
        [f"{prefix}altup_{part}.{index}" for index in range(num_others)]
        for part in ("projections", "unembed_projections")
    )
    return [
        *_fourth_outer(config, prefix),
        stacked_kernel(("begins", "kernel"), Linears(tuple(begins)), ("embed", None, None), (width, num_others, width)),
        *(
            transposed(("ends", f"state_{index}", "kernel"), f"{name}.weight", ("embed", None), (width, width))
            for index, name in enumerate(ends)
        ),
    ]


def _nested_layer(config: DecoderConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    """Return the leaves of a layer, with its predictions of states and its connection of low rank."""
    width, num_states, rank = config.hidden_size, config.num_states, config.laurel_rank
    altup, laurel = f"{prefix}altup.", f"{prefix}laurel."
    leaves = _fourth_layer(config, prefix, kind)
    if kind.sparsity:
        gates = ("mlp", "gate_up", "kernel")
        leaves = [
            dataclasses.replace(leaf, path=("mlp", "pair", "kernel")) if leaf.path == gates else leaf for leaf in leaves
        ]
    shapes = (
        ("router", "modality_router", (width, num_states)),
        ("predictions", "prediction_coefs", (num_states, num_states**2)),
        ("corrections", "correction_coefs", (num_states, num_states)),
    )
    return [
        *leaves,
        *(transposed(("altup", part), f"{altup}{name}.weight", (None, None), shape) for part, name, shape in shapes),
        whole(("altup", "norm", "scale"), f"{altup}router_norm.weight", width),
        whole(("altup", "scale"), f"{altup}correct_output_scale", width),
        transposed(("laurel", "left", "kernel"), f"{laurel}linear_left.weight", ("embed", None), (width, rank)),
        transposed(("laurel", "right", "kernel"), f"{laurel}linear_right.weight", (None, "embed"), (rank, width)),
        whole(("laurel", "norm", "scale"), f"{laurel}post_laurel_norm.weight", width),
    ]


def _nested_modules() -> Modules[DecoderConfig]:
    from jpaged.models.decoder.shared_kv import AltUpEnds, AltUpLayer

    return Modules(AltUpEnds, AltUpLayer)


def _beside_leaves(config: DecoderConfig, num_experts: int, prefix: str) -> list[Leaf]:
    """Return the leaves of a dense feed-forward next to experts, of all norms, and of the router's factors."""
    width, router = config.hidden_size, f"{prefix}router."
    leaves = [
        dataclasses.replace(leaf, path=("dense", *leaf.path)) for leaf in feed_forward(config, prefix, _FOURTH_NAMES)
    ]
    for part, name in (("norm", "post_1"), ("experts_norm", "pre_2"), ("experts_post_norm", "post_2")):
        before, number = name.split("_")
        leaves.append(whole(("dense", part, "scale"), f"{prefix}{before}_feedforward_layernorm_{number}.weight", width))
    return [
        *leaves,
        whole(("mlp", "router_norm", "scale"), f"{router}scale", width),
        same(("mlp", "factors"), f"{router}per_expert_scale", (None,), (num_experts,)),
    ]


def _fourth_modules() -> Modules[DecoderConfig]:
    from jpaged.models.decoder.shared_kv import SharingEnds, SharingLayer

    return Modules(SharingEnds, SharingLayer)


# Settings for image and audio inputs.
_OF_IMAGES = (
    *("vision_config", "mm_tokens_per_image"),
    *("boi_token_index", "eoi_token_index", "image_token_index"),
    *("boi_token_id", "eoi_token_id", "image_token_id"),
)
_OF_IMAGES_AND_AUDIO = (
    *_OF_IMAGES,
    *("audio_config", "video_token_id", "boa_token_id", "eoa_token_index", "eoa_token_id", "audio_token_id"),
    *("vision_soft_tokens_per_image", "audio_soft_tokens_per_image", "boa_token_index", "audio_token_index"),
)
# Keys that transformers reads at the top level only; and those of either level, the top level first.
_OF_WHOLE, _OF_EITHER = ("dtype", "torch_dtype", "tie_word_embeddings"), ("eos_token_id", "bos_token_id")
# Defaults of transformers for text_config: checkpoints omit values that equal them.
_SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}


_NESTED_SIZES = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "max_position_embeddings": 32768,
}
_FOURTH_SIZES = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}


def _language(whole: JsonFields, defaults: Mapping[str, int], ignored: Sequence[str]) -> JsonFields:
    """Return the fields of the language model of a multimodal Gemma, from text_config and the top level."""
    text = whole.mapping("text_config")
    given = {key: whole.value(key) for key in (*_OF_WHOLE, *_OF_EITHER) if whole.has(key)}
    whole.ignore(ignored)
    for key, missing in defaults.items():
        size = text.get(key, missing)
        whole.only(key, size, why=f"{key} is {size} in text_config, which defines the language model")
    return JsonFields(
        {**defaults, **{key: value for key, value in text.items() if key not in _OF_WHOLE}, **given},
        f"{whole.name} text_config",
    )


def _third_language(whole: JsonFields) -> JsonFields:
    """Return the fields of the language model of Gemma 3."""
    fields = _language(whole, _SIZES, _OF_IMAGES)
    fields.only(
        "final_logit_softcapping", why="transformers applies no soft cap to logits in Gemma 3 models that read images"
    )
    return fields


def _language_prefix(stored: Iterable[str]) -> str:
    """Return the prefix of checkpoints on the hub, or that of transformers since version 5."""
    is_old = any(name.startswith("language_model.model.") for name in stored)
    return "language_model.model." if is_old else "model.language_model."


def _to_hf_of_whole(config: DecoderConfig, version: str) -> dict[str, object]:
    sizes = {
        "model_type": f"gemma{version}_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }
    write = {"3": _to_hf, "3n": _nested_to_hf, "4": _fourth_to_hf}[version]
    return {"text_config": sizes | write(config)}


_IMAGES = decoder_family(
    "gemma3",
    functools.partial(_read, version=3),
    functools.partial(_to_hf_of_whole, version="3"),
    _NAMES,
    name_prefix=_language_prefix,
    ignored=("vision_tower.", "multi_modal_projector."),
)
_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_NESTED = dataclasses.replace(
    decoder_family("gemma3n_text", _read_nested, _nested_to_hf, _NAMES),
    modules=_nested_modules,
    outer_leaves=_nested_outer,
    layer_leaves=_nested_layer,
)
_FOURTH = dataclasses.replace(
    decoder_family("gemma4_text", _read_fourth, _fourth_to_hf, _NAMES),
    modules=_fourth_modules,
    outer_leaves=_fourth_outer,
    layer_leaves=_fourth_layer,
)

_FAMILIES = {
    "GemmaForCausalLM": decoder_family("gemma", functools.partial(_read, version=1), _to_hf_of_first, Names()),
    "Gemma2ForCausalLM": decoder_family("gemma2", functools.partial(_read, version=2), _to_hf, _NAMES),
    "Gemma3ForCausalLM": decoder_family("gemma3_text", functools.partial(_read, version=3), _to_hf, _NAMES),
    "Gemma3TextModel": decoder_family("gemma3_text", functools.partial(_read, version=3), _to_hf, _NAMES),
    "Gemma3ForConditionalGeneration": dataclasses.replace(_IMAGES, language=_third_language),
    "Gemma3nForCausalLM": _NESTED,
    "Gemma3nForConditionalGeneration": dataclasses.replace(
        _NESTED,
        model_type="gemma3n",
        to_hf=functools.partial(_to_hf_of_whole, version="3n"),
        name_prefix=lambda stored: "model.language_model.",
        ignored=_TOWERS,
        language=functools.partial(_language, defaults=_NESTED_SIZES, ignored=_OF_IMAGES_AND_AUDIO),
    ),
    "Gemma4ForCausalLM": _FOURTH,
    "Gemma4ForConditionalGeneration": dataclasses.replace(
        _FOURTH,
        model_type="gemma4",
        to_hf=functools.partial(_to_hf_of_whole, version="4"),
        name_prefix=lambda stored: "model.language_model.",
        ignored=_TOWERS,
        language=functools.partial(_language, defaults=_FOURTH_SIZES, ignored=_OF_IMAGES_AND_AUDIO),
    ),
}
# The sums of layers exceed 65504 (google/gemma_pytorch and vLLM reject float16 for the same reason).
ARCHITECTURES = {name: dataclasses.replace(family, overflows_float16=True) for name, family in _FAMILIES.items()}
