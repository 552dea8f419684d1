"""Interface of the layouts of quantized weights, and the matrix that they read.

Module patterns of quantization configs become rules of module names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jpaged.checkpoints.tensor_files import TensorSource
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.config import Quantization
from jpaged.models.json_fields import JsonFields
from jpaged.models.param_specs import Leaf

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """One tensor of a quantized matrix.

    Attributes:
        name: in the checkpoint.
        shapes: allowed shapes.
        dtypes: allowed types; empty for any type of weights.
        is_optional: the tensor may be missing.
        block_rows: outputs that share a row of the tensor; `Scheme.read` gets a row for each output.
        problem: returns a description of invalid contents, or None.
    """

    name: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = ()
    is_optional: bool = False
    block_rows: int = 1
    problem: Callable[[np.ndarray], str | None] | None = None

    def read(self, files: TensorSource, num_out: int) -> np.ndarray:
        """Read the tensor, with one row for each of num_out outputs if they share rows.

        Raises:
            InvalidArgument: it holds numbers that are not finite, or other invalid contents.
        """
        tensor = files.read(self.name, files.shape(self.name))
        problem = None if self.problem is None else self.problem(tensor)
        if not np.issubdtype(tensor.dtype, np.integer) and not np.isfinite(tensor.astype(np.float32)).all():
            problem = "has numbers that are not finite"
        if problem is not None:
            raise InvalidArgument(str(files.where(self.name)), f"tensor {self.name} {problem}")
        return tensor if self.block_rows == 1 else np.repeat(tensor, self.block_rows, axis=0)[:num_out]


Parts = Mapping[str, MatrixPart]
KV_SCALES = {
    ".k_scale": (0,),
    ".k_proj.output_scale": (0,),
    ".v_scale": (1,),
    ".v_proj.output_scale": (1,),
    ".kv_scale": (0, 1),
}
"""Suffixes of scales for an fp8 KV cache, and whether they are for keys (0) or values (1)."""
OF_KV_CACHE = (*KV_SCALES, ".q_scale", ".prob_scale")
"""Suffixes of tensors for KV-cache quantization, which no weight uses."""
FLOATS = ("float32", "bfloat16", "float16")
TUNING = (
    # AutoRound
    *("amp", "autoround_version", "batch_size", "dataset", "dynamic_max_gap", "enable_adam", "enable_alg_ext"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "enable_torch_compile"),
    *("gradient_accumulate_steps", "iters", "low_cpu_mem_usage", "low_gpu_mem_usage", "lr", "lr_scheduler"),
    *("minmax_lr", "model_free", "momentum", "not_use_best_mse", "nsamples", "optimizer", "provider", "sampler"),
    *("scale_dtype", "seed", "seqlen", "to_quant_block_names", "train_bs"),
    # GPTQModel
    *("act_group_aware", "auto_forward_data_parallel", "compute_device_filter", "damp_auto_increment"),
    *("damp_percent", "dense_vram_strategy", "failsafe", "fallback", "foem", "gc_mode", "gptaq", "gptaq_alpha"),
    *("hessian", "hyb_act", "moe", "moe_vram_strategy", "mse", "offload_to_disk", "offload_to_disk_path"),
    *("static_groups", "true_sequential", "v2", "v2_alpha", "vram_strategy", "wait_for_submodule_finalizers"),
)
"""Keys about the quantization procedure, which do not affect the numbers."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """An unpacked matrix as published: `[out, in]`, or `[experts, in, out]`; axis 1 is contracted either way.

    Attributes:
        values: of the format's type.
        scales: float32, shaped as values with groups in place of `in`; or a single one.
        zeros: int8, or float32 if they are not integers, shaped as scales.
        group_ids: int32 `[in]`.
        input_scale: divisor of the rows.
        group_size: numbers of `in` that share a scale; the last group may have fewer.
    """

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    group_ids: np.ndarray | None = None
    input_scale: float | None = None
    group_size: int | None = None

    def weights(self) -> np.ndarray:
        """Return the dequantized weights, float32."""
        weights = self.values.astype(np.float32)
        if self.zeros is not None:
            weights -= self._spread(self.zeros)
        weights *= self._spread(self.scales)
        return weights

    def _spread(self, of_groups: np.ndarray) -> np.ndarray:
        """Repeat group values for each number along the contracted axis; a single group is returned as it is."""
        if of_groups.shape[1] == 1:
            return of_groups
        ids = np.arange(self.values.shape[1]) // (self.group_size or 1) if self.group_ids is None else self.group_ids
        return of_groups[:, ids]


class Scheme(Protocol):
    """A layout of quantized weights, as a checkpoint's `quantization_config` describes it."""

    @property
    def quantization(self) -> Quantization:
        """The quantized matrices, and their formats in memory."""

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """Return the tensors of a module whose unquantized weight would have this shape."""

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """Return the matrix of a module's present tensors, whose shapes and types `parts` allows."""


