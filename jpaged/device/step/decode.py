"""Several decode steps as one program: a loop of forward and sampler until all rows have ended.

    decode[R]    (params, pool, last tokens, inputs) -> (pool, last tokens, outputs)      pool donated, updated in place

    place      0            1            2
    ids        t7 ────┐  ┌> t8 ────┐  ┌> t9          a row's sampled token is its next input
    positions  7      └──┘  8      └──┘  9           grow by one, and so do the lengths of contexts; slots come from the
                                                     block tables, which have room for all steps

Rows with grammars wait in it for their masks, if the sampling kernel supports that (`engine/executor/verbs.py`).

It computes what single steps compute. It pays off because on one core two dispatches and the copy of a token to the
host take half a millisecond, while a step of a small model takes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.device.step.forward import Step
from jpaged.device.step.runner import NUM_TOKEN_COLUMNS, DecodePacking
from jpaged.engine.executor import MAX_NUM_STEPS, Verdict
from jpaged.kernels.sampling import RowSampling
from jpaged.models.layers import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Shaped


_State = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""Number of steps run, the pool, the last tokens, ended rows, the outputs, and the newest step's verdict."""


@dataclass(frozen=True, slots=True)
class _Decode:
    """A dispatch on the device; `step` has the fields of `StepInputs` by name."""

    step: Mapping[str, jax.Array]
    num_steps: Int[Array, ""]
    feed: Int[Array, ""]
    ending_token_ids_rx: Int[Array, "R X"]
    how: RowSampling
    block_size: int

    @classmethod
    def of(cls, words: Int[Array, "W"], packing: DecodePacking, block_size: int) -> _Decode:
        """Unpack the buffer of a call."""
        step, (num_steps, feed), ending_rx, rows = packing.unpack(words)
        return cls(step, num_steps, feed, ending_rx, RowSampling(**rows), block_size)

    @property
    def is_used_r(self) -> Bool[Array, "R"]:
        """Rows in use, each of which has one token."""
        return jnp.arange(len(self.ending_token_ids_rx)) < self.step["num_rows"]

    def ends(self, ids_r: Int[Array, "R"]) -> Bool[Array, "R"]:
        """Return True for each row whose token ends it."""
        return jnp.any(ids_r[:, None] == self.ending_token_ids_rx, axis=1)

    def step_at(self, place: Int[Array, ""]) -> dict[str, jax.Array]:
        """Return the fields of one of the steps."""
        step, is_used_r = self.step, self.is_used_r
        kv_lens_s, tables_gsm = step["kv_lens_s"], step["block_tables_gsm"]
        is_used_s = jnp.arange(len(kv_lens_s)) < step["num_rows"]
        positions_r = step["positions_t"] + jnp.where(is_used_r, place, 0)
        rows_r = jnp.minimum(jnp.arange(len(positions_r)), len(kv_lens_s) - 1)
        blocks_gr = tables_gsm[:, rows_r, positions_r // self.block_size]
        slots_gr = blocks_gr * self.block_size + positions_r % self.block_size
        return {
            **step,
            "positions_t": positions_r,
            "rope_lens_t": jnp.maximum(step["rope_lens_t"], positions_r + 1),
            "slots_gt": jnp.where(is_used_r, slots_gr, 0),
            "kv_lens_s": kv_lens_s + jnp.where(is_used_s, place, 0),
        }


def packed_decode(
    step: Step,
    params: Params,
    pool: Shaped[Array, "P B ..."],
    last_tokens_s: Int[Array, "S"],
    words: Int[Array, "W"],
    *,
    packing: DecodePacking,
) -> tuple[Shaped[Array, "P B ..."], Int[Array, "S"], Int[Array, "N R C"]]:
    """Run the steps on packed inputs until every row has ended.

    Returns:
        the pool, the tokens that the rows sampled last, and for each step the columns that `unpack_outputs` parses. A
        row that ended keeps its token; its later outputs are marked finite and must be ignored.
    """
    inputs = _Decode.of(words, packing, step.layout.block_size)
    first = inputs.step
    ids_r = jnp.where(first["is_prev_sampled_t"], last_tokens_s[first["prev_sampled_rows_t"]], first["token_ids_t"])
    has_ended_r = ~inputs.is_used_r | (first["is_prev_sampled_t"] & inputs.ends(ids_r))
    outputs_nrc = jnp.ones((MAX_NUM_STEPS, packing.num_rows, NUM_TOKEN_COLUMNS), jnp.int32)

    def goes_on(state: _State) -> jax.Array:
        place, _, _, has_ended_r, _, verdict = state
        return (place < inputs.num_steps) & ~jnp.all(has_ended_r) & (verdict == Verdict.GOES_ON)

    def run(state: _State) -> _State:
        place, pool, ids_r, has_ended_r, outputs_nrc, _ = state
        hidden_re, pool = step.run(params, pool, ids_r, inputs.step_at(place))
        how = dataclasses.replace(inputs.how, positions_r=inputs.how.positions_r + place)
        sampled, verdict = step.sample_fed(params, hidden_re, how, inputs.feed, place)
        ids_r = jnp.where(has_ended_r | (verdict == Verdict.VOID), ids_r, sampled.token_ids_r)
        columns_rc = jnp.stack([ids_r, (sampled.is_sound_r | has_ended_r).astype(jnp.int32)], axis=1)
        outputs_nrc = lax.dynamic_update_index_in_dim(outputs_nrc, columns_rc, place, 0)
        return place + 1, pool, ids_r, has_ended_r | inputs.ends(ids_r), outputs_nrc, verdict

    state: _State = jnp.int32(0), pool, ids_r, has_ended_r, outputs_nrc, jnp.int32(Verdict.GOES_ON)
    _, pool, ids_r, _, outputs_nrc, _ = lax.while_loop(goes_on, run, state)
    return pool, jnp.pad(ids_r, (0, step.num_places - packing.num_rows)), outputs_nrc
