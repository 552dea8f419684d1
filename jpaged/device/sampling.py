"""Sampling of each row's next token from logits.

    logits ──┬─────────────────────────────────────────────> if requested, the token's log-probability and rank
             └─ banned ids ──┬─ greedy rows: the largest
                                └─ others: / temperature ─ min_p ─ top_k ─ top_p ─ + Gumbel noise: the largest

- A logit of minus infinity marks an impossible token. A row with NaN or plus infinity, or with no token left to sample,
  is not sound (`is_sound_r`), whatever token it names.
- min_p drops tokens less likely than min_p times the likeliest, after temperature, as in vLLM.
- top_k keeps the k likeliest, top_p the smallest set of the likeliest remaining ones whose share reaches top_p. Both
  are thresholds on the logit: tokens that tie with the last one kept are kept too, so the likeliest token always is.
- The noise is a function of (seed, sequence index, position) alone, and the largest of logit + Gumbel noise is a sample
  from the softmax ("Gumbel-max"). Rounding in the logits changes such a sample far less often than one from a running
  sum.
- Ties for the largest go to the lowest token id.

All reductions over a row use `SamplingVocabulary`, so the same code runs if the columns are split over devices.
Truncation is exact there too, and gathers nothing: a pass of a search takes fifteen numbers per row from each device, 2
KB for 32 rows; the logits of 32 rows over a vocabulary of 128k would be 16 MB.

On CPUs and TPUs a kernel does all of this if one device has all columns (`jpaged.kernels.sampling`). The code here is
its specification, and runs elsewhere.

No step sorts the vocabulary: on CPUs a sort of 64 x 4096 takes 140 ms, and 32 passes of a bisection 6.

Stages that no row of the batch needs are skipped. On CPUs and TPUs the program decides that, by conditionals. On GPUs
each conditional, and each loop whose number of turns the program computes, would make the host wait for the device. So
there the host chooses a program with the stages that the rows need (`SamplingStages`), and the program has neither. A
stage that no row needs changes no bit of a row, so the tokens do not depend on the program that samples them.

A `SamplingVocabulary` is the columns of an array, whole or split over devices, with reductions over all of them:

    device 0           device 1           device 2
    | 0 1 2 3 4 5 |    | 6 7 ...   11 |   | 12 13 14 - - - |      padding comes last and holds minus infinity

No reduction moves more than a few numbers per row between devices.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jpaged.engine.executor import BEYOND_TOKENS, TOP_WIDTH, Detail, SamplingInputs
from jpaged.kernels.sampling import RowSampling, SampledTokens, SamplingKernel
from jpaged.kernels.sampling.rows import SMALLEST, exponentials, get_exponentials

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num


class SamplingStages(enum.IntEnum):
    """Stages of sampling in a program. A higher level also serves lower ones, with the same tokens."""

    GREEDY = 0
    RANDOM = 1
    """Temperature, min_p and noise as well."""
    ALL = 2
    """Top_k, top_p and typical_p as well."""

    @classmethod
    def of(cls, inputs: SamplingInputs) -> SamplingStages:
        """Return the level that the rows of a batch need."""
        rows_r, edits = inputs.rows_r, inputs.edits
        if (rows_r["top_p_r"] < 1).any() or (rows_r["top_k_r"] < BEYOND_TOKENS).any():
            return cls.ALL
        if edits is not None and (edits.rows_r["typical_p_r"] < 1).any():
            return cls.ALL
        return cls.RANDOM if (rows_r["temperature_r"] > 0).any() else cls.GREEDY


@dataclass(frozen=True, slots=True)
class SamplingVocabulary:
    """The tokens of the columns. Static under jit.

    Attributes:
        size: V, tokens.
        axis: the mesh axis over which the columns are split, inside shard_map; None if they are all here.
    """

    size: int
    axis: str | None = None

    def ids(self, num_columns: int) -> Int[Array, "V"]:
        """Return the token of each local column; padding columns have ids from the size on."""
        return self.first(num_columns) + jnp.arange(num_columns, dtype=jnp.int32)

    def columns(self, ids: Int[Array, "..."], num_columns: int) -> Int[Array, "..."]:
        """Return the local column of each token, the inverse of `ids`; `num_columns` for a token on another device."""
        columns = ids - self.first(num_columns)
        return jnp.where((columns >= 0) & (columns < num_columns), columns, num_columns)

    def without_padding(self, x_rv: Float[Array, "R V"]) -> Float[Array, "R V"]:
        """Return the values with minus infinity in padding columns."""
        if self.axis is None:
            return x_rv
        return jnp.where(self.ids(x_rv.shape[1]) < self.size, x_rv, -jnp.inf)

    def pick(self, x_rv: Float[Array, "R V"], ids_r: Int[Array, "R"]) -> Float[Array, "R 1"]:
        """Return each row's value of one token."""
        return self.pick_some(x_rv, ids_r[:, None])

    def pick_some(self, x_rv: Float[Array, "R V"], ids_rk: Int[Array, "R K"]) -> Float[Array, "R K"]:
        """Return each row's values of some tokens."""
        here_rk = self.pick_here(x_rv, ids_rk, 0)
        return here_rk if self.axis is None else lax.psum(here_rk, self.axis)

    def pick_here(self, x_rv: Float[Array, "R V"], ids_rk: Int[Array, "R K"], missing: float) -> Float[Array, "R K"]:
        """Return each row's values of some tokens, and `missing` for tokens on other devices."""
        columns_rk = self.columns(ids_rk, x_rv.shape[1])
        return jnp.take_along_axis(x_rv, columns_rk, axis=1, mode="fill", fill_value=missing)

    def max(self, x_rv: Float[Array, "R V"]) -> Float[Array, "R 1"]:
        """Return the largest value of each row."""
        here_r1 = x_rv.max(axis=1, keepdims=True)
        return here_r1 if self.axis is None else lax.pmax(here_r1, self.axis)

    def min(self, x_rv: Int[Array, "R V"]) -> Int[Array, "R"]:
        """Return the smallest value of each row."""
        here_r = x_rv.min(axis=1)
        return here_r if self.axis is None else lax.pmin(here_r, self.axis)

    def all_below_infinity(self, x_rv: Float[Array, "R V"]) -> Bool[Array, "R 1"]:
        """Return True for rows with neither NaN nor plus infinity.

        It counts, because the largest of values with NaN is not NaN on every platform.
        """
        return (self.sum(jnp.where(x_rv < jnp.inf, 0.0, 1.0)) == 0)[:, None]

    def sum(self, *parts: Num[Array, "R ..."]) -> Num[Array, "R"]:
        """Return the sum of each row, over all arguments."""
        here_r = functools.reduce(operator.add, (x_rv.sum(axis=1) for x_rv in parts))
        return here_r if self.axis is None else lax.psum(here_r, self.axis)

    def sums(self, *parts: Float[Array, "R V"]) -> Float[Array, "N R"]:
        """Return the sums of each row, for each of N arrays, in one reading of their inputs."""
        if len(parts) == 1:
            return self.sum(*parts)[None]
        zeros = tuple(jnp.zeros((), x_rv.dtype) for x_rv in parts)
        # One reduction of many operands: XLA for GPUs would run separate reductions one after the other.
        here_nr = jnp.stack(lax.reduce(parts, zeros, lambda a, b: tuple(map(operator.add, a, b)), [1]))
        return here_nr if self.axis is None else lax.psum(here_nr, self.axis)

    def log_sum_exp(self, largest_r1: Float[Array, "R 1"], *parts: Float[Array, "R ..."]) -> Float[Array, "R 1"]:
        """Return log(sum(exp(x))) of each row over all arguments, whose largest value is given."""
        return largest_r1 + jnp.log(self.sum(*(jnp.exp(x_rv - largest_r1) for x_rv in parts)))[:, None]

    def top_k(self, x_rv: Float[Array, "R V"], k: int) -> tuple[Float[Array, "R K"], Int[Array, "R K"]]:
        """Return the k largest values of each row in order, and their tokens; of equals the lower token comes first."""
        x_rk, columns_rk = lax.top_k(x_rv, min(k, x_rv.shape[1]))
        if self.axis is None:
            return x_rk, columns_rk
        # The best of each device, in order of tokens among equals: the order in which top_k takes equals.
        ids_rk = columns_rk + self.first(x_rv.shape[1])
        x_rn = lax.all_gather(x_rk, self.axis, axis=1, tiled=True)
        ids_rn = lax.all_gather(ids_rk, self.axis, axis=1, tiled=True)
        x_rk, indices_rk = lax.top_k(x_rn, k)
        return x_rk, jnp.take_along_axis(ids_rn, indices_rk, axis=1)

    def first(self, num_columns: int) -> Int[Array, ""] | int:
        """Return the token of the first local column."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * num_columns


BITS_OF_A_PASS = {"cpu": 1, "other": 4}
"""Bits of a threshold that one pass determines.

