"""Checkpoints of small floats: FP8 with scales of blocks, tensors or columns, and MXFP4 experts as in gpt-oss.

FP8, with blocks as in DeepSeek and Qwen
    weight            float8_e4m3fn [out, in]
    weight_scale_inv  [ceil(out / rows), ceil(in / columns)] of blocks; a factor, despite its name
    weight_scale      of a tensor, or [out, 1]
    input_scale       of a tensor, if activations are static

MXFP4, in blocks of 32 along the contracted axis
    NAME_blocks       uint8 [experts, out, in / 32, 16]    two numbers in a byte, the first in its lowest bits
    NAME_scales       uint8 [experts, out, in / 32]        exponents of two, 127 for 1

NVIDIA's ModelOpt
    FP8               as above, with scales of tensors, or of columns (FP8_PER_CHANNEL_PER_TOKEN)
    FP8_PB_WO         weight_scale [ceil(out / 128), 1, ceil(in / 128), 1] of blocks
    MXFP8             weight_scale uint8 [out, in / 32], 127 for 1
    NVFP4             weight uint8 [out, in / 2], weight_scale float8_e4m3fn [out, in / 16]
                      weight_scale_2 [], a factor of the scales

With dynamic activations of FP8 each row has a separate scale; with blocks, each row and block.

bitsandbytes, which becomes weights
    weight            uint8 [out * in / 2, 1]    two indices of a table in a byte, the first in its highest bits
    weight.quant_map  [16]    the table of NF4 or FP4
    weight.absmax     [blocks], or uint8: indices of nested_quant_map, to be scaled by nested_absmax [blocks / 256]
    weight.quant_state.bitsandbytes__nf4    uint8, JSON: shape, blocksize, dtype, nested_blocksize, nested_offset
    SCB               [out], of a weight that is int8 [out, in]: weight = number * SCB / 127
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jpaged.checkpoints.quantized.scheme import (
    FLOATS,
    MatrixPart,
    Parts,
    Shape,
    StoredMatrix,
    build_rules,
    require_whole,
    within,
)
from jpaged.checkpoints.tensor_files import DTYPES, TensorSource, check_shape
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
        block_scales: the name of the scales of blocks.
        has_exponents: these are exponents of two.
    """

    quantization: Quantization
    block_rows: int | None
    block_scales: str = "weight_scale_inv"
    has_exponents: bool = False

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`."""
        num_out = shape[0]
        shapes: tuple[Shape, ...] = ((), (1,), (1, 1), (num_out, 1), (num_out,))
        name = "weight_scale"
        if self.block_rows is not None:
            rows, groups = -(-num_out // self.block_rows), form.num_groups(shape[1])
            name, shapes = self.block_scales, ((rows, groups), (rows, 1, groups, 1))
        scale_types = ("uint8",) if self.has_exponents else (*FLOATS, "float8_e8m0fnu")
        problem = not_a_power if self.has_exponents else None
        inputs = MatrixPart(f"{module}.input_scale", ((), (1,)), is_optional=not form.has_input_scale)
        return {
            "weight": MatrixPart(f"{module}.weight", (shape,), _FP8),
            "scale": MatrixPart(f"{module}.{name}", shapes, scale_types, False, self.block_rows or 1, problem),
            "input_scale": inputs,
        }

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        if self.has_exponents:
            tensors = {**tensors, "scale": powers_of_two(tensors["scale"])}
        return read_fp8(tensors, shape, form)


def read_fp8(tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
    """Return a matrix of float8 numbers with one scale, or scales of rows or groups."""
    scales = tensors["scale"].astype(np.float32).reshape(-1, form.num_groups(shape[1]))
    return StoredMatrix(tensors["weight"], scales, input_scale=one_number(tensors))


def one_number(tensors: Mapping[str, np.ndarray]) -> float | None:
    """Return the scale of inputs, or None."""
    given = tensors.get("input_scale")
    return None if given is None else float(given.reshape(()).astype(np.float32))


def read_fp8_config(fields: JsonFields) -> Fp8:
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


_BLOCK = 32
_BIAS = 127
_NAN = 255


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The layout of MXFP4 in gpt-oss: all experts of a layer are one tensor."""

    quantization: Quantization

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`."""
        num_experts, depth, num_out = shape
        blocks = (num_experts, num_out, depth // _BLOCK)
        return {
            "blocks": MatrixPart(f"{module}_blocks", ((*blocks, _BLOCK // 2),), ("uint8",)),
            "scales": MatrixPart(f"{module}_scales", (blocks,), ("uint8",), problem=not_a_power),
        }

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        num_experts, depth, num_out = shape
        values = unpack_e2m1(tensors["blocks"]).reshape(num_experts, num_out, depth)
        return StoredMatrix(values.swapaxes(1, 2), powers_of_two(tensors["scales"]).swapaxes(1, 2))


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 `[..., n]` to float4_e2m1fn `[..., 2 n]`; the first of two numbers is in the lowest bits."""
    pairs = np.stack((packed & 15, packed >> 4), axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1).view(ml_dtypes.float4_e2m1fn)


