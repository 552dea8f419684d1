"""Distribution of contexts over the devices of a mesh: each by position, or whole sequences.

`ContextOrder` splits every context: device d of c stores the positions p of every sequence with p % c = d.

    position    0 1 2 3 4 5 6 7 | 8 9 ...         c = 2, blocks of 8 slots, 4 of them on each device
    device 0    0   2   4   6   | 8 ...           its slots 0 1 2 3 of the first block, 0 of the second
    device 1      1   3   5   7 |   9 ...

So block tables and the block allocator are unaware of the split; a device holds 1 / c of any context, however long.
Each device attends to its own keys, and the parts are merged by the logarithms of their sums of exponentials.

Of queries that are c positions apart each sees one key more than the previous one, on every device. A row of many
queries is therefore split into c rows. For each of those, a device's own keys are a causal context like any other:

    packed      5 6 7 8 9          one row, whose queries have these positions
    in order    5 7 9 | 6 8        two rows; the first sees 3 4 5 keys on both devices, the second 4 5 and 3 4

Kernels are unaware of it: a row's first query is at (p - d) // c among a device's keys, and a window has the length of
its part, W / c. All devices have equal work, also in prompts. Striped Attention (Brandon et al., 2023) found that
interleaving tokens balances causal attention; the order is computed once per step, before the layers.

`RankOrder` distributes sequences, for data-parallel attention: a device has all blocks of some sequences, and runs
their tokens with all heads.

    packed      a0 a1 a2 b7 c4 . . .         n = 2; a and c are on device 1, b on device 0
    in order    b7 .  .  .  | a0 a1 a2 c4    T / n places for each device; the scheduler gives none more tokens

Recurrent layers take rows as they are packed (`recurrent_rows`): each device has its own heads of every state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jpaged.device.mesh import MODEL_AXIS, first_device, num_shards, on_shards
from jpaged.errors import InvalidArgument
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.spec import Attended, RaggedRows
from jpaged.kernels.recurrence import SHORT_LEN, RecurrenceKernel, RecurrentRows, unsupported_cpu_reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxtyping import Array, Bool, Int

_OF_TOKENS = ("positions_t", "rope_lens_t", "slots_gt", "adapters_t", "is_embed_t", "rope_shifts_3t")


def _ordered(inputs: Mapping[str, jax.Array], tokens_t: jax.Array) -> dict[str, jax.Array]:
    """Return the fields of `StepInputs`, with per-token fields in another order."""
    found = {**inputs, **{name: inputs[name][..., tokens_t] for name in _OF_TOKENS if name in inputs}}
    if "embeds_te" in inputs:
        found["embeds_te"] = inputs["embeds_te"][tokens_t]
    return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ContextOrder:
    """Order of a step's tokens in which each row's tokens are sorted by their distance from its first one, modulo c.

    Attributes:
        tokens_t: the packed token at each place.
        places_t: the place of each packed token.
        rows_u: the original row of each new row.
        offsets_u: distance of the new row's first query from the original row's first query, below c.
        query_starts_u1: as of `RaggedRows`.
        firsts_s1: the first new row of each original row, and the number of all new rows.
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
        """Build the order of a step of `num_tokens` packed tokens, including padding, which keeps its places."""
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
        """Return the fields of `StepInputs`, with per-token fields in this order."""
        return _ordered(inputs, self.tokens_t)

    def get_rows(self, rows: RaggedRows, part: Int[Array, ""], num_parts: int) -> RaggedRows:
        """Return the new rows over the keys that one device holds.

        Args:
            rows: as the scheduler has them; a prefix that they skip is a multiple of the block size.
            part: index of the device on the axis, from 0.
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
        """Return the starts of runs among the new rows; unused runs begin at the end of the last one."""
        starts, num_rows = self.firsts_s1[run_starts_s1], self.rows_u.shape[0]
        return jnp.pad(starts[: num_rows + 1], (0, max(0, num_rows + 1 - len(starts))), mode="edge")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RankOrder:
    """Order of a step's tokens in which each device's are adjacent, in an equal part of the step's places.

    Attributes:
        tokens_t: the packed token at each place; token 0 at places that are not in use.
        places_t: the place of each packed token; undefined for padding.
        is_used_t: the places in use.
        ranks_s: the device of each row; n for rows that are not in use.
    """

    tokens_t: Int[Array, "T"]
    places_t: Int[Array, "T"]
    is_used_t: Bool[Array, "T"]
    ranks_s: Int[Array, "S"]

    @classmethod
    def of(cls, inputs: Mapping[str, jax.Array], layout: KVLayout) -> RankOrder:
        """Build the order of a step, given the fields of `StepInputs`; a row's first block determines its device."""
        starts_s1, num_tokens, dp_size = inputs["query_starts_s1"], inputs["positions_t"].shape[0], layout.dp_size
        first_blocks_s = inputs["block_tables_gsm"][0, :, 0]
        is_row_s = jnp.arange(len(first_blocks_s)) < inputs["num_rows"]
        ranks_s = jnp.where(is_row_s, (first_blocks_s - 1) // (layout.num_blocks // dp_size), dp_size)

        t, of_rank = jnp.arange(num_tokens, dtype=jnp.int32), num_tokens // dp_size
        row_t = jnp.minimum((t[:, None] >= starts_s1[None, 1:]).sum(axis=1, dtype=jnp.int32), len(ranks_s) - 1)
        rank_t = jnp.where(t < starts_s1[-1], ranks_s[row_t], dp_size)
        is_of_tn = rank_t[:, None] == jnp.arange(dp_size)
        before_t = jnp.sum(jnp.where(is_of_tn, jnp.cumsum(is_of_tn, axis=0, dtype=jnp.int32), 0), axis=1) - 1
        places_t = jnp.where(rank_t < dp_size, rank_t * of_rank + before_t, num_tokens).astype(jnp.int32)
        tokens_t = jnp.zeros_like(t).at[places_t].set(t, mode="drop", unique_indices=True)
        is_used_t = jnp.zeros_like(t, jnp.bool_).at[places_t].set(True, mode="drop")
        return cls(tokens_t, jnp.minimum(places_t, num_tokens - 1), is_used_t, ranks_s)

    def ordered(self, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the fields of `StepInputs`, with per-token fields in this order; unused places have the null slot."""
        found = _ordered(inputs, self.tokens_t)
        return {**found, "slots_gt": jnp.where(self.is_used_t, found["slots_gt"], 0)}

    def get_rows(self, rows: RaggedRows, rank: Int[Array, ""], layout: KVLayout) -> RaggedRows:
        """Return the rows of one device, over the places and with the block numbers of that device.

        The scheduler gives no device more than an equal share of the rows of a step, S / n rounded up.
        """
        is_own_s = self.ranks_s == rank
        order_s = jnp.argsort(~is_own_s, stable=True)[: -(-len(is_own_s) // layout.dp_size)]
        is_own_s = is_own_s[order_s]
        nums_s = (rows.query_starts_s1[1:] - rows.query_starts_s1[:-1])[order_s]
        starts_s1 = jnp.pad(jnp.cumsum(jnp.where(is_own_s, nums_s, 0)), (1, 0)).astype(jnp.int32)
        return RaggedRows(
            query_starts_s1=starts_s1,
            kv_lens_s=jnp.where(is_own_s, rows.kv_lens_s[order_s], 0),
            block_tables_sm=layout.local_ids(rows.block_tables_sm[order_s], rank),
            num_rows=is_own_s.sum(dtype=jnp.int32),
            kv_begins_s=None,
        )

    @staticmethod
    def own_slots(slots_t: Int[Array, "T"], rank: Int[Array, ""], layout: KVLayout) -> Int[Array, "T/n"]:
        """Return the slots of one device's places, within its own blocks."""
        of_rank, block_size = slots_t.shape[0] // layout.dp_size, layout.block_size
        slots = lax.dynamic_slice_in_dim(slots_t, rank * of_rank, of_rank)
        return layout.local_ids(slots // block_size, rank) * block_size + slots % block_size


def most_rows(num_rows: int, num_tokens: int, num_parts: int) -> int:
    """Return the maximum rows of a step after its rows are split: each new row has a token."""
    return num_rows if num_parts == 1 else min(num_rows * num_parts, num_tokens)


def own_slots(slots_t: Int[Array, "T"], part: Int[Array, ""], num_parts: int) -> Int[Array, "T"]:
    """Return each token's slot on this device, or -1 if another device stores it."""
    return jnp.where(slots_t % num_parts == part, slots_t // num_parts, -1)


def kind_of_part(kind: AttentionKind, num_parts: int) -> AttentionKind:
    """Return the attention kind over the keys of one device: a window shrinks to its part."""
    if kind.sliding_window is None or num_parts == 1:
        return kind
    num_sinks = kind.num_sink_tokens // num_parts
    return dataclasses.replace(kind, sliding_window=-(-kind.sliding_window // num_parts), num_sink_tokens=num_sinks)


def check_windows(kinds: Iterable[AttentionKind], max_model_len: int, num_parts: int) -> None:
    """Check that windows divide into the parts of the context; a window longer than any sequence has no effect.

    Raises:
        InvalidArgument: a window or the sink tokens cannot be divided equally.
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
    """Merge attention over each device's keys into attention over the keys of all devices of a mesh axis.

    Every device gets the result. Two collectives: gathers lse [T, H], and adds outputs [T, H, D] in float32.
    """
    o_thd, lse_th = attended
    lse_pth = lax.all_gather(lse_th, axis)
    highest_th = lse_pth.max(axis=0)
    highest_th = jnp.where(jnp.isneginf(highest_th), 0.0, highest_th)
    total_th = jnp.exp(lse_pth - highest_th).sum(axis=0)
    share_th = jnp.exp(lse_th - highest_th) / jnp.where(total_th > 0, total_th, 1)
    summed_thd = lax.psum(share_th[..., None] * o_thd.astype(jnp.float32), axis)
    return summed_thd.astype(o_thd.dtype), highest_th + jnp.log(total_th)


def recurrent_rows(
    inputs: Mapping[str, jax.Array], num_tokens: int, mesh: Mesh, max_drafts: int
) -> RecurrentRows | None:
    """Return a step's rows for recurrent layers; None if there are none."""
    if "state_slots_s" not in inputs:
        return None
    starts_s1 = inputs["query_starts_s1"]
    is_first_s = inputs["kv_lens_s"] == starts_s1[1:] - starts_s1[:-1]
    sources_s, slots_s, kernel = inputs["state_sources_s"], inputs["state_slots_s"], recurrence_kernel(mesh, max_drafts)
    return RecurrentRows.of(starts_s1, is_first_s, sources_s, slots_s, num_tokens, kernel, inputs["is_draft_s"])


def recurrence_kernel(mesh: Mesh, max_drafts: int = 0) -> RecurrenceKernel:
    """Return the kernel of recurrent layers on these devices, for rows with up to `max_drafts` draft tokens."""
    platform, num_parts = first_device(mesh).platform, num_shards(mesh)
    if platform != "cpu":
        short_len = SHORT_LEN * (1 + max_drafts // SHORT_LEN)
        return RecurrenceKernel("blocks", platform == "gpu", _HeadShards(mesh), num_parts, short_len)
    is_built = unsupported_cpu_reason() is None
    return RecurrenceKernel("cpu" if is_built else "tokens", split=_HeadShards(mesh), num_parts=num_parts)


@dataclass(frozen=True, slots=True)
class _HeadShards:
    """Splits a function over the heads of a recurrence; see `RecurrenceKernel`."""

    mesh: Mesh

    def __call__(
        self, function: Callable[..., Any], axes_in: Sequence[int | None], axes_out: Sequence[int]
    ) -> Callable[..., Any]:
        def spec(axis: int | None) -> PartitionSpec:
            return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, MODEL_AXIS)

        return on_shards(function, self.mesh, tuple(map(spec, axes_in)), tuple(map(spec, axes_out)))
