"""A GGUF file as a source of tensors under the names of Hugging Face, and the places of these tensors in it.

Converters to GGUF change some tensors; reading reverts it. Rows of queries and keys of the Llama architecture alternate
between the halves of a head, norms of Gemma are stored plus 1, experts of a layer are one tensor, GPT-2's matrices are
transposed, GPT-NeoX's queries, keys and values are separated, and the value heads of Qwen3.5's delta rule go around the
key heads.

Each type that `blocks.py` supports is kept without requantization. Matrices of one leaf (queries, keys and values;
gates and ups) with different types get the narrowest common format. If one of them is not quantized, or has an
unsupported type, the leaf is dequantized, as are routers and, on request, the token embedding.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoints.gguf.blocks import BLOCK_TYPES, FLOATS, PACKED_TYPES, READ, dequantize_blocks, joint_form
from jpaged.checkpoints.gguf.config import hf_config
from jpaged.checkpoints.gguf.file import GgufFile, GgufTensor, open_gguf
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.quantized.scheme import MatrixPart, Parts, Shape, StoredMatrix, check_parts
from jpaged.checkpoints.tensor_files import StableFile, check_shape
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.matmul.packed import StoredColumns
from jpaged.kernels.matrix_format import NUM_BITS, MatrixFormat
from jpaged.models.config import ModelConfig, Quantization
from jpaged.models.decoder.config import DeltaShape
from jpaged.models.hf_config import from_hf
from jpaged.models.param_specs import Leaf, contracted_axis, get_module, is_matrix, stored_formats

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are a part of the config."""
_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias|scale))?")
_OUTER = re.compile(r"(\w+)\.(weight|bias)")
_OTHER_LAYOUTS = {
    r"blk\.\d+\.attn_qkv\.\w+": "fused queries, keys and values; convert the model without --fuse-qkv",
    r"blk\.\d+\.ffn_gate_up_exps\.\w+": "fused gate and up matrices; convert the model without --fuse-gate-up-exps",
    r"blk\.\d+\.ffn_\w+\.\d+\.\w+": "a single expert; convert the model with a newer llama.cpp",
}
"""Alternative layouts of an architecture's tensors by name pattern, and their content."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Place of a checkpoint's tensor in a file.

    Attributes:
        tensor: its name in the file.
        expert: index in a stack of experts.
        rows: index of each row in the file, which can have others; None for all rows in order.
        columns: index of each column in the file; None if columns are in order.
        offset: subtracted from each number.
        is_negative_exp: it is stored as minus its exponential.
        is_transposed: it is stored transposed.
        new_axis: place of an axis of 1 that only the checkpoint has.
        partner: name of another tensor, of which each row follows one of this; empty if there is none.
        has_all_experts: it has all experts of a layer, stored as `[experts, out, in]`.
        swaps_experts: it is `[experts, in, out]` in a checkpoint.
    """

    tensor: str
    expert: int | None = None
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    offset: float = 0.0
    is_negative_exp: bool = False
    is_transposed: bool = False
    new_axis: int | None = None
    partner: str = ""
    has_all_experts: bool = False
    swaps_experts: bool = False

    def shape(self, tensor: GgufTensor) -> tuple[int, ...]:
        """Return its shape in a checkpoint."""
        stored = tensor.shape if self.expert is None else tensor.shape[1:]
        if self.rows is not None:
            stored = (len(self.rows), *stored[1:])
        if self.new_axis is not None:
            return (*stored[: self.new_axis], 1, *stored[self.new_axis :])
        if self.partner:
            stored = (stored[0], 2 * stored[1], *stored[2:])
        if self.swaps_experts and len(stored) == 3:
            return (stored[0], stored[2], stored[1])
        return stored[::-1] if self.is_transposed else stored