def not_a_power(exponents: np.ndarray) -> str | None:
    """Return the problem of exponents of 255, which mean NaN; None if there are none."""
    count = int(np.count_nonzero(exponents == _NAN))
    return f"has {count} exponents of {_NAN}, which encode no number" if count else None


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Convert uint8 exponents, with 127 for 1, to float32."""
    return np.exp2(exponents.astype(np.float32) - _BIAS)


def read_mxfp4_config(fields: JsonFields) -> Mxfp4:
    """Parse a `quantization_config` of gpt-oss: its experts are quantized, except the modules that it excludes."""
    left = fields.names("modules_to_not_convert")
    fields.ignore(("quant_method", "dequantize"))
    patterns = [pattern.replace(r"\*", "[^.]+") for pattern in within(left)]
    form = MatrixFormat("mxfp4", _BLOCK)
    rules = (*((pattern, None) for pattern in patterns), (r"\.experts\.(gate_up_proj|down_proj)$", form))
    return Mxfp4(Quantization("mxfp4", rules))


@dataclass(frozen=True, slots=True)
class ModelOptNvfp4:
    """The layout of NVFP4 by ModelOpt, which becomes int8 as that of compressed-tensors."""

    quantization: Quantization

    def widening(self) -> str:
        """Return what the format costs in memory."""
        return f"{self.quantization.method}: {NVFP4_WIDENING}"

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`."""
        require_whole(module, shape, _NVFP4_BLOCK)
        num_out, depth = shape
        return {
            "weight": MatrixPart(f"{module}.weight", ((num_out, depth // 2),), ("uint8",)),
            "scale": MatrixPart(f"{module}.weight_scale", ((num_out, depth // _NVFP4_BLOCK),), _FP8),
            "whole": MatrixPart(f"{module}.weight_scale_2", ((), (1,)), FLOATS, problem=_not_positive),
            "inputs": MatrixPart(f"{module}.input_scale", ((), (1,)), FLOATS, is_optional=True),
        }

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        halves = tensors["scale"].astype(np.float32) * (tensors["whole"].astype(np.float32) / 2)
        return StoredMatrix(twice_e2m1(tensors["weight"]), halves)


def twice_e2m1(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 `[..., n]` of two float4_e2m1fn each to twice their numbers, which are whole: int8 `[..., 2 n]`."""
    return (unpack_e2m1(packed).astype(np.float32) * 2).astype(np.int8)


def _not_positive(scale: np.ndarray) -> str | None:
    value = float(scale.reshape(()))
    return None if value > 0 else f"is {value:g}; it must be above 0"


NVFP4_WIDENING = (
    "4.5 bits per weight in the file take 8 in memory on CPUs, and 10 elsewhere, because no kernel multiplies this "
    "format as stored; the weights are the same"
)
MODEL_OPT = "modelopt"
_NVFP4_BLOCK = 16
_MODEL_OPT_BLOCK = 128
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4")


def read_modelopt(fields: JsonFields) -> Fp8 | ModelOptNvfp4:
    """Parse a `quantization_config` of ModelOpt, or the same section of `hf_quant_config.json`.

    `config_groups` repeats what the algorithm implies.

    Raises:
        Unsupported: the algorithm or a setting is not supported; it is named.
        InvalidArgument: a value is malformed.
    """
    algorithm = fields.text("quant_algo", "").upper()
    if algorithm not in _ALGORITHMS:
        raise Unsupported(f"{fields.name}: quant_algo is {algorithm!r}; supported: {', '.join(_ALGORITHMS)}")
    fields.only("has_zero_point", False, why="weights with zero points are not supported")
    fields.only("pre_quant_scale", False, why="scales of inputs before they are rounded are not supported")
    left = [rule for key in ("ignore", "exclude_modules") for name in fields.names(key) for rule in _left_by(name)]
    fields.ignore((*_HARMLESS, "kv_cache_quant_algo", "producer", "config_groups"))
    is_nvfp4 = algorithm.endswith("NVFP4")
    if is_nvfp4:
        fields.only("group_size", _NVFP4_BLOCK, why=f"NVFP4 has groups of {_NVFP4_BLOCK}")
    fields.ignore(("group_size",))
    form, rows = {
        "FP8": (MatrixFormat("fp8", activations="fp8", has_input_scale=True), None),
        "FP8_PER_CHANNEL_PER_TOKEN": (MatrixFormat("fp8", activations="fp8"), None),
        "FP8_PB_WO": (MatrixFormat("fp8", _MODEL_OPT_BLOCK), _MODEL_OPT_BLOCK),
        "MXFP8": (MatrixFormat("fp8", _BLOCK), 1),
    }.get(algorithm, (MatrixFormat("int8", _NVFP4_BLOCK, num_bits=6), None))
    quantization = Quantization(MODEL_OPT, build_rules(form, left), has_output=True)
    if is_nvfp4:
        return ModelOptNvfp4(quantization)
    return Fp8(quantization, rows, "weight_scale", algorithm == "MXFP8")


def _left_by(name: str) -> list[str]:
    """Return the rules for a module that is not quantized: its name, or a pattern with wildcards for whole names."""
    return [f"^{fnmatch.translate(name)}"] if set(name) & set("*?[") else within([name])


BITSANDBYTES = "bitsandbytes"
_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_BESIDE = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *_STATES)
_SCALE, _FORMAT = "SCB", "weight_format"
_MAX_INT8 = 127


def check_bitsandbytes_config(fields: JsonFields) -> None:
    """Check a `quantization_config` of bitsandbytes, whose matrices become weights.

    Raises:
        Unsupported: weights are quantized while they load, not in the files.
    """
    if not (fields.flag("load_in_4bit", False) or fields.flag("load_in_8bit", False)):
        raise Unsupported("quantization_config: quant_method is 'bitsandbytes' without load_in_4bit or load_in_8bit")


@dataclass(frozen=True, slots=True)
class _FourBits:
    """The description of a matrix of four bits.

    Attributes:
        block_size: numbers that share a scale.
        nested: number of scales that share an outer one, and the offset of all; None if scales are float32.
    """

    shape: Shape
    dtype: np.dtype
    block_size: int
    nested: tuple[int, float] | None

    @classmethod
    def parse(cls, text: bytes, where: str) -> _FourBits:
        """Parse the JSON of a quantization state.

        Raises:
            InvalidArgument: it is malformed, or a value of it is.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(where, f"is not JSON: {error}") from error
        if not isinstance(found, Mapping):
            raise InvalidArgument(where, f"is a {type(found).__name__}; it must be an object")
        fields = JsonFields(found, where)
        sizes, dtype = fields.value("shape"), fields.text("dtype")
        if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
            raise fields.bad("shape", f"is {sizes!r:.80}; it must be a list of numbers above 0")
        if dtype not in DTYPES:
            raise fields.bad("dtype", f"is {dtype!r:.80}; supported: {', '.join(DTYPES)}")
        nested = None
        if fields.has("nested_blocksize") or fields.has("nested_offset"):
            nested = fields.integer("nested_blocksize"), fields.number("nested_offset", is_signed=True)
        return cls(tuple(sizes), DTYPES[dtype], fields.integer("blocksize"), nested)


class BitsAndBytesTensors:
    """A checkpoint of bitsandbytes as a `TensorSource` of weights.

    Args:
        files: the tensors as stored.
    """

    def __init__(self, files: TensorSource) -> None:
        self._files, self._stored = files, files.names
        others = {name + end for name in self._stored for end in _BESIDE}
        modules = [name.removesuffix(_SCALE) for name in self._stored if name.endswith(f".{_SCALE}")]
        self._names = self._stored - others - {module + end for module in modules for end in (_SCALE, _FORMAT)}

    @property
    def names(self) -> frozenset[str]:
        """See `TensorSource`; tensors that only describe others are left out."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        state = self._state(name)
        return self._files.shape(name) if state is None else state.shape

    def dtype(self, name: str) -> np.dtype:
        """See `TensorSource`."""
        state = self._state(name)
        if state is not None:
            return state.dtype
        return self._files.dtype(name) if self._scale(name) is None else np.dtype(np.float32)

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource`; a matrix of four bits is read whole.

        Raises:
            InvalidArgument: it is misshapen, or a tensor that describes it is missing, misshapen or of another type.
            Unsupported: its numbers are in the order of a kernel.
        """
        check_shape(self, name, shape)
        state, scale = self._state(name), self._scale(name)
        if state is not None:
            return self._read_four_bits(name, state)[index]
        stored = self._files.read(name, shape, index)
        if scale is None:
            return stored
        self._check_int8(name, stored.dtype)
        rows = self._vector(scale, shape[0])[index[0]] if index else self._vector(scale, shape[0])
        return stored.astype(np.float32) * (rows / _MAX_INT8)[:, None]

    def where(self, name: str) -> Path:
        """See `TensorSource`."""
        return self._files.where(name)

    @property
    def num_matrices(self) -> int:
        """Number of quantized matrices."""
        return sum(name.endswith((*_STATES, f".{_SCALE}")) for name in self._stored)

    def _whole(self, name: str) -> np.ndarray:
        if name not in self._stored:
            raise InvalidArgument(str(self._files.where(name)), f"tensor {name} is missing from the checkpoint")
        return self._files.read(name, self._files.shape(name))

    def _vector(self, name: str, size: int) -> np.ndarray:
        """Read a vector of `size` numbers, float32.

        Raises:
            InvalidArgument: it is missing, misshapen or of another type.
        """
        found = self._whole(name)
        if found.shape != (size,) or found.dtype.name not in FLOATS:
            problem = f"tensor {name} is {found.dtype.name} {list(found.shape)}; it must be {' or '.join(FLOATS)}"
            raise InvalidArgument(str(self._files.where(name)), f"{problem} [{size}]")
        return found.astype(np.float32)

    def _scale(self, name: str) -> str | None:
        """Return the name of the scales of an int8 matrix; None for other tensors."""
        scale = f"{name.removesuffix('weight')}{_SCALE}"
        return scale if name.endswith(".weight") and scale in self._stored else None

    def _check_int8(self, name: str, dtype: np.dtype) -> None:
        """Raise an error unless a matrix with scales is int8 in the order of rows."""
        if dtype != np.int8:
            problem = f"tensor {name} is {dtype.name}; it must be int8, because {_SCALE} has scales for it"
            raise InvalidArgument(str(self.where(name)), problem)
        key = f"{name.removesuffix('weight')}{_FORMAT}"
        if key in self._stored and self._whole(key).any():
            raise Unsupported(
                f"{self.where(key)}: tensor {key} is {self._whole(key).tolist()}; only 0, the order of rows, is "
                "supported: save the model again with bitsandbytes 0.45 or newer"
            )

    def _state(self, name: str) -> _FourBits | None:
        """Return the description of a matrix of four bits; None for other tensors.

        Raises:
            InvalidArgument: it is malformed.
        """
        found = next((name + end for end in _STATES if name + end in self._stored), None)
        if found is None:
            return None
        return _FourBits.parse(self._whole(found).tobytes(), f"{self._files.where(found)}: tensor {found}")

    def _read_four_bits(self, name: str, state: _FourBits) -> np.ndarray:
        packed, count = self._whole(name).reshape(-1).view(np.uint8), math.prod(state.shape)
        if packed.size != -(-count // 2):
            problem = f"tensor {name} has {packed.size} bytes; its state describes {-(-count // 2)}"
            raise InvalidArgument(str(self.where(name)), problem)
        size = min(state.block_size, count)
        num_blocks = -(-count // size)
        scales = self._block_scales(name, num_blocks, state.nested)
        weights = np.zeros((num_blocks, size), np.float32)
        indices = np.stack((packed >> 4, packed & 15), axis=-1).reshape(-1)[:count]
        weights.reshape(-1)[:count] = self._vector(f"{name}.quant_map", 16)[indices]
        weights *= scales[:, None]
        return weights.reshape(-1)[:count].reshape(state.shape).astype(state.dtype)

    def _block_scales(self, name: str, num_blocks: int, nested: tuple[int, float] | None) -> np.ndarray:
        """Return the scale of each block of a matrix of four bits, float32."""
        key = f"{name}.absmax"
        if nested is None:
            return self._vector(key, num_blocks)
        indices, (size, offset) = self._whole(key), nested
        if indices.shape != (num_blocks,) or indices.dtype != np.uint8:
            problem = f"tensor {key} is {indices.dtype.name} {list(indices.shape)}; it must be uint8 [{num_blocks}]"
            raise InvalidArgument(str(self._files.where(key)), f"{problem}, because its state describes nested scales")
        outer = self._vector(f"{name}.nested_absmax", -(-num_blocks // size))
        table = self._vector(f"{name}.nested_quant_map", 256)
        return table[indices] * outer[np.arange(num_blocks) // size] + np.float32(offset)
