"""The shape of a vision encoder, as a config.json describes it, and its leaves under the names in a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import MAX_LAYERS, MAX_WIDTH, ModelConfig, VisionConfig
from jpaged.models.decoder.config_fields import read_activation
from jpaged.models.json_fields import JsonFields
from jpaged.models.param_specs import Leaf, Linears, same, stacked_bias, stacked_kernel

_LOG = logging.getLogger(__name__)
_TRAINING = ("attention_dropout", "initializer_range", "dtype", "torch_dtype", "transformers_version", "architectures")
_NAMING = ("_name_or_path", "_attn_implementation_autoset", "id2label", "label2id", "use_cache", "pad_token_id")
_SELECTED = "vision_feature_layer"


def read_vision(config: Mapping[str, object], text: ModelConfig) -> VisionConfig | None:
    """Return the vision encoder of a model, given its config.json and its language model.

    None if it has none. One that is not supported is logged, and the model serves text only.
    """
    read = _READERS.get(text.architecture)
    if read is None or not isinstance(config.get("vision_config"), Mapping):
        return None
    try:
        whole = JsonFields(config, "config.json")
        fields = JsonFields(whole.mapping("vision_config"), "config.json vision_config")
        fields.ignore((*_TRAINING, *_NAMING))
        found = read(whole, fields, text)
        fields.finish()
    except (InvalidArgument, Unsupported) as error:
        _LOG.warning("images are refused: %s", error)
        return None
    return found


def _read_pixtral(whole: JsonFields, fields: JsonFields, text: ModelConfig) -> VisionConfig:
    """Read the encoder of Pixtral and Mistral 3, in a model with a patch merger or without one."""
    fields.only("model_type", "pixtral", why="the supported encoder of this model is pixtral")
    fields.ignore(("vocab_size",))
    hidden_size = fields.integer("hidden_size", 1024, maximum=MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 16)
    fields.only("head_dim", hidden_size // num_heads, why="heads divide hidden_size")
    rope = JsonFields(fields.mapping("rope_parameters"), f"{fields.name} rope_parameters")
    rope.only("rope_type", "axial", "default", why="only rotary positions of rows and columns are supported")
    theta = rope.number("rope_theta", fields.number("rope_theta", 1e4))
    rope.finish()
    num_layers = fields.integer("num_hidden_layers", 24, maximum=MAX_LAYERS)
    is_merged = text.architecture == "Mistral3ForConditionalGeneration"
    if not is_merged:
        strategy = whole.text("vision_feature_select_strategy", "default")
        if strategy != "full":
            raise Unsupported(f"config.json: vision_feature_select_strategy is {strategy!r}; pixtral supports full")
    return VisionConfig(
        kind="pixtral",
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 4096, maximum=MAX_WIDTH),
        num_layers=_read_num_layers(whole, num_layers, default=-1 if is_merged else -2),
        num_heads=num_heads,
        num_channels=fields.integer("num_channels", 3, maximum=3, minimum=3),
        patch_size=fields.integer("patch_size", 16),
        image_size=fields.integer("image_size", 1024),
        merge_size=whole.integer("spatial_merge_size", 2) if is_merged else 1,
        out_size=text.hidden_size,
        activation=read_activation(fields, "hidden_act", "gelu"),
        norm_eps=1e-5,
        rope_theta=theta,
        image_token_id=_read_image_token(whole, 10 if is_merged else 32000, text),
        projector_activation=read_activation(whole, "projector_hidden_act", "gelu"),
        projector_bias=whole.flag("multimodal_projector_bias", not is_merged),
        projector_eps=_get_norm_eps(text) if is_merged else 0.0,
    )


def _read_num_layers(whole: JsonFields, num_layers: int, default: int) -> int:
    """Return the number of layers up to the one whose output is projected."""
    chosen = whole.value(_SELECTED, default)
    if isinstance(chosen, bool) or not isinstance(chosen, int):
        raise Unsupported(f"config.json: {_SELECTED} is {chosen!r}; it must be the number of one layer")
    found = num_layers + 1 + chosen if chosen < 0 else chosen
    if not 0 < found <= num_layers:
        raise whole.bad(_SELECTED, f"is {chosen}; the encoder has {num_layers} layers")
    return found


def _read_image_token(whole: JsonFields, default: int, text: ModelConfig) -> int:
    key = "image_token_id" if whole.has("image_token_id") else "image_token_index"
    return whole.integer(key, default, minimum=0, maximum=text.vocab_size - 1)


def _get_norm_eps(text: ModelConfig) -> float:
    eps = getattr(text, "norm_eps", None)
    if not isinstance(eps, float):
        raise Unsupported(f"{text.architecture}: the language model has no epsilon of norms")
    return eps


def _read_qwen(whole: JsonFields, fields: JsonFields, text: ModelConfig) -> VisionConfig:
    """Read the encoder of Qwen2.5-VL, whose layers attend inside windows, except some."""
    fields.only("model_type", "qwen2_5_vl", "qwen2_5_vl_vision", why="the supported encoder is that of Qwen2.5-VL")
    fields.ignore(("tokens_per_second", "spatial_patch_size", "image_size"))  # of videos, and a repetition
    num_layers = fields.integer("depth", 32, maximum=MAX_LAYERS)
    full_layers = fields.value("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(full_layers, list) or not all(type(layer) is int for layer in full_layers):
        raise fields.bad("fullatt_block_indexes", f"is {str(full_layers)[:80]}; it must be a list of layers")
    fields.only("out_hidden_size", text.hidden_size, why=f"the language model has {text.hidden_size}")
    fields.only("in_chans", 3, why="images have 3 channels")
    rope = JsonFields(fields.mapping("rope_parameters"), f"{fields.name} rope_parameters")
    rope.only("rope_type", "axial", "default", why="only rotary positions of rows and columns are supported")
    theta = rope.number("rope_theta", 1e4)
    rope.finish()
    return VisionConfig(
        kind="qwen2_5_vl",
        hidden_size=fields.integer("hidden_size", 1280, maximum=MAX_WIDTH),
        intermediate_size=fields.integer("intermediate_size", 3420, maximum=MAX_WIDTH),
        num_layers=num_layers,
        num_heads=fields.integer("num_heads", 16),
        num_channels=fields.integer("in_channels", 3, minimum=3, maximum=3),
        patch_size=fields.integer("patch_size", 14),
        temporal_size=fields.integer("temporal_patch_size", 2),
        image_size=0,
        merge_size=fields.integer("spatial_merge_size", 2),
        out_size=text.hidden_size,
        activation=read_activation(fields, "hidden_act", "silu"),
        norm_eps=1e-6,
        rope_theta=theta,
        window_size=fields.integer("window_size", 112),
        full_layers=tuple(full_layers),
        image_token_id=_read_image_token(whole, 151655, text),
        projector_eps=1e-6,
        projector_bias=True,
    )


def _read_qwen3(whole: JsonFields, fields: JsonFields, text: ModelConfig) -> VisionConfig:
    """Read the encoder of Qwen3-VL, whose learned positions are interpolated."""
    fields.only("model_type", "qwen3_vl", "qwen3_vl_vision", why="the supported encoder is that of Qwen3-VL")
    num_layers = fields.integer("depth", 27, maximum=MAX_LAYERS)
    deep_layers = fields.value("deepstack_visual_indexes", [8, 16, 24])
    if not isinstance(deep_layers, list) or not all(type(i) is int and 0 <= i < num_layers for i in deep_layers):
        raise fields.bad("deepstack_visual_indexes", f"is {str(deep_layers)[:80]}; it must be a list of layers")
    if len(deep_layers) > text.num_layers or sorted(set(deep_layers)) != deep_layers:
        problem = f"is {deep_layers}; it must ascend, with up to {text.num_layers} layers"
        raise fields.bad("deepstack_visual_indexes", problem)
    num_positions = fields.integer("num_position_embeddings", 2304)
    side = math.isqrt(num_positions)
    if side**2 != num_positions:
        raise fields.bad("num_position_embeddings", f"is {num_positions}; it must be a square")
    fields.only("out_hidden_size", text.hidden_size, why=f"the language model has {text.hidden_size}")
    rope = JsonFields(fields.mapping("rope_parameters"), f"{fields.name} rope_parameters")
    rope.only("rope_type", "axial", "default", why="only rotary positions of rows and columns are supported")
    theta = rope.number("rope_theta", 1e4)
    rope.finish()
    return VisionConfig(
        kind="qwen3_vl",
        hidden_size=fields.integer("hidden_size", 1152, maximum=MAX_WIDTH),
        intermediate_size=fields.integer("intermediate_size", 4304, maximum=MAX_WIDTH),
        num_layers=num_layers,
        num_heads=fields.integer("num_heads", 16),
        num_channels=fields.integer("in_channels", 3, minimum=3, maximum=3),
        patch_size=fields.integer("patch_size", 16),
        temporal_size=fields.integer("temporal_patch_size", 2),
        image_size=0,
        merge_size=fields.integer("spatial_merge_size", 2),
        out_size=text.hidden_size,
        activation=read_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        norm_eps=1e-6,
        rope_theta=theta,
        num_places=side,
        deep_layers=tuple(deep_layers),
        image_token_id=_read_image_token(whole, 151655, text),
        projector_eps=1e-6,
        projector_bias=True,
    )


def _read_siglip(whole: JsonFields, fields: JsonFields, text: ModelConfig) -> VisionConfig:
    """Read SigLIP (Zhai et al. 2023) as Gemma 3 uses it: every image has one size, and rows are means of patches."""
    fields.only("model_type", "siglip_vision_model", why="the supported encoder of this model is SigLIP")
    fields.ignore(("vision_use_head", "projection_dim", "projector_hidden_act", "use_bidirectional_attention"))
    image_size, patch_size = fields.integer("image_size", 224), fields.integer("patch_size", 16)
    num_tokens, edge = whole.integer("mm_tokens_per_image", 256), image_size // patch_size
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens or edge % side:
        raise whole.bad("mm_tokens_per_image", f"is {num_tokens}; an image of {edge} x {edge} patches cannot have it")
    ids = [
        whole.integer(
            f"{name}_token_id" if whole.has(f"{name}_token_id") else f"{name}_token_index", default, minimum=0
        )
        for name, default in (("boi", 255999), ("eoi", 256000))
    ]
    return VisionConfig(
        kind="siglip",
        hidden_size=fields.integer("hidden_size", 768, maximum=MAX_WIDTH),
        intermediate_size=fields.integer("intermediate_size", 3072, maximum=MAX_WIDTH),
        num_layers=fields.integer("num_hidden_layers", 12, maximum=MAX_LAYERS),
        num_heads=fields.integer("num_attention_heads", 12),
        num_channels=fields.integer("num_channels", 3, minimum=3, maximum=3),
        patch_size=patch_size,
        image_size=image_size,
        merge_size=edge // side,
        out_size=text.hidden_size,
        activation=read_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        norm_eps=(eps := fields.number("layer_norm_eps", 1e-6)),
        image_token_id=_read_image_token(whole, 262144, text),
        begin_token_id=ids[0],
        end_token_id=ids[1],
        projector_eps=eps,
    )


_Reader = Callable[[JsonFields, JsonFields, ModelConfig], VisionConfig]
_READERS: Mapping[str, _Reader] = {
    "Mistral3ForConditionalGeneration": _read_pixtral,
    "Gemma3ForConditionalGeneration": _read_siglip,
    "LlavaForConditionalGeneration": _read_pixtral,
    "Qwen2_5_VLForConditionalGeneration": _read_qwen,
    "Qwen3VLForConditionalGeneration": _read_qwen3,
}


@dataclasses.dataclass(frozen=True, slots=True)
class VisionLeaves:
    """Leaves of an encoder: those outside the layers, and those of each layer, whose paths start inside it."""

    outer: list[Leaf]
    layers: list[list[Leaf]]

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for each in (self.outer, *self.layers) for leaf in each)


def vision_leaves(config: VisionConfig, stored: Collection[str] = ()) -> VisionLeaves:
    """Return the leaves of an encoder, with tensor names that match a checkpoint with the `stored` names.

    Raises:
        InvalidArgument: the checkpoint has no encoder.
    """
    leaves = _LEAVES[config.kind](config)
    ((first, _),) = leaves.outer[0].tensors
    old = "vision_tower.vision_model."
    if config.kind == "siglip" and any(old in name for name in stored):
        leaves = _renamed(leaves, lambda name: name.replace("vision_tower.", old))
        ((first, _),) = leaves.outer[0].tensors
    if not stored or first in stored:
        return leaves
    found = [name for name in stored if name.endswith(f".{first}")]
    if len(found) != 1:
        raise InvalidArgument("checkpoint", f"has {len(found)} tensors {first} of a vision encoder, not one")
    prefix = found[0].removesuffix(first)
    return _renamed(leaves, lambda name: prefix + name)


def _renamed(leaves: VisionLeaves, rename: Callable[[str], str]) -> VisionLeaves:
    def renamed(leaf: Leaf) -> Leaf:
        return dataclasses.replace(leaf, tensors=tuple((rename(name), shape) for name, shape in leaf.tensors))

    return VisionLeaves(list(map(renamed, leaves.outer)), [list(map(renamed, layer)) for layer in leaves.layers])


def _pixtral_leaves(config: VisionConfig) -> VisionLeaves:
    width, out = config.hidden_size, config.out_size
    projector, tower = "multi_modal_projector.", "vision_tower."
    outer = [
        _patch_kernel(config, f"{tower}patch_conv"),
        _vector(("pre_norm", "scale"), f"{tower}ln_pre.weight", width),
        *_linear("linear_1", f"{projector}linear_1", width, out, has_bias=config.projector_bias),
        *_linear("linear_2", f"{projector}linear_2", out, out, has_bias=config.projector_bias),
    ]
    if config.merge_size > 1 or config.projector_eps:
        outer.append(_vector(("merge_norm", "scale"), f"{projector}norm.weight", width))
        outer.append(_merging_kernel(config, f"{projector}patch_merger.merging_layer.weight"))
    return VisionLeaves(
        outer, [_pixtral_layer(config, f"{tower}transformer.layers.{i}.") for i in range(config.num_layers)]
    )


def _pixtral_layer(config: VisionConfig, prefix: str) -> list[Leaf]:
    width, between = config.hidden_size, config.intermediate_size
    attention, feed_forward = f"{prefix}attention.", f"{prefix}feed_forward."
    return [
        _vector(("attention_norm", "scale"), f"{prefix}attention_norm.weight", width),
        *_projections([f"{attention}{part}_proj" for part in "qkv"], width, has_bias=False),
        *_linear("out", f"{attention}o_proj", width, width, has_bias=False),
        _vector(("mlp_norm", "scale"), f"{prefix}ffn_norm.weight", width),
        *_linear("gate", f"{feed_forward}gate_proj", width, between, has_bias=False),
        *_linear("up", f"{feed_forward}up_proj", width, between, has_bias=False),
        *_linear("down", f"{feed_forward}down_proj", between, width, has_bias=False),
    ]


def _qwen_leaves(config: VisionConfig) -> VisionLeaves:
    width, between, tower = config.hidden_size, config.intermediate_size, "visual."
    merged = config.num_merged * width
    outer = [
        _patch_kernel(config, f"{tower}patch_embed.proj"),
        _vector(("merge_norm", "scale"), f"{tower}merger.ln_q.weight", width),
        *_linear("linear_1", f"{tower}merger.mlp.0", merged, merged, has_bias=True),
        *_linear("linear_2", f"{tower}merger.mlp.2", merged, config.out_size, has_bias=True),
    ]
    layers = []
    for prefix in (f"{tower}blocks.{i}." for i in range(config.num_layers)):
        layers.append(
            [
                _vector(("attention_norm", "scale"), f"{prefix}norm1.weight", width),
                *_projections([f"{prefix}attn.qkv"], width, has_bias=True),
                *_linear("out", f"{prefix}attn.proj", width, width, has_bias=True),
                _vector(("mlp_norm", "scale"), f"{prefix}norm2.weight", width),
                *_linear("gate", f"{prefix}mlp.gate_proj", width, between, has_bias=True),
                *_linear("up", f"{prefix}mlp.up_proj", width, between, has_bias=True),
                *_linear("down", f"{prefix}mlp.down_proj", between, width, has_bias=True),
            ]
        )
    return VisionLeaves(outer, layers)


def _qwen3_leaves(config: VisionConfig) -> VisionLeaves:
    width, between, tower = config.hidden_size, config.intermediate_size, "visual."
    merged, out = config.num_merged * width, config.out_size
    outer = [
        _patch_kernel(config, f"{tower}patch_embed.proj"),
        _vector(("patch", "bias"), f"{tower}patch_embed.proj.bias", width),
        same(("positions",), f"{tower}pos_embed.weight", (None, None), (config.num_places**2, width)),
        *_layer_norm("merge_norm", f"{tower}merger.norm", width),
        *_linear("linear_1", f"{tower}merger.linear_fc1", merged, merged, has_bias=True),
        *_linear("linear_2", f"{tower}merger.linear_fc2", merged, out, has_bias=True),
    ]
    for i in range(len(config.deep_layers)):
        prefix = f"{tower}deepstack_merger_list.{i}."
        outer += _layer_norm(f"deep_{i}_norm", f"{prefix}norm", merged)
        outer += _linear(f"deep_{i}_1", f"{prefix}linear_fc1", merged, merged, has_bias=True)
        outer += _linear(f"deep_{i}_2", f"{prefix}linear_fc2", merged, out, has_bias=True)
    layers = []
    for prefix in (f"{tower}blocks.{i}." for i in range(config.num_layers)):
        layers.append(
            [
                *_layer_norm("attention_norm", f"{prefix}norm1", width),
                *_projections([f"{prefix}attn.qkv"], width, has_bias=True),
                *_linear("out", f"{prefix}attn.proj", width, width, has_bias=True),
                *_layer_norm("mlp_norm", f"{prefix}norm2", width),
                *_linear("up", f"{prefix}mlp.linear_fc1", width, between, has_bias=True),
                *_linear("down", f"{prefix}mlp.linear_fc2", between, width, has_bias=True),
            ]
        )
    return VisionLeaves(outer, layers)


def _siglip_leaves(config: VisionConfig) -> VisionLeaves:
    width, between, tower = config.hidden_size, config.intermediate_size, "vision_tower."
    projector, num_places = "multi_modal_projector.", (config.image_size // config.patch_size) ** 2
    embeddings = f"{tower}embeddings."
    outer = [
        _patch_kernel(config, f"{embeddings}patch_embedding"),
        _vector(("patch", "bias"), f"{embeddings}patch_embedding.bias", width),
        same(("positions",), f"{embeddings}position_embedding.weight", (None, None), (num_places, width)),
        *_layer_norm("post_norm", f"{tower}post_layernorm", width),
        _offset_norm("pooled_norm", f"{projector}mm_soft_emb_norm.weight", width),
        same(("linear_1", "kernel"), f"{projector}mm_input_projection_weight", (None, None), (width, config.out_size)),
    ]
    layers = []
    for prefix in (f"{tower}encoder.layers.{i}." for i in range(config.num_layers)):
        layers.append(
            [
                *_layer_norm("attention_norm", f"{prefix}layer_norm1", width),
                *_projections([f"{prefix}self_attn.{part}_proj" for part in "qkv"], width, has_bias=True),
                *_linear("out", f"{prefix}self_attn.out_proj", width, width, has_bias=True),
                *_layer_norm("mlp_norm", f"{prefix}layer_norm2", width),
                *_linear("up", f"{prefix}mlp.fc1", width, between, has_bias=True),
                *_linear("down", f"{prefix}mlp.fc2", between, width, has_bias=True),
            ]
        )
    return VisionLeaves(outer, layers)


_LEAVES: Mapping[str, Callable[[VisionConfig], VisionLeaves]] = {
    "pixtral": _pixtral_leaves,
    "qwen2_5_vl": _qwen_leaves,
    "qwen3_vl": _qwen3_leaves,
    "siglip": _siglip_leaves,
}


def _vector(path: tuple[str, ...], name: str, width: int) -> Leaf:
    return same(path, name, (None,), (width,))


def _layer_norm(place: str, name: str, width: int) -> list[Leaf]:
    return [
        _vector((place, "scale"), f"{name}.weight", width),
        _vector((place, "bias"), f"{name}.bias", width),
    ]


def _offset_norm(place: str, name: str, width: int) -> Leaf:
    """Return the scale of a norm whose stored weight is the scale less 1, in float32: it has more digits."""

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0].astype(np.float32) + 1

    return Leaf((place, "scale"), (None,), (width,), ((name, (width,)),), pack, (0,), dtype=np.dtype(np.float32))


def _linear(place: str, name: str, width: int, out: int, *, has_bias: bool) -> list[Leaf]:
    linears = Linears((name,))
    kernel = stacked_kernel((place, "kernel"), linears, (None, None), (width, out))
    return [kernel, stacked_bias((place, "bias"), linears, (None,), (out,))] if has_bias else [kernel]


def _projections(names: Sequence[str], width: int, *, has_bias: bool) -> list[Leaf]:
    """Return query, key and value as one kernel, from three linear layers or one with the outputs of all."""
    linears = Linears(tuple(names))
    kernel = stacked_kernel(("qkv", "kernel"), linears, (None, None, None), (width, 3, width))
    return [kernel, stacked_bias(("qkv", "bias"), linears, (None, None), (3, width))] if has_bias else [kernel]


def _patch_kernel(config: VisionConfig, name: str) -> Leaf:
    """Return a convolution whose stride is its size as a matrix of patches."""
    size, width = config.patch_size, config.hidden_size
    frames = (config.temporal_size,) if config.temporal_size > 1 else ()
    stored = (width, config.num_channels, *frames, size, size)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0].reshape(width, -1).T

    path, shape = ("patch", "kernel"), (config.patch_dim, width)
    return Leaf(path, (None, None), shape, ((f"{name}.weight", stored),), pack, (None, None))


def _merging_kernel(config: VisionConfig, name: str) -> Leaf:
    """Return the merger's weight, whose inputs are stored dimension by dimension, for patches one after another."""
    width, num_merged = config.hidden_size, config.num_merged

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        of_dims = tensors[0].reshape(width, width, num_merged)
        leaf[...] = of_dims.transpose(2, 1, 0).reshape(num_merged * width, width)

    shape = (num_merged * width, width)
    return Leaf(("merger", "kernel"), (None, None), shape, ((name, shape[::-1]),), pack, (None, None))
