"""The operation's public face: checks the call, and runs the backend that was named."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jpaged.config import Backend
from jpaged.kernels.paged_attention.backends import implementation
from jpaged.kernels.paged_attention.spec import (
    Attended,
    AttentionCall,
    AttentionSpec,
    NewKV,
    Queries,
    RaggedRows,
    Updated,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped


def prepare_rows(
    rows: RaggedRows, slots_t: Int[Array, "T"] | None, spec: AttentionSpec, queries: Queries, *, backend: Backend
) -> RaggedRows:
    """The rows with what the backend makes of them once for all layers of a step; a call makes it itself otherwise.

    They are good for calls of this spec with queries of this description, and to store keys in these slots.

    Raises:
        Unsupported: as `paged_attention` does.
    """
    found = implementation(backend, spec, queries)
    return rows if found.prepare is None else found.prepare(rows, slots_t, spec, queries)


def paged_attention(
    q_thd: Float[Array, "T H D"],
    pool: Shaped[Array, "P B ..."],
    layer: Int[Array, ""] | int,
    rows: RaggedRows,
    spec: AttentionSpec,
    scales_lk2: Float[Array, "L K 2"] | None = None,
    *,
    backend: Backend,
) -> Attended:
    """Causal grouped-query attention of ragged rows, prefill chunks and decodes mixed, over paged keys and values.

    Query head h reads key/value head h // (H / K). What lies in the pool beyond what a row sees never matters, not
    even NaN; a block id outside of the layer reads as zeros. The keys and values of this step are in the pool.

    The arguments are the fields of `AttentionCall`, and the backend whose kernel runs (`backends.py`): none is chosen
    in silence.

    Raises:
        Unsupported: the backend cannot do it; the reason is named.
        InternalError: shapes that contradict the layout.
    """
    call = AttentionCall(q_thd, pool, layer, rows, spec, scales_lk2)
    return implementation(backend, spec, call.queries).attend(call)


def paged_attention_update(
    q_thd: Float[Array, "T H D"],
    new_kv: NewKV,
    pool: Shaped[Array, "P B ..."],
    layer: Int[Array, ""] | int,
    rows: RaggedRows,
    spec: AttentionSpec,
    scales_lk2: Float[Array, "L K 2"] | None = None,
    *,
    backend: Backend,
) -> Updated:
    """Stores the step's own keys and values, then `paged_attention`: in one kernel where the backend has it.

    Donate the pool: it is updated in place. Every row's last queries are the last tokens of its context. Arguments and
    errors are `paged_attention`'s, but for the new keys and values, which come as the model makes them.
    """
    call = AttentionCall(q_thd, pool, layer, rows, spec, scales_lk2)
    run = implementation(backend, spec, call.queries)
    new_kv = call.scaled(new_kv)
    if run.update is not None:
        return run.update(call, new_kv)
    pool = spec.layout.write(pool, layer, *new_kv)
    return *run.attend(dataclasses.replace(call, pool=pool)), pool
