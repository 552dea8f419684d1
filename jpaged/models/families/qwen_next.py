"""Qwen3-Next and Qwen3.5 (Qwen 2025, 2026): the gated delta rule in three of four layers, gated attention in others.

Qwen3.5 stores the projections of the delta rule apart, and has dense models, too. Only the language model is served.
The sections of rotary embedding differ only for images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, Mixture
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config import DeltaShape
from jpaged.models.decoder.config_fields import (
    FULL,
    TRAINING,
    HeadFields,
    Sizes,
    read_choice,
    read_heads,
    read_sizes,
    read_sparse_layers,
    read_width,
)
from jpaged.models.decoder.leaves import ExpertNames, layer_leaves
from jpaged.models.family import Family, Modules, model_prefix
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind, StateArray
from jpaged.models.param_specs import Leaf, same, transpose, transposed
from jpaged.models.rope_config import RopeConfig

LINEAR = "linear_attention"
MAX_TAPS = 64
"""Limit of the tokens that a short convolution reads."""
_WITHOUT_ATTENTION_GATES = "attention without gates is not supported"
_OF_DRAFTS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
_OF_IMAGES = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "language_model_only",
)
_OF_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "bos_token_id")
"""Keys that apply to the language model; those of `text_config` are the default."""
_RESTATED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Values of missing keys in Qwen3.5, as in transformers."""

    hidden_size: int
    num_hidden_layers: int
    num_kv_heads: int


_DENSE, _SPARSE = _Defaults(4096, 32, 4), _Defaults(2048, 40, 2)


def _read(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore((*TRAINING, *_OF_DRAFTS))
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=2, head_dim=256)
    is_sparse = read_sparse_layers(fields, sizes["num_layers"])
    normalises = fields.flag("norm_topk_prob", True)
    return _read_decoder(fields, architecture, sizes, heads, is_sparse, _read_mixture(fields, (512, 10), normalises))


def _read_dense(fields: JsonFields, architecture: str) -> DecoderConfig:
    inner = fields.integer("intermediate_size", 12288, maximum=MAX_WIDTH)
    return _read_qwen35(fields, architecture, inner, _DENSE, None)


def _read_sparse(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore((*TRAINING, "intermediate_size"))  # no layer is dense
    mixture = _read_mixture(fields, (256, 8), normalises=True)
    return _read_qwen35(fields, architecture, mixture.width, _SPARSE, mixture)


def _read_qwen35(
    fields: JsonFields, architecture: str, inner: int, defaults: _Defaults, mixture: Mixture | None
) -> DecoderConfig:
    fields.ignore(_OF_DRAFTS)
    fields.only("attn_output_gate", True, why=_WITHOUT_ATTENTION_GATES)
    fields.only("mamba_ssm_dtype", "float32", why="matrices of states are float32")
    fields.only("mlp_only_layers", [], why="all layers have experts, or none")
    sizes: Sizes = {
        "vocab_size": fields.integer("vocab_size", 248320, maximum=MAX_VOCAB_SIZE),
        "hidden_size": fields.integer("hidden_size", defaults.hidden_size, maximum=MAX_WIDTH),
        "intermediate_size": inner,
        "num_layers": fields.integer("num_hidden_layers", defaults.num_hidden_layers, maximum=MAX_LAYERS),
    }
    heads: HeadFields = {
        "num_heads": fields.integer("num_attention_heads", 16, maximum=MAX_WIDTH),
        "num_kv_heads": fields.integer("num_key_value_heads", defaults.num_kv_heads, maximum=MAX_WIDTH),
        "head_dim": fields.integer("head_dim", 256, maximum=MAX_WIDTH),
    }
    is_sparse = (mixture is not None,) * sizes["num_layers"]
    return _read_decoder(fields, architecture, sizes, heads, is_sparse, mixture)


def _read_mixture(fields: JsonFields, default: tuple[int, int], normalises: bool) -> Mixture:
    num_experts, top_k = read_choice(fields, default, ("num_experts",))
    return Mixture(
        routing=Routing(num_experts, top_k, normalises=normalises),
        width=read_width(fields, "moe_intermediate_size", 512),
        shared_width=read_width(fields, "shared_expert_intermediate_size", 512),
        shared_is_weighed=True,
    )


def _read_decoder(
    fields: JsonFields,
    architecture: str,
    sizes: Sizes,
    heads: HeadFields,
    is_sparse: Sequence[bool],
    mixture: Mixture | None,
) -> DecoderConfig:
    fields.only("hidden_act", "silu", "swish", why="feed-forwards support only the activation silu")
    fields.only("attention_bias", False, why="biases next to gates are not supported")
    max_position_embeddings = fields.integer("max_position_embeddings", 32768)
    delta, conv_len = _read_delta(fields), fields.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_TAPS)
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
        kinds=_read_kinds(fields, is_sparse, heads["head_dim"], delta, conv_len),
        mixture=mixture,
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
    fields: JsonFields, is_sparse: Sequence[bool], head_dim: int, delta: DeltaShape, conv_len: int
) -> tuple[LayerKind, ...]:
    """Return the kinds of layers, from their names or from the interval of those with attention.

    Raises:
        Unsupported: no layer has attention.
    """
    interval, num_layers = fields.integer("full_attention_interval", 4), len(is_sparse)
    types: Sequence[str] = fields.texts("layer_types", FULL, LINEAR, count=num_layers)
    types = types or [LINEAR if (index + 1) % interval else FULL for index in range(num_layers)]
    if FULL not in types:
        raise Unsupported(f"{fields.name}: no layer has attention; at least one is required")
    (num_channels,), matrices = delta.states
    states = StateArray((num_channels * (conv_len - 1),)), StateArray(matrices, "float32")
    attention = AttentionKind(head_dim**-0.5)
    full, linear = LayerKind(attention), LayerKind(attention, None, states=states)
    return tuple(
        dataclasses.replace(linear if name == LINEAR else full, is_sparse=has_experts)
        for name, has_experts in zip(types, is_sparse, strict=True)
    )


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    mixture, delta, kinds = config.mixture, config.delta, config.layer_kinds
    assert delta is not None
    is_split = _is_split(config)
    own: dict[str, object] = {}
    if mixture is None or not is_split:
        own = {"intermediate_size": config.intermediate_size}
    if mixture is not None:
        own |= {
            "moe_intermediate_size": mixture.width,
            "shared_expert_intermediate_size": mixture.shared_width,
            "num_experts": mixture.routing.num_experts,
            "num_experts_per_tok": mixture.routing.top_k,
        }
    if mixture is not None and not is_split:
        own |= {
            "norm_topk_prob": mixture.routing.normalises,
            "mlp_only_layers": [index for index, kind in enumerate(kinds) if not kind.is_sparse],
        }
    return own | {
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
    }


