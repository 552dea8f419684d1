"""Checkpoints of compressed-tensors, as llm-compressor writes them.

    int-quantized     weight         int8 [out, in]
    float-quantized   weight         float8_e4m3fn [out, in]
    pack-quantized    weight_packed  int32 [out, ceil(in * bits / 32)], numbers from 0 on, the first in the lowest bits
                      weight_shape   [2]
    mxfp4-pack-quantized             uint8 [out, in / 2], scales uint8 with 127 for 1
    nvfp4-pack-quantized             likewise, scales float8_e4m3fn
      weight_global_scale            [1], divisor of the scales
    mxfp8-quantized   weight         float8_e4m3fn [out, in], scales uint8 with 127 for 1

    weight_scale       [1], [out, 1], [out, groups], or [ceil(out / rows), ceil(in / columns)] of blocks
    weight_zero_point  likewise int8; of pack-quantized int32 [ceil(out * bits / 32), groups]
    weight_g_idx       int32 [in], if groups are ordered by activations; if missing or -1, groups are consecutive
    input_scale        [1], if activations are static

    weight = scale * (number - zero)

`config_groups` assigns these to modules; `ignore` takes precedence. A dynamic activation scale of a whole batch is read
as one scale per row, because otherwise a row's result would depend on the other rows. NVFP4 becomes int8, in six bits
on CPUs: twice its numbers are whole, and kernels of float4 require scales that are powers of two. Its activations are
not rounded to float4.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jpaged.checkpoints.quantized.floats import (
    NVFP4_WIDENING,
    block_sizes,
    not_a_power,
    one_number,
    powers_of_two,
    read_fp8,
    twice_e2m1,
    unpack_e2m1,
)
from jpaged.checkpoints.quantized.scheme import (
    FLOATS,
    MatrixPart,
    Parts,
    Shape,
    StoredMatrix,
    from_start,
    not_among,
    require_whole,
    signed,
    words_to_numbers,
)
from jpaged.errors import Unsupported
from jpaged.kernels.matrix_format import Activations, MatrixFormat, Values
from jpaged.models.config import Quantization
from jpaged.models.json_fields import JsonFields

PACKED, INTEGERS, FLOATING = "pack-quantized", "int-quantized", "float-quantized"
MXFP4, NVFP4, MXFP8 = "mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"
_NAIVE = "naive-quantized"  # old checkpoints' name of the two formats that are not packed
_WEIGHTS: Mapping[tuple[str, str, int], Values] = {
    (PACKED, "int", 4): "int4",
    (PACKED, "int", 8): "int8",
    (INTEGERS, "int", 4): "int4",
    (INTEGERS, "int", 8): "int8",
    (FLOATING, "float", 8): "fp8",
    (MXFP4, "float", 4): "mxfp4",
    (NVFP4, "float", 4): "int8",
    (MXFP8, "float", 8): "fp8",
}
_OBSERVERS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_ORDERS = ("group", "dynamic", "weight", "static")
"""Group orders: by activations, which is stored as weight_g_idx, and by weights, which is not; two names each."""
_BLOCKS = {MXFP4: 32, NVFP4: 16, MXFP8: 32}
"""Numbers that share a scale in formats that have a single group size."""
_LEAST_DIVISOR = 1e-30
"""Limit of the divisor of NVFP4's scales, which are up to 448: float32 ends at 3e38."""
_LINEAR, _EXPRESSION = "Linear", "re:"
_NOT_SET = -1
_MIDDLES = np.array([0x88888888, 0x80808080], np.uint32)
"""Words of zero points in the middle, of 4 and of 8 bits."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Storage of the matrices of one group of modules.

    Attributes:
        written: the name of the format.
        block_rows: outputs that share a scale; None without blocks.
    """

    written: str
    form: MatrixFormat
    block_rows: int | None = None


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The layouts of a checkpoint of compressed-tensors, in the order of the quantization rules."""

    quantization: Quantization
    layouts: tuple[Layout | None, ...]

    def widening(self) -> str | None:
        """Return what the formats with fewer bits in the file than in memory cost; None if there are none."""
        if all(layout is None or layout.written != NVFP4 for layout in self.layouts):
            return None
        return f"{NVFP4}: {NVFP4_WIDENING}"

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`."""
        layout = self._get_layout(module)
        (num_out, depth), groups = shape, form.num_groups(shape[1])
        scale_shapes: tuple[Shape, ...] = ((num_out, groups),)
        if groups == 1:
            scale_shapes = ((num_out, 1), (num_out,), (1,), (), (1, 1))
        if layout.block_rows is not None:
            scale_shapes = ((-(-num_out // layout.block_rows), groups),)
        scale = MatrixPart(f"{module}.weight_scale", scale_shapes, FLOATS, block_rows=layout.block_rows or 1)
        if layout.written in (MXFP4, MXFP8):
            scale = dataclasses.replace(scale, dtypes=("uint8",), problem=not_a_power)
        parts = {"scale": scale}
        if layout.written == NVFP4:
            parts["scale"] = dataclasses.replace(scale, dtypes=("float8_e4m3fn",))
            whole = MatrixPart(f"{module}.weight_global_scale", ((1,), ()), FLOATS, problem=_not_a_divisor)
            inputs = f"{module}.input_global_scale"
            parts |= {"whole": whole, "inputs": dataclasses.replace(whole, name=inputs, is_optional=True)}
        if layout.written == PACKED:
            bits = 8 if form.values == "int8" else 4
            parts["packed"] = MatrixPart(
                f"{module}.weight_packed", ((num_out, math.ceil(depth * bits / 32)),), ("int32",)
            )
            parts["shape"] = MatrixPart(f"{module}.weight_shape", ((2,),), ("int64", "int32"), is_optional=True)
            zeros = MatrixPart(f"{module}.weight_zero_point", ((math.ceil(num_out * bits / 32), groups),), ("int32",))
        elif layout.written in (MXFP4, NVFP4):
            require_whole(module, shape, 2)
            parts["packed"] = MatrixPart(f"{module}.weight_packed", ((num_out, depth // 2),), ("uint8",))
        else:
            stored = "int8" if layout.written == INTEGERS else "float8_e4m3fn"
            parts["weight"] = MatrixPart(f"{module}.weight", (shape,), (stored,))
            zeros = MatrixPart(f"{module}.weight_zero_point", scale_shapes, ("int8",))
        if form.has_zeros:
            parts["zeros"] = zeros
        else:
            shapes = (*scale_shapes, *((math.ceil(num_out * bits / 32), groups) for bits in (4, 8)))
            dtypes = ("int8", "uint8", "int32", "float8_e4m3fn", *FLOATS)
            parts["no_zeros"] = MatrixPart(
                f"{module}.weight_zero_point", shapes, dtypes, is_optional=True, problem=_not_symmetric
            )
        if form.has_group_ids:
            among = not_among(groups, _NOT_SET)
            parts["ids"] = MatrixPart(
                f"{module}.weight_g_idx", ((depth,),), ("int32",), is_optional=True, problem=among
            )
        if form.has_input_scale:
            parts["input_scale"] = MatrixPart(f"{module}.input_scale", ((1,), ()))
        return parts

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        (num_out, depth), groups = shape, form.num_groups(shape[1])
        if tensors["scale"].dtype == np.uint8:
            tensors = {**tensors, "scale": powers_of_two(tensors["scale"])}
        if form.values == "fp8":
            return read_fp8(tensors, shape, form)
        if form.values == "mxfp4":
            return StoredMatrix(unpack_e2m1(tensors["packed"]), tensors["scale"])
        if "whole" in tensors:
            halves = tensors["scale"].astype(np.float32) / tensors["whole"].astype(np.float32) / 2
            return StoredMatrix(twice_e2m1(tensors["packed"]), halves)
        scales = tensors["scale"].astype(np.float32).reshape(-1, groups)
        zeros = tensors.get("zeros")
        if "packed" in tensors:
            bits = 8 if form.values == "int8" else 4
            values = signed(words_to_numbers(tensors["packed"], bits)[:, :depth], bits)
            if zeros is not None:
                columns = words_to_numbers(np.ascontiguousarray(zeros.T), bits)
                zeros = signed(columns.T[:num_out], bits)
        else:
            values, zeros = tensors["weight"], None if zeros is None else zeros.reshape(-1, groups)
        ids = _get_groups(tensors.get("ids"), depth, form) if form.has_group_ids else None
        return StoredMatrix(values.astype(form.dtype), scales, zeros, ids, one_number(tensors))

    def _get_layout(self, module: str) -> Layout:
        place = self.quantization.get_rule(module)
        layout = None if place is None else self.layouts[place]
        assert layout is not None
        return layout


def _not_symmetric(zeros: np.ndarray) -> str | None:
    """Return the problem of a symmetric matrix with zero points that are not the middle; None if there is none."""
    if not zeros.any() or (zeros.dtype == np.int32 and np.isin(zeros.view(np.uint32), _MIDDLES).all()):
        return None
    return "has zero points, but symmetric is true in quantization_config"


def _not_a_divisor(scale: np.ndarray) -> str | None:
    """Return the problem of a divisor that is not above 0, or by which scales overflow; None if there is none."""
    value = float(scale.reshape(-1)[0])
    return None if value >= _LEAST_DIVISOR else f"is {value:g}; it must be at least {_LEAST_DIVISOR:g}"


def _get_groups(ids: np.ndarray | None, depth: int, form: MatrixFormat) -> np.ndarray:
    """Return the group of each number: as listed, or consecutive if the list is missing or not set."""
    if ids is None or (ids == _NOT_SET).any():
        return np.arange(depth, dtype=np.int32) // np.int32(form.group_size or depth)
    return ids


def read_config(fields: JsonFields) -> CompressedTensors:
    """Parse a `quantization_config` of compressed-tensors.

    Raises:
        Unsupported: a setting is not supported; it is named.
        InvalidArgument: a value is malformed.
    """
    fields.only("quantization_status", "compressed", "frozen", why="weights must be compressed")
    fields.only("transform_config", {}, why="transforms of weights and activations are not supported")
    sparsity = JsonFields(fields.mapping("sparsity_config"), "quantization_config sparsity_config")
    sparsity.only("format", "dense", why="sparse weights are not supported")
    fields.ignore(("quant_method", "global_compression_ratio", "kv_cache_scheme", "version"))
    written = fields.text("format", "")
    rules: list[tuple[str, MatrixFormat | None]] = [(_pattern(name), None) for name in fields.names("ignore")]
    layouts: list[Layout | None] = [None] * len(rules)
    found: list[tuple[str, Layout]] = []
    for name, group in fields.mapping("config_groups").items():
        if not isinstance(group, Mapping):
            raise fields.bad("config_groups", f"{name} is {group!r}; it must be an object")
        found += _group(JsonFields(group, f"quantization_config config_groups {name}"), written)
    # Names take precedence over expressions, and those over the class of all linear layers.
    for target, layout in sorted(found, key=lambda each: (each[0] == _LINEAR, each[0].startswith(_EXPRESSION))):
        rules.append((_pattern(target), layout.form))
        layouts.append(layout)
    return CompressedTensors(Quantization("compressed-tensors", tuple(rules), has_output=True), tuple(layouts))


def _group(fields: JsonFields, written: str) -> list[tuple[str, Layout]]:
    targets = fields.names("targets")
    fields.only("output_activations", why="activations are rounded only before matrix products")
    weights = JsonFields(fields.mapping("weights"), "quantization_config weights")
    layout = _weights(weights, fields.text("format", written))
    if fields.has("input_activations"):
        inputs = JsonFields(fields.mapping("input_activations"), "quantization_config input_activations")
        activations, is_static = _activations(inputs, layout)
        form = dataclasses.replace(layout.form, activations=activations, has_input_scale=is_static)
        layout = dataclasses.replace(layout, form=form)
    fields.ignore(("input_activations",))
    fields.finish()
    return [(target, layout) for target in targets]


def _weights(fields: JsonFields, written: str) -> Layout:
    kind, bits = fields.text("type", "int"), fields.integer("num_bits", 8)
    if written == _NAIVE:
        written = INTEGERS if kind == "int" else FLOATING
    values = _WEIGHTS.get((written, kind, bits))
    if values is None:
        known = ", ".join(f"{name} {kind}{bits}" for name, kind, bits in _WEIGHTS)
        raise Unsupported(
            f"quantization_config: weights of format {written!r}, {kind}{bits}, are not supported; supported: {known}"
        )
    is_symmetric = fields.flag("symmetric", True)
    if not is_symmetric and kind == "float":
        raise Unsupported("quantization_config: symmetric is false; floating weights have no zero points")
    fields.only("dynamic", False, why="weights must be quantized once")
    group_size = fields.integer("group_size", minimum=-1) if fields.has("group_size") else None
    strategy = fields.text("strategy", "tensor" if group_size is None else "channel" if group_size < 0 else "group")
    fields.only("actorder", False, True, *_ORDERS, why=f"supported group orders: {', '.join(_ORDERS)}")
    order, blocks = fields.value("actorder"), fields.value("block_structure")
    if written == NVFP4 and strategy == "tensor_group":
        strategy = "group"
    if strategy not in ("tensor", "channel", "group", "block"):
        raise Unsupported(
            f"quantization_config: strategy of weights is {strategy!r}; supported: tensor, channel, group, block"
        )
    fields.ignore(("group_size", *_OBSERVERS))
    fields.finish()
    form = MatrixFormat(values, has_zeros=not is_symmetric, num_bits=6 if written == NVFP4 else None)
    if strategy == "block":
        if values != "fp8":
            raise Unsupported(
                f"quantization_config: strategy is 'block' with {values}; blocks are supported only for float8"
            )
        rows, columns = block_sizes(blocks)
        return Layout(written, dataclasses.replace(form, group_size=columns), rows)
    if strategy == "group":
        size = group_size if group_size is not None and group_size > 0 else 0
        if size == 0:
            raise fields.bad("group_size", f"is {group_size}; it must be above 0")
        if size != _BLOCKS.get(written, size):
            raise Unsupported(f"quantization_config: group_size is {size}; {written} requires {_BLOCKS[written]}")
        has_ids = order in (True, "group", "dynamic")
        return Layout(written, dataclasses.replace(form, group_size=size, has_group_ids=has_ids))
    if written in _BLOCKS:
        raise Unsupported(f"quantization_config: strategy is {strategy!r}; {written} requires group")
    return Layout(written, form)


def _activations(fields: JsonFields, layout: Layout) -> tuple[Activations | None, bool]:
    """Return the format of activations, and True if the checkpoint has a static scale for them."""
    if layout.written == NVFP4:
        fields.only("type", "float", why="activations of NVFP4 have float4")
        fields.only("num_bits", 4, why="activations of NVFP4 have 4 bits")
        return None, False
    kind, bits, values = fields.text("type", "int"), fields.integer("num_bits", 8), layout.form.values
    is_integer = kind == "int" and bits == 8 and values in ("int8", "int4")
    if not is_integer and not (kind == "float" and bits == 8 and values == "fp8"):
        raise Unsupported(
            f"quantization_config: input_activations of {kind}{bits} with weights of {values} are not supported"
        )
    fields.only("symmetric", True, why="activations with zero points are not supported")
    dynamic = fields.flag("dynamic", False)
    strategy = fields.text("strategy", "tensor")
    group_size = fields.integer("group_size") if fields.has("group_size") and strategy == "group" else None
    fields.ignore(("group_size", "actorder", "block_structure", *_OBSERVERS))
    fields.finish()
    if strategy == "group" and dynamic and not is_integer and group_size == layout.form.group_size:
        return "fp8-groups", False
    if strategy not in (("token", "tensor") if dynamic else ("tensor",)):
        raise Unsupported(
            f"quantization_config: strategy of input_activations is {strategy!r}, dynamic {dynamic}; supported: "
            "token, tensor, group (of the size of the float8 weights' groups), and static tensor"
        )
    return ("int8" if is_integer else "fp8"), not dynamic


def _pattern(target: str) -> str:
    """Return the expression for the modules of a target: a class, a name, or `re:` and a prefix expression."""
    if target == _LINEAR:
        return ""
    if target.startswith(_EXPRESSION):
        return from_start(target.removeprefix(_EXPRESSION))
    return f"^{re.escape(target)}$"
