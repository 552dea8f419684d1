"""The Mosaic kernel of sampling on TPUs: rows of logits are read once, and all passes over them stay on the chip.

    grid step g     logits of 8 rows ──► scaled by the temperature, banned tokens at minus infinity
                    the next 8 rows  ──► in flight

    scaled  | first half of the vocabulary, padded | second half, padded |      a row a sublane, a token a lane

Tokens v and v + half take their noise from the two words of one threefry block, so they are at equal places of the two
halves. Padding is minus infinity. A row's state is kept in all 128 lanes at once.

Each pass sums a row lane by lane in a fixed order, and then the lanes: a row's result depends only on that row.
Thresholds are searched between bounds. A search ends when no row of the group can change its kept tokens. Stages that
no row of the group needs are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.sampling.rows import threefry_2x32

LANES = 128
ROWS = 8
"""Rows of a group."""
PASS = 64 * LANES
"""Columns of one turn of a pass, whose overhead equals the cost of 8 vectors."""
DRAW = 8 * LANES
"""Columns of each half in one turn of loops other than passes."""
_NUM_SUMS = 8
_NUM_VALUE_HALVINGS = 16  # then of the bits: at most 32
_NUM_HALVINGS = _NUM_VALUE_HALVINGS + 32

_SHAPE = ROWS, LANES  # a number per row, in all lanes

SAMPLES, TRUNCATES_COUNT, TRUNCATES_SHARE = 1, 2, 4
"""Bits of a group's flags: a row has a temperature, a top_k, a top_p."""
FIELDS = ("temperature", "is_greedy", "top_k", "top_p", "reach", "log_min_p", "key_high", "key_low")
"""Words of a row, in order; float32 as their bits. `reach`: how far below the largest a top_p below 1 can reach."""
RESULTS = ("token", "num_unsound", "rank", "logprob", "log_total")
"""Result words of a row, in order."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Compile-time constants of a call.

    Attributes:
        vocab_size: V.
        has_logprobs: also return the token's log-probability and rank.
        vmem_limit_bytes: for the compiler.
    """

    vocab_size: int
    has_logprobs: bool
    vmem_limit_bytes: int

    @property
    def half(self) -> int:
        """Tokens of the first half."""
        return (self.vocab_size + 1) // 2

    @property
    def half_width(self) -> int:
        """Columns of a half with its padding: a multiple of half a turn of a pass."""
        return -(-self.half // (PASS // 2)) * (PASS // 2)

    @property
    def block_width(self) -> int:
        """Columns that are read: up to the end of the padded second half, including the start of the first vector."""
        return self.half // LANES * LANES + self.half_width + LANES

    @property
    def vmem_bytes(self) -> int:
        """Bytes of two groups of logits, the scaled ones and their weights."""
        return 4 * ROWS * (2 * self.block_width + 4 * self.half_width)


class SamplingScalars(NamedTuple):
    """Arguments in scalar memory.

    Attributes:
        flags: of each group.
        num_banned: of each row, the number of places in `banned` in use.
        banned: tokens, a fixed number of places per row; those outside the vocabulary are ignored.
    """

    flags: Any
    num_banned: Any
    banned: Any


@dataclass(frozen=True, slots=True)
class _Group:
    """A group's rows in vector memory.

    Attributes:
        plan: compile-time constants.
        fields_ref: [8, 128] int32.
        logits_ref: [8, block_width], the original logits.
        scaled_ref: [8, 2 * half_width], divided by the temperature.
        weights_ref: the same shape: exp(scaled - largest) of the remaining tokens.
    """

    plan: SamplingPlan
    fields_ref: Any
    logits_ref: Any
    scaled_ref: Any
    weights_ref: Any

    def words(self, name: str) -> jax.Array:
        """Return an int32 field of each row."""
        i = FIELDS.index(name)
        return jnp.broadcast_to(self.fields_ref[:, i : i + 1], _SHAPE)

    def numbers(self, name: str) -> jax.Array:
        """Return a float32 field of each row."""
        return lax.bitcast_convert_type(self.words(name), jnp.float32)

    def full(self, value: float) -> jax.Array:
        """Return the same float32 for all rows."""
        return jnp.full(_SHAPE, value, jnp.float32)

    def lanes(self) -> jax.Array:
        """Return the index of each lane."""
        return lax.broadcasted_iota(jnp.int32, _SHAPE, 1)

    def over_scaled(self, take: Callable[[jax.Array, jax.Array], jax.Array], init: jax.Array) -> list[jax.Array]:
        """Fold the scaled logits into `_NUM_SUMS` separate states."""
        return self._over((self.scaled_ref,), take, init)

    def over_weighed(
        self, take: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], init: jax.Array
    ) -> list[jax.Array]:
        """Fold the scaled logits and their weights in the same way."""
        return self._over((self.scaled_ref, self.weights_ref), take, init)

    def _over(self, refs: tuple[Any, ...], take: Callable[..., jax.Array], init: jax.Array) -> list[jax.Array]:
        def turn(i: jax.Array, states: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            columns = pl.ds(pl.multiple_of(i * PASS, PASS), PASS)
            wide, parts = [ref[:, columns] for ref in refs], list(states)
            for j in range(PASS // LANES):
                vectors = (x[:, j * LANES : (j + 1) * LANES] for x in wide)
                parts[j % _NUM_SUMS] = take(parts[j % _NUM_SUMS], *vectors)
            return tuple(parts)

        return list(lax.fori_loop(0, 2 * self.plan.half_width // PASS, turn, (init,) * _NUM_SUMS))

    def over_logits(self, take: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], init: jax.Array) -> jax.Array:
        """Fold the original logits, with their tokens; minus infinity after the last."""
        plan = self.plan
        width = -(-plan.vocab_size // LANES) * LANES

        def turn(i: jax.Array, state: jax.Array) -> jax.Array:
            begin = pl.multiple_of(i * LANES, LANES)
            ids = begin + self.lanes()
            x = jnp.where(ids < plan.vocab_size, self.logits_ref[:, pl.ds(begin, LANES)], -jnp.inf)
            return take(state, x, ids)

        return lax.fori_loop(0, width // LANES, turn, init, unroll=min(8, width // LANES))


def _sum(parts: list[jax.Array]) -> jax.Array:
    """Return the sum of each row, in all lanes."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return jnp.broadcast_to(jnp.sum(parts[0], axis=1, keepdims=True), parts[0].shape)


def _max(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.max(x, axis=1, keepdims=True), x.shape)


def _min(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.min(x, axis=1, keepdims=True), x.shape)


def keys(x: jax.Array) -> jax.Array:
    """Return integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _floats(keys: jax.Array) -> jax.Array:
    """Return the floats of integers; the inverse of `keys`."""
    return lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ 0x7FFFFFFF, keys), jnp.float32)


def _scale(group: _Group) -> jax.Array:
    """Fill `scaled_ref`; return the number of NaN and plus infinity among each row's logits."""
    plan, skip = group.plan, group.plan.half % LANES
    temperature, lanes = group.numbers("temperature"), group.lanes()

    def turn(i: jax.Array, num_unsound: jax.Array) -> jax.Array:
        begin = pl.multiple_of(i * DRAW, DRAW)
        first = group.logits_ref[:, pl.ds(begin, DRAW)]
        at = pl.multiple_of(begin + (plan.half - skip), LANES)
        second = group.logits_ref[:, pl.ds(at, DRAW + LANES)]
        scaled: tuple[list[jax.Array], list[jax.Array]] = [], []
        for j in range(DRAW // LANES):
            ids = begin + j * LANES + lanes
            x = second[:, j * LANES : (j + 1) * LANES]
            if skip:  # the second half begins within a vector
                following = second[:, (j + 1) * LANES : (j + 2) * LANES]
                x = pltpu.roll(jnp.where(lanes >= skip, x, following), LANES - skip, 1)
            halves = (
                (first[:, j * LANES : (j + 1) * LANES], ids < plan.half),
                (x, ids < plan.vocab_size - plan.half),
            )
            for half, (logits, is_token) in enumerate(halves):
                num_unsound += jnp.where(is_token & ~(logits < jnp.inf), 1.0, 0.0)
                scaled[half].append(jnp.where(is_token, logits / temperature, -jnp.inf))
        group.scaled_ref[:, pl.ds(begin, DRAW)] = jnp.concatenate(scaled[0], axis=1)
        behind = pl.multiple_of(begin + plan.half_width, DRAW)
        group.scaled_ref[:, pl.ds(behind, DRAW)] = jnp.concatenate(scaled[1], axis=1)
        return num_unsound

    return _sum([lax.fori_loop(0, plan.half_width // DRAW, turn, group.full(0))])


def _ban(group: _Group, scalars: SamplingScalars, first_row: jax.Array) -> None:
    """Write minus infinity over the banned tokens of each row."""
    plan = group.plan
    width = scalars.banned.shape[0] // scalars.num_banned.shape[0]

    def ban(token: jax.Array, row: int) -> None:
        place = jnp.where(token < plan.half, token, token - plan.half + plan.half_width)
        columns = pl.ds(pl.multiple_of(place // LANES * LANES, LANES), LANES)
        is_it = (lax.broadcasted_iota(jnp.int32, _SHAPE, 0) == row) & (group.lanes() == place % LANES)
        group.scaled_ref[:, columns] = jnp.where(is_it, -jnp.inf, group.scaled_ref[:, columns])

    def turn(i: jax.Array, row: int) -> None:
        token = scalars.banned[(first_row + row) * width + i]
        pl.when((token >= 0) & (token < plan.vocab_size))(functools.partial(ban, token, row))

    for row in range(ROWS):
        num_banned = scalars.num_banned[first_row + row]
        lax.fori_loop(0, num_banned, lambda i, _, row=row: turn(i, row), None)


_Search = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""Number of halvings, keys low and high, their totals."""


def search(
    low: jax.Array,
    high: jax.Array,
    total_at: Callable[[jax.Array], jax.Array],
    need: jax.Array,
    is_settled: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Return a threshold that keeps the same tokens as the largest one with a total of at least `need`.

    Args:
        low: keys whose totals suffice.
        high: keys whose totals do not; a row with adjacent bounds is settled.
        total_at: returns each row's total for thresholds; decreases monotonically.
        need: of each row.
        is_settled: (threshold low, its total, that of high) -> no value between the two is another threshold.
    """

    def goes_on(state: _Search) -> jax.Array:
        i, low, high, _, _ = state
        return (i < _NUM_HALVINGS) & (jnp.max(jnp.where(high > low + 1, 1.0, 0.0)) > 0)

    def halve(state: _Search) -> _Search:
        i, low, high, total_low, total_high = state
        between = keys(0.5 * _floats(low) + 0.5 * _floats(high))
        is_useful = (i < _NUM_VALUE_HALVINGS) & (between > low) & (between < high)
        tried = jnp.where(is_useful, between, (low & high) + ((low ^ high) >> 1))
        total = total_at(_floats(tried))
        is_open = high > low + 1
        is_enough = total >= need
        total_low = jnp.where(is_open & is_enough, total, total_low)
        low = jnp.where(is_open & is_enough, tried, low)
        total_high = jnp.where(is_open & ~is_enough, total, total_high)
        high = jnp.where(is_open & ~is_enough, tried, high)
        high = jnp.where(is_settled(_floats(low), total_low, total_high), low + 1, high)
        return i + 1, low, high, total_low, total_high

    unknown = jnp.full(low.shape, jnp.inf, jnp.float32)
    state: _Search = jnp.int32(0), low, high, unknown, jnp.zeros_like(unknown)
    _, low, _, _, _ = lax.while_loop(goes_on, lambda state: halve(halve(state)), state)
    return _floats(low)


def has_one_between(weight: jax.Array, total: jax.Array, total_low: jax.Array, total_high: jax.Array) -> jax.Array:
    """Return True if only one token is between two thresholds, the lower of which has this weight.

    Two would weigh at least twice that. Returns False for weights so small that rounding could hide another token.
    """
    return (weight > 1e-4 * total) & (total_low - total_high < 1.5 * weight)


def _floor_of_count(group: _Group, largest: jax.Array, bound: jax.Array) -> jax.Array:
    """Return the threshold of the top_k largest and of ties with the last; minus infinity if all are kept."""
    top_k = group.words("top_k")
    is_wanted = top_k < group.plan.vocab_size
    need = top_k.astype(jnp.float32)

    def count(threshold: jax.Array) -> jax.Array:
        one, none = group.full(1), group.full(0)
        return _sum(group.over_scaled(lambda n, x: n + jnp.where(x >= threshold, one, none), none))

    high = keys(largest) + 1
    low = jnp.where(is_wanted, keys(jnp.where(top_k <= _NUM_SUMS * LANES, bound, -jnp.inf)), high - 1)
    found = search(low, high, count, need, lambda _, total, __: total == need)
    return jnp.where(is_wanted, found, -jnp.inf)


def _floor_of_share(group: _Group, largest: jax.Array, floor: jax.Array) -> jax.Array:
    """Return the threshold of the smallest set of likeliest tokens with a share of top_p.

    It is minus infinity if all are kept.
    """
    top_p = group.numbers("top_p")
    is_wanted = top_p < 1

    def weigh(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        columns = pl.ds(pl.multiple_of(i * DRAW, DRAW), DRAW)
        x = group.scaled_ref[:, columns]
        vectors = (x[:, j * LANES : (j + 1) * LANES] for j in range(DRAW // LANES))
        weights = [jnp.where(x >= floor, jnp.exp(x - largest), 0) for x in vectors]
        group.weights_ref[:, columns] = jnp.concatenate(weights, axis=1)
        return tuple(total + weight for total, weight in zip(sums, weights, strict=True))

    def share(threshold: jax.Array) -> jax.Array:
        none = group.full(0)
        return _sum(group.over_weighed(lambda m, x, w: m + jnp.where(x >= threshold, w, none), none))

    sums = (group.full(0),) * (DRAW // LANES)
    total = _sum(list(lax.fori_loop(0, 2 * group.plan.half_width // DRAW, weigh, sums)))
    need = top_p * total

    def is_settled(threshold: jax.Array, total_low: jax.Array, total_high: jax.Array) -> jax.Array:
        return has_one_between(jnp.exp(threshold - largest), total, total_low, total_high)

    high = keys(largest) + 1
    low = jnp.where(is_wanted, keys(jnp.maximum(floor, largest - group.numbers("reach"))), high - 1)
    found = search(low, high, share, need, is_settled)
    return jnp.where(is_wanted, found, -jnp.inf)


def _gumbel(bits: jax.Array) -> jax.Array:
    """Return the negative logarithm of `noise`'s exponentials of these bits."""
    # Halves are exact as floats, and their sum is rounded once, as in a conversion of the unsigned word.
    high, low = (lax.bitcast_convert_type(part, jnp.int32) for part in (bits >> 16, bits & 0xFFFF))
    whole = high.astype(jnp.float32) * 65536.0 + low.astype(jnp.float32)
    u = jnp.minimum((whole + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # Small u decide a sample; for them 1 - u has few digits.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return -jnp.log(jnp.where(u < 2.0**-6, series, -jnp.log(1 - u)))


def _draw(group: _Group, floor: jax.Array, *, has_noise: bool) -> jax.Array:
    """Return each row's token: the largest noisy logit not below the floor; of equals the lowest token."""
    plan, lanes = group.plan, group.lanes()
    key_high, key_low = (lax.bitcast_convert_type(group.words(name), jnp.uint32) for name in ("key_high", "key_low"))
    is_greedy = group.words("is_greedy") != 0

    def turn(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        begin = pl.multiple_of(i * DRAW, DRAW)
        halves = [
            group.scaled_ref[:, pl.ds(pl.multiple_of(begin + offset, DRAW), DRAW)] for offset in (0, plan.half_width)
        ]

        found = list(state)
        for j in range(DRAW // LANES):
            ids = begin + j * LANES + lanes
            if has_noise:
                counters = lax.bitcast_convert_type(ids, jnp.uint32)
                words = threefry_2x32((key_high, key_low), (counters, jnp.zeros_like(counters)))
            for half in range(2):
                x = halves[half][:, j * LANES : (j + 1) * LANES]
                score = x + jnp.where(is_greedy, 0.0, _gumbel(words[half])) if has_noise else x
                best, token = found[2 * half : 2 * half + 2]
                is_better = (x >= floor) & (score > best)
                found[2 * half] = jnp.where(is_better, score, best)
                found[2 * half + 1] = jnp.where(is_better, ids + half * plan.half, token)
        return tuple(found)

    nothing = group.full(-jnp.inf), jnp.zeros(_SHAPE, jnp.int32)
    best_0, token_0, best_1, token_1 = lax.fori_loop(0, plan.half_width // DRAW, turn, (*nothing, *nothing))
    best = _max(jnp.maximum(best_0, best_1))
    behind = jnp.int32(2**30)
    token = jnp.minimum(jnp.where(best_0 == best, token_0, behind), jnp.where(best_1 == best, token_1, behind))
    return _min(token.astype(jnp.float32)).astype(jnp.int32)


def _compute_logprob(group: _Group, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rank, log-probability and the logarithm of the sum, of the original logits."""
    lowest, zero = group.full(-jnp.inf), group.full(0)
    largest = _max(group.over_logits(lambda m, x, _: jnp.maximum(m, x), lowest))
    chosen = _max(group.over_logits(lambda m, x, ids: jnp.where(ids == token, x, m), lowest))
    num_likelier = _sum([group.over_logits(lambda n, x, _: n + jnp.where(x > chosen, 1.0, 0.0), zero)])
    total = _sum([group.over_logits(lambda n, x, _: n + jnp.exp(x - largest), zero)])
    log_total = largest + jnp.log(total)
    return 1 + num_likelier.astype(jnp.int32), chosen - log_total, log_total


def _kernel(scalars: SamplingScalars, group: _Group, results_ref: Any) -> None:
    i = pl.program_id(0)
    flags = scalars.flags[i]
    lanes, told = group.lanes(), dict(zip(RESULTS, range(len(RESULTS)), strict=True))
    # Written at once: it would occupy a register until the end.
    results_ref[...] = jnp.where(lanes == told["num_unsound"], _scale(group).astype(jnp.int32), 0)
    _ban(group, scalars, i * ROWS)
    parts = group.over_scaled(jnp.maximum, group.full(-jnp.inf))
    bound = _min(jnp.min(jnp.stack(parts), axis=0))
    largest = _max(jnp.max(jnp.stack(parts), axis=0))
    floor = jnp.where(group.words("is_greedy") != 0, largest, largest + group.numbers("log_min_p"))

    def if_any(flag: int, change: Callable[[jax.Array], jax.Array], floor: jax.Array) -> jax.Array:
        return lax.cond((flags & flag) != 0, lambda x: jnp.maximum(x, change(x)), lambda x: x, floor)

    floor = if_any(TRUNCATES_COUNT, lambda _: _floor_of_count(group, largest, bound), floor)
    floor = if_any(TRUNCATES_SHARE, lambda floor: _floor_of_share(group, largest, floor), floor)
    token = lax.cond(
        (flags & SAMPLES) != 0,
        lambda floor: _draw(group, floor, has_noise=True),
        lambda floor: _draw(group, floor, has_noise=False),
        floor,
    )
    results_ref[...] = jnp.where(lanes == told["token"], token, results_ref[...])
    if group.plan.has_logprobs:
        for name, result in zip(("rank", "logprob", "log_total"), _compute_logprob(group, token), strict=True):
            bits = result if result.dtype == jnp.int32 else lax.bitcast_convert_type(result, jnp.int32)
            results_ref[...] = jnp.where(lanes == told[name], bits, results_ref[...])


def call(scalars: SamplingScalars, fields_rf: jax.Array, logits_rv: jax.Array, plan: SamplingPlan) -> jax.Array:
    """Run the kernel; returns `RESULTS` of each row, for whole groups.

    Args:
        scalars: of all groups.
        fields_rf: [groups * 8, 128], `FIELDS`.
        logits_rv: float32.
        plan: compile-time constants.
    """
    num_groups = scalars.flags.shape[0]
    of_group = pl.BlockSpec(_SHAPE, lambda g, *_: (g, 0))

    def body(flags: Any, num_banned: Any, banned: Any, fields: Any, logits: Any, results: Any, *scratch: Any) -> None:
        _kernel(SamplingScalars(flags, num_banned, banned), _Group(plan, fields, logits, *scratch), results)

    scratch = pltpu.VMEM((ROWS, 2 * plan.half_width), jnp.float32)
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_groups,),
            in_specs=[of_group, pl.BlockSpec((ROWS, plan.block_width), lambda g, *_: (g, 0))],
            out_specs=of_group,
            scratch_shapes=[scratch, scratch],
        ),
        out_shape=jax.ShapeDtypeStruct((num_groups * ROWS, LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=plan.vmem_limit_bytes,
            disable_bounds_checks=True,  # the loops' bounds are static, and banned tokens are checked
        ),
        name="sample",
    )(*scalars, fields_rf, logits_rv)
