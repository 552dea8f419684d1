"""The draft model's run over tokens that only the model has run, so that its pool has their keys before it proposes.

    draft[T]   (draft params, draft pool, inputs) -> draft pool      donated, updated in place

It takes inputs as a forward does, with tokens known to the host. It returns no hidden states: XLA removes what only
they would need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jpaged.device.step.forward import Draft
from jpaged.device.step.runner import Packing
from jpaged.models.layers import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped

_READ = ("positions_t", "rope_lens_t", "query_starts_s1", "kv_lens_s", "num_rows")


def packed_keys(
    draft: Draft,
    params: Params,
    pool: Shaped[Array, "P B ..."],
    words: Int[Array, "W"],
    *,
    packing: Packing,
) -> Shaped[Array, "P B ..."]:
    """Run the draft's layers on packed inputs; return the pool, with the keys and values of their tokens."""
    inputs = packing.unpack(words)
    by_group = {name: inputs[name][draft.group][None] for name in ("slots_gt", "block_tables_gsm")}
    return draft.step.run(params, pool, inputs["token_ids_t"], {**{name: inputs[name] for name in _READ}, **by_group})[
        1
    ]
