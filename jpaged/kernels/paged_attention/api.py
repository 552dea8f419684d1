"""The operation's public face: checks the call, and runs the backend that was named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from jpaged.errors import InternalError, Unsupported
from jpaged.kernels.paged_attention import reference
from jpaged.kernels.paged_attention.spec import AttentionSpec, RaggedRows

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped

Backend = Literal["xla"]


def paged_attention(
    q_thd: Float[Array, "T H D"],
    pool: Shaped[Array, "P B 2K D"],
    layer: Int[Array, ""] | int,
    rows: RaggedRows,
    spec: AttentionSpec,
    *,
    backend: Backend = "xla",
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Causal grouped-query attention of ragged rows, prefill chunks and decodes mixed, over paged keys and values.

    Query head h reads key/value head h // (H / K). What lies in the pool beyond a row's context never matters, not
    even NaN; a block id outside of the layer reads as zeros.

    Args:
        q_thd: queries, packed; not scaled.
        pool: keys and values of all layers as `spec.layout` says, those of this step included.
        layer: which layer's blocks are meant.
        rows: how the packed queries form rows.
        spec: the static side of the call.
        backend: `xla` runs everywhere, and is made for CPUs: on accelerators its loops over rows and chunks are
            correct and slow. There is no other yet, and none is chosen in silence.

    Returns:
        outputs [T, H, D] in the queries' type, and the log-sum-exp of the scores [T, H] in float32, with which
        attention over parts of a context can be merged. Tokens that belong to no row get 0 and minus infinity.

    Raises:
        Unsupported: no such backend.
        InternalError: shapes that contradict the layout.
    """
    layout = spec.layout
    if backend not in get_args(Backend):
        raise Unsupported(f"paged attention has no backend {backend!r}; it has {', '.join(get_args(Backend))}")
    if pool.shape != layout.shape or pool.dtype != layout.storage_dtype:
        raise InternalError(f"the pool is {pool.dtype}{pool.shape}, its layout {layout.storage_dtype}{layout.shape}")
    if q_thd.shape[1] % layout.num_kv_heads or q_thd.shape[2] != layout.head_dim:
        raise InternalError(
            f"queries {q_thd.shape} do not fit {layout.num_kv_heads} key/value heads of {layout.head_dim}"
        )
    return reference.paged_attention(q_thd, pool, layer, rows, spec)