@dataclass(frozen=True, slots=True)
class Naming:
    """Names of an architecture's tensors in checkpoints.

    Attributes:
        outer: by names in the file, without `.weight` and `.bias`.
        layers: the same for a layer; `{x}` is the number of an expert or, in a norm's name, of a head.
        layers_prefix: prefix of a layer's number.
        rows: tensors with reordered rows: `alternating` in each head, `parted` into queries, keys, values, or by heads
            of the delta rule.
        columns: the same for columns.
        offset: of norms, except those in `plain_norms`.
        negative_exps: tensors that are stored as minus their exponentials.
        transposed: tensors that are stored transposed.
        own_names: complete names of other tensors of a layer, by those in the file; matrices have all experts.
        swaps_experts: these matrices are `[experts, in, out]` in checkpoints, and `[experts, out, in]` in files.
        partners: tensors among these whose rows alternate with those of another one.
        parts: tensors that a checkpoint has in several: name and kind of rows of each.
        drafts: outer names of draft layers, by those in their blocks, which follow the layers.
        first_layer: number of the first block with this naming.
    """

    outer: Mapping[str, str]
    layers: Mapping[str, str]
    layers_prefix: str = "model.layers."
    rows: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    negative_exps: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    own_names: Mapping[str, str] = field(default_factory=dict)
    swaps_experts: bool = True
    partners: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    drafts: Mapping[str, str] = field(default_factory=dict)
    first_layer: int = 0


