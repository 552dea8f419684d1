"""Quantization of 16 or 32 bit weights: one tensor at a time, each column separately, at loading or into a checkpoint.

| option    | values and scales                                        | rows               |
|-----------|----------------------------------------------------------|--------------------|
| int8      | int8, one scale a column                                 | unchanged          |
| int4      | int4, one scale and zero point for 128 numbers of a column | unchanged        |
| fp8       | float8_e4m3fn, one scale a column                        | fp8, a scale a row |

The matrices of layers are quantized; norms, biases and routers are not. The suffix `-all` adds embedding and
output matrix, which become int8 with a scale per token whatever the other matrices become.

A quantized checkpoint has the layouts of compressed-tensors, which vLLM and transformers also read:

    int8, int4   pack-quantized: weight_packed, weight_scale, weight_shape, and weight_zero_point of int4
    fp8          float-quantized: weight, weight_scale

Scales are float32, so that loading the checkpoint gives exactly the numbers of `--quantization`.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import numpy as np

from jpaged.checkpoints.finite import refuse_tensor
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.quantized.compressed_tensors import FLOATING, PACKED
from jpaged.checkpoints.quantized.scheme import Shape, StoredMatrix, numbers_to_words
from jpaged.checkpoints.tensor_files import StoredTensor, TensorSource, read_weight
from jpaged.config.engine_options import OWN_QUANTIZATIONS
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.matmul.quantized import round_to
from jpaged.kernels.matrix_format import NUM_BITS, MatrixFormat
from jpaged.models.config import ModelConfig, Quantization
from jpaged.models.param_specs import Leaf, contracted_axis, get_module, leaf_format
from jpaged.models.registry import find_family

Asked = Literal["int8", "int4", "fp8"]
ASKED: tuple[Asked, ...] = get_args(Asked)
FORMATS: Mapping[Asked, MatrixFormat] = {
    "int8": MatrixFormat("int8"),
    "int4": MatrixFormat("int4", 128, has_zeros=True),
    "fp8": MatrixFormat("fp8", activations="fp8"),
}

_OWN: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in OWN_QUANTIZATIONS},
    "awq_marlin": ("awq",),
    "gptq_marlin": ("gptq",),
    "moe_wna16": ("awq", "gptq"),
    "modelopt_fp4": ("modelopt",),
    "modelopt_mxfp8": ("modelopt",),
}
"""Names of a checkpoint's own method that the option accepts, vLLM's among them, and the methods."""

_ALL = "-all"
_OUTER_FORMAT = MatrixFormat("int8")
"""Format of embedding and output matrix; with a single scale per row, every platform multiplies with the codes."""


def quantized_here(config: ModelConfig, asked: str) -> ModelConfig:
    """Return the config of a model quantized at loading by an option: `auto`, or one of `ASKED`, also with `-all`.

    An option may also name the checkpoint's own method; then nothing changes.

    Raises:
        InvalidArgument: the checkpoint is quantized already, or not with the method that the option names.
    """
    own = config.widened_method if config.quantization is None else config.quantization.method
    if asked in _OWN and own not in _OWN[asked]:
        problem = "is not quantized" if own is None else f"is quantized with {own}"
        advice = f"remove the option, or use one of {', '.join(ASKED)}, which quantize while loading"
        advice = advice if own is None else "remove the option"
        raise InvalidArgument("quantization", f"is {asked}, but the checkpoint {problem}: {advice}")
    if own is not None and (asked in _OWN or asked == own):
        return config
    form = {**FORMATS}.get(cast(Asked, asked.removesuffix(_ALL)))
    if form is None:
        return config
    _require_exact(config, asked)
    rules: tuple[tuple[str, MatrixFormat | None], ...] = (("", form),)
    is_all = asked.endswith(_ALL)
    if is_all:
        outer = (leaf for leaf in model_leaves(config).outer if leaf.path[0] in ("embed", "lm_head"))
        names = {find_family(config.architecture).lm_head, *(name for leaf in outer for name, _ in leaf.tensors)}
        ends = sorted({re.escape(get_module(name).rpartition(".")[2]) for name in names})
        rules = ((rf"(^|\.)({'|'.join(ends)})$", _OUTER_FORMAT), *rules)
    return replace(config, quantization=Quantization(asked, rules, has_output=is_all, has_embedding=is_all))


def _require_exact(config: ModelConfig, asked: str) -> None:
    """Raise InvalidArgument if the matrices of a checkpoint are quantized."""
    if config.quantization is not None:
        problem = f"is {asked}, but the checkpoint is already quantized with {config.quantization.method}"
        raise InvalidArgument("quantization", f"{problem}: remove the option")


def round_matrix(
    files: TensorSource, name: str, shape: Shape, axis: int, form: MatrixFormat, dtype: np.dtype
) -> StoredMatrix:
    """Read a weight, cast it to the model's type, and quantize it.

    Args:
        axis: the contracted axis of the stored weight.

    Raises:
        InvalidArgument: it is not finite, missing or misshapen.
    """
    with np.errstate(over="ignore"):
        weights = np.swapaxes(read_weight(files, name, shape).astype(dtype), axis, 1)
    if not np.isfinite(weights).all():
        refuse_tensor(files, name, shape, dtype)
    form = form.split(weights.shape[1], 1)
    values, scales, zeros = round_to(np.ascontiguousarray(weights), form, 1 - weights.ndim)
    return StoredMatrix(values, scales, zeros, group_size=form.group_size)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A checkpoint with quantized matrices.

    Attributes:
        matrices: the quantized tensors by name, with the contracted axis and the format of each.
        left: modules with matrices that are not quantized.
    """

    asked: Asked
    matrices: Mapping[str, tuple[int, MatrixFormat]]
    left: tuple[str, ...]

    @classmethod
    def of(cls, config: ModelConfig, source: TensorSource, asked: str) -> Rounded:
        """Choose the matrices of a checkpoint to quantize.

        Raises:
            InvalidArgument: its matrices are quantized already.
            Unsupported: it has matrices of all experts in one tensor, for which the layouts have no names.
        """
        _require_exact(config, asked)
        quantization = quantized_here(config, asked).quantization
        leaves = model_leaves(config, source.names)
        matrices: dict[str, tuple[int, MatrixFormat]] = {}
        left = []
        for leaf in (leaf for each in (leaves.outer, *leaves.layers) for leaf in each):
            form, axis = leaf_format(quantization, leaf), _stored_axis(leaf)
            for name, shape in leaf.tensors:
                if form is not None and len(shape) > 2:
                    raise Unsupported(
                        f"quantize: {asked}: {name} has the matrices of all experts in one tensor, which "
                        f"compressed-tensors cannot store; serve the model with --quantization {asked}"
                    )
                if form is not None and axis is not None:
                    matrices[name] = axis, FORMATS[cast(Asked, asked)].split(shape[axis], 1)
                elif len(shape) > 1 and leaf.path[0] != "embed":
                    left.append(get_module(name))
        return cls(cast(Asked, asked), matrices, tuple(dict.fromkeys(left)))

    def tensors(self, source: TensorSource, name: str, dtype: np.dtype) -> list[StoredTensor]:
        """Return the tensors that replace one of `matrices`; each is quantized again when it is written."""
        shape, (axis, form) = source.shape(name), self.matrices[name]
        num_out, depth = shape if axis == 1 else shape[::-1]
        groups, module = form.num_groups(depth), get_module(name)

        def part(suffix: str, part_shape: tuple[int, ...], part_dtype: type | np.dtype) -> StoredTensor:
            def read() -> np.ndarray:
                matrix = round_matrix(source, name, shape, axis, form, dtype)
                return np.ascontiguousarray(_parts(matrix, form)[suffix])

            return StoredTensor(module + suffix, part_shape, np.dtype(part_dtype), read)

        scales = part(".weight_scale", (num_out, groups), np.float32)
        if form.values == "fp8":
            return [part(".weight", (num_out, depth), form.dtype), scales]
        per_word = 32 // NUM_BITS[form.values]
        parts = [part(".weight_packed", (num_out, -(-depth // per_word)), np.int32), scales]
        if form.has_zeros:
            parts.append(part(".weight_zero_point", (-(-num_out // per_word), groups), np.int32))
        of_shape = np.array((num_out, depth), np.int64)
        return [*parts, StoredTensor(f"{module}.weight_shape", (2,), of_shape.dtype, lambda: of_shape)]

    def config(self) -> dict[str, object]:
        """Return the `quantization_config` of the written checkpoint."""
        by_group: dict[int | None, list[str]] = defaultdict(list)
        for name, (_, form) in self.matrices.items():
            by_group[form.group_size].append(get_module(name))
        sizes = sorted(by_group, key=lambda size: -len(by_group[size]))
        groups = {
            f"group_{index}": self._group(size, ["Linear"] if index == 0 else by_group[size])
            for index, size in enumerate(sizes)
        }
        return {
            "quant_method": "compressed-tensors",
            "format": FLOATING if self.asked == "fp8" else PACKED,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ["lm_head", *(module for module in self.left if module != "lm_head")],
            "kv_cache_scheme": None,
        }

    def _group(self, group_size: int | None, targets: Sequence[str]) -> dict[str, object]:
        form = FORMATS[self.asked]
        kind = {"num_bits": NUM_BITS[form.values], "type": "float" if form.values == "fp8" else "int"}
        weights = {
            **kind,
            "symmetric": not form.has_zeros,
            "strategy": "channel" if group_size is None else "group",
            "group_size": group_size,
            "dynamic": False,
        }
        rows = {**kind, "symmetric": True, "strategy": "token", "dynamic": True}
        inputs = None if form.activations is None else rows
        return {"targets": list(targets), "weights": weights, "input_activations": inputs, "output_activations": None}


def _stored_axis(leaf: Leaf) -> int | None:
    """Return the contracted axis of a leaf's tensors."""
    place = len(leaf.shape) + contracted_axis(leaf)
    return leaf.tensor_axes[place] if 0 <= place < len(leaf.tensor_axes) else None


def _parts(matrix: StoredMatrix, form: MatrixFormat) -> dict[str, np.ndarray]:
    """Return the arrays of a matrix by the suffixes of their names."""
    if form.values == "fp8":
        return {".weight": matrix.values, ".weight_scale": matrix.scales}
    bits = NUM_BITS[form.values]
    from_zero = functools.partial(np.add, np.int16(2 ** (bits - 1)))
    parts = {
        ".weight_packed": numbers_to_words(from_zero(matrix.values.astype(np.int16)), bits),
        ".weight_scale": matrix.scales,
    }
    if matrix.zeros is not None:
        parts[".weight_zero_point"] = numbers_to_words(from_zero(matrix.zeros.astype(np.int16)).T, bits).T
    return parts
