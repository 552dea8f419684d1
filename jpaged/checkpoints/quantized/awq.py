"""AWQ checkpoints in the layout `gemm`, as AutoAWQ writes them.

qweight  int32 [in, out / 8]        eight columns in a word, in the order 0 2 4 6 1 3 5 7 from the lowest bits on
qzeros   int32 [groups, out / 8]    likewise
scales   [groups, out]

weight = scale * (number - zero)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jpaged.checkpoints.quantized.scheme import (
    TUNING,
    MatrixPart,
    Parts,
    Shape,
    StoredMatrix,
    build_rules,
    dynamic_rules,
    signed,
    words_to_numbers,
)
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.config import Quantization
from jpaged.models.json_fields import JsonFields

_BITS = 4
_PER_WORD = 32 // _BITS
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight columns in its word."""

_HARMLESS = (
    *TUNING,
    "backend",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "meta",
    "modules_to_fuse",
    "pack_impl",
    "quant_method",
    "sym",
)


@dataclass(frozen=True, slots=True)
class Awq:
    """The layout of AWQ."""

    quantization: Quantization

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`."""
        (num_out, depth), groups = shape, form.num_groups(shape[1])
        return {
            "qweight": MatrixPart(f"{module}.qweight", ((depth, num_out // _PER_WORD),), ("int32",)),
            "qzeros": MatrixPart(f"{module}.qzeros", ((groups, num_out // _PER_WORD),), ("int32",)),
            "scales": MatrixPart(f"{module}.scales", ((groups, num_out),)),
        }

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        values, zeros = (
            signed(_in_order(words_to_numbers(tensors[key], _BITS)), _BITS) for key in ("qweight", "qzeros")
        )
        return StoredMatrix(values.T.astype(form.dtype), tensors["scales"].astype(np.float32).T, zeros.T)


def read_config(fields: JsonFields) -> Awq:
    """Parse a `quantization_config` of AWQ.

    Raises:
        Unsupported: a setting is not supported; it is named.
        InvalidArgument: a value is malformed.
    """
    fields.only("bits", _BITS, why="AWQ supports only 4 bits")
    fields.only("w_bit", _BITS, why="AWQ supports only 4 bits")
    fields.only("version", "gemm", "GEMM", why="only the layout gemm is supported")
    for key in ("checkpoint_format", "format"):
        fields.only(key, "gemm", why="only the layout gemm is supported")
    fields.only("method", "awq", why="the method must be AWQ")
    fields.only("pack_dtype", "int32", why="only int32 words are supported")
    fields.only("desc_act", False, why="AWQ does not support listed groups")
    fields.only("zero_point", True, why="AWQ without zero points is not supported")
    group_key = "q_group_size" if fields.has("q_group_size") else "group_size"
    group_size = fields.integer(group_key, 128, minimum=-1)
    # AutoAWQ skips a module if its name contains any of these, also within a word (awq/utils/module.py).
    left = [re.escape(name) for name in fields.names("modules_to_not_convert")]
    has_output = fields.flag("lm_head", False)
    fields.only("data_type", "int", why="AWQ supports only integers")
    fields.ignore(_HARMLESS)

    def read_own(own: JsonFields) -> MatrixFormat:
        own.only("bits", _BITS, why="AWQ supports only 4 bits")
        own.ignore(_HARMLESS)
        return format_of_groups(own.integer("group_size", group_size, minimum=-1))

    rules = build_rules(format_of_groups(group_size), left, dynamic_rules(fields, read_own))
    return Awq(Quantization("awq", rules, has_output))


def format_of_groups(group_size: int) -> MatrixFormat:
    """Return the format of a matrix with groups of this size; -1 is one group."""
    return MatrixFormat("int4", group_size if group_size > 0 else None, has_zeros=True)


def _in_order(numbers: np.ndarray) -> np.ndarray:
    """Reorder numbers `[rows, columns]` from the order in words to the order of columns."""
    words = numbers.reshape(len(numbers), -1, _PER_WORD)
    return words[:, :, PLACES].reshape(numbers.shape)