_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LAYER_NAMES = _ATTENTION | _FEED_FORWARD
_GEMMA = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{part}_exps": f"mlp.experts.{{x}}.{part}_proj" for part in ("gate", "up", "down")
}
_SHARED = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | {
    f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{x}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{x}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{x}.w2",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_NEOX = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_LAST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_UNGATED = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GLM4 = _ATTENTION | {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}
_GPT_OSS = {name: _ATTENTION[name] for name in _ATTENTION if name != "ffn_norm"} | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_GEMMA4 = {
    **_GEMMA,
    **_HEAD_NORMS,
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_TURNED = {"attn_q": "alternating", "attn_k": "alternating"}
_DELTA = {
    **{name: _ATTENTION[name] for name in _ATTENTION if name != "ffn_norm"},
    **_HEAD_NORMS,
    **_FEED_FORWARD,
    **_EXPERTS,
    **_SHARED,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_OF_DELTA: dict[str, Any] = {
    "offset": 1.0,
    "plain_norms": ("ssm_norm",),
    "negative_exps": ("ssm_a",),
    "own_names": {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    "drafts": {
        "nextn.eh_proj": "mtp.fc",
        "nextn.enorm": "mtp.pre_fc_norm_embedding",
        "nextn.hnorm": "mtp.pre_fc_norm_hidden",
        "nextn.shared_head_norm": "mtp.norm",
    },
}
_QWEN35 = Naming(
    _OUTER_NAMES,
    _DELTA,
    rows={"attn_qkv": "values_around"}
    | {"ssm_conv1d": "values_around"}
    | dict.fromkeys(("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), "around"),
    columns={"ssm_out": "around"},
    **_OF_DELTA,
)

NAMINGS: Mapping[str, Naming] = {
    "llama": Naming(_OUTER_NAMES, _LAYER_NAMES | _MIXTRAL, rows=_TURNED),
    "qwen2": Naming(_OUTER_NAMES, _LAYER_NAMES),
    "qwen3": Naming(_OUTER_NAMES, _LAYER_NAMES | _HEAD_NORMS),
    "qwen2moe": Naming(_OUTER_NAMES, _LAYER_NAMES | _EXPERTS | _SHARED),
    "qwen3moe": Naming(_OUTER_NAMES, _LAYER_NAMES | _HEAD_NORMS | _EXPERTS),
    "gemma2": Naming(_OUTER_NAMES, _GEMMA, offset=1.0),
    "gemma3": Naming(_OUTER_NAMES, _GEMMA | _HEAD_NORMS, offset=1.0),
    "gemma4": Naming(
        {
            **_OUTER_NAMES,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        _GEMMA4,
        own_names={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        swaps_experts=False,
    ),
    "phi3": Naming(_OUTER_NAMES, _PHI3),
    "starcoder2": Naming(_OUTER_NAMES, _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "gpt2": Naming(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        _GPT2,
        "transformer.h.",
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "gptneox": Naming(
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        _NEOX,
        "gpt_neox.layers.",
        rows={"attn_qkv": "parted"},
    ),
    "arcee": Naming(_OUTER_NAMES, _ATTENTION | _UNGATED, rows=_TURNED),
    "smollm3": Naming(_OUTER_NAMES, _LAYER_NAMES, rows=_TURNED),
    "granite": Naming(_OUTER_NAMES, _LAYER_NAMES, rows=_TURNED),
    "olmo2": Naming(_OUTER_NAMES, _LAYER_NAMES | _HEAD_NORMS | _LAST_NORMS),
    "glm4": Naming(_OUTER_NAMES, _GLM4),
    "seed_oss": Naming(_OUTER_NAMES, _LAYER_NAMES | _LAST_NORMS),
    "exaone4": Naming(_OUTER_NAMES, _LAYER_NAMES | _HEAD_NORMS | _LAST_NORMS),
    "hunyuan-dense": Naming(
        _OUTER_NAMES,
        _LAYER_NAMES | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "command-r": Naming(_OUTER_NAMES, _LAYER_NAMES | _HEAD_NORMS),
    "cohere2": Naming(_OUTER_NAMES, _LAYER_NAMES),
    "stablelm": Naming(
        _OUTER_NAMES,
        _LAYER_NAMES | {f"attn_{part}_norm": f"self_attn.{part}_layernorm.norms.{{x}}" for part in ("q", "k")},
    ),
    "nemotron": Naming(_OUTER_NAMES, _ATTENTION | _UNGATED, offset=1.0),
    "ernie4_5": Naming(_OUTER_NAMES, _LAYER_NAMES),
    "gpt-oss": Naming(
        _OUTER_NAMES,
        _GPT_OSS,
        own_names={
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        partners={"ffn_gate_exps": "ffn_up_exps"},
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    # The two projections of Qwen3-Next are read as the four of Qwen3.5, whose language model is the same.
    "qwen3next": Naming(
        _OUTER_NAMES,
        _DELTA,
        parts={
            "ssm_ba": {"linear_attn.in_proj_b": "betas", "linear_attn.in_proj_a": "alphas"},
            "ssm_in": {"linear_attn.in_proj_qkv": "joint_qkv", "linear_attn.in_proj_z": "joint_gates"},
        },
        **_OF_DELTA,
    ),
    "lfm2": Naming(_OUTER_NAMES | {"token_embd_norm": "model.embedding_norm"}, _LFM2),
}
"""By the names of architectures in llama.cpp."""


def places(file: GgufFile, config: ModelConfig) -> dict[str, TensorLocation]:
    """Return the place of each tensor by its checkpoint name; unknown tensors keep their name in the file.

    Raises:
        Unsupported: a tensor has an unsupported layout.
    """
    naming = NAMINGS[file.architecture]
    orders = _Orders(config.num_heads, config.num_kv_heads, getattr(config, "delta", None))
    found: dict[str, TensorLocation] = {}
    for name, tensor in file.tensors.items():
        if name not in ROPE_TENSORS:
            found.update(_named(_find_naming(naming, name, config.num_layers), name, tensor, orders))
    joint = {place.partner for place in found.values()}
    return {name: place for name, place in found.items() if name not in joint or place.partner}


def _find_naming(naming: Naming, name: str, num_layers: int) -> Naming:
    """Return the naming of a tensor: blocks after the layers are draft layers."""
    layer = _LAYER.fullmatch(name)
    if layer is None or not naming.drafts or int(layer[1]) < num_layers:
        return naming
    return dataclasses.replace(naming, layers_prefix="mtp.layers.", first_layer=num_layers)


def _named(naming: Naming, name: str, tensor: GgufTensor, orders: _Orders) -> Iterator[tuple[str, TensorLocation]]:
    outer, layer = _OUTER.fullmatch(name), _LAYER.fullmatch(name)
    if outer is not None and outer[1] in naming.outer:
        offset = naming.offset if outer[1].endswith("_norm") and outer[2] == "weight" else 0.0
        yield f"{naming.outer[outer[1]]}.{outer[2]}", TensorLocation(name, offset=offset)
        return
    if layer is None:
        yield name, TensorLocation(name)
        return
    number, stem, end = layer.groups()
    if naming.first_layer and stem in naming.drafts:
        yield f"{naming.drafts[stem]}.{end}", TensorLocation(name, offset=naming.offset if "norm" in stem else 0.0)
        return
    prefix = f"{naming.layers_prefix}{int(number) - naming.first_layer}."
    num_rows = tensor.shape[0] if tensor.shape else 0
    order = orders.of(naming.rows.get(stem), stem, num_rows)
    if (own := naming.own_names.get(stem if end is None else f"{stem}.{end}")) is not None:
        partner = naming.partners.get(stem, "")
        yield (
            f"{prefix}{own}",
            TensorLocation(
                name,
                rows=order,
                is_negative_exp=stem in naming.negative_exps,
                partner=partner and f"blk.{number}.{partner}.{end}",
                has_all_experts=len(tensor.shape) == 3,
                swaps_experts=naming.swaps_experts and len(tensor.shape) == 3,
            ),
        )
        return
    for part, kind in naming.parts.get(stem, {}).items():
        yield f"{prefix}{part}.{end}", TensorLocation(name, rows=orders.of(kind, stem, num_rows))
    if stem in naming.parts:
        return
    if stem not in naming.layers or end is None:
        for pattern, content in _OTHER_LAYOUTS.items():
            if re.fullmatch(pattern, name):
                raise Unsupported(f"{tensor.path}: tensor {name} is not supported: it has {content}")
        yield name, TensorLocation(name)
        return
    path = f"{prefix}{naming.layers[stem]}.{end}"
    if "{x}" in path:
        for expert in range(num_rows):
            yield path.format(x=expert), TensorLocation(name, expert)
        return
    is_moved = stem.endswith("_norm") and stem not in naming.plain_norms and end == "weight"
    yield (
        path,
        TensorLocation(
            name,
            rows=order,
            columns=orders.of(naming.columns.get(stem), stem, tensor.shape[-1]),
            offset=naming.offset if is_moved else 0.0,
            is_transposed=stem in naming.transposed and end == "weight",
            new_axis=_new_axis(stem, tensor),
        ),
    )


def _new_axis(stem: str, tensor: GgufTensor) -> int | None:
    """Return the place of the axis of 1 of shared experts' gates and of convolutions."""
    if stem == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        return 0
    return 1 if stem in ("shortconv.conv", "ssm_conv1d") and len(tensor.shape) == 2 else None


@dataclass(frozen=True, slots=True)
class _Orders:
    """Row orders of a model with these numbers of heads."""

    num_heads: int
    num_kv_heads: int
    delta: DeltaShape | None

    def of(self, kind: str | None, stem: str, num_rows: int) -> np.ndarray | None:
        if kind is None:
            return None
        if self.delta is not None:
            return _delta_order(kind, self.delta, num_rows)
        # Reading the tensor raises an error, with its name, if heads do not divide the number of rows.
        num_heads = self.num_kv_heads if stem == "attn_k" else self.num_heads
        shape = (num_heads, -1, 2) if kind == "alternating" else (3, num_heads, -1)
        if num_rows % (num_heads * (2 if kind == "alternating" else 3)):
            return None
        axes = (1, 2) if kind == "alternating" else (0, 1)
        return np.arange(num_rows).reshape(shape).swapaxes(*axes).reshape(-1)


def _delta_order(kind: str, delta: DeltaShape, num_rows: int) -> np.ndarray | None:
    """Return the row of the file for each row of a checkpoint; None if heads do not divide the number of rows.

    Value heads are grouped by key head in checkpoints. A file that goes around has the first of each group first.
    """
    num_keys, width = delta.num_key_heads, delta.key_dim
    per_key = delta.num_value_heads // num_keys
    if kind in ("around", "values_around"):
        first = 0 if kind == "around" else 2 * num_keys * width
        if per_key == 1 or num_rows <= first or (num_rows - first) % delta.num_value_heads:
            return None
        values = np.arange(first, num_rows).reshape(per_key, num_keys, -1).swapaxes(0, 1).reshape(-1)
        return np.concatenate([np.arange(first), values])
    sizes = (per_key, per_key) if kind in ("betas", "alphas") else (width, width, *(per_key * delta.value_dim,) * 2)
    if num_rows != num_keys * sum(sizes):
        return None
    parts = np.split(np.arange(num_rows).reshape(num_keys, -1), np.cumsum(sizes)[:-1], axis=1)
    chosen = {"betas": parts[:1], "alphas": parts[1:], "joint_qkv": parts[:3], "joint_gates": parts[3:]}[kind]
    return np.concatenate([part.reshape(-1) for part in chosen])


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """The tensors of a file, as a `TensorSource`: weights, in float32 if they are quantized, or blocks.

    Attributes:
        places: of tensors, by their names in a checkpoint.
        blocks: names of tensors that are read as stored blocks: rows of bytes `[out, bytes]`.
    """

    file: GgufFile
    places: Mapping[str, TensorLocation]
    blocks: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """See `TensorSource`."""
        return frozenset(self.places)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        tensor, place = self._stored(name), self.places[name]
        if name in self.blocks:
            block = BLOCK_TYPES[tensor.kind]
            *outer, num_out, depth = tensor.shape if place.has_all_experts else tensor.shape[-2:]
            num_out = num_out if place.rows is None else len(place.rows)
            return *outer, num_out * (2 if place.partner else 1), depth // block.size * block.num_bytes
        return place.shape(tensor)

    def dtype(self, name: str) -> np.dtype:
        """See `TensorSource`.

        Raises:
            Unsupported: the type is not supported.
        """
        tensor = self._stored(name)
        if tensor.kind not in READ:
            raise Unsupported(
                f"{tensor.path}: tensor {name} has type {tensor.kind}; supported GGUF types: {', '.join(READ)}"
            )
        if name in self.blocks:
            return np.dtype(np.uint8)
        place = self.places[name]
        is_changed = place.offset or place.is_negative_exp
        return np.dtype(np.float32) if is_changed else FLOATS.get(tensor.kind, np.dtype(np.float32))

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource`; of a quantized tensor only the rows of the part are converted.

        Raises:
            InvalidArgument: it is misshapen, or stored blocks are not finite.
            Unsupported: the type is not supported.
        """
        check_shape(self, name, shape)
        self.dtype(name)
        tensor, place = self._stored(name), self.places[name]
        if place.partner or place.has_all_experts:
            return self._read_experts(name)[index]
        data = tensor.read(place.expert)
        if name in self.blocks:
            rows = _rows(data, place, index[:1])
            if not BLOCK_TYPES[tensor.kind].is_finite(rows):
                raise InvalidArgument(str(tensor.path), f"tensor {name} has block scales that are not finite")
            return rows
        if place.is_transposed or place.new_axis is not None:
            whole = dequantize_blocks(tensor.kind, _rows(data, place, ()))
            found: np.ndarray = whole.T if place.new_axis is None else np.expand_dims(whole, place.new_axis)
            return found[index]
        weights = dequantize_blocks(tensor.kind, _rows(data, place, index[:1]))
        if place.columns is not None:
            weights = weights[:, place.columns]
        if len(index) > 1:
            weights = weights[(slice(None), *index[1:])]
        if place.is_negative_exp:
            return np.asarray(np.log(-weights.astype(np.float32)))
        return weights - np.float32(place.offset) if place.offset else weights

    def _read_experts(self, name: str) -> np.ndarray:
        """Return a tensor with all experts, as weights or as rows of blocks; partners' rows alternate."""
        place, parts = self.places[name], list[np.ndarray]()
        for own in filter(None, (place.tensor, place.partner)):
            tensor = self.file.tensors.get(own)
            if tensor is None:
                raise InvalidArgument(str(self._stored(name).path), f"tensor {own} is missing")
            if tensor.shape != self._stored(name).shape:
                problem = f"tensor {own} has shape {list(tensor.shape)}, and {place.tensor} another one"
                raise InvalidArgument(str(tensor.path), problem)
            data = np.asarray(tensor.read())
            rows = data.reshape(-1, data.shape[-1])
            if name not in self.blocks:
                rows = dequantize_blocks(tensor.kind, rows)
            elif not BLOCK_TYPES[tensor.kind].is_finite(rows):
                raise InvalidArgument(str(tensor.path), f"tensor {own} has block scales that are not finite")
            parts.append(rows.reshape(*tensor.shape[:-1], -1) if len(tensor.shape) > 2 else rows)
        found = parts[0]
        if len(parts) > 1:
            found = np.stack(parts, axis=2).reshape(len(found), -1, *found.shape[2:])
        return found.swapaxes(1, 2) if place.swaps_experts and name not in self.blocks else found

    def where(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._stored(name).path if name in self.places else self.file.path

    def _stored(self, name: str) -> GgufTensor:
        return self.file.tensors[self.places[name].tensor]


def _rows(data: np.ndarray, place: TensorLocation, index: tuple[slice, ...]) -> np.ndarray:
    """Return all rows of a tensor, or a part of them, in the checkpoint's order."""
    if place.rows is not None:
        return data[place.rows[index]] if index else data[place.rows]
    return np.asarray(data[index] if index else data)


_METHOD = "gguf"
_EVERYTHING = Quantization(_METHOD, (("", MatrixFormat("int8")),), has_output=True, has_embedding=True)


@dataclass(frozen=True, slots=True)
class GgufScheme:
    """The layout of a GGUF model's quantized matrices.

    Attributes:
        kinds: GGUF type by module name.
        columns: index of each column in the file, by the names of modules with columns in another order.
    """

    quantization: Quantization
    kinds: Mapping[str, str]
    columns: Mapping[str, np.ndarray]

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`; the key of a part is its type, with the module's name if its columns have another order."""
        kind = self.kinds[module]
        block = BLOCK_TYPES[kind]
        if len(shape) > 2:
            num_experts, depth, num_out = shape
            return {
                kind: MatrixPart(module, ((num_experts, num_out, depth // block.size * block.num_bytes),), ("uint8",))
            }
        num_out, depth = shape
        key = f"{kind} {module}" if module in self.columns else kind
        return {key: MatrixPart(f"{module}.weight", ((num_out, depth // block.size * block.num_bytes),), ("uint8",))}

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        ((key, rows),) = tensors.items()
        kind, _, module = key.partition(" ")
        matrix = BLOCK_TYPES[kind].matrix(rows.reshape(-1, rows.shape[-1]), form)
        if module:
            assert form.group_size is not None
            order = self.columns[module]
            groups = order[:: form.group_size] // form.group_size
            zeros = None if matrix.zeros is None else matrix.zeros[:, groups]
            return dataclasses.replace(
                matrix, values=matrix.values[:, order], scales=matrix.scales[:, groups], zeros=zeros
            )
        if rows.ndim < 3:
            return matrix
        values, scales, zeros = (
            None if each is None else each.reshape(*rows.shape[:2], -1).swapaxes(1, 2)
            for each in (matrix.values, matrix.scales, matrix.zeros)
        )
        assert values is not None
        assert scales is not None
        return dataclasses.replace(matrix, values=values, scales=scales, zeros=zeros)


def get_columns(files: GgufTensors, scheme: GgufScheme, leaf: Leaf, form: MatrixFormat) -> StoredColumns | None:
    """Return the columns of a leaf, which is no expert's, as rows of blocks in the file.

    None if the kernel's library does not read blocks of these types.

    Raises:
        InvalidArgument: a tensor of it is missing or misshapen.
    """
    modules = [get_module(name) for name, _ in leaf.tensors]
    if any(scheme.kinds[module] not in PACKED_TYPES or module in scheme.columns for module in modules):
        return None
    place = len(leaf.shape) + contracted_axis(leaf)
    stored_axis = leaf.tensor_axes[place]
    assert stored_axis is not None
    numbered, tensors, num_rows = [], [], 0
    for name, shape in leaf.tensors:
        num_out, depth = shape if stored_axis == 1 else shape[::-1]
        check_parts(files, scheme.parts(get_module(name), (num_out, depth), form), (num_out, depth))
        tensors.append((name, files.places[name].rows, num_rows))
        numbered.append(np.swapaxes(np.arange(num_rows, num_rows + num_out)[:, None], stored_axis, 1))
        num_rows += num_out
    # The leaf's own order of columns, from a column of row numbers in place of weights.
    packed = np.empty((*leaf.shape[:place], 1, *leaf.shape[place + 1 :]), np.int64)
    leaf.pack(numbered, packed)
    return _columns(files, tensors, packed.reshape(-1))


def _columns(
    files: GgufTensors, tensors: Sequence[tuple[str, np.ndarray | None, int]], numbers: np.ndarray
) -> StoredColumns:
    """Return columns, by the numbers of their rows in several tensors.

    Args:
        tensors: name, index of each row in the file or None, and the number of the first row.
    """
    begins = np.array([begin for *_, begin in tensors])
    owners = np.searchsorted(begins, numbers, side="right") - 1
    rows = numbers - begins[owners]
    for index, (_, order, _) in enumerate(tensors):
        if order is not None:
            rows[owners == index] = order[rows[owners == index]]
    stored = [files.file.tensors[files.places[name].tensor] for name, *_ in tensors]
    row_bytes = [tensor.stored_shape[-1] for tensor in stored]
    buffers = threading.local()

    def buffer(num_bytes: int) -> np.ndarray:
        """Return this thread's memory, which the next call overwrites: mapping new pages takes as long as reading."""
        if len(getattr(buffers, "bytes", ())) < num_bytes:
            buffers.bytes = np.empty(num_bytes, np.uint8)
        memory: np.ndarray = buffers.bytes
        return memory

    def read(begin: int, end: int) -> tuple[np.ndarray, object]:
        own, at = owners[begin:end], rows[begin:end]
        among = [(i, at[own == i]) for i in range(len(stored))]
        spans = {i: (int(mine.min()), int(mine.max()) + 1) for i, mine in among if len(mine)}
        memory = buffer(sum((last - first) * row_bytes[i] for i, (first, last) in spans.items()))
        addresses, used = np.empty(end - begin, np.uint64), 0
        for i, (first, last) in spans.items():
            num_bytes = (last - first) * row_bytes[i]
            file = StableFile(stored[i].path, stored[i].state)
            try:
                file.fill(memory[used : used + num_bytes], stored[i].begin + first * row_bytes[i])
            finally:
                file.close()
            addresses[own == i] = memory.ctypes.data + used + (at[own == i] - first) * row_bytes[i]
            used += num_bytes
        return addresses, memory

    kinds = np.array([PACKED_TYPES.index(tensor.kind) for tensor in stored], np.uint8)
    return StoredColumns(
        kinds[owners],
        max(row_bytes),
        read,
        lambda column: (str(stored[owners[column]].path), tensors[owners[column]][0]),
    )


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in GGUF, with everything needed to load it.

    Attributes:
        config: as parsed by the family, with the quantization.
        hf: the same as a config.json.
        scheme: None if no matrix stays quantized.
    """

    file: GgufFile
    config: ModelConfig
    hf: Mapping[str, object]
    scheme: GgufScheme | None
    places: Mapping[str, TensorLocation]

    def widening(self) -> str | None:
        """Return what the types with fewer bits in the file than in memory cost; None if there are none."""
        if self.scheme is None:
            return None
        kinds, stored, kept = set(), 0, 0
        for module, kind in self.scheme.kinds.items():
            form = self.scheme.quantization.get_format(module)
            if (kind in PACKED_TYPES and module not in self.scheme.columns) or form is None:
                continue
            place = self.places[_get_tensor(module, self.places)]
            tensor = self.file.tensors[place.tensor]
            num_out, depth = tensor.shape[-2:]
            if place.has_all_experts:
                num_out *= tensor.shape[0] * (2 if place.partner else 1)
            block = BLOCK_TYPES[kind]
            kinds.add(kind)
            stored += num_out * depth // block.size * block.num_bytes
            of_group = 4 * (1 + form.has_zeros)
            kept += num_out * (depth * NUM_BITS[form.values] // 8 + form.num_groups(depth) * of_group)
        if kept <= stored:
            return None
        return (
            f"{', '.join(sorted(kinds))}: {stored / 2**20:.1f} MiB in the file take up to {kept / 2**20:.1f} MiB in "
            "memory, because no kernel multiplies these types as stored; the weights are the same"
        )

    def tensors(self, *, as_weights: bool = False) -> GgufTensors:
        """Return its tensors; quantized ones for the scheme, or all of them as weights."""
        modules = () if self.scheme is None or as_weights else self.scheme.kinds
        return GgufTensors(self.file, self.places, frozenset(_get_tensor(module, self.places) for module in modules))


def read_model(path: Path, *, keeps_embedding: bool = True) -> GgufModel:
    """Return the model in a file.

    Args:
        keeps_embedding: the token embedding stays quantized, which a tied one does as the output matrix too.

    Raises:
        InvalidArgument: the file is broken, or something in it is missing or malformed.
        Unsupported: its architecture, or a setting, is not supported.
    """
    file = open_gguf(path)
    hf = hf_config(file)
    config = from_hf(hf)
    found = places(file, config)
    formed = dict(_forms(config, file, found, keeps_embedding))
    if not formed:
        return GgufModel(file, config, hf, None, found)
    quantization = Quantization(_METHOD, _rules(formed), has_output=True, has_embedding=keeps_embedding)
    located = {module: found[_get_tensor(module, found)] for module in formed}
    kinds = {module: file.tensors[place.tensor].kind for module, place in located.items()}
    columns = {module: place.columns for module, place in located.items() if place.columns is not None}
    config = dataclasses.replace(config, quantization=quantization)
    return GgufModel(file, config, hf, GgufScheme(quantization, kinds, columns), found)


def _get_tensor(module: str, found: Mapping[str, TensorLocation]) -> str:
    """Return the name of a module's matrix; one with all experts is called as the module."""
    return module if module in found else f"{module}.weight"


def _forms(
    config: ModelConfig, file: GgufFile, found: Mapping[str, TensorLocation], keeps_embedding: bool
) -> Iterator[tuple[str, MatrixFormat]]:
    """Yield each module that stays quantized, and its format."""
    leaves = model_leaves(config, found)
    for leaf in (leaf for each in (leaves.outer, *leaves.layers) for leaf in each):
        if not _may_be_quantized(leaf) or (leaf.path[0] == "embed" and not keeps_embedding):
            continue
        kinds = [_kind(file, found, name, shape) for name, shape in leaf.tensors]
        if all(kind in BLOCK_TYPES for kind in kinds):
            form = joint_form([BLOCK_TYPES[kind].form for kind in kinds])
            if any(_splits_groups(found[name].columns, form) for name, _ in leaf.tensors):
                continue
            for name, _ in leaf.tensors:
                yield get_module(name), form


def _splits_groups(columns: np.ndarray | None, form: MatrixFormat) -> bool:
    """Return True if columns that share a scale in the file are apart in the checkpoint."""
    if columns is None:
        return False
    assert form.group_size is not None
    if len(columns) % form.group_size:
        return True
    groups = columns.reshape(-1, form.group_size)
    return bool((groups != groups[:, :1] + np.arange(form.group_size)).any() or (groups[:, 0] % form.group_size).any())


def _may_be_quantized(leaf: Leaf) -> bool:
    return is_matrix(leaf) and all(form is not None for form in stored_formats(_EVERYTHING, leaf))


def _kind(file: GgufFile, found: Mapping[str, TensorLocation], name: str, shape: Shape) -> str:
    """Return the GGUF type of a tensor; empty if it does not exist or has another shape, which its reader refuses."""
    if name not in found:
        return ""
    tensor, partner = file.tensors[found[name].tensor], file.tensors.get(found[name].partner)
    if partner is not None and partner.kind != tensor.kind:
        return ""
    return tensor.kind if found[name].shape(tensor) == shape else ""


def _rules(forms: Mapping[str, MatrixFormat]) -> tuple[tuple[str, MatrixFormat | None], ...]:
    """Return rules that give each module its format: one rule for modules that differ only in their numbers.

    The first number of a name is the layer's. The second is an expert's; experts are one tensor with one format.
    """
    layers: dict[tuple[str, MatrixFormat], set[str]] = defaultdict(set)
    for module, form in forms.items():
        first, *others = re.split(r"(?<=\.)(\d+)(?=\.)", module, maxsplit=1)
        rest = re.sub(r"(?<=\.)\d+(?=\\.)", r"\\d+", re.escape(others[1])) if others else ""
        layers[f"^{re.escape(first)}{'(#)' if others else ''}{rest}$", form].update(others[:1])
    return tuple(
        (pattern.replace("#", "|".join(sorted(numbers, key=int))), form) for (pattern, form), numbers in layers.items()
    )