Accelerators compare faster than they read, and synchronize at each pass.
"""
_ROWS = Layout((0, 1))  # XLA for TPUs would let a matmul produce columns, and copy them for the loop


def sample(
    logits_rv: Float[Array, "R V"],
    how: RowSampling,
    vocabulary: SamplingVocabulary,
    detail: Detail,
    kernel: SamplingKernel | None = None,
    stages: SamplingStages | None = None,
) -> SampledTokens:
    """Sample one token per row.

    Args:
        logits_rv: float32: the vocabulary's, or this device's columns of them.
        how: sampling inputs of each row.
        vocabulary: the tokens of the columns.
        detail: additional outputs.
        kernel: does all of it if all columns are here; None leaves it to XLA.
        stages: the stages that XLA's program has, without conditionals; None for conditionals that skip stages.
    """
    if kernel is not None:
        num_top = min(TOP_WIDTH, logits_rv.shape[1]) if detail == Detail.TOP_LOGPROBS else 0
        return kernel.sample(logits_rv, how, has_logprobs=detail >= Detail.LOGPROBS, num_top=num_top)
    logits_rv = with_layout_constraint(vocabulary.without_padding(logits_rv), _ROWS)
    is_below_r1 = vocabulary.all_below_infinity(logits_rv)
    is_read_r1, largest_r1, top = is_below_r1, None, None
    if detail == Detail.TOP_LOGPROBS:
        top = vocabulary.top_k(logits_rv, min(TOP_WIDTH, vocabulary.size))
    if detail >= Detail.LOGPROBS:
        largest_r1 = vocabulary.max(logits_rv) if top is None else top[0].max(axis=1, keepdims=True)
        is_read_r1 = is_below_r1 & jnp.isfinite(largest_r1)
    # All uses of the full logits precede the loop, which depends on them: so it may change them in place.
    banned_token_ids_rx = jnp.where(is_read_r1, how.banned_token_ids_rx, vocabulary.size)
    allowed_rv, taken_rx = without_banned(logits_rv, banned_token_ids_rx, vocabulary, stages)
    token_ids_r = _choose_tokens(allowed_rv, how, vocabulary, stages)
    chosen_r1 = vocabulary.pick(allowed_rv, token_ids_r)
    sampled = SampledTokens(token_ids_r, (is_below_r1 & jnp.isfinite(chosen_r1))[:, 0])
    if largest_r1 is None:
        return sampled
    ranks_r = 1 + _count(vocabulary, allowed_rv > chosen_r1, taken_rx > chosen_r1)
    log_total_r1 = vocabulary.log_sum_exp(largest_r1, allowed_rv, taken_rx)
    sampled = dataclasses.replace(sampled, logprobs_r=(chosen_r1 - log_total_r1)[:, 0], ranks_r=ranks_r)
    if top is None:
        return sampled
    top_rk, top_ids_rk = top
    return dataclasses.replace(sampled, top_ids_rk=top_ids_rk, top_logprobs_rk=top_rk - log_total_r1)


def _choose_tokens(
    x_rv: jax.Array, how: RowSampling, vocabulary: SamplingVocabulary, stages: SamplingStages | None
) -> Int[Array, "R"]:
    if stages is None:
        return lax.cond(
            jnp.any(how.temperature_r > 0),
            lambda x_rv: _sample(x_rv, how, vocabulary, stages),
            lambda x_rv: first_largest(x_rv, vocabulary),
            x_rv,
        )
    return first_largest(x_rv, vocabulary) if stages < SamplingStages.RANDOM else _sample(x_rv, how, vocabulary, stages)


def compute_aux(
    logits_rv: Float[Array, "R V"],
    sampled: SampledTokens,
    vocabulary: SamplingVocabulary,
    detail: Detail | Int[Array, ""],
) -> SampledTokens:
    """Return the model's own log-probabilities of tokens that were sampled after logits processors.

    Args:
        logits_rv: the model's logits.
        sampled: tokens alone.
        detail: a `Detail`. Outputs that it excludes are None, or 0 if it is an array.
    """
    num_rows, num_top = len(logits_rv), min(TOP_WIDTH, vocabulary.size)
    no_floats_r1 = jnp.zeros((num_rows, 1), logits_rv.dtype)

    def of_tokens() -> tuple[jax.Array, ...]:
        chosen_r1 = vocabulary.pick(logits_rv, sampled.token_ids_r)
        log_total_r1 = vocabulary.log_sum_exp(vocabulary.max(logits_rv), logits_rv)
        return log_total_r1, chosen_r1 - log_total_r1, 1 + _count(vocabulary, logits_rv > chosen_r1)

    def of_none() -> tuple[jax.Array, ...]:
        return no_floats_r1, no_floats_r1, jnp.zeros(num_rows, jnp.int32)

    def of_top() -> tuple[jax.Array, ...]:
        top_rk, top_ids_rk = vocabulary.top_k(logits_rv, num_top)
        return top_rk - log_total_r1, top_ids_rk

    def of_no_top() -> tuple[jax.Array, ...]:
        return jnp.zeros((num_rows, num_top), logits_rv.dtype), jnp.zeros((num_rows, num_top), jnp.int32)

    is_sound_r = sampled.is_sound_r & vocabulary.all_below_infinity(logits_rv)[:, 0]
    if isinstance(detail, Detail):
        outputs = SampledTokens(sampled.token_ids_r, is_sound_r)
        if detail < Detail.LOGPROBS:
            return outputs
        log_total_r1, logprobs_r1, ranks_r = of_tokens()
        outputs = dataclasses.replace(outputs, logprobs_r=logprobs_r1[:, 0], ranks_r=ranks_r)
        if detail < Detail.TOP_LOGPROBS:
            return outputs
        top_logprobs_rk, top_ids_rk = of_top()
        return dataclasses.replace(outputs, top_ids_rk=top_ids_rk, top_logprobs_rk=top_logprobs_rk)
    log_total_r1, logprobs_r1, ranks_r = lax.cond(detail >= Detail.LOGPROBS, of_tokens, of_none)
    top_logprobs_rk, top_ids_rk = lax.cond(detail >= Detail.TOP_LOGPROBS, of_top, of_no_top)
    return SampledTokens(sampled.token_ids_r, is_sound_r, logprobs_r1[:, 0], ranks_r, top_ids_rk, top_logprobs_rk)


def aux_columns(
    logits_rv: Float[Array, "R V"],
    ids_rk: Int[Array, "R K"],
    log_total_r1: Float[Array, "R 1"],
    vocabulary: SamplingVocabulary,
) -> Int[Array, "R C"]:
    """Return columns with log-probabilities of given tokens.

    They are: whether the logits are finite, the first token's rank, all log-probabilities, the likeliest tokens and
    their log-probabilities.
    """
    values_rk = vocabulary.pick_some(logits_rv, ids_rk)
    ranks_r = 1 + _count(vocabulary, logits_rv > values_rk[:, :1])
    is_sound_r1 = vocabulary.all_below_infinity(logits_rv) & jnp.isfinite(log_total_r1)
    top_rk, top_ids_rk = vocabulary.top_k(logits_rv, min(TOP_WIDTH, vocabulary.size))

    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    columns = is_sound_r1.astype(jnp.int32), ranks_r[:, None], bits(values_rk - log_total_r1)
    return jnp.concatenate([*columns, top_ids_rk, bits(top_rk - log_total_r1)], axis=1)


def first_largest(x_rv: Float[Array, "R V"], vocabulary: SamplingVocabulary) -> Int[Array, "R"]:
    """Return the token of each row's largest value, the first of equals. 2 to 3 times as fast as argmax on CPUs."""
    ids_rv = jnp.broadcast_to(vocabulary.ids(x_rv.shape[1]), x_rv.shape)
    first_r = vocabulary.min(jnp.where(x_rv == vocabulary.max(x_rv), ids_rv, vocabulary.size))
    # A row of NaN equals nothing, but must still name a token.
    return jnp.minimum(first_r, vocabulary.size - 1)