def _is_split(config: DecoderConfig) -> bool:
    """Return True if projections of the delta rule are apart, as in Qwen3.5."""
    return config.architecture.startswith("Qwen3_5")


_NAMES = Names()
_INNER = "model.language_model."
"""Prefix of the language model of a model that reads images."""
_FUSED = Names(experts=ExpertNames(gate="gate_up_proj", down="down_proj", fused="rows"))
"""Published models that read images have all experts of a layer in one tensor."""
FUSED_MTP = "Qwen3_5MoeFusedMTP"
"""Architecture of MTP layers with all experts in one tensor, as Qwen3.6 has them."""


def _layer_leaves(config: DecoderConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    names = _FUSED if prefix.startswith(_INNER) or config.architecture == FUSED_MTP else _NAMES
    if kind.states:
        return layer_leaves(config, prefix, kind, names, attention=_delta_leaves(config, f"{prefix}linear_attn."))
    leaves = layer_leaves(config, prefix, kind, names)
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
    num_keys, num_values = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
    of_values = ("heads",), (delta.num_value_heads,)
    rates = same(("attention", "log_rate"), f"{prefix}A_log", *of_values)
    biases = same(("attention", "step_bias"), f"{prefix}dt_bias", *of_values)
    if _is_split(config):
        qkv, gates = (num_keys, num_keys, num_values), (num_values,)
        project = grouped_columns(
            config, "project", {f"{prefix}in_proj_qkv.weight": qkv, f"{prefix}in_proj_z.weight": gates}
        )
        heads = (delta.num_value_heads,)
        control = grouped_columns(config, "control", {f"{prefix}in_proj_{part}.weight": heads for part in "ba"})
    else:
        num_outputs = 2 * (num_keys + num_values)
        project = _columns("project", f"{prefix}in_proj_qkvz.weight", (width, num_outputs))
        control = _columns("control", f"{prefix}in_proj_ba.weight", (width, 2 * delta.num_value_heads))
    return [
        project,
        control,
        grouped_taps([f"{prefix}conv1d.weight"], delta, config.conv_len),
        *(dataclasses.replace(leaf, dtype=np.dtype(np.float32)) for leaf in (rates, biases)),
        same(("attention", "norm", "scale"), f"{prefix}norm.weight", (None,), (delta.value_dim,)),
        transposed(("attention", "out", "kernel"), f"{prefix}out_proj.weight", ("heads", "embed"), (num_values, width)),
    ]


def _columns(path: str, name: str, shape: tuple[int, int]) -> Leaf:
    return transposed(("attention", path, "kernel"), name, ("embed", "heads"), shape)


def grouped_columns(config: DecoderConfig, path: str, outputs: dict[str, tuple[int, ...]]) -> Leaf:
    """Return a kernel of the delta rule with the outputs of several tensors grouped by key head.

    Args:
        outputs: for each tensor, the outputs of each part, which has all heads.
    """
    assert config.delta is not None
    num_heads, width = config.delta.num_key_heads, config.hidden_size
    shape = width, sum(map(sum, outputs.values()))

    def pack(tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        split = zip(tensors, outputs.values(), strict=True)
        parts = [part for tensor, sizes in split for part in np.split(tensor, np.cumsum(sizes)[:-1])]
        concat = tensors[0].__array_namespace__().concat  # NumPy's, or JAX's when traced
        grouped = concat([part.reshape(num_heads, -1, part.shape[1]) for part in parts], axis=1)
        transpose(grouped.reshape(-1, grouped.shape[2]), out)  # scales have fewer columns than weights

    tensors = tuple((name, (sum(sizes), width)) for name, sizes in outputs.items())
    axes = "embed", "heads"
    return Leaf(("attention", path, "kernel"), axes, shape, tensors, pack, (1, None), num_groups=num_heads)


def grouped_taps(names: Sequence[str], delta: DeltaShape, num_taps: int) -> Leaf:
    """Return the taps of all channels, grouped by key head.

    Args:
        names: of tensors with the queries, the keys and the values of all heads, or of one with all of these.
    """
    num_heads, num_channels = delta.num_key_heads, delta.num_key_heads * delta.num_channels
    sizes = (num_heads * delta.key_dim, num_heads * delta.key_dim, num_heads * delta.value_width)

    def pack(tensors: Sequence[np.ndarray], out: np.ndarray) -> None:
        concat = tensors[0].__array_namespace__().concat
        parts = np.split(concat(tensors).reshape(num_channels, num_taps), np.cumsum(sizes)[:-1])
        grouped = concat([part.reshape(num_heads, -1, num_taps) for part in parts], axis=1)
        out[...] = grouped.reshape(num_channels, num_taps)

    stored = sizes if len(names) > 1 else (num_channels,)
    tensors = tuple((name, (size, 1, num_taps)) for name, size in zip(names, stored, strict=True))
    return Leaf(("attention", "taps"), ("heads", None), (num_channels, num_taps), tensors, pack, (None, None))


def _modules() -> Modules[DecoderConfig]:
    from jpaged.models.decoder.modules import DecoderEnds
    from jpaged.models.decoder.recurrent import DeltaLayer

    return Modules(DecoderEnds, DeltaLayer)


def _language(whole: JsonFields) -> JsonFields:
    """Return the fields of the language model of a model that reads images."""
    whole.ignore(_OF_IMAGES)
    text, given = whole.mapping("text_config"), {key: whole.value(key) for key in _OF_WHOLE if whole.has(key)}
    for key in _RESTATED:
        size = text.get(key)
        whole.only(key, size, why=f"{key} is {size} in text_config, which defines the language model")
    return JsonFields({**text, **given}, f"{whole.name} text_config")


def _prefix(stored: Iterable[str]) -> str:
    """Return the prefix of language models alone, or next to a model that reads images."""
    return _INNER if any(name.startswith(_INNER) for name in stored) else model_prefix(stored)


def _family(model_type: str, read: Callable[[JsonFields, str], DecoderConfig]) -> Family[DecoderConfig]:
    family = decoder_family(model_type, read, _to_hf, _NAMES, name_prefix=_prefix, ignored=("mtp.", "model.visual."))
    return dataclasses.replace(family, layer_leaves=_layer_leaves, modules=_modules)


def _with_images(model_type: str, read: Callable[[JsonFields, str], DecoderConfig]) -> Family[DecoderConfig]:
    def write(config: DecoderConfig) -> dict[str, object]:
        sizes = {
            "model_type": f"{model_type}_text",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": config.max_position_embeddings,
        }
        return {"text_config": sizes | _to_hf(config)}

    return dataclasses.replace(_family(model_type, read), to_hf=write, language=_language)


ARCHITECTURES = {
    "Qwen3NextForCausalLM": _family("qwen3_next", _read),
    "Qwen3_5ForCausalLM": _family("qwen3_5_text", _read_dense),
    "Qwen3_5ForConditionalGeneration": _with_images("qwen3_5", _read_dense),
    "Qwen3_5MoeForCausalLM": _family("qwen3_5_moe_text", _read_sparse),
    "Qwen3_5MoeForConditionalGeneration": _with_images("qwen3_5_moe", _read_sparse),
}
