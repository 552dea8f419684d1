"""Entry points of the operation: check the call, and run the chosen backend."""

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
    """Return the rows with the backend's preparation for all layers of a step.

    A call with unprepared rows prepares them itself. Prepared rows are valid for calls with this spec and queries of
    this description, and for storing keys in these slots.

    Raises:
        Unsupported: as `paged_attention`.
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
    """Compute causal grouped-query attention of ragged rows over paged keys and values.

    The rows may mix prefill chunks and decodes. Query head h reads key/value head h // (H / K). Pool contents that a
    row does not see never matter, not even NaN; a block id outside the layer reads as zeros. The keys and values of
    this step are already in the pool.

    The arguments are the fields of `AttentionCall`, and the backend whose kernel runs (`backends.py`); there is no
    fallback.

    Raises:
        Unsupported: the backend does not support the call; has the reason.
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
    """Store the step's own keys and values, then run `paged_attention`: in one kernel if the backend has it.

    Donate the pool: it is updated in place. Every row's last queries are the last tokens of the row's context.
    Arguments and errors are those of `paged_attention`, plus the new keys and values, as the model computes them.
    """
    call = AttentionCall(q_thd, pool, layer, rows, spec, scales_lk2)
    run = implementation(backend, spec, call.queries)
    new_kv = call.scaled(new_kv)
    if run.update is not None:
        return run.update(call, new_kv)
    pool = spec.layout.write(pool, layer, *new_kv)
    return *run.attend(dataclasses.replace(call, pool=pool)), pool
