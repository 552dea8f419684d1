"""MXFP4 experts as in gpt-oss, in blocks of 32 along the contracted axis.

NAME_blocks  uint8 [experts, out, in / 32, 16]    two numbers in a byte, the first in its lowest bits
NAME_scales  uint8 [experts, out, in / 32]        exponents of two, 127 for 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jpaged.checkpoints.quantized.scheme import MatrixPart, Parts, Shape, StoredMatrix, within
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.config import Quantization
from jpaged.models.json_fields import JsonFields

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


def read_config(fields: JsonFields) -> Mxfp4:
    """Parse a `quantization_config` of gpt-oss: its experts are quantized, except the modules that it excludes."""
    left = fields.names("modules_to_not_convert")
    fields.ignore(("quant_method", "dequantize"))
    patterns = [pattern.replace(r"\*", "[^.]+") for pattern in within(left)]
    form = MatrixFormat("mxfp4", _BLOCK)
    rules = (*((pattern, None) for pattern in patterns), (r"\.experts\.(gate_up_proj|down_proj)$", form))
    return Mxfp4(Quantization("mxfp4", rules))
