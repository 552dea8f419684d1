"""One step as two pure programs, so that tokens and rows are bucketed apart.

    forward[T]   (params, pool, last tokens, inputs) -> (pool, hidden)      pool donated, updated in place
    sample[R]    (params, hidden, sampling) -> (last tokens, outputs)       want_top_logprobs: the larger variant

The last tokens stay on the device: a decode row of the next step names its input by its place among them, so that the
next step can be dispatched before the host has seen a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.device.mesh import HEADS_SPEC, LOGITS_SPEC, MODEL_AXIS, POOL_SPEC, SCALES_SPEC, num_shards, on_shards
from jpaged.device.step import sampling
from jpaged.device.step.runner import Packing, unpack_rows
from jpaged.device.step.vocabulary import Vocabulary
from jpaged.engine.executor import Geometry
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, Backend, RaggedRows, paged_attention_update
from jpaged.kernels.paged_attention.cascade import CascadeRows, cascade_attention_update
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode, LayerPlace
from jpaged.models.tokens import TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Shaped

Params = Mapping[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """What the model runs on; the fields of `engine.executor.StepInputs` on the device."""

    token_ids_t: Int[Array, "T"]
    is_prev_sampled_t: Bool[Array, "T"]
    prev_sampled_rows_t: Int[Array, "T"]
    positions_t: Int[Array, "T"]
    rope_lens_t: Int[Array, "T"]
    slots_t: Int[Array, "T"]
    sample_tokens_s: Int[Array, "S"]
    rows: RaggedRows | CascadeRows


def forward_packing(num_tokens: int, geometry: Geometry) -> Packing:
    """The buffer of a forward call with T tokens: the fields of `StepInputs` that have no row of the sampler.

    It has the runs of rows that read a prefix together where the geometry says that there are any.
    """
    t, s, s1 = (num_tokens,), (geometry.max_num_seqs,), (geometry.max_num_seqs + 1,)
    runs = {"kv_begins_s": (s, "int32"), "run_starts_s1": (s1, "int32"), "num_runs": ((), "int32")}
    return Packing.of(
        token_ids_t=(t, "int32"),
        is_prev_sampled_t=(t, "bool"),
        prev_sampled_rows_t=(t, "int32"),
        positions_t=(t, "int32"),
        rope_lens_t=(t, "int32"),
        slots_t=(t, "int32"),
        sample_tokens_s=(s, "int32"),
        query_starts_s1=(s1, "int32"),
        kv_lens_s=(s, "int32"),
        block_tables_sm=((geometry.max_num_seqs, geometry.max_blocks_per_seq), "int32"),
        num_rows=((), "int32"),
        **(runs if geometry.cascade is not None else {}),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """The two programs of a model over a pool. Static under jit; holds no array.

    Attributes:
        model: the description of the network, wide enough for every shard.
        layout: of the pool that its attention reads.
        layer_mode: how the layers run, and so how the parameters are stacked.
        num_places: rows of the hidden states and of the last tokens: what the largest sample takes.
        vocab_size: tokens that can be sampled; the model's own number may hold padding.
        mesh: the devices that each run their part.
        backend: whose attention kernel runs.
    """

    model: Model
    layout: KVLayout
    layer_mode: LayerMode
    num_places: int
    vocab_size: int
    mesh: Mesh
    backend: Backend

    def forward(
        self,
        params: Params,
        pool: Shaped[Array, "P B ..."],
        last_tokens_s: Int[Array, "S"],
        inputs: ForwardInputs,
    ) -> tuple[Shaped[Array, "P B ..."], Float[Array, "S E"]]:
        """Runs the layers; the hidden state from which each row samples comes back.

        The parameters hold the pool's scales as "kv_scales" `[L, K, 2]` where it keeps 8 bits.
        """
        scales_lk2 = params.get("kv_scales")

        def attend(
            q_thd: jax.Array, k_tkd: jax.Array, v_tkd: jax.Array, pool: jax.Array, place: LayerPlace
        ) -> tuple[jax.Array, jax.Array]:
            return self._attend(q_thd, (k_tkd, v_tkd, inputs.slots_t), pool, place, inputs.rows, scales_lk2)

        sampled_t = last_tokens_s[inputs.prev_sampled_rows_t]
        ids_t = jnp.where(inputs.is_prev_sampled_t, sampled_t, inputs.token_ids_t)
        tokens = TokenBatch(ids_t, inputs.positions_t, inputs.rope_lens_t)
        hidden_te, pool = self.model.run(dict(params), tokens, attend, pool, self.layer_mode)
        num_missing = self.num_places - inputs.sample_tokens_s.shape[0]
        return pool, hidden_te[jnp.pad(inputs.sample_tokens_s, (0, num_missing))]

    def sample(
        self, params: Params, hidden_se: Float[Array, "S E"], how: sampling.RowSampling, *, want_top_logprobs: bool
    ) -> tuple[Int[Array, "S"], sampling.Sampled]:
        """Samples a token for each of the first R rows, R being what `how` is of."""
        num_rows = how.temperature_r.shape[0]
        logits_rv = self.model.logits(dict(params), hidden_se[:num_rows])
        logits_rv = jax.lax.with_sharding_constraint(logits_rv, NamedSharding(self.mesh, LOGITS_SPEC))
        vocabulary = Vocabulary(self.vocab_size, MODEL_AXIS if num_shards(self.mesh) > 1 else None)

        def sample(logits_rv: jax.Array, how: sampling.RowSampling) -> sampling.Sampled:
            return sampling.sample(logits_rv, how, vocabulary, want_top_logprobs=want_top_logprobs)

        sampled = on_shards(sample, self.mesh, (LOGITS_SPEC, PartitionSpec()), PartitionSpec())(logits_rv, how)
        return jnp.pad(sampled.token_ids_r, (0, self.num_places - num_rows)), sampled

    def _attend(
        self,
        q_thd: jax.Array,
        new_kv: tuple[jax.Array, jax.Array, jax.Array],
        pool: jax.Array,
        place: LayerPlace,
        rows: RaggedRows | CascadeRows,
        scales_lk2: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attention and the pool that it updated: each device has its own heads, and all have the same blocks."""
        spec = AttentionSpec(self.layout.local, place.attention)

        def attend(q: Any, new_kv: Any, pool: Any, layer: Any, rows: Any, scales: Any) -> tuple[jax.Array, jax.Array]:
            update = cascade_attention_update if isinstance(rows, CascadeRows) else paged_attention_update
            o_thd, _, pool = update(q, new_kv, pool, layer, rows, spec, scales, backend=self.backend)
            return o_thd, pool

        whole = PartitionSpec()
        in_specs = (HEADS_SPEC, (HEADS_SPEC, HEADS_SPEC, whole), POOL_SPEC, whole, whole, SCALES_SPEC)
        run = on_shards(attend, self.mesh, in_specs, (HEADS_SPEC, POOL_SPEC))
        return run(q_thd, new_kv, pool, place.index, rows, scales_lk2)

    def packed_forward(
        self, params: Params, pool: jax.Array, last_tokens_s: jax.Array, buffer: jax.Array, *, packing: Packing
    ) -> tuple[jax.Array, jax.Array]:
        """`forward` with its inputs in one buffer."""
        arrays = packing.unpack(buffer)
        rows = RaggedRows(
            query_starts_s1=arrays.pop("query_starts_s1"),
            kv_lens_s=arrays.pop("kv_lens_s"),
            block_tables_sm=arrays.pop("block_tables_sm"),
            num_rows=arrays.pop("num_rows"),
            kv_begins_s=arrays.pop("kv_begins_s", None),
        )
        if "num_runs" in arrays:
            cascade = CascadeRows.of(rows, arrays.pop("run_starts_s1"), arrays.pop("num_runs"))
            return self.forward(params, pool, last_tokens_s, ForwardInputs(rows=cascade, **arrays))
        return self.forward(params, pool, last_tokens_s, ForwardInputs(rows=rows, **arrays))

    def packed_sample(
        self, params: Params, hidden_se: jax.Array, words: jax.Array, *, want_top_logprobs: bool
    ) -> tuple[jax.Array, jax.Array]:
        """`sample` with its inputs as words and its outputs in one array, which `unpack_outputs` takes apart."""
        how = sampling.RowSampling(**unpack_rows(words))
        last_tokens_s, sampled = self.sample(params, hidden_se, how, want_top_logprobs=want_top_logprobs)
        columns = [sampled.token_ids_r[:, None], _bits(sampled.logprobs_r)[:, None], sampled.ranks_r[:, None]]
        if sampled.top_ids_rk is not None and sampled.top_logprobs_rk is not None:
            columns += [sampled.top_ids_rk, _bits(sampled.top_logprobs_rk)]
        return last_tokens_s, jnp.concatenate(columns, axis=1)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
