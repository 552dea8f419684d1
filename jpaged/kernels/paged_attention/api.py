"""The operation's public face: checks the call, and runs the backend that was named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jpaged.errors import InternalError
from jpaged.kernels.paged_attention.backends import Backend, implementation
from jpaged.kernels.paged_attention.spec import AttentionSpec, Queries, RaggedRows

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped


def paged_attention(
    q_thd: Float[Array, "T H D"],
    pool: Shaped[Array, "P B ..."],
    layer: Int[Array, ""] | int,
    rows: RaggedRows,
    spec: AttentionSpec,
    scales_lk2: Float[Array, "L K 2"] | None = None,
    *,
    backend: Backend,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Causal grouped-query attention of ragged rows, prefill chunks and decodes mixed, over paged keys and values.

    Query head h reads key/value head h // (H / K). What lies in the pool beyond what a row sees never matters, not
    even NaN; a block id outside of the layer reads as zeros.

    Args:
        q_thd: queries, packed; not scaled.
        pool: keys and values of all layers as `spec.layout` says, those of this step included.
        layer: which layer's blocks are meant.
        rows: how the packed queries form rows.
        spec: the static side of the call.
        scales_lk2: of each layer's and head's keys and values, which the pool holds divided by them; a pool of 8 bits
            has them, another has not.
        backend: whose kernel runs; see `jpaged.kernels.paged_attention.backends`. None is chosen in silence.

    Returns:
        outputs [T, H, D] in the queries' type, and the log-sum-exp of the scores [T, H] in float32, with which
        attention over parts of a context can be merged. Tokens that belong to no row, or see no key, get 0 and minus
        infinity.

    Raises:
        Unsupported: the backend cannot do it; the reason is named.
        InternalError: shapes that contradict the layout.
    """
    _check_call(q_thd, pool, spec, scales_lk2)
    run = implementation(backend, spec, Queries.of(q_thd, rows))
    return run.attend(q_thd, pool, layer, rows, spec, scales_lk2)


def paged_attention_update(
    q_thd: Float[Array, "T H D"],
    new_kv: tuple[Float[Array, "T K D"], Float[Array, "T K D"], Int[Array, "T"]],
    pool: Shaped[Array, "P B ..."],
    layer: Int[Array, ""] | int,
    rows: RaggedRows,
    spec: AttentionSpec,
    scales_lk2: Float[Array, "L K 2"] | None = None,
    *,
    backend: Backend,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"], Shaped[Array, "P B ..."]]:
    """Stores the step's own keys and values, then `paged_attention`: in one kernel where the backend has it.

    Args:
        q_thd: as in `paged_attention`.
        new_kv: keys and values of the packed tokens as the model makes them, and each token's slot, which is where its
            row's block table puts its position, or outside of the layer for padding: nothing is stored for it.
        pool: without the new keys and values. Donate it: it is updated in place.
        layer: as in `paged_attention`, and so is the rest.
        rows: every row's last queries are the last tokens of its context.
        spec: the static side of the call.
        scales_lk2: of a pool of 8 bits.
        backend: whose kernel runs.

    Returns:
        outputs and log-sum-exp as `paged_attention` has them, and the pool.

    Raises:
        Unsupported: the backend cannot do it; the reason is named.
        InternalError: shapes that contradict the layout.
    """
    _check_call(q_thd, pool, spec, scales_lk2)
    run = implementation(backend, spec, Queries.of(q_thd, rows))
    k_tkd, v_tkd, slots_t = new_kv
    if scales_lk2 is not None:
        k_tkd, v_tkd = k_tkd / scales_lk2[layer, :, :1], v_tkd / scales_lk2[layer, :, 1:]
    if run.update is not None:
        return run.update(q_thd, (k_tkd, v_tkd, slots_t), pool, layer, rows, spec, scales_lk2)
    pool = spec.layout.write(pool, layer, k_tkd, v_tkd, slots_t)
    return *run.attend(q_thd, pool, layer, rows, spec, scales_lk2), pool


def _check_call(
    q_thd: Float[Array, "T H D"],
    pool: Shaped[Array, "P B ..."],
    spec: AttentionSpec,
    scales_lk2: Float[Array, "L K 2"] | None,
) -> None:
    layout = spec.layout
    if pool.shape != layout.shape or pool.dtype != layout.storage_dtype:
        raise InternalError(f"the pool is {pool.dtype}{pool.shape}, its layout {layout.storage_dtype}{layout.shape}")
    if q_thd.shape[1] % layout.num_kv_heads or q_thd.shape[2] != layout.head_dim:
        raise InternalError(
            f"queries {q_thd.shape} do not fit {layout.num_kv_heads} key/value heads of {layout.head_dim}"
        )
    if (scales_lk2 is not None) != layout.is_scaled:
        raise InternalError(f"a pool of {layout.dtype} has {'its' if layout.is_scaled else 'no'} scales")
