"""Matmuls with adjacent operations in one call: a norm before, a bias, a gate and a sum after.

Each row of a result is a function of that row and the matrix alone, to the last bit. It does not depend on the other
rows, their number or the number of threads. Rows that are not in use cost nothing and become zeros, or undefined.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import InternalError
from jpaged.kernels.cpu.library import MAX_WIDTH, NAME, register
from jpaged.kernels.matmul.packed import ROUNDINGS, PackedMatrix, Packer

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_PLAIN = {"code": np.int64(-1), "group": np.int64(1), "rounding": np.int64(0)}
"""The form of a matrix that is not quantized."""
_BYTE_CORES = ("avx512bf16", "avx512vnni", "avxvnni", "avx2")
"""Cores that multiply rows of int8 faster than floats, as measured."""
Gate = Literal["silu", "gelu_tanh", "gelu"]
"""An activation of gates or sums in the kernel."""
GATES: tuple[Gate | None, ...] = (None, *get_args(Gate))
"""In the order of `Gate` in core.h."""
_NORMS = ("none", "rms", "layer")
"""In the order of `Norm` in core.h."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of each row before the matmul; computed in float32 and rounded to the row's type.

    Attributes:
        kind: rms, x / sqrt(mean(x^2) + eps) * scale, or layer, (x - mean) / sqrt(var + eps) * scale + bias.
        scale: `[K]`, of the row's type; the layer norm's may be None, as may its bias.
    """

    kind: Literal["rms", "layer"]
    eps: float
    scale: jax.Array | None
    bias: jax.Array | None = None


@dataclass(frozen=True, slots=True)
class RowDelta:
    """Values that some rows add to their sums before anything else is added or gated.

    Attributes:
        sums_tn: float32 `[T, parts * N]`; ignored for rows without a delta.
        adapters_t: int32 `[T]`; rows have a delta if it is not 0.
        vectors: float32 `[slots, 2, parts * N]`, or None: scales less 1, by which a slot's rows multiply their sums
            first, and shifts that they add.
    """

    sums_tn: jax.Array
    adapters_t: jax.Array
    vectors: jax.Array | None = None


@dataclass(frozen=True, slots=True)
class ProductKernel:
    """The library's functions, as registered with XLA.

    Attributes:
        core: the code that this processor runs: baseline, or an instruction set in `ISAS` of library.py.
        max_width: floats of the widest vectors to use, if the processor has them: 16, 8 or 4.
        max_threads: maximum threads of XLA's pool; 0 is all.
        gate: the activation of matrices of two parts.
        activation: applied to the sums of other matrices; None is none.
        clears: `multiply` sets rows that are not in use to zeros; otherwise they are undefined.
    """

    library: ctypes.CDLL
    core: str
    max_width: int = MAX_WIDTH
    max_threads: int = 0
    gate: Gate = "silu"
    activation: Gate | None = None
    clears: bool = True

    @property
    def has_byte_products(self) -> bool:
        """True if this processor multiplies rows of int8 faster than rows of floats."""
        return self.core in _BYTE_CORES

    def packer(self, sharding: jax.sharding.Sharding, *, rounds_rows: bool = False) -> Packer:
        """Return a packer for the matrices of one model, for one device; see `Packer`."""
        return Packer(self.library, sharding, rounds_rows=rounds_rows)

    def multiply(
        self,
        x_tk: Float[Array, "T K"],
        matrix: PackedMatrix,
        num_rows: Int[Array, ""],
        *,
        norm: Norm | None = None,
        bias: jax.Array | None = None,
        residual: Float[Array, "T N"] | None = None,
        dtype: np.dtype | None = None,
        delta: RowDelta | None = None,
    ) -> Float[Array, "T N"]:
        """Compute residual + act(norm(x) W + delta + bias), accumulated in float32 and rounded once.

        A matrix of two parts is gated: act(x) is gate(first part) * second part. Otherwise it is the activation, or x.

        Args:
            x_tk: float32, bfloat16 or float16, as the matrix if that is not quantized.
            num_rows: rows in use, the first ones.
            bias: one number per column of the matrix.
            dtype: of the result, and of the residual; x's by default.
        """
        out_dtype = x_tk.dtype if dtype is None else dtype
        run = jax.ffi.ffi_call(f"{NAME}_multiply", jax.ShapeDtypeStruct((x_tk.shape[0], matrix.num_columns), out_dtype))
        none, no_residual = jnp.zeros((0,), x_tk.dtype), jnp.zeros((0,), out_dtype)
        operands = (
            *(x_tk, matrix.blocks, num_rows.astype(jnp.int32)),
            *(none if array is None else array for array in ((norm.scale, norm.bias) if norm else (None, None))),
            none if bias is None else bias.reshape(-1),
            no_residual if residual is None else residual,
        )
        scales, form = scale_operands(matrix)
        gate = np.int64(GATES.index(self.gate if matrix.num_parts == 2 else None))
        none32 = jnp.zeros((0,), jnp.float32)
        added = (none32, jnp.zeros((0,), jnp.int32)) if delta is None else (delta.sums_tn, delta.adapters_t)
        vectors = none32 if delta is None or delta.vectors is None else delta.vectors
        attributes = {**form, **self._norm_attributes(norm), "clears": np.int64(self.clears)}
        act = np.int64(GATES.index(None if matrix.num_parts == 2 else self.activation))
        y_tn: jax.Array = run(*operands, *scales, *added, vectors, gate=gate, activation=act, **attributes)
        return y_tn

    def normalise(self, x_tk: Float[Array, "T K"], norm: Norm, num_rows: Int[Array, ""]) -> Float[Array, "T K"]:
        """Return the rows in use, the first ones, after a norm alone; the others are zeros."""
        none = jnp.zeros((0,), x_tk.dtype)
        operands = (none if array is None else array for array in (norm.scale, norm.bias))
        run = jax.ffi.ffi_call(f"{NAME}_normalise", jax.ShapeDtypeStruct(x_tk.shape, x_tk.dtype))
        attributes = {**_PLAIN, **self._norm_attributes(norm), "clears": np.int64(1), "activation": np.int64(0)}
        y_tk: jax.Array = run(x_tk, num_rows.astype(jnp.int32), *operands, gate=np.int64(0), **attributes)
        return y_tk

    def rotate(
        self,
        qkv: Float[Array, "T K G+2 D"],
        cos_sin: tuple[Float[Array, "T D/2"], Float[Array, "T D/2"]],
        num_rows: Int[Array, ""],
        *,
        q_scale: jax.Array | None = None,
        k_scale: jax.Array | None = None,
        eps: float = 0.0,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Split grouped heads, and rotate queries and keys by their angles after an optional RMS norm of each head.

        Args:
            qkv: for each key/value head its queries, its key and its value.
            cos_sin: of each row's angles; dimension i rotates against i + D/2.
            num_rows: rows in use, the first ones.
            q_scale, k_scale: of the norms `[D]`; None is no norm.

        Returns:
            q `[T, K * G, D]`, k `[T, K, D]` and v `[T, K, D]`.
        """
        num_tokens, num_groups, rows, head_dim = qkv.shape
        kv_shape = jax.ShapeDtypeStruct((num_tokens, num_groups, head_dim), qkv.dtype)
        q_shape = jax.ShapeDtypeStruct((num_tokens, num_groups * (rows - 2), head_dim), qkv.dtype)
        none = jnp.zeros((0,), qkv.dtype)
        scales = (none if scale is None else scale for scale in (q_scale, k_scale))
        run = jax.ffi.ffi_call(f"{NAME}_rotate", (q_shape, kv_shape, kv_shape))
        q, k, v = run(qkv, *cos_sin, *scales, num_rows.astype(jnp.int32), eps=np.float32(eps), **self._limits)
        return q, k, v

    def _norm_attributes(self, norm: Norm | None) -> dict[str, np.generic]:
        kind = _NORMS.index("none" if norm is None else norm.kind)
        return {"eps": np.float32(0 if norm is None else norm.eps), "norm": np.int64(kind), **self._limits}

    @property
    def _limits(self) -> dict[str, np.int64]:
        return {"max_width": np.int64(self.max_width), "max_threads": np.int64(self.max_threads)}