def without_banned(
    logits_rv: jax.Array,
    ids_rx: Int[Array, "R X"],
    vocabulary: SamplingVocabulary,
    stages: SamplingStages | None = None,
) -> tuple[Float[Array, "R V"], Float[Array, "R X"]]:
    """Return the logits with minus infinity for banned tokens, and the original logits of those that this device has.

    It is a loop over the columns in use, without a branch: XLA runs a loop in place, and with nothing banned it makes
    no pass. A branch returns a new array, so that a branch that does nothing copies its input: on a TPU v6e 0.2 ms for
    256 rows of Llama 3. A program of given stages has no such loop, but a scatter.
    """
    if stages is not None:
        return _without_banned_at_once(logits_rv, ids_rx, vocabulary)
    is_used_x = jnp.any(ids_rx < vocabulary.size, axis=0)
    num_columns = jnp.max(jnp.where(is_used_x, jnp.arange(1, len(is_used_x) + 1), 0))
    ids_v = vocabulary.ids(logits_rv.shape[1])

    def take(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_rv, taken_rx = state
        ids_r1 = lax.dynamic_slice_in_dim(ids_rx, i, 1, axis=1)
        taken_r1 = vocabulary.pick_here(x_rv, ids_r1, -jnp.inf)
        # The second condition only forces the value to be read before it is overwritten.
        x_rv = jnp.where((ids_v == ids_r1) & (taken_r1 > -jnp.inf), -jnp.inf, x_rv)
        return x_rv, lax.dynamic_update_slice_in_dim(taken_rx, taken_r1, i, axis=1)

    return lax.fori_loop(0, num_columns, take, (logits_rv, jnp.full(ids_rx.shape, -jnp.inf, logits_rv.dtype)))


def _without_banned_at_once(
    logits_rv: jax.Array, ids_rx: Int[Array, "R X"], vocabulary: SamplingVocabulary
) -> tuple[Float[Array, "R V"], Float[Array, "R X"]]:
    """Return the same as the loop, which finds minus infinity for an id that comes again."""
    num_ids = ids_rx.shape[1]
    is_again_rx = jnp.any((ids_rx[:, :, None] == ids_rx[:, None, :]) & jnp.tri(num_ids, k=-1, dtype=jnp.bool_), axis=2)
    ids_rx = jnp.where(is_again_rx, vocabulary.size, ids_rx)
    taken_rx = vocabulary.pick_here(logits_rv, ids_rx, -jnp.inf)
    rows_r1 = jnp.arange(len(logits_rv))[:, None]
    columns_rx = jnp.where(taken_rx > -jnp.inf, vocabulary.columns(ids_rx, logits_rv.shape[1]), logits_rv.shape[1])
    return logits_rv.at[rows_r1, columns_rx].set(-jnp.inf, mode="drop"), taken_rx


def _sample(
    logits_rv: jax.Array, how: RowSampling, vocabulary: SamplingVocabulary, stages: SamplingStages | None
) -> jax.Array:
    is_greedy_r1 = how.temperature_r[:, None] == 0
    scaled_rv = logits_rv / jnp.where(is_greedy_r1, 1, jnp.maximum(how.temperature_r[:, None], SMALLEST))
    key = how.seeds_r2, how.sequence_indices_r, how.positions_r
    if vocabulary.axis is None:
        waits_rv = exponentials(*key, vocabulary.size)
    else:
        waits_rv = get_exponentials(*key, vocabulary.ids(logits_rv.shape[1]), vocabulary.size)
    is_kept_rv = scaled_rv >= truncation_floor(scaled_rv, how, vocabulary, stages)
    noisy_rv = jnp.where(is_kept_rv, scaled_rv - jnp.log(waits_rv), -jnp.inf)
    return first_largest(jnp.where(is_greedy_r1, logits_rv, noisy_rv), vocabulary)


def truncation_floor(
    scaled_rv: Float[Array, "R V"],
    how: RowSampling,
    vocabulary: SamplingVocabulary,
    stages: SamplingStages | None = None,
) -> Float[Array, "R 1"]:
    """Return the smallest logit (after temperature) that min_p, top_k and top_p keep in each row.

    Args:
        stages: as of `sample`.
    """

    def at_least_top_k(floor_r1: jax.Array) -> jax.Array:
        return jnp.maximum(floor_r1, _top_k_floor(scaled_rv, how.top_k_r, vocabulary))

    def at_least_top_p(floor_r1: jax.Array) -> jax.Array:
        return jnp.maximum(floor_r1, _top_p_floor(scaled_rv, floor_r1, how.top_p_r, vocabulary))

    floor_r1 = vocabulary.max(scaled_rv) + jnp.log(how.min_p_r)[:, None]
    floor_r1 = run_stage(SamplingStages.ALL, stages, how.top_k_r < vocabulary.size, at_least_top_k, floor_r1)
    return run_stage(SamplingStages.ALL, stages, how.top_p_r < 1, at_least_top_p, floor_r1)


def run_stage(
    stage: SamplingStages,
    stages: SamplingStages | None,
    is_needed_r: Bool[Array, "R"],
    change: Callable[[jax.Array], jax.Array],
    x: jax.Array,
) -> jax.Array:
    """Return the changed array if the program has the stage, else the array.

    Args:
        stages: of the program; None for a conditional.
        is_needed_r: rows that need the stage; it changes no bit of the others.
    """
    if stages is None:
        return lax.cond(jnp.any(is_needed_r), change, lambda x: x, x)
    return change(x) if stages >= stage else x


def _top_k_floor(x_rv: jax.Array, top_k_r: jax.Array, vocabulary: SamplingVocabulary) -> jax.Array:
    """Return the k-th largest value of each row."""

    def is_enough(floors: list[jax.Array]) -> jax.Array:
        return vocabulary.sums(*(jnp.where(x_rv >= floor_r1, 1.0, 0.0) for floor_r1 in floors)) >= top_k_r

    return largest_threshold(len(x_rv), is_enough)


def _top_p_floor(x_rv: jax.Array, floor_r1: jax.Array, top_p_r: jax.Array, vocabulary: SamplingVocabulary) -> jax.Array:
    """Return the largest threshold whose tokens have a share of top_p of those not below the floor.

    It is minus infinity for a top_p of 1.
    """
    weights_rv = jnp.where(x_rv >= floor_r1, jnp.exp(x_rv - vocabulary.max(x_rv)), 0)
    need_r = jnp.maximum(top_p_r, SMALLEST) * vocabulary.sum(weights_rv)

    def is_enough(floors: list[jax.Array]) -> jax.Array:
        return vocabulary.sums(*(jnp.where(x_rv >= floor_r1, weights_rv, 0) for floor_r1 in floors)) >= need_r

    return jnp.where(top_p_r[:, None] < 1, largest_threshold(len(x_rv), is_enough), -jnp.inf)


def _count(vocabulary: SamplingVocabulary, *is_so: jax.Array) -> jax.Array:
    """Count True values in each row. Sums float32, which is 3 times as fast on CPUs and exact up to 2^24."""
    return vocabulary.sum(*(jnp.where(is_so_rv, 1.0, 0.0) for is_so_rv in is_so)).astype(jnp.int32)


def largest_threshold(num_rows: int, is_enough: Callable[[list[jax.Array]], jax.Array]) -> jax.Array:
    """Search the largest float32 [R, 1] that satisfies a monotonic condition: one that holds below it and fails above.

    With transformed bits (all inverted for negative numbers, the sign for positive ones) floats are ordered as
    integers. A pass that tries 2^n - 1 thresholds in one reading determines n bits. Returns minus infinity if the
    condition holds nowhere.

    Args:
        num_rows: R.
        is_enough: maps thresholds [R, 1] to whether the condition holds at each, [N, R].
    """

    def to_float(key_r: jax.Array) -> jax.Array:
        bits_r = jnp.where(key_r >> 31 == 1, key_r ^ jnp.uint32(1 << 31), ~key_r)
        return lax.bitcast_convert_type(bits_r, jnp.float32)[:, None]

    def search(num_bits: int, key_r: jax.Array) -> jax.Array:
        def settle(i: jax.Array, key_r: jax.Array) -> jax.Array:
            shift = jnp.uint32(32 - num_bits) - i.astype(jnp.uint32) * num_bits
            tried = [key_r | (jnp.uint32(j) << shift) for j in range(1, 1 << num_bits)]
            is_enough_nr = is_enough([to_float(one_r) for one_r in tried])
            return jnp.max(jnp.where(is_enough_nr, jnp.stack(tried), key_r), axis=0)

        return lax.fori_loop(0, 32 // num_bits, settle, key_r)

    # Below minus infinity are only bits of NaN, which compares with nothing.
    lowest_r = jnp.full(num_rows, 0x007FFFFF, jnp.uint32)
    key_r = lax.platform_dependent(
        jnp.zeros_like(lowest_r),
        cpu=functools.partial(search, BITS_OF_A_PASS["cpu"]),
        default=functools.partial(search, BITS_OF_A_PASS["other"]),
    )
    return to_float(jnp.maximum(key_r, lowest_r))
