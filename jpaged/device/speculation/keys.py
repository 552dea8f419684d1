"""The draft model over tokens that the model has run, so that its pool has their keys when it is to propose.

    draft[T]   (draft params, draft pool, inputs) -> draft pool      donated, updated in place

It takes inputs as a forward does, of tokens that the host knows, and gives no hidden state: XLA leaves out what only
those would need.
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
    """Runs the draft's layers on inputs that are packed; the pool, with the keys and values of their tokens."""
    inputs = packing.unpack(words)
    by_group = {name: inputs[name][draft.group][None] for name in ("slots_gt", "block_tables_gsm")}
    return draft.step.run(params, pool, inputs["token_ids_t"], {**{name: inputs[name] for name in _READ}, **by_group})[
        1
    ]
