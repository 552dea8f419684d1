"""FP8 checkpoints: with block scales as in DeepSeek and Qwen, and with a scale per tensor or column.

    weight            float8_e4m3fn [out, in]
    weight_scale_inv  [ceil(out / rows), ceil(in / columns)] of blocks; a factor, despite its name
    weight_scale      of a tensor, or [out, 1]
    input_scale       of a tensor, if activations are static

With dynamic activations each row has a separate scale; with blocks, each row and block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jpaged.checkpoints.quantized.scheme import FLOATS, MatrixPart, Parts, Shape, StoredMatrix, build_rules, within
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.matrix_format import Activations, MatrixFormat
from jpaged.models.config import Quantization
from jpaged.models.json_fields import JsonFields

_FP8 = ("float8_e4m3fn",)
# scale_fmt is how other kernels round the scales of activations; jpaged's are exact.
_HARMLESS = ("quant_method", "fmt", "scale_fmt", "kv_cache_scheme", "kv_cache_quant_method")


@dataclass(frozen=True, slots=True)
class Fp8:
    """The layout of FP8.

    Attributes:
        block_rows: outputs that share a scale; None for one scale for all outputs, or one for each.
    """

    quantization: Quantization
    block_rows: int | None

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`."""
        num_out = shape[0]
        shapes: tuple[Shape, ...] = ((), (1,), (1, 1), (num_out, 1), (num_out,))
        name = "weight_scale"
        if self.block_rows is not None:
            name, shapes = "weight_scale_inv", ((-(-num_out // self.block_rows), form.num_groups(shape[1])),)
        scale_types = (*FLOATS, "float8_e8m0fnu")
        inputs = MatrixPart(f"{module}.input_scale", ((), (1,)), is_optional=not form.has_input_scale)
        return {
            "weight": MatrixPart(f"{module}.weight", (shape,), _FP8),
            "scale": MatrixPart(f"{module}.{name}", shapes, scale_types, block_rows=self.block_rows or 1),
            "input_scale": inputs,
        }

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        return read_fp8(tensors, shape, form)


def read_fp8(tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
    """Return a matrix of float8 numbers with one scale, or scales of rows or groups."""
    scales = tensors["scale"].astype(np.float32).reshape(-1, form.num_groups(shape[1]))
    return StoredMatrix(tensors["weight"], scales, input_scale=one_number(tensors))


def one_number(tensors: Mapping[str, np.ndarray]) -> float | None:
    """Return the scale of inputs, or None."""
    given = tensors.get("input_scale")
    return None if given is None else float(given.reshape(()).astype(np.float32))


def read_config(fields: JsonFields) -> Fp8:
    """Parse a `quantization_config` of FP8.

    Raises:
        Unsupported: a setting is not supported; it is named.
        InvalidArgument: a value is malformed.
    """
    fields.only("fmt", "e4m3", why="only e4m3 is supported")
    scheme = fields.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise Unsupported(f"quantization_config: activation_scheme is {scheme!r}; supported: dynamic, static")
    blocks = fields.value("weight_block_size")
    left = [*fields.names("modules_to_not_convert"), *fields.names("ignored_layers")]
    rounds_rows = not fields.flag("dequantize", False)
    fields.ignore(_HARMLESS)
    if blocks is None:
        activations: Activations | None = "fp8" if rounds_rows else None
        has_input_scale = rounds_rows and scheme == "static"
        form = MatrixFormat("fp8", activations=activations, has_input_scale=has_input_scale)
        return Fp8(Quantization("fp8", build_rules(form, within(left))), None)
    rows, columns = block_sizes(blocks)
    if scheme == "static":
        raise Unsupported("quantization_config: activation_scheme is 'static'; blocks require dynamic")
    form = MatrixFormat("fp8", columns, activations="fp8-groups" if rounds_rows else None)
    return Fp8(Quantization("fp8", build_rules(form, within(left))), rows)


def block_sizes(value: object) -> tuple[int, int]:
    """Parse the rows and columns of a block in a config: two numbers, or `128x128`.

    Raises:
        InvalidArgument: it is something else.
    """
    sizes = [int(size) if size.isdecimal() else 0 for size in value.split("x")] if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    raise InvalidArgument("quantization_config", f"the size of blocks is {value!r}; it must be two numbers above 0")
