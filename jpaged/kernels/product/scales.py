"""The codes and scales of a quantized matrix in the order in which the CPU kernel reads them.

int8      [parts * ceil(N / 32), ceil(K / 4), 32, 4]    four of a column side by side
fp8       [parts * ceil(N / 32), ceil(K / 4), 32, 4]    k, k + 2, k + 1, k + 3
4 bits    [parts * ceil(N / 32), ceil(K / 8), 32, 4]    eight: the low halves are four, the high halves the next four
scales    [parts * ceil(N / 32), groups, 32]            and zeros

A code is a byte or half of one: integers are shifted to begin with 0, floats are their bits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jpaged.errors import Unsupported
from jpaged.kernels.matrix_format import NUM_BITS, VALUE_DTYPES, Values
from jpaged.kernels.product.quantised import QuantisedMatrix, num_outer

CODES: tuple[Values, ...] = ("int8", "int4", "mxfp4", "fp8")
"""In the order of `Code` in quantised.h."""
_KINDS = {dtype: kind for kind, dtype in VALUE_DTYPES.items()}
_LANE_BITS = 32
_MXFP4_NUMBERS = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_FP8_PLACES = (0, 2, 1, 3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PackedScales:
    """The scales of a packed matrix's codes, and the rounding of rows.

    Attributes:
        scales: as above; bfloat16 if they are powers of two (MXFP4), otherwise float32.
        zeros: int8 or float32; None is zero.
        order: int32 `[K]`, if the matrix's depth was sorted by groups: the original index of each k.
        step: float32 `[1]`: the scale of rounded rows, if the checkpoint has one.
        kind: of the codes.
        group: numbers of a column that share a scale.
        has_int8_rows: rows are rounded to int8, with the step or a scale per row.
        dtype: of the model.
    """

    scales: Any
    zeros: Any
    order: Any
    step: Any
    kind: Values = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    has_int8_rows: bool = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def code(self) -> int:
        """The kernel's number of the kind."""
        return CODES.index(self.kind)

    def decode(self, lanes: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
        """Return the numbers `[T, K]` of lanes `[T, K / .., 4]`, given scales and zeros `[T, groups]`; K is padded."""
        halves = [lanes & 15, lanes >> 4] if NUM_BITS[self.kind] == 4 else [lanes]
        codes = jnp.stack(halves, axis=2).reshape(len(lanes), -1)
        if self.kind == "fp8":
            codes = lanes[:, :, jnp.array(_FP8_PLACES)].reshape(len(lanes), -1)
            numbers = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        elif self.kind == "mxfp4":
            numbers = jnp.asarray(_MXFP4_NUMBERS)[codes]
        else:
            numbers = codes.astype(jnp.float32) - 2.0 ** (NUM_BITS[self.kind] - 1)
        depth = min(codes.shape[1], scales.shape[1] * self.group)
        numbers = numbers[:, :depth]
        if zeros is not None:
            numbers = numbers - jnp.repeat(zeros.astype(jnp.float32), self.group, axis=1)[:, :depth]
        return (numbers * jnp.repeat(scales.astype(jnp.float32), self.group, axis=1)[:, :depth]).astype(self.dtype)


def num_lanes(matrix: QuantisedMatrix) -> int:
    """Return the number of lanes of a column."""
    return -(-matrix.depth // _lane(matrix))


def can_pack(matrix: QuantisedMatrix) -> bool:
    """Return True if the kernel supports a matrix: a single one, whose groups are whole lanes and divide the depth."""
    if num_outer(matrix.ndim, matrix.axis):
        return False
    has_whole_lanes = matrix.depth % matrix.num_groups == 0 and matrix.group_size % _lane(matrix) == 0
    return matrix.num_groups == 1 or has_whole_lanes


def code_of(matrix: QuantisedMatrix) -> int:
    """Return the kernel's number of the kind of a matrix's codes."""
    return CODES.index(_kind(matrix))


def describe(matrix: QuantisedMatrix, scales: Any, zeros: Any, order: Any, step: Any) -> PackedScales:
    """Return the description of a matrix with these arrays, which may be shapes."""
    has_int8_rows = matrix.activations == "int8"
    return PackedScales(scales, zeros, order, step, _kind(matrix), matrix.group_size, has_int8_rows, matrix.dtype)


def scale_dtype(matrix: QuantisedMatrix) -> np.dtype:
    """Return the type that stores scales without loss."""
    return np.dtype(ml_dtypes.bfloat16 if _kind(matrix) == "mxfp4" else np.float32)


def zeros_dtype(matrix: QuantisedMatrix) -> np.dtype:
    """Return the type of the zero points; int8 if there are none."""
    return np.dtype(np.int8 if matrix.zeros is None else matrix.zeros.dtype)


def codes_of(matrix: QuantisedMatrix) -> np.ndarray:
    """Return a byte for each number, in the leaf's shape."""
    values = np.asarray(matrix.values).view(np.uint8)
    match _kind(matrix):
        case "int8":
            return values ^ np.uint8(128)
        case "int4":
            return values & np.uint8(15) ^ np.uint8(8)
        case "mxfp4":
            return values & np.uint8(15)
        case _:
            return values


def order_of(matrix: QuantisedMatrix) -> np.ndarray:
    """Return the indices of a column's numbers sorted by their groups.

    Raises:
        Unsupported: listed groups have different sizes.
    """
    group_ids = np.asarray(matrix.group_ids)
    counts = np.bincount(group_ids, minlength=matrix.num_groups)
    if (counts != matrix.group_size).any():
        raise Unsupported(
            f"linear_backend: cpu cannot multiply groups of {counts.min()} to {counts.max()} numbers in one matrix: "
            "all must have the same size; linear_backend xla supports them"
        )
    return np.argsort(group_ids, kind="stable").astype(np.int32)


def blocks_of(of_groups: np.ndarray, num_parts: int, columns: int, *, is_embedding: bool) -> np.ndarray:
    """Return scales or zeros of a leaf, `[groups, *out]` or `[N, groups]`, as blocks `[.., groups, columns]`."""
    num_groups = of_groups.shape[-1] if is_embedding else of_groups.shape[0]
    of_columns = of_groups.T if is_embedding else of_groups
    parts = of_columns.reshape(num_groups, num_parts, -1)
    padding = -parts.shape[2] % columns
    padded = np.pad(parts, ((0, 0), (0, 0), (0, padding))).reshape(num_groups, -1, columns)
    return np.ascontiguousarray(padded.transpose(1, 0, 2))


def _kind(matrix: QuantisedMatrix) -> Values:
    return _KINDS[np.dtype(matrix.values.dtype)]


def _lane(matrix: QuantisedMatrix) -> int:
    """Return the numbers of a lane."""
    return _LANE_BITS // NUM_BITS[_kind(matrix)]