def scale_operands(matrix: PackedMatrix) -> tuple[tuple[jax.Array, ...], dict[str, np.int64]]:
    """Return the scales, zeros, order and step of a quantized matrix, empty for others, and the form of the codes."""
    packed = matrix.scales
    if packed is None:
        none = jnp.zeros((0,), jnp.float32)
        return (none, none, none, none), _PLAIN
    of_none = {"zeros": jnp.int8, "order": jnp.int32, "step": jnp.float32}
    others = {name: getattr(packed, name) for name in of_none}
    filled = (jnp.zeros((0,), of_none[name]) if array is None else array for name, array in others.items())
    form = {"code": packed.code, "group": packed.group, "rounding": ROUNDINGS.index(packed.rounding)}
    return (packed.scales, *filled), {name: np.int64(value) for name, value in form.items()}


@functools.cache
def kernel() -> ProductKernel | str:
    """Return the package's kernel, or the reason why there is none."""
    found = register("multiply", "normalise", "rotate")
    if isinstance(found, str):
        return found
    found.jpaged_product_core.restype = ctypes.c_char_p
    return ProductKernel(found, found.jpaged_product_core().decode())


def loaded() -> ProductKernel:
    """Return the package's kernel, for matrices that were packed for it.

    Raises:
        InternalError: there is none.
    """
    found = kernel()
    if isinstance(found, str):
        raise InternalError(f"no kernel can read a packed matrix: {found}")
    return found
