"""Contexts over the devices of a mesh: of every sequence, device d of c keeps the positions p with p % c = d.

    position    0 1 2 3 4 5 6 7 | 8 9 ...         c = 2, blocks of 8 slots, 4 of them on each device
    device 0    0   2   4   6   | 8 ...           its slots 0 1 2 3 of the first block, 0 of the second
    device 1      1   3   5   7 |   9 ...

So block tables, and whoever gives blocks out, know of one kind of block; a device holds 1 / c of any context, however
long it is. Each attends to what it holds, and the parts are merged by the logarithms of their sums of exponentials.

Of queries that are c positions apart each sees one key more than the one before, on every device. A row of many is
therefore taken apart into c rows, and to each of those a device's own keys are a causal context like any other:

    packed      5 6 7 8 9          one row, whose queries have these positions
    in order    5 7 9 | 6 8        two rows; the first sees 3 4 5 keys on both devices, the second 4 5 and 3 4

No kernel has to know of it: a row's first query is at (p - d) // c among a device's keys, and a window is as long
there as its part, W / c. All devices have equal work, prompts included. That tokens dealt out in turn balance causal
attention is what Striped Attention (Brandon et al., 2023) found; the order is made once a step, ahead of the layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.errors import InvalidArgument
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.paged_attention.spec import Attended, RaggedRows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxtyping import Array, Int

_OF_TOKENS = ("positions_t", "rope_lens_t", "slots_gt", "adapters_t")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ContextOrder:
    """A step's tokens in an order in which each row's are by their distance from its first, modulo c.

    Attributes:
        tokens_t: the packed token that comes to each place.
        places_t: where each packed token comes to.
        rows_u: whose part each of the new rows is.
        offsets_u: how far behind that row's first query its own first one is, below c.
        query_starts_u1: as of `RaggedRows`.
        firsts_s1: the first of the new rows that is a part of each row, and the number of them all.
    """

    tokens_t: Int[Array, "T"]
    places_t: Int[Array, "T"]
    rows_u: Int[Array, "U"]
    offsets_u: Int[Array, "U"]
    query_starts_u1: Int[Array, "U+1"]
    firsts_s1: Int[Array, "S+1"]

    @classmethod
    def of(
        cls, query_starts_s1: Int[Array, "S+1"], num_rows: Int[Array, ""], num_tokens: int, num_parts: int
    ) -> ContextOrder:
        """The order of a step of so many packed tokens, padding included, which stays where it is."""
        starts_s, last = query_starts_s1[:-1], query_starts_s1.shape[0] - 2
        nums_s = jnp.where(jnp.arange(last + 1) < num_rows, query_starts_s1[1:] - starts_s, 0)
        firsts_s1 = jnp.pad(jnp.cumsum(jnp.minimum(nums_s, num_parts)), (1, 0)).astype(jnp.int32)

        def first_place(row: jax.Array, offset: jax.Array) -> jax.Array:
            each, rest = nums_s[row] // num_parts, nums_s[row] % num_parts
            return starts_s[row] + offset * each + jnp.minimum(offset, rest)

        u = jnp.arange(most_rows(last + 1, num_tokens, num_parts), dtype=jnp.int32)
        rows_u = jnp.minimum((u[:, None] >= firsts_s1[None, 1:]).sum(axis=1, dtype=jnp.int32), last)
        offsets_u = u - firsts_s1[rows_u]
        end = starts_s[0] + nums_s.sum()
        begins_u = jnp.where(u < firsts_s1[-1], first_place(rows_u, offsets_u), end)

        t = jnp.arange(num_tokens, dtype=jnp.int32)
        row_t = jnp.minimum((t[:, None] >= query_starts_s1[None, 1:]).sum(axis=1, dtype=jnp.int32), last)
        distance_t = t - starts_s[row_t]
        places_t = first_place(row_t, distance_t % num_parts) + distance_t // num_parts
        places_t = jnp.where(t < end, places_t, t).astype(jnp.int32)
        tokens_t = jnp.zeros_like(t).at[places_t].set(t, unique_indices=True)
        return cls(tokens_t, places_t, rows_u, offsets_u, jnp.append(begins_u, end).astype(jnp.int32), firsts_s1)

    def ordered(self, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The fields of `StepInputs` with those that tokens have in this order."""
        return {**inputs, **{name: inputs[name][..., self.tokens_t] for name in _OF_TOKENS if name in inputs}}

    def rows_of(self, rows: RaggedRows, part: Int[Array, ""], num_parts: int) -> RaggedRows:
        """The new rows over the keys that one device holds.

        Args:
            rows: as the scheduler has them; where they begin behind a prefix it is whole blocks long.
            part: which device of the axis it is, from 0.
        """
        row_u, counts_u = self.rows_u, self.query_starts_u1[1:] - self.query_starts_u1[:-1]
        positions_u = (rows.positions[row_u] + self.offsets_u - part) // num_parts
        begins_s = rows.kv_begins_s
        return RaggedRows(
            query_starts_s1=self.query_starts_u1,
            kv_lens_s=jnp.where(counts_u > 0, positions_u + counts_u, 0),
            block_tables_sm=rows.block_tables_sm[row_u],
            num_rows=self.firsts_s1[-1],
            kv_begins_s=None if begins_s is None else begins_s[row_u] // num_parts,
        )

    def run_starts(self, run_starts_s1: Int[Array, "S+1"]) -> Int[Array, "U+1"]:
        """Where runs of rows begin among the new rows; those that are not there begin where the last one ends."""
        starts, num_rows = self.firsts_s1[run_starts_s1], self.rows_u.shape[0]
        return jnp.pad(starts[: num_rows + 1], (0, max(0, num_rows + 1 - len(starts))), mode="edge")