def read_matrix(scheme: Scheme, files: TensorSource, module: str, shape: Shape) -> StoredMatrix:
    """Read one complete quantized matrix.

    Raises:
        InvalidArgument: a tensor of it is missing, misshapen, of another type, or has numbers that are not finite.
    """
    form = scheme.quantization.get_format(module)
    assert form is not None
    parts = scheme.parts(module, shape, form)
    check_parts(files, parts, shape)
    tensors = {key: part.read(files, shape[0]) for key, part in parts.items() if part.name in files.names}
    return dataclasses.replace(scheme.read(tensors, shape, form), group_size=form.group_size)


def check_parts(files: TensorSource, parts: Parts, shape: Shape) -> None:
    """Raise InvalidArgument if a tensor is missing, misshapen or of another type."""
    for part in parts.values():
        where = str(files.where(part.name))
        if part.name not in files.names:
            if not part.is_optional:
                raise InvalidArgument(where, f"tensor {part.name} is missing from the checkpoint")
            continue
        stored, dtype = files.shape(part.name), files.dtype(part.name).name
        if stored not in part.shapes:
            allowed = " or ".join(str(list(each)) for each in part.shapes)
            raise InvalidArgument(
                where, f"tensor {part.name} has shape {list(stored)}; a weight of {list(shape)} requires {allowed}"
            )
        if dtype not in (part.dtypes or FLOATS):
            raise InvalidArgument(
                where, f"tensor {part.name} is {dtype}; it must be {' or '.join(part.dtypes or FLOATS)}"
            )


def require_whole(module: str, shape: Shape, in_multiple: int, out_multiple: int = 1) -> None:
    """Raise an error if the sizes of a matrix do not fill its words.

    Args:
        shape: `[out, in]`.
        in_multiple: numbers of `in` that a word holds.
        out_multiple: numbers of `out` that a word holds.

    Raises:
        Unsupported: one size is no multiple.
    """
    for axis, size, multiple in (("outputs", shape[-2], out_multiple), ("inputs", shape[-1], in_multiple)):
        if size % multiple:
            raise Unsupported(
                f"{module}: the number of {axis} is {size}; its quantization packs them into words of {multiple}"
            )


