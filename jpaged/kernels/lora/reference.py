"""LoRA deltas in XLA: one masked matmul with all adapters' first matrices, and one with all second ones.

Rows are not sorted, and adapters have no separate steps: the program does not depend on the rows' adapters. It reads
little compared to the matrix: (in + out) * rank numbers per adapter.

`AdaptedMatrix` is a matrix with adapters, each in a slot. `EmbeddingAdapters` are those of an embedding of ids.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A matrix `[in, *out]` and its adapters, in place of a leaf of parameters.

        (x @ a[s - 1].T) @ b[s - 1]        is the delta of a row with adapter slot s, computed for each part separately

    Parts are separate matrices of the checkpoint: queries, keys and values, or gates and ups. Unused slots and ranks
    are zeros. Vectors hold the magnitudes of DoRA and biases: see `scaled`.

    Attributes:
        base: an array, a `QuantizedMatrix`, a `StackedMatrix` or a `PackedMatrix`.
        a: `[slots, parts * rank, in]`; float32, bfloat16 or float16, as rows are.
        b: for each part `[slots, rank, its columns]`, including the adapter's scale.
        num_groups: groups of columns of the matrix; each has a share of each part, in order.
        vectors: for each part float32 `[slots, 2, its columns]`: scales less 1, and shifts; empty if no adapter may
            have them.
        adapters_r: int32 `[R]`, the slots of the rows that an output matrix multiplies; None for other matrices.
    """

    base: Any
    a: jax.Array
    b: tuple[jax.Array, ...]
    num_groups: int = dataclasses.field(default=1, metadata={"static": True})
    vectors: tuple[jax.Array, ...] = ()
    adapters_r: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return tuple(self.base.shape)

    @property
    def dtype(self) -> np.dtype:
        """Type of the matrix."""
        return np.dtype(self.base.dtype)

    @property
    def of_output(self) -> AdaptedMatrix:
        """The adapters alone of an output matrix `[out, in]`, as those of a matrix `[in, out]`."""
        shape = int(self.a.shape[-1]), int(self.b[0].shape[-1])
        return dataclasses.replace(self, base=jax.ShapeDtypeStruct(shape, self.a.dtype), adapters_r=None)

    @property
    def rank(self) -> int:
        """Maximum rank of an adapter."""
        return int(self.b[0].shape[-2])


def adapt(x_te: Float[Array, "T E"], adapters_t: Int[Array, "T"], matrix: AdaptedMatrix) -> Float[Array, "T ..."]:
    """Return the delta of each row, float32 `[T, *out]`; zeros if its slot is 0.

    The sums of the rank are rounded to the type of the rows.
    """
    num_slots = len(matrix.a)
    ranks_tsi = _dot(x_te, matrix.a, ((1,), (2,)))
    has_slot_ts = adapters_t[:, None] == 1 + jnp.arange(num_slots)
    ranks_tsi = jnp.where(has_slot_ts[:, :, None], ranks_tsi, 0.0).astype(x_te.dtype)
    rank, out = matrix.rank, matrix.shape[1:]
    deltas = [
        _dot(ranks_tsi[:, :, part * rank : (part + 1) * rank], b, ((1, 2), (0, 1))) for part, b in enumerate(matrix.b)
    ]
    return _joined(deltas, matrix.num_groups, out)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class EmbeddingAdapters:
    """The adapters of an embedding of ids, next to it.

        a[s - 1][:, id] @ b[s - 1]         is the delta of the embedding of a row's id with adapter slot s

    Attributes:
        a: `[slots, rank, ids]`.
        b: one part, `[slots, rank, width]`, including the adapter's scale.
        vectors: none.
    """

    a: jax.Array
    b: tuple[jax.Array, ...]
    vectors: tuple[jax.Array, ...] = ()

    def add(
        self, x_te: Float[Array, "T E"], ids_t: Int[Array, "T"], adapters_t: Int[Array, "T"]
    ) -> Float[Array, "T E"]:
        """Return embeddings with the delta of each row; unchanged if its slot is 0."""
        slots_t = jnp.maximum(adapters_t - 1, 0)
        ranks_ti = self.a[slots_t, :, ids_t].astype(x_te.dtype)
        has_slot_ts = adapters_t[:, None] == 1 + jnp.arange(len(self.a))
        ranks_tsi = jnp.where(has_slot_ts[:, :, None], ranks_ti[:, None], 0)
        summed_te = x_te.astype(jnp.float32) + _dot(ranks_tsi, self.b[0], ((1, 2), (0, 1)))
        return jnp.where((adapters_t > 0)[:, None], summed_te.astype(x_te.dtype), x_te)


def scaled(y: Float[Array, "T ..."], adapters_t: Int[Array, "T"], matrix: AdaptedMatrix) -> Float[Array, "T ..."]:
    """Return float32 products `[T, *out]` with the matrix, scaled and shifted by the vectors of each row's adapter.

    Rows with slot 0, and rows of slots without vectors, are unchanged to the last bit.
    """
    if not matrix.vectors:
        return y
    has_slot = (adapters_t > 0).reshape(-1, *(1,) * (y.ndim - 1))
    slots_t = jnp.maximum(adapters_t - 1, 0)
    scales, shifts = (
        _joined([part[:, row][slots_t] for part in matrix.vectors], matrix.num_groups, matrix.shape[1:])
        for row in range(2)
    )
    return jnp.where(has_slot, y + (y * scales + shifts), y)


def joined_vectors(matrix: AdaptedMatrix) -> Float[Array, "S 2 N"] | None:
    """Return the vectors of all slots in the order of the matrix's columns, of which axes are merged; None without."""
    if not matrix.vectors:
        return None
    width = sum(part.shape[2] for part in matrix.vectors)
    rows = [part.reshape(-1, part.shape[2]) for part in matrix.vectors]
    return _joined(rows, matrix.num_groups, (width,)).reshape(-1, 2, width)


def _joined(parts: list[jax.Array], num_groups: int, out: tuple[int, ...]) -> jax.Array:
    """Return `[T, *out]` from the columns of each part, `[T, columns]`, in the order of the matrix."""
    num_rows = len(parts[0])
    if len(parts) == 1:
        return parts[0].reshape(num_rows, *out)
    if len(out) > 1:  # parts have a separate axis; with several devices each has a share of the other
        return jnp.stack(parts, axis=1)
    of_groups = [part.reshape(num_rows, num_groups, -1) for part in parts]
    return jnp.concatenate(of_groups, axis=2).reshape(num_rows, *out)


def _dot(x: jax.Array, y: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, (contracted, ((), ())), precision, jnp.float32)