def most_rows(num_rows: int, num_tokens: int, num_parts: int) -> int:
    """Rows that a step of so many rows and tokens has at most, once they are taken apart: each has a token."""
    return num_rows if num_parts == 1 else min(num_rows * num_parts, num_tokens)


def own_slots(slots_t: Int[Array, "T"], part: Int[Array, ""], num_parts: int) -> Int[Array, "T"]:
    """Each token's slot among those of one device, or -1 where another keeps it."""
    return jnp.where(slots_t % num_parts == part, slots_t // num_parts, -1)


def kind_of_part(kind: AttentionKind, num_parts: int) -> AttentionKind:
    """What attention computes over the keys of one device: of a window, its part."""
    if kind.sliding_window is None or num_parts == 1:
        return kind
    num_sinks = kind.num_sink_tokens // num_parts
    return dataclasses.replace(kind, sliding_window=-(-kind.sliding_window // num_parts), num_sink_tokens=num_sinks)


def check_windows(kinds: Iterable[AttentionKind], max_model_len: int, num_parts: int) -> None:
    """Holds windows to the parts that they are cut into; one that is longer than any sequence hides nothing.

    Raises:
        InvalidArgument: one cannot be cut into equal parts.
    """
    for window, num_sinks in {(kind.sliding_window, kind.num_sink_tokens) for kind in kinds}:
        if window is None or window >= max_model_len:
            continue
        whose = "sliding window of the lossy cache, lossy_kv_window," if num_sinks else "model's sliding window"
        if window % num_parts:
            raise InvalidArgument(
                "context_parallel_size", f"{num_parts} does not divide the {whose} of {window} tokens"
            )
        if num_sinks % num_parts:
            raise InvalidArgument("context_parallel_size", f"{num_parts} does not divide lossy_kv_sinks, {num_sinks}")


def merged(attended: Attended, axis: str) -> Attended:
    """Attention over the keys of one device -> over those of all devices of a mesh axis, on each of them.

    Sends lse [T, H] to all, and adds up outputs [T, H, D]: in float32, two collectives.
    """
    o_thd, lse_th = attended
    lse_pth = lax.all_gather(lse_th, axis)
    highest_th = lse_pth.max(axis=0)
    highest_th = jnp.where(jnp.isneginf(highest_th), 0.0, highest_th)
    total_th = jnp.exp(lse_pth - highest_th).sum(axis=0)
    share_th = jnp.exp(lse_th - highest_th) / jnp.where(total_th > 0, total_th, 1)
    summed_thd = lax.psum(share_th[..., None] * o_thd.astype(jnp.float32), axis)
    return summed_thd.astype(o_thd.dtype), highest_th + jnp.log(total_th)
