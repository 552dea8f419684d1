"""One step as two pure programs, and several decode steps as one program.

A step has two programs so that tokens and rows are bucketed separately:

    forward[T]   (params, pool, last tokens, inputs) -> (pool, hidden)      pool donated, updated in place
    sample[R]    (params, hidden, sampling) -> (last tokens, outputs)       variants: `Detail` and `SamplingStages`

The last tokens stay on the device: a decode row of the next step names its input by its row among them, so that the
next step can be dispatched before the host has seen a token.

Several decode steps are a loop of forward and sampler until all rows have ended:

    decode[R]    (params, pool, last tokens, inputs) -> (pool, last tokens, outputs)      pool donated, updated in place

    index      0            1            2
    ids        t7 ────┐  ┌> t8 ────┐  ┌> t9          a row's sampled token is its next input
    positions  7      └──┘  8      └──┘  9           grow by one, and so do the lengths of contexts; slots come from the
                                                     block tables, which have room for all steps

Rows with grammars wait in the loop for their masks, if the sampling kernel supports that (`engine/executor/verbs.py`).

The loop computes what single steps compute. It pays off because on one core two dispatches and the copy of a token to
the host take half a millisecond, while a step of a small model takes one. On GPUs a loop that ends when the rows have
ended would make the host wait for the device in each turn. So there several steps are dispatched one after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.config import ActivationDtype, Backend, LinearBackend
from jpaged.device import sampling
from jpaged.device.context import ContextOrder, RankOrder, kind_of_part, merged, own_slots, recurrent_rows
from jpaged.device.logits_processors import RowEdits, TokenCounts, edited
from jpaged.device.lora import AdapterRoom
from jpaged.device.mesh import (
    CONTEXT_AXIS,
    HEADS_SPEC,
    LOGITS_SPEC,
    MODEL_AXIS,
    PROJECTION_SPEC,
    SINKS_SPEC,
    STAGE_AXIS,
    TOKENS_SPEC,
    Microbatches,
    num_context_parts,
    num_shards,
    num_stages,
    on_shards,
    on_stages,
    pool_spec,
    replicated,
    scales_spec,
)
from jpaged.device.model_runner import (
    NUM_COUNT_WORDS,
    Packing,
    unpack_edits,
    unpack_rows,
)
from jpaged.device.sampling import SamplingStages, SamplingVocabulary
from jpaged.device.sharded_matmul import experts_kernel, in_parts, state_parts
from jpaged.engine.executor import Detail, Geometry, StepDirective, StepInputs
from jpaged.engine.executor.aux_io import AUX_IDS, AuxKind
from jpaged.kernels import qkv_rope as heads
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, Queries, RaggedRows, paged_attention_update, rotate_heads
from jpaged.kernels.paged_attention.cascade import StepRows, attend_ahead, cascade_attention_update, prepare_step_rows
from jpaged.kernels.paged_attention.spec import NewKV, add_sinks, merge
from jpaged.kernels.recurrence import StatefulPool, StepRoutes
from jpaged.kernels.sampling import FedSamplingKernel, RowSampling, SampledTokens, SamplingKernel
from jpaged.models.layer_kinds import KVGroups, get_states
from jpaged.models.layers import Attend, Params
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode, LayerPlace
from jpaged.models.tokens import HeadsKernel, InputEmbeds, PooledRows, StateShardings, TokenBatch
from jpaged.types import POOLINGS

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped

_RUNS = {"kv_begins_s", "run_starts_s1", "num_runs"}
_ADAPTERS = {"adapters_t"}
_STATES = {"state_sources_s", "state_slots_s", "is_draft_s"}
_ENCODED = {"poolings_s", "pair_starts_s"}
_Order = ContextOrder | RankOrder | None


def forward_packing(num_tokens: int, geometry: Geometry) -> Packing:
    """Return the buffer of a forward call with T tokens: the fields of `StepInputs`, whose names encode their shapes.

    Fields of runs with a shared prefix, of adapters, of recurrent state, of encoders and of input embeddings are
    included only if the geometry has them. The embeddings themselves are a separate argument.
    """
    t, s, m, g = num_tokens, geometry.max_num_seqs, geometry.max_blocks_per_seq, len(geometry.windows)
    shapes = {"q": (geometry.num_aux,), "t": (t,), "gt": (g, t), "s": (s,), "s1": (s + 1,), "gsm": (g, s, m)}
    shapes["3t"] = (3, t)
    left_out = {"num_tokens", "draft_slots_sk", *(() if geometry.max_loras else _ADAPTERS)}
    left_out |= _RUNS if geometry.cascade is None else set()
    left_out |= set() if geometry.state_bytes else _STATES
    left_out |= set() if geometry.is_encoder else _ENCODED
    left_out |= {"embeds_te", *(() if geometry.embed_width else ("is_embed_t",))}
    left_out |= set() if geometry.has_rope_shifts else {"rope_shifts_3t"}
    names = [field.name for field in dataclasses.fields(StepInputs) if field.name not in left_out]
    return Packing.of(
        **{name: (shapes.get(name.split("_")[-1], ()), "bool" if name.startswith("is_") else "int32") for name in names}
    )


@dataclass(frozen=True, slots=True)
class Step:
    """The two programs of a model over a pool. Static under jit; holds no array.

    Attributes:
        model: the description of the network, padded for every shard.
        layout: of the pool that its attention reads.
        kv_groups: layers that share block tables, of each stage; the layout has the number of layers of one group, in
            all stages.
        layer_mode: how the layers run, and so how the parameters are stacked.
        max_sample_rows: rows of the last tokens, and of the hidden states to sample from: those of the largest sample.
        num_aux: hidden states after those, for log-probabilities or embeddings.
        vocab_size: tokens that can be sampled; the model's own number may include padding.
        mesh: the devices that each run their part.
        backend: the attention backend.
        linear_backend: the matmul backend, and so whether weights are packed.
        activation_dtype: of the rows that packed quantized matrices multiply.
        sampler: the sampling kernel; None for XLA.
        slots: the capacity for adapters; None takes none.
        draft: the draft model or head; None if there is none.
        overlaps_sums: hidden states are summed over the devices in parts (`jpaged.device.sharded_matmul`).
        max_drafts: draft tokens of a sequence in a step.
        keeps_routes: the pool has the experts that tokens were routed to.
        has_branches: programs decide which stages of sampling and how many steps the rows need. On GPUs the host does,
            because it would wait for each decision of a program.
    """

    model: Model
    layout: KVLayout
    kv_groups: KVGroups
    layer_mode: LayerMode
    max_sample_rows: int
    vocab_size: int
    mesh: Mesh
    backend: Backend
    linear_backend: LinearBackend
    activation_dtype: ActivationDtype
    sampler: SamplingKernel | None
    num_aux: int
    slots: AdapterRoom | None = None
    draft: DraftStep | None = None
    has_branches: bool = True
    overlaps_sums: bool = False
    max_drafts: int = 0
    keeps_routes: bool = False

    def packed_forward(
        self,
        params: Params,
        pool: Shaped[Array, "P B ..."] | StatefulPool,
        last_tokens_s: Int[Array, "S"],
        words: Int[Array, "W"],
        embeds_te: Float[Array, "T E"] | None = None,
        *,
        packing: Packing,
    ) -> tuple[Any, ...]:
        """Run the layers on packed inputs.

        Args:
            embeds_te: input embeddings, for the tokens of `is_embed_t`; None if the program takes none.

        If the pool has 8 bits, the parameters have its scales as "kv_scales" `[G * L, K, 2]`, group by group; those of
        a stage are together.

        Returns:
            the pool, and hidden states `[S+Q, E]` to sample from (S) and for log-probabilities or embeddings (Q); if
            there is a head, also the states of each token that it takes, `[T, F]`. The first S of an encoder are pooled
            over the tokens of each row.
        """
        inputs = packing.unpack(words)
        if embeds_te is not None:
            inputs["embeds_te"] = embeds_te
        sampled_t = last_tokens_s[inputs["prev_sampled_rows_t"]]
        ids_t = jnp.where(inputs["is_prev_sampled_t"], sampled_t, inputs["token_ids_t"])
        hidden_te, pool, features = self.run_watched(params, pool, ids_t, inputs)
        num_missing = self.max_sample_rows - inputs["sample_tokens_s"].shape[0]
        if self.model.config.is_encoder:
            hidden_te = self.model.normed(params, hidden_te).astype(self.hidden_dtype)
            rows = PooledRows.of(inputs["query_starts_s1"], len(ids_t))
            pooled_se = rows.pool(hidden_te, inputs["poolings_s"], POOLINGS, has_branches=self.has_branches)
            pooled_se = jnp.pad(pooled_se, ((0, num_missing), (0, 0)))
            return pool, jnp.concatenate([pooled_se, hidden_te[inputs["aux_tokens_q"]]])
        places = jnp.concatenate([jnp.pad(inputs["sample_tokens_s"], (0, num_missing)), inputs["aux_tokens_q"]])
        return pool, hidden_te[places], *features

    def run_watched(
        self,
        params: Params,
        pool: Shaped[Array, "P B ..."] | StatefulPool,
        ids_t: Int[Array, "T"],
        inputs: Mapping[str, jax.Array],
    ) -> tuple[Float[Array, "T E"], Any, tuple[jax.Array, ...]]:
        """Run the layers as `run`; with a head also return the states that it takes, concatenated, `[T, F]`."""
        watched = () if self.draft is None else self.draft.watched
        hidden_te, pool, seen = self._run(params, pool, ids_t, inputs, watched=watched)
        return self._with_slots(hidden_te, inputs), pool, (jnp.concatenate(seen, axis=-1),) if seen else ()

    def run(
        self,
        params: Params,
        pool: Shaped[Array, "P B ..."] | StatefulPool,
        ids_t: Int[Array, "T"],
        inputs: Mapping[str, jax.Array],
        states_te: Float[Array, "T E"] | None = None,
    ) -> tuple[Float[Array, "T E"], Any]:
        """Run the layers on tokens, with the other fields of `StepInputs` by name; return each token's hidden state.

        A head takes states in addition to the tokens.
        """
        hidden_te, pool, _ = self._run(params, pool, ids_t, inputs, states_te)
        return self._with_slots(hidden_te, inputs), pool

    def _with_slots(self, hidden_te: jax.Array, inputs: Mapping[str, jax.Array]) -> jax.Array:
        return hidden_te if self.slots is None else self.slots.add_slots(hidden_te, inputs["adapters_t"])

    def _run(
        self,
        params: Params,
        pool: Any,
        ids_t: jax.Array,
        inputs: Mapping[str, jax.Array],
        states_te: jax.Array | None = None,
        watched: Sequence[int] = (),
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        if num_stages(self.mesh) > 1:
            return *self._run_stages(params, pool, ids_t, inputs), []
        inputs, ids_t, order = self._ordered(inputs, ids_t)
        if order is not None and states_te is not None:
            states_te = states_te[order.tokens_t]
        attend = self._attention(params, inputs, order)
        tokens = self._tokens(ids_t, inputs, order, states_te)
        params = in_parts(params, self.model, self.layer_mode, self.mesh)
        places, routes = self.kv_groups.places, None
        if self.keeps_routes:
            pool, routes = self._begin_routes(pool, len(ids_t)), pool.routes
        hidden_te, pool, seen = self.model.run_watched(params, tokens, attend, pool, self.layer_mode, watched, places)
        if routes is not None:
            pool = dataclasses.replace(pool, routes=pool.routes.store(routes, inputs["slots_gt"][0]))
        if order is None:
            return hidden_te, pool, seen
        return hidden_te[order.places_t], pool, [states[order.places_t] for states in seen]

    def _run_stages(
        self, params: Params, pool: jax.Array, ids_t: jax.Array, inputs: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Run the layers in stages, each on its own devices, on one microbatch per turn; see `Microbatches`."""
        last = num_stages(self.mesh) - 1
        parts = Microbatches.of(len(ids_t), last + 1, self.layout.form)

        def run(
            params: Params, pool: jax.Array, ids_t: jax.Array, inputs: Mapping[str, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            stage = lax.axis_index(STAGE_AXIS)

            def turn(index: jax.Array, state: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
                received, pool, hidden_mte = state
                part, part_ids, number = parts.take(inputs, ids_t, index - stage)
                own, own_ids, order = self._ordered(part, part_ids)
                attend, tokens = self._attention(params, own, order), self._tokens(own_ids, own, order)
                x, pool, hidden_te = self.model.run_stage(
                    params, tokens, attend, pool, self.kv_groups.places, (stage == 0, received)
                )
                hidden_te = hidden_te if order is None else hidden_te[order.places_t]
                hidden_mte = lax.dynamic_update_index_in_dim(hidden_mte, hidden_te, number, 0)
                sent = jax.tree.map(lambda x: lax.ppermute(x, STAGE_AXIS, [(i, i + 1) for i in range(last)]), x)
                return sent, pool, hidden_mte

            part, part_ids, _ = parts.take(inputs, ids_t, jnp.int32(0))
            begun = jax.eval_shape(self.model.begin, params, self._tokens(part_ids, part))
            shape = parts.num + 1, parts.num_tokens, self.model.config.hidden_size
            state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), begun), pool, jnp.zeros(shape, self.model.dtype)
            _, pool, hidden_mte = lax.fori_loop(0, parts.num + last, turn, state)
            hidden_te = hidden_mte[:-1].reshape(len(ids_t), -1)
            # A sum with zeros in float32 is exact; that of 16 bits does not compile on every platform.
            of_last = lax.psum(jnp.where(stage == last, hidden_te.astype(jnp.float32), 0), STAGE_AXIS)
            return of_last.astype(hidden_te.dtype), pool

        whole, of_stage = PartitionSpec(), PartitionSpec(STAGE_AXIS)
        of_params = {name: of_stage if name in ("layers", "kv_scales") else whole for name in params}
        results = on_stages(run, self.mesh, (of_params, of_stage, whole, whole), (whole, of_stage))(
            params, pool, ids_t, inputs
        )
        hidden_te, pool = results
        return hidden_te, pool

    def _ordered(
        self, inputs: Mapping[str, jax.Array], ids_t: jax.Array
    ) -> tuple[Mapping[str, jax.Array], jax.Array, _Order]:
        """Return inputs and tokens in the order of distributed contexts, and that order; unchanged if there is none."""
        order: _Order = None
        if (num_parts := num_context_parts(self.mesh)) > 1:
            order = ContextOrder.of(inputs["query_starts_s1"], inputs["num_rows"], len(ids_t), num_parts)
        elif self.layout.dp_size > 1:
            order = RankOrder.of(inputs, self.layout)
        if order is None:
            return inputs, ids_t, None
        return order.ordered(inputs), ids_t[order.tokens_t], order

    def _attention(self, params: Params, inputs: Mapping[str, jax.Array], order: _Order) -> Attend:
        """Return the attention of a step's layers."""
        kinds, places = self.model.config.layer_kinds, self.kv_groups.places
        found = {  # a stage has the first kinds
            (kind.attention, kind.num_places, group + number)
            for kind, (group, _) in zip(kinds, places, strict=False)
            for number in range(kind.num_places)
        }
        rows = {key: self._prepare(*key, inputs, order) for key in found}
        scales_lk2, num_layers = params.get("kv_scales"), self.layout.num_layers // self.layout.num_stages
        images_t = _number_images(inputs) if self._has_whole_images and "embeds_te" in inputs else None

        def attend(
            q_thd: jax.Array,
            k_tkd: jax.Array,
            v_tkd: jax.Array | None,
            pool: Any,
            place: LayerPlace,
            sinks_h: jax.Array | None = None,
        ) -> tuple[jax.Array, Any]:
            if isinstance(pool, StatefulPool):
                o_thd, kv = attend(q_thd, k_tkd, v_tkd, pool.kv, place, sinks_h)
                return o_thd, pool.with_kv(kv)
            heads, layout, outputs = place.kind.heads, self.layout, []
            num_places = 1 if heads is None else heads.num_places
            qkv: Sequence[Any] = (q_thd, k_tkd, v_tkd)
            placed = [qkv] if heads is None else zip(*(layout.place_heads(x, num_places) for x in qkv), strict=True)
            for group, (q, *kv) in enumerate(placed, place.group):
                scales = None if scales_lk2 is None else scales_lk2[group * num_layers : (group + 1) * num_layers]
                new_kv, of_step = (*kv, inputs["slots_gt"][group]), rows[place.attention, num_places, group]
                o_thd, pool = self._attend(q, new_kv, pool, place, of_step, scales, sinks_h, images_t)
                outputs.append(o_thd)
            return (outputs[0] if heads is None else layout.join_heads(outputs, heads.head_dim)), pool

        return attend

    def _tokens(
        self,
        ids_t: jax.Array,
        inputs: Mapping[str, jax.Array],
        order: _Order = None,
        states_te: jax.Array | None = None,
    ) -> TokenBatch:
        """Return a step's tokens as the model takes them."""
        is_used_t = order.is_used_t if isinstance(order, RankOrder) else None
        types_t: jax.Array | None = None
        if (pair_starts_s := inputs.get("pair_starts_s")) is not None:
            types_t = PooledRows.of(inputs["query_starts_s1"], len(ids_t)).types(pair_starts_s)
        embeds_te, shifts_3t = inputs.get("embeds_te"), inputs.get("rope_shifts_3t")
        num_tokens = inputs["query_starts_s1"][-1]  # rows that are not in use begin at the end of the last one
        num_chunks, num_parts = self.state_parts(len(ids_t))
        return TokenBatch(
            *(ids_t, inputs["positions_t"], inputs["rope_lens_t"], num_tokens),
            heads=self._heads(),
            experts=experts_kernel(self.model.config, self.mesh),
            adapters_t=inputs.get("adapters_t"),
            states_te=states_te,
            num_row_chunks=num_chunks,
            num_column_parts=num_parts,
            is_used_t=is_used_t,
            states=None if is_used_t is None else StateShardings(self._sharding(TOKENS_SPEC), replicated(self.mesh)),
            recurrent=recurrent_rows(inputs, len(ids_t), self.mesh, self.max_drafts),
            types_t=types_t,
            embeds=None if embeds_te is None else InputEmbeds(inputs["is_embed_t"], embeds_te),
            rope_axes_3t=None if shifts_3t is None else inputs["positions_t"] - shifts_3t,
        )

    def packed_sample(
        self,
        params: Params,
        hidden_se: Float[Array, "S E"],
        words: Int[Array, "W"],
        *,
        detail: Detail,
        stages: SamplingStages | None = None,
    ) -> tuple[Int[Array, "S"], Int[Array, "R C"]]:
        """Sample a token for each of the first R rows; the size of `words` determines R.

        Args:
            stages: as of `sampling.sample`.

        Returns:
            the tokens, and all outputs in one array, which `unpack_outputs` parses.
        """
        how = RowSampling(**unpack_rows(words))
        num_rows = how.temperature_r.shape[0]
        if self.model.config.is_encoder:
            is_sound_r = jnp.all(jnp.isfinite(hidden_se[:num_rows]), axis=1)
            return self._told(SampledTokens(jnp.zeros(num_rows, jnp.int32), is_sound_r))
        return self._told(self.sample(params, hidden_se[:num_rows], how, detail, stages))

    def packed_edited_sample(
        self,
        params: Params,
        counts: TokenCounts,
        hidden_se: Float[Array, "S E"],
        words: Int[Array, "W"],
        edit_words: Int[Array, "W"],
        singles_rx3: Int[Array, "R X 3"],
        mask_rw: Int[Array, "R W"],
        *,
        fixed: tuple[Detail, SamplingStages] | None = None,
    ) -> tuple[TokenCounts, Int[Array, "S"], Int[Array, "R C"]]:
        """Sample as `packed_sample`, after logits processors. The counts are donated, and updated in place.

        Args:
            edit_words: the `Detail` comes last.
            fixed: the detail and the stages of the program. If None, the last edit word decides: outputs have all
                columns, and those that it excludes hold 0.
        """
        how = RowSampling(**unpack_rows(words))
        edits = RowEdits(**unpack_edits(edit_words[:-1]), singles_rx3=singles_rx3, mask_rw=mask_rw)
        hidden_re = hidden_se[: how.temperature_r.shape[0]]
        detail, stages = (edit_words[-1], None) if fixed is None else fixed
        counts, sampled = self.sample_edited(params, counts, hidden_re, how, edits, detail, stages)
        return counts, *self._told(sampled)

    def sample(
        self,
        params: Params,
        hidden_re: Float[Array, "R E"],
        how: RowSampling,
        detail: Detail,
        stages: SamplingStages | None = None,
    ) -> SampledTokens:
        """Sample a token for each row, from the hidden state at the row's last token."""
        vocabulary = self._vocabulary

        def sample(logits_rv: jax.Array, how: RowSampling) -> SampledTokens:
            return sampling.sample(logits_rv, how, vocabulary, detail, self.sampler, stages)

        logits_rv, whole = self._logits(params, hidden_re, how.num_in_use), PartitionSpec()
        return on_shards(sample, self.mesh, (LOGITS_SPEC, whole), whole)(logits_rv, how)

    def sample_fed(
        self,
        params: Params,
        hidden_re: Float[Array, "R E"],
        how: RowSampling,
        feed: Int[Array, ""],
        index: Int[Array, ""],
    ) -> tuple[SampledTokens, Int[Array, ""]]:
        """Sample tokens as `sample`, with masks that the host may supply while the program runs.

        Args:
            feed: number of the mask channel; 0 is none.
            index: of the step in its dispatch.

        Returns:
            the samples, and the step's `StepDirective`.
        """
        if not isinstance(self.sampler, FedSamplingKernel):
            return self.sample(params, hidden_re, how, Detail.TOKENS), jnp.int32(StepDirective.CONTINUE)
        return self.sampler.sample_fed(self._logits(params, hidden_re, how.num_in_use), how, feed, index)

    def sample_edited(
        self,
        params: Params,
        counts: TokenCounts,
        hidden_re: Float[Array, "R E"],
        how: RowSampling,
        edits: RowEdits,
        detail: Detail | Int[Array, ""],
        stages: SamplingStages | None = None,
    ) -> tuple[TokenCounts, SampledTokens]:
        """Sample as `sample`, after logits processors; also return the counts with the sampled tokens."""
        vocabulary, fixed = self._vocabulary, detail if isinstance(detail, Detail) else None

        def sample(
            logits_rv: jax.Array, counts: TokenCounts, how: RowSampling, edits: RowEdits, detail: jax.Array
        ) -> tuple[TokenCounts, SampledTokens]:
            logits_rv = vocabulary.without_padding(logits_rv)
            # Tokens that cannot be sampled must not affect the statistics of the rest.
            allowed_rv, _ = sampling.without_banned(logits_rv, how.banned_token_ids_rx, vocabulary, stages)
            x_rv = edited(allowed_rv, edits, counts, how.temperature_r, vocabulary, stages)
            found = sampling.sample(x_rv, how, vocabulary, Detail.TOKENS, self.sampler, stages)
            told = sampling.compute_aux(logits_rv, found, vocabulary, detail if fixed is None else fixed)
            return counts.counted(edits.slots_r, told.token_ids_r, vocabulary), told

        logits_rv, whole = self._logits(params, hidden_re, how.num_in_use), PartitionSpec()
        of_counts = _of_counts(LOGITS_SPEC, whole)
        run = on_shards(sample, self.mesh, (LOGITS_SPEC, of_counts, whole, whole, whole), (of_counts, whole))
        return run(logits_rv, counts, how, edits, jnp.int32(detail))

    def count(self, counts: TokenCounts, words: Int[Array, "W"]) -> TokenCounts:
        """Count a part of a sequence's tokens.

        Args:
            words: slot, whether the part is the first, its tokens of the prompt, all its tokens, and the token ids.
        """
        vocabulary, whole = self._vocabulary, PartitionSpec()

        def count(counts: TokenCounts, words: jax.Array) -> TokenCounts:
            slot, is_first, num_prompt, num_tokens = (words[i] for i in range(NUM_COUNT_WORDS))
            return counts.begun(slot, words[NUM_COUNT_WORDS:], num_prompt, num_tokens, is_first > 0, vocabulary)

        of_counts = _of_counts(LOGITS_SPEC, whole)
        return on_shards(count, self.mesh, (of_counts, whole), of_counts)(counts, words)

    def tell(
        self, params: Params, hidden_he: Float[Array, "H E"], words: Int[Array, "W"], *, tell: AuxKind
    ) -> jax.Array:
        """Return log-probabilities or final hidden states for some hidden states of a forward.

        Args:
            words: as of `AuxInputs`.

        Returns:
            for `AuxKind.LOGPROBS` columns that `unpack_aux` parses; otherwise log-probabilities or hidden states,
            float32.
        """
        vocabulary, rows = self._vocabulary, words.reshape(-1, 1 + AUX_IDS)
        hidden_re, ids_rk = hidden_he[rows[:, 0]], rows[:, 1:]
        if self.model.config.is_encoder:
            return hidden_re  # normalized before they were pooled
        if tell == AuxKind.HIDDEN:
            hidden_re = hidden_re if self.slots is None else self.slots.without_slots(hidden_re)
            return self.model.normed(params, hidden_re).astype(jnp.float32)

        def find(logits_rv: jax.Array, ids_rk: jax.Array) -> jax.Array:
            logits_rv = vocabulary.without_padding(logits_rv)
            log_total_r1 = vocabulary.log_sum_exp(vocabulary.max(logits_rv), logits_rv)
            if tell == AuxKind.ALL_LOGPROBS:
                return logits_rv - log_total_r1
            return sampling.aux_columns(logits_rv, ids_rk, log_total_r1, vocabulary)

        logits_rv, whole = self._logits(params, hidden_re, jnp.int32(len(hidden_re))), PartitionSpec()
        results = LOGITS_SPEC if tell == AuxKind.ALL_LOGPROBS else whole
        return on_shards(find, self.mesh, (LOGITS_SPEC, whole), results)(logits_rv, ids_rk)

    def abstract_counts(self, num_slots: int) -> TokenCounts:
        """Return the shapes of the token counts of `num_slots` sequences, plus the unused slot 0."""
        mesh, shape = self.mesh, (num_slots + 1, self.model.config.vocab_size)
        counts = jax.ShapeDtypeStruct(shape, jnp.int16, sharding=NamedSharding(mesh, LOGITS_SPEC))
        return _of_counts(counts, jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=replicated(mesh)))

    def abstract_states(self, num_slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes of the recurrent states of `num_slots` sequences, with slot 0 for padding."""
        num_layers, states = get_states(self.model.config.layer_kinds)
        sharding = NamedSharding(self.mesh, PartitionSpec(None, None, MODEL_AXIS))
        return tuple(
            jax.ShapeDtypeStruct(
                (num_layers, num_slots + 1, *one.shape), one.get_dtype(self.model.dtype), sharding=sharding
            )
            for one in states
        )

    def abstract_expert_load(self) -> jax.ShapeDtypeStruct | None:
        """Return the shape of the load of physical experts, see `StatefulPool`; None if experts are not balanced."""
        mixture, dp_size = self.model.config.mixture, self.layout.dp_size
        if mixture is None or mixture.num_redundant_experts is None:
            return None
        shape = len(self.kv_groups.windows), self.kv_groups.num_layers, dp_size, mixture.num_physical_experts
        sharding = self._sharding(PartitionSpec(None, None, MODEL_AXIS if dp_size > 1 else None))
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    @property
    def abstract_routes(self) -> jax.ShapeDtypeStruct | None:
        """The shape of the routes of tokens, see `StatefulPool`; None if they are not kept."""
        mixture = self.model.config.mixture
        if mixture is None or not self.keeps_routes:
            return None
        width = len(self.sparse_layers) * mixture.routing.top_k
        dtype = np.uint8 if mixture.routing.num_experts <= 1 << 8 else np.uint16
        shape = self.layout.blocks_per_layer, self.layout.block_size, width
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))

    @property
    def sparse_layers(self) -> list[int]:
        """Numbers of the layers with experts."""
        return [number for number, kind in enumerate(self.model.config.layer_kinds) if kind.is_sparse]

    def _begin_routes(self, pool: StatefulPool, num_tokens: int) -> StatefulPool:
        """Return the pool with the routes of a step of `num_tokens` tokens, before its first layer."""
        mixture = self.model.config.mixture
        assert mixture is not None
        shape = len(self.sparse_layers), num_tokens, mixture.routing.top_k
        return dataclasses.replace(pool, routes=StepRoutes.blank(shape, pool.routes.dtype))

    def state_parts(self, num_tokens: int) -> tuple[int, int]:
        """Return the chunks of the hidden states' rows and the parts of their columns; see `RowChunks`."""
        return state_parts(num_tokens, self.model.config, num_shards(self.mesh)) if self.overlaps_sums else (1, 1)

    def _logits(self, params: Params, hidden_re: jax.Array, num_in_use: jax.Array) -> Float[Array, "R V"]:
        if self.slots is not None:
            params = self.slots.bind(params, hidden_re, self.model.config)
            hidden_re = self.slots.without_slots(hidden_re)
        logits_rv = self.model.logits(params, hidden_re, num_in_use)
        return jax.lax.with_sharding_constraint(logits_rv, NamedSharding(self.mesh, LOGITS_SPEC))

    @property
    def hidden_dtype(self) -> np.dtype:
        """Type of the hidden states of a forward: an encoder's are sums over many tokens."""
        return np.dtype(np.float32) if self.model.config.is_encoder else self.model.dtype

    @property
    def num_head_parts(self) -> int:
        """Devices that share the heads; 1 for data-parallel attention."""
        return num_shards(self.mesh) // self.layout.dp_size

    @property
    def _vocabulary(self) -> SamplingVocabulary:
        return SamplingVocabulary(self.vocab_size, MODEL_AXIS if num_shards(self.mesh) > 1 else None)

    def _told(self, sampled: SampledTokens) -> tuple[Int[Array, "S"], Int[Array, "R C"]]:
        """Return the last tokens, and all outputs as columns, which `unpack_outputs` parses."""
        last_tokens_s = jnp.pad(sampled.token_ids_r, (0, self.max_sample_rows - len(sampled.token_ids_r)))
        columns = [sampled.token_ids_r[:, None], sampled.is_sound_r[:, None].astype(jnp.int32)]
        if sampled.logprobs_r is not None and sampled.ranks_r is not None:
            columns += [lax.bitcast_convert_type(sampled.logprobs_r, jnp.int32)[:, None], sampled.ranks_r[:, None]]
        if sampled.top_ids_rk is not None and sampled.top_logprobs_rk is not None:
            columns += [sampled.top_ids_rk, lax.bitcast_convert_type(sampled.top_logprobs_rk, jnp.int32)]
        return last_tokens_s, jnp.concatenate(columns, axis=1)

    def _heads(self) -> HeadsKernel | None:
        """Return the kernel that applies RoPE to heads for this backend's attention; each device has its own heads."""
        config, layout = self.model.config, self.layout.local
        num_rows = config.num_heads // self.num_head_parts + 2 * layout.num_kv_heads
        if (
            self.backend != "pallas-tpu"
            or layout.value_dim is not None
            or heads.unsupported_reason(config.head_dim, jnp.dtype(self.model.dtype), layout.dtype, num_rows)
        ):
            return None
        whole = PartitionSpec()
        turn = on_shards(heads.turn, self.mesh, (PROJECTION_SPEC, whole, whole), (HEADS_SPEC,) * 3)
        return HeadsKernel(heads.angles, turn)

    @property
    def _has_whole_images(self) -> bool:
        vision = self.model.config.vision
        return vision is not None and vision.is_bidirectional

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def _prepare(
        self, kind: AttentionKind, num_places: int, group: int, inputs: Mapping[str, jax.Array], order: _Order
    ) -> StepRows:
        """Prepare the rows for the layers of an attention kind in a KV group, once per step.

        Query heads are divided evenly among the places of a layer. If contexts are split, or sequences distributed,
        each device has its own rows, stacked on a first axis.
        """
        rows = RaggedRows(
            query_starts_s1=inputs["query_starts_s1"],
            kv_lens_s=inputs["kv_lens_s"],
            block_tables_sm=inputs["block_tables_gsm"][group],
            num_rows=inputs["num_rows"],
            kv_begins_s=inputs.get("kv_begins_s"),
            first_positions_s=None if kind.is_causal else _later_positions(kind, inputs["kv_lens_s"]),
        )
        slots_t = inputs["slots_gt"][group]
        runs = (inputs["run_starts_s1"], inputs["num_runs"]) if "num_runs" in inputs else None
        if order is None:
            return self._prepared(kind, num_places, rows, slots_t, runs)
        if isinstance(order, RankOrder):

            def of_rank(order: RankOrder, rows: RaggedRows, slots_t: jax.Array) -> StepRows:
                rank = jax.lax.axis_index(MODEL_AXIS)
                own = order.get_rows(rows, rank, self.layout)
                prepared = self._prepared(kind, num_places, own, order.own_slots(slots_t, rank, self.layout), None)
                found: StepRows = jax.tree.map(lambda leaf: leaf[None], prepared)
                return found

            of_ranks = on_shards(of_rank, self.mesh, PartitionSpec(), TOKENS_SPEC)
            of_all: StepRows = of_ranks(order, rows, slots_t)
            return of_all
        num_parts = num_context_parts(self.mesh)

        def of_part(order: Any, rows: Any, slots: Any, runs: Any) -> StepRows:
            part = jax.lax.axis_index(CONTEXT_AXIS)
            runs = None if runs is None else (order.run_starts(runs[0]), runs[1])
            own = order.get_rows(rows, part, num_parts)
            prepared = self._prepared(kind, num_places, own, own_slots(slots, part, num_parts), runs)
            found: StepRows = jax.tree.map(lambda leaf: leaf[None], prepared)
            return found

        of_parts = on_shards(of_part, self.mesh, PartitionSpec(), PartitionSpec(CONTEXT_AXIS))
        prepared: StepRows = of_parts(order, rows, slots_t, runs)
        return prepared

    def _prepared(
        self,
        kind: AttentionKind,
        num_places: int,
        rows: RaggedRows,
        slots_t: jax.Array,
        runs: tuple[jax.Array, jax.Array] | None,
    ) -> StepRows:
        """Prepare the rows of one device, with their runs if any: their starts, and their number."""
        spec = self._spec(kind)
        num_rows, table_width = rows.block_tables_sm.shape
        num_heads = self.model.config.num_heads // self.num_head_parts // num_places
        queries = Queries(num_heads, jnp.dtype(self.model.dtype), num_rows, table_width, slots_t.shape[0])
        return prepare_step_rows(rows, slots_t, runs, spec, queries, backend=self.backend)

    def _attend(
        self,
        q_thd: jax.Array,
        new_kv: NewKV,
        pool: jax.Array,
        place: LayerPlace,
        rows: StepRows,
        scales_lk2: jax.Array | None,
        sinks_h: jax.Array | None,
        images_t: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Compute attention and update the pool: each device has its own heads, and all have the same blocks.

        If contexts are split, each device also has its own slots of the blocks, and the results are merged. If
        attention is data-parallel, each device has all heads, for its own tokens.

        Args:
            images_t: image of each token, if the tokens of an image see each other; -1 for text.
        """
        spec, num_parts, dp_size = self._spec(place.attention), num_context_parts(self.mesh), self.layout.dp_size

        def attend(
            q: Any, new_kv: Any, pool: Any, layer: Any, rows: Any, scales: Any, sinks: Any, images: Any
        ) -> tuple[jax.Array, jax.Array]:
            if num_parts > 1:
                k, v, slots = new_kv
                new_kv = k, v, own_slots(slots, jax.lax.axis_index(CONTEXT_AXIS), num_parts)
            if dp_size > 1:
                k, v, slots = new_kv
                new_kv = k, v, RankOrder.own_slots(slots, jax.lax.axis_index(MODEL_AXIS), self.layout)
            if num_parts > 1 or dp_size > 1:
                rows = jax.tree.map(lambda leaf: leaf[0], rows)
            if is_rotated := spec.layout.is_rotated:
                k, v, slots = new_kv
                k, v = (rotate_heads(x, jnp.float32, backend=self.backend) for x in (k, v))
                q, new_kv = rotate_heads(q, q.dtype, backend=self.backend), (k, v, slots)
            update = paged_attention_update if isinstance(rows, RaggedRows) else cascade_attention_update
            *attended, pool = update(q, new_kv, pool, layer, rows, spec, scales, backend=self.backend)
            o_thd, lse_th = attended if num_parts == 1 else merged((attended[0], attended[1]), CONTEXT_AXIS)
            if images is not None and (vision := self.model.config.vision) is not None:
                k, v, _ = new_kv
                o_thd, lse_th = merge((o_thd, lse_th), attend_ahead(q, k, v, images, vision.num_tokens, spec.kind))
            o_thd = o_thd if sinks is None else add_sinks((o_thd, lse_th), sinks)[0]
            return (rotate_heads(o_thd, o_thd.dtype, backend=self.backend) if is_rotated else o_thd), pool

        whole, of_rows = PartitionSpec(), PartitionSpec(*((CONTEXT_AXIS,) if num_parts > 1 else ()))
        of_heads, of_scales, of_pool = HEADS_SPEC, scales_spec(self.layout), pool_spec(self.layout)
        if dp_size > 1:
            of_heads, of_rows = TOKENS_SPEC, TOKENS_SPEC
        in_specs = (of_heads, (of_heads, of_heads, whole), of_pool, whole, of_rows, of_scales, SINKS_SPEC, whole)
        run = on_shards(attend, self.mesh, in_specs, (of_heads, of_pool))
        return run(q_thd, new_kv, pool, place.index, rows, scales_lk2, sinks_h, images_t)

    def _spec(self, kind: AttentionKind) -> AttentionSpec:
        """Return the attention spec of a kind as one device computes it, over its part of the pool."""
        return AttentionSpec(self.layout.local, kind_of_part(kind, num_context_parts(self.mesh)))


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A draft model or head next to a model, over its own pool, which uses the model's block tables.

    Attributes:
        step: of the draft model. Its layers form one KV group, whatever their windows.
        group: the model's KV group whose block tables it uses; one with full attention.
        num_tokens: proposals per row and round (k).
        watched: the model's layers whose inputs a head takes; empty for a draft model.
        shared: names of parameters that are the model's, each with its name there.
        pinned_length: thousandths of the mean tokens of a round, for benchmarks: proposals are accepted by position,
            whatever the model samples. None accepts those that the model samples.
    """

    step: Step
    group: int
    num_tokens: int
    watched: tuple[int, ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    pinned_length: int | None = None

    @property
    def is_head(self) -> bool:
        """True for a head, which takes hidden states of the model, and so runs after each forward."""
        return bool(self.watched)


def _number_images(inputs: Mapping[str, jax.Array]) -> jax.Array:
    """Return the number of the image of each token `[T]`, -1 for text: successive input embeddings of a row."""
    is_embed_t = inputs["is_embed_t"]
    is_first_t = jnp.zeros_like(is_embed_t).at[inputs["query_starts_s1"][:-1]].set(True, mode="drop")
    is_begin_t = is_embed_t & (is_first_t | ~jnp.pad(is_embed_t, (1, 0))[:-1])
    return jnp.where(is_embed_t, jnp.cumsum(is_begin_t, dtype=jnp.int32), -1)


def _later_positions(kind: AttentionKind, kv_lens_s: jax.Array) -> jax.Array:
    """Return first positions from which the queries of whole prompts see all tokens, or half of their window ahead."""
    return kv_lens_s if kind.sliding_window is None else jnp.full_like(kv_lens_s, kind.sliding_window // 2)


def _of_counts(counts: Any, last_tokens: Any) -> TokenCounts:
    """Return counts with any values in place of their arrays."""
    return TokenCounts(counts, last_tokens)
