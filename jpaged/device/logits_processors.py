"""Logits processors: change logits before a token is sampled, other than temperature and truncation.

    logits ── mask ── single tokens ── repetition ── frequency, presence ── top-n-sigma, typical_p ──> the sampler
                      (bias, bans)     └──── from the counts of the row's sequence ────┘

    counts    slot 1  | 0  P  2  0  P+1 ... |      a word per token: how often it was generated, and a bit for the
    prompt
              slot 2  | ...                 |      the same program counts the token that it samples

The order is vLLM's, and also that of the tests' oracle. A program that runs processors takes and returns the counts, so
that the next step includes a token that the host has not seen yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.device.sampling import SamplingStages, SamplingVocabulary, largest_threshold, run_stage
from jpaged.engine.executor.io import ANY_TOKEN, MASK_BITS
from jpaged.kernels.sampling.rows import SMALLEST

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Int16

IN_PROMPT = -(1 << 15)
"""Bit of an int16 count that marks a token of the prompt."""


_OF_A_PASS = 8
"""Token biases that TPUs apply in one pass; divides `NUM_SINGLES`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of sequences, by slot; slot 0 is unused.

    Attributes:
        counts_pv: how often each token was generated, up to 2^15 - 1, and IN_PROMPT.
        last_tokens_p: the last token of each sequence.
    """

    counts_pv: Int16[Array, "P V"]
    last_tokens_p: Int[Array, "P"]

    def at(self, slots_r: Int[Array, "R"]) -> Int16[Array, "R V"]:
        """Return the counts of rows."""
        return self.counts_pv[slots_r]

    def counted(self, slots_r: Int[Array, "R"], ids_r: Int[Array, "R"], vocabulary: SamplingVocabulary) -> TokenCounts:
        """Return the counts with one more token for each row; rows have distinct slots, except slot 0."""
        columns_r = vocabulary.columns(ids_r, self.counts_pv.shape[1])
        is_full_r = self.counts_pv.at[slots_r, columns_r].get(mode="fill", fill_value=0) & 0x7FFF == 0x7FFF
        one_r = jnp.where((slots_r > 0) & ~is_full_r, 1, 0).astype(jnp.int16)
        return TokenCounts(
            self.counts_pv.at[slots_r, columns_r].add(one_r, mode="drop"), self.last_tokens_p.at[slots_r].set(ids_r)
        )

    def begun(
        self,
        slot: Int[Array, ""],
        ids_w: Int[Array, "W"],
        num_prompt: Int[Array, ""],
        num_tokens: Int[Array, ""],
        is_first: Bool[Array, ""],
        vocabulary: SamplingVocabulary,
    ) -> TokenCounts:
        """Return the counts with a part of a sequence added to a slot; the first part resets the slot.

        Args:
            ids_w: the next part of the sequence, padded.
            num_prompt: tokens of this part that belong to the prompt.
            num_tokens: tokens of this part.
            is_first: True for the first part.
        """
        num_columns = self.counts_pv.shape[1]
        indices_w = jnp.arange(len(ids_w))
        columns_w = jnp.where(indices_w < num_tokens, vocabulary.columns(ids_w, num_columns), num_columns)
        row_v = jnp.where(is_first, 0, self.counts_pv[slot])
        of_output_w = jnp.where(indices_w >= num_prompt, columns_w, num_columns)
        generated_v = jnp.zeros(num_columns, jnp.int32).at[of_output_w].add(1, mode="drop")
        is_prompt_v = jnp.zeros(num_columns, jnp.bool_).at[
            jnp.where(indices_w < num_prompt, columns_w, num_columns)
        ].set(True, mode="drop") | (row_v < 0)
        total_v = jnp.minimum((row_v & 0x7FFF).astype(jnp.int32) + generated_v, 0x7FFF).astype(jnp.int16)
        row_v = jnp.where(is_prompt_v, total_v | IN_PROMPT, total_v).astype(jnp.int16)
        last = ids_w[jnp.maximum(num_tokens - 1, 0)]
        return TokenCounts(self.counts_pv.at[slot].set(row_v), self.last_tokens_p.at[slot].set(last))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RowEdits:
    """Logits processors of each row: `engine.edits.EDIT_FIELDS` on the device, and words of token biases and masks."""

    slots_r: Int[Array, "R"]
    repetition_r: Float[Array, "R"]
    frequency_r: Float[Array, "R"]
    presence_r: Float[Array, "R"]
    top_n_sigma_r: Float[Array, "R"]
    typical_p_r: Float[Array, "R"]
    singles_rx3: Int[Array, "R X 3"]
    mask_rw: Int[Array, "R W"]


def edited(
    logits_rv: Float[Array, "R V"],
    edits: RowEdits,
    counts: TokenCounts,
    temperature_r: Float[Array, "R"],
    vocabulary: SamplingVocabulary,
    stages: SamplingStages | None = None,
) -> Float[Array, "R V"]:
    """Return the logits to sample from; minus infinity for tokens that cannot be sampled.

    Args:
        stages: the stages that the program has; None for conditionals that skip what no row needs. Without conditionals
            each program has all processors but typical_p, which take a few passes over the logits.
    """
    x_rv = jnp.where(_is_allowed(edits.mask_rw, logits_rv.shape[1], vocabulary), logits_rv, -jnp.inf)
    x_rv = _with_single_tokens(x_rv, edits, counts.last_tokens_p[edits.slots_r], vocabulary, stages)
    has_penalties_r = (edits.repetition_r != 1) | (edits.frequency_r != 0) | (edits.presence_r != 0)
    always, all_stages = SamplingStages.GREEDY, SamplingStages.ALL
    x_rv = run_stage(
        always, stages, has_penalties_r, lambda x_rv: _penalised(x_rv, edits, counts.at(edits.slots_r)), x_rv
    )
    x_rv = run_stage(
        always,
        stages,
        edits.top_n_sigma_r > 0,
        lambda x_rv: _near_the_largest(x_rv, edits.top_n_sigma_r, vocabulary),
        x_rv,
    )
    return run_stage(
        all_stages,
        stages,
        edits.typical_p_r < 1,
        lambda x_rv: _typical(x_rv, edits.typical_p_r, temperature_r, vocabulary),
        x_rv,
    )


def _is_allowed(mask_rw: Int[Array, "R W"], num_columns: int, vocabulary: SamplingVocabulary) -> Bool[Array, "R V"]:
    """Return True for the columns that a row's mask allows.

    It expands words in place: a gather per column would be slow.
    """
    first, num_words = vocabulary.first(num_columns), num_columns // MASK_BITS + 2
    padded_rw = jnp.pad(mask_rw, ((0, 0), (0, num_words)))
    words_rw = lax.dynamic_slice_in_dim(padded_rw, first // MASK_BITS, num_words, axis=1)
    bits_rwb = (words_rw[:, :, None] >> jnp.arange(MASK_BITS)) & 1
    return lax.dynamic_slice_in_dim(bits_rwb.reshape(len(mask_rw), -1), first % MASK_BITS, num_columns, axis=1) == 1


def _with_single_tokens(
    x_rv: jax.Array,
    edits: RowEdits,
    last_tokens_r: jax.Array,
    vocabulary: SamplingVocabulary,
    stages: SamplingStages | None,
) -> Float[Array, "R V"]:
    ids_rx, after_rx, bits_rx = (edits.singles_rx3[..., i] for i in range(3))
    applies_rx = (after_rx == ANY_TOKEN) | (after_rx == last_tokens_r[:, None])
    columns_rx = jnp.where(applies_rx, vocabulary.columns(ids_rx, x_rv.shape[1]), x_rv.shape[1])
    values_rx = lax.bitcast_convert_type(bits_rx, jnp.float32)
    if stages is not None:
        return _scattered(x_rv, columns_rx, values_rx)
    num_used = jnp.max(jnp.where(ids_rx < vocabulary.size, jnp.arange(1, ids_rx.shape[1] + 1), 0))
    return lax.platform_dependent(x_rv, columns_rx, values_rx, num_used, tpu=_added_in_passes, default=_added_singly)


def _added_singly(
    x_rv: jax.Array, columns_rx: jax.Array, values_rx: jax.Array, num_used: jax.Array
) -> Float[Array, "R V"]:
    return lax.cond(num_used > 0, lambda x_rv: _scattered(x_rv, columns_rx, values_rx), lambda x_rv: x_rv, x_rv)


def _scattered(x_rv: jax.Array, columns_rx: jax.Array, values_rx: jax.Array) -> Float[Array, "R V"]:
    return x_rv.at[jnp.arange(len(x_rv))[:, None], columns_rx].add(values_rx, mode="drop")


def _added_in_passes(
    x_rv: jax.Array, columns_rx: jax.Array, values_rx: jax.Array, num_used: jax.Array
) -> Float[Array, "R V"]:
    """Add biases in passes over all logits, a few tokens each, because TPUs scatter one number at a time."""
    columns_v = jnp.arange(x_rv.shape[1])

    def add(i: jax.Array, x_rv: jax.Array) -> jax.Array:
        columns_rp = lax.dynamic_slice_in_dim(columns_rx, i * _OF_A_PASS, _OF_A_PASS, axis=1)
        values_rp = lax.dynamic_slice_in_dim(values_rx, i * _OF_A_PASS, _OF_A_PASS, axis=1)
        for j in range(_OF_A_PASS):
            x_rv += jnp.where(columns_v == columns_rp[:, j : j + 1], values_rp[:, j : j + 1], 0)
        return x_rv

    return lax.fori_loop(0, (num_used + _OF_A_PASS - 1) // _OF_A_PASS, add, x_rv)


def _penalised(x_rv: jax.Array, edits: RowEdits, counts_rv: Int16[Array, "R V"]) -> Float[Array, "R V"]:
    smallest_r = jnp.maximum(edits.repetition_r, SMALLEST)  # a smaller value would make logits infinite
    repetition_r1 = jnp.where(edits.repetition_r > 0, smallest_r, 1)[:, None]
    repeated_rv = jnp.where(x_rv > 0, x_rv / repetition_r1, x_rv * repetition_r1)
    x_rv = jnp.where(counts_rv != 0, repeated_rv, x_rv)
    generated_rv = (counts_rv & 0x7FFF).astype(jnp.float32)
    x_rv = x_rv - edits.frequency_r[:, None] * generated_rv
    return x_rv - jnp.where(generated_rv > 0, edits.presence_r[:, None], 0)


def _near_the_largest(x_rv: jax.Array, num_sigma_r: jax.Array, vocabulary: SamplingVocabulary) -> Float[Array, "R V"]:
    """Keep the tokens whose logits are within `num_sigma_r` standard deviations of the largest.

    https://arxiv.org/abs/2411.07641
    """
    is_there_rv = x_rv > -jnp.inf
    num_r1 = jnp.maximum(vocabulary.sum(is_there_rv.astype(jnp.float32)), 1)[:, None]
    mean_r1 = vocabulary.sum(jnp.where(is_there_rv, x_rv, 0))[:, None] / num_r1
    variance_r1 = vocabulary.sum(jnp.where(is_there_rv, (x_rv - mean_r1) ** 2, 0))[:, None] / num_r1
    floor_r1 = vocabulary.max(x_rv) - num_sigma_r[:, None] * jnp.sqrt(variance_r1)
    return jnp.where((num_sigma_r[:, None] <= 0) | (x_rv >= floor_r1), x_rv, -jnp.inf)


def _typical(
    x_rv: jax.Array, share_r: jax.Array, temperature_r: jax.Array, vocabulary: SamplingVocabulary
) -> Float[Array, "R V"]:
    """Keep the tokens whose information is nearest to the entropy and whose probabilities add up to `share_r`.

    https://arxiv.org/abs/2202.00666
    """
    temperature_r1 = jnp.where(temperature_r == 0, 1, jnp.maximum(temperature_r, SMALLEST))[:, None]
    scaled_rv = (x_rv - vocabulary.max(x_rv)) / temperature_r1  # at most 0, so that no temperature overflows
    logprobs_rv = scaled_rv - vocabulary.log_sum_exp(jnp.zeros_like(temperature_r1), scaled_rv)
    weights_rv = jnp.exp(logprobs_rv)
    entropy_r1 = -vocabulary.sum(jnp.where(weights_rv > 0, weights_rv * logprobs_rv, 0))[:, None]
    nearness_rv = jnp.where(weights_rv > 0, -jnp.abs(logprobs_rv + entropy_r1), -jnp.inf)
    need_r = jnp.maximum(share_r, SMALLEST) * vocabulary.sum(weights_rv)

    def is_enough(floors: list[jax.Array]) -> jax.Array:
        return vocabulary.sums(*(jnp.where(nearness_rv >= floor_r1, weights_rv, 0) for floor_r1 in floors)) >= need_r

    floor_r1 = largest_threshold(len(x_rv), is_enough)
    return jnp.where((share_r[:, None] >= 1) | (nearness_rv >= floor_r1), x_rv, -jnp.inf)