def words_to_numbers(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack int32 `[..., n]` to uint8 `[..., n * 32 / bits]`: numbers start at the lowest bits of a word.

    Numbers of 3 bits may begin in one word and end in the next.
    """
    if bits == 3:
        stored = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
        places = stored.reshape(*stored.shape[:-1], -1, bits)
        return np.packbits(places, axis=-1, bitorder="little")[..., 0]
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return numbers.astype(np.uint8).reshape(*words.shape[:-1], -1)


def numbers_to_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 `[..., n]` to int32 `[..., ceil(n * bits / 32)]`, the inverse; the last word is padded with zeros."""
    per_word = 32 // bits
    missing = -numbers.shape[-1] % per_word
    padded = np.pad(numbers, (*((0, 0),) * (numbers.ndim - 1), (0, missing))).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = padded.reshape(*padded.shape[:-1], -1, per_word) << shifts
    packed: np.ndarray = np.bitwise_or.reduce(words, axis=-1).view(np.int32)
    return packed


def signed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Convert unsigned numbers to int8 by subtracting the middle: 8 of 4 bits is 0."""
    return (numbers.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def not_among(num_groups: int, least: int = 0) -> Callable[[np.ndarray], str | None]:
    """Return a check that listed groups are among num_groups.

    Args:
        least: the smallest valid number of a list.
    """

    def problem(ids: np.ndarray) -> str | None:
        low, high = int(ids.min()), int(ids.max())
        if low >= least and high < num_groups:
            return None
        return f"has groups from {low} to {high}; there are {num_groups}, counted from 0"

    return problem


def within(names: Sequence[str]) -> list[str]:
    """Return rules that match every module whose name contains one of these names, delimited by dots."""
    return [rf"(^|\.){re.escape(name)}(\.|$)" for name in names]


def build_rules(
    form: MatrixFormat, left: Sequence[str], own: Sequence[tuple[str, MatrixFormat | None]] = ()
) -> tuple[tuple[str, MatrixFormat | None], ...]:
    """Return the rules of a checkpoint with one format for its matrices, except those in `left` and `own`."""
    return (*((pattern, None) for pattern in left), *own, ("", form))


def from_start(expression: str) -> str:
    """Return the rule of an expression that must match at the start of a module's name.

    Raises:
        Unsupported: it is no regular expression.
    """
    flags = re.match(r"(\(\?[aiLmsux]+\))?", expression)
    assert flags is not None
    pattern = f"{flags[0]}^(?:{expression[flags.end() :]})"
    try:
        re.compile(pattern)
    except re.error as error:
        raise Unsupported(f"quantization_config: {expression!r} is not a regular expression: {error}") from error
    return pattern


def dynamic_rules(
    fields: JsonFields, read_form: Callable[[JsonFields], MatrixFormat]
) -> list[tuple[str, MatrixFormat | None]]:
    """Return the rules of GPTQModel's `dynamic`: unquantized modules (`-:`), and modules with other settings.

    Args:
        read_form: parses the format of a module's settings.

    Raises:
        Unsupported: a setting is not supported, or a pattern is no regular expression.
    """
    rules: list[tuple[str, MatrixFormat | None]] = []
    for name, given in fields.mapping("dynamic").items():
        if name.startswith("-:"):
            rules.append((from_start(name.removeprefix("-:")), None))
            continue
        if not isinstance(given, Mapping):
            raise fields.bad("dynamic", f"{name} is {given!r}; it must be an object")
        own = JsonFields(given, f"{fields.name} dynamic {name}")
        form = read_form(own)
        own.finish()
        rules.append((from_start(name.removeprefix("+:")), form))
    return rules


def find_kv_scales(files: TensorSource, layers: Sequence[Sequence[Leaf]]) -> np.ndarray | None:
    """Return the scales of keys and values in each layer for an fp8 KV cache, float32 `[L, 2]`, or None.

    A layer without them has NaN. A scale of only one of both is that of the other.

    Args:
        layers: of the model, with the names of the tensors in `files`.

    Raises:
        Unsupported: there are several scales, as for each head.
        InvalidArgument: a scale is not above 0, or not finite.
    """
    stored = sorted(name for name in files.names if name.endswith(tuple(KV_SCALES)))
    if not stored:
        return None
    numbers = {
        module: number
        for number, leaves in enumerate(layers)
        for leaf in leaves
        if leaf.path[0] == "attention"
        for name, _ in leaf.tensors
        for module in _enclosing(name)[:2]
    }
    scales_l2 = np.full((len(layers), 2), np.nan, np.float32)
    for name in stored:
        suffix = next(suffix for suffix in KV_SCALES if name.endswith(suffix))
        number = next((numbers[one] for one in _enclosing(name) if one in numbers), None)
        if number is not None:
            scales_l2[number, list(KV_SCALES[suffix])] = _read_scale(files, name)
    return np.where(np.isnan(scales_l2), scales_l2[:, ::-1], scales_l2)


def _enclosing(name: str) -> list[str]:
    """Return the module of a tensor and those around it, the innermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _read_scale(files: TensorSource, name: str) -> float:
    stored = files.read(name, files.shape(name)).astype(np.float32)
    if stored.size != 1:
        raise Unsupported(
            f"{files.where(name)}: tensor {name} has {stored.size} numbers; only one for all heads is supported"
        )
    scale = float(stored.reshape(()))
    if not 0 < scale < float("inf"):
        raise InvalidArgument(str(files.where(name)), f"tensor {name} is {scale}; it must be above 0")
    return scale
