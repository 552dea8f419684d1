"""LoRA deltas in XLA: one masked matmul with all adapters' first matrices, and one with all second ones.

Rows are not sorted, and adapters have no separate steps: the program does not depend on the rows' adapters. It reads
little compared to the matrix: (in + out) * rank numbers per adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.lora.adapted import AdaptedMatrix

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


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
    if len(deltas) == 1:
        return deltas[0].reshape(len(x_te), *out)
    if len(out) > 1:  # parts have a separate axis; with several devices each has a share of the other
        return jnp.stack(deltas, axis=1)
    of_groups = [delta.reshape(len(x_te), matrix.num_groups, -1) for delta in deltas]
    return jnp.concatenate(of_groups, axis=2).reshape(len(x_te), *out)


def _dot(x: jax.Array, y: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, (contracted, ((), ())), precision, jnp.float32)
