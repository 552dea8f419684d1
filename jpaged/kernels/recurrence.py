"""Recurrent layers over packed rows: states, short convolutions, the delta rule and Mamba-2. XLA is the reference.

Each head has a decay, or each channel of keys (Kimi Delta Attention).

A sequence has a slot in each array of states, `[L, N, ...]`, and slot 0 is for padding. A step reads the state of each
row from one slot and writes it to another. So a fork costs no copy: the first step reads the parent's slot.

    slot      0   1   2   3   4
    row 0         r                     the last holder of a slot writes it in place
    row 1             r   w             a slot that others share is read, and the result is in a new one
    row 2                     w         a sequence that begins reads nothing: its state is zero

All rows are read before the first one is written, so one row may take over the slot of another.

Rows of draft tokens follow the row of their sequence. Each writes the state after the token to another slot, so that
a sequence continues with the slot of the last accepted token:

    row       source   slot
    r         1        1           t7, the last token
    r + 1     1        5           a, a draft: after the token of row r
    r + 2     1        6           b, a draft: after a; if only a is accepted, slot 5 is the state

Three backends update matrices. The bits of a row depend on no other row.

    tokens    XLA, one token after another: the specification. Bits do not depend on where a prompt is cut.
    cpu       C++ (cpu/recurrence), one token after another: the same. Reads only rows in use, and updates in place.
    blocks    XLA, for TPUs and GPUs: 64 tokens are a few matmuls. A cut may change the last bits of float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import InternalError
from jpaged.kernels.cpu.library import MAX_WIDTH, NAME, register

BLOCK_LEN, SHORT_LEN = 64, 16
"""Tokens of a block, and of the longest rows that are computed all at once, unless they have more draft tokens.

Pairs of tokens in the same `SHORT_LEN` of a block have their own products if each channel has a decay.
"""
_ZEROS, _ROW_BEFORE = -1, -2
"""Sources of rows in the C++ kernel that are no slots: a sequence begins, or continues the row before."""


def _whole(function: Callable[..., Any], axes_in: Sequence[int | None], axes_out: Sequence[int]) -> Callable[..., Any]:
    return function


@dataclass(frozen=True, slots=True)
class RecurrenceKernel:
    """The code that updates the matrices of states. Hashable, static under jit.

    Attributes:
        backend: see above; `cpu` requires `unsupported_cpu_reason` to be None.
        has_static_loops: every loop has a fixed number of turns, so that the host does not wait for a GPU.
        split: (function, axes of arguments, axes of results) -> the function of each device's heads. An axis is that of
            heads; None is for an argument that every device has.
        short_len: tokens of the longest rows that `blocks` computes all at once, a multiple of `SHORT_LEN`. Rows with
            draft tokens must not be longer.
        num_parts: devices that share the heads.
        max_width: floats of the widest vectors that `cpu` uses.
        max_threads: maximum threads that `cpu` uses; 0 is all.
    """

    backend: Literal["tokens", "cpu", "blocks"] = "tokens"
    has_static_loops: bool = False
    split: Callable[[Callable[..., Any], Sequence[int | None], Sequence[int]], Callable[..., Any]] = _whole
    num_parts: int = 1
    short_len: int = SHORT_LEN
    max_width: int = MAX_WIDTH
    max_threads: int = 0


_TOKENS = RecurrenceKernel()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """The rows of a step, as recurrent layers read them.

    Attributes:
        starts_s1: first packed token of each row, and the end.
        firsts_s: first token of the row's sequence in the step; for draft tokens it is in another row.
        is_first_s: the row begins its sequence.
        is_draft_s: the row continues the one before it.
        sources_s: slot from which the state before the first token is read.
        slots_s: slot to which it is written; 0 for padding.
        rows_t: row of each token.
        offsets_t: tokens of the same sequence before each token.
        kernel: updates matrices. Static.
    """

    starts_s1: jax.Array
    firsts_s: jax.Array
    is_first_s: jax.Array
    is_draft_s: jax.Array
    sources_s: jax.Array
    slots_s: jax.Array
    rows_t: jax.Array
    offsets_t: jax.Array
    kernel: RecurrenceKernel = field(default=_TOKENS, metadata={"static": True})

    @classmethod
    def of(
        cls,
        starts_s1: jax.Array,
        is_first_s: jax.Array,
        sources_s: jax.Array,
        slots_s: jax.Array,
        num_tokens: int,
        kernel: RecurrenceKernel = _TOKENS,
        is_draft_s: jax.Array | None = None,
    ) -> RecurrentRows:
        """Return the rows of a step of `num_tokens` packed tokens, including padding.

        Args:
            is_draft_s: None if no row has draft tokens.
        """
        t, last = jnp.arange(num_tokens, dtype=jnp.int32), len(starts_s1) - 2
        rows_t = jnp.minimum((t[:, None] >= starts_s1[None, 1:]).sum(axis=1, dtype=jnp.int32), last)
        firsts_s = starts_s1[:-1]
        if is_draft_s is None:
            is_draft_s = jnp.zeros(last + 1, bool)
        else:
            firsts_s = jax.lax.cummax(jnp.where(is_draft_s, 0, firsts_s))  # rows are packed in order
        offsets_t = t - firsts_s[rows_t]
        return cls(starts_s1, firsts_s, is_first_s, is_draft_s, sources_s, slots_s, rows_t, offsets_t, kernel)

    @classmethod
    def one(cls, num_tokens: int) -> RecurrentRows:
        """Return a single row, which begins its sequence."""
        zero = jnp.zeros(1, jnp.int32)
        return cls.of(jnp.array([0, num_tokens], jnp.int32), jnp.ones(1, bool), zero, zero, num_tokens)

    @property
    def lens_s(self) -> jax.Array:
        """Tokens of each row, with those of the same sequence before it; 0 for rows that are not in use."""
        return jnp.where(self.starts_s1[1:] > self.starts_s1[:-1], self.starts_s1[1:] - self.firsts_s, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StatefulPool:
    """The KV pool together with the states of recurrent layers, the load of experts, and the routes of tokens.

    Attributes:
        kv: the pool.
        states: for each array of a layer, `[L, N, ...]`: all recurrent layers and slots.
        expert_load: int32 `[G, L, D, P]`: rows that each physical expert has computed, by the device that routed them;
            None if experts are not balanced. Layers have their places in the pool.
        routes: the experts of each token, `[N + 1, B, L * K]`, in the slots where its keys are; L are the layers with
            experts. While layers run, `StepRoutes`. None if they are not returned.
    """

    kv: Any
    states: tuple[Any, ...] = ()
    expert_load: Any = None
    routes: Any = None

    def with_kv(self, kv: Any) -> StatefulPool:
        """Return the states with another pool."""
        return dataclasses.replace(self, kv=kv)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepRoutes:
    """The experts of a step's tokens, of the layers that have run.

    Attributes:
        ids_ltk: of the layers with experts, in order.
        num_layers: int32 scalar: those that have run.
    """

    ids_ltk: jax.Array
    num_layers: jax.Array

    @classmethod
    def blank(cls, shape: tuple[int, int, int], dtype: Any) -> StepRoutes:
        """Return the routes before the first layer."""
        return cls(jnp.zeros(shape, dtype), jnp.int32(0))

    def add(self, ids_tk: jax.Array) -> StepRoutes:
        """Return the routes with those of the next layer."""
        ids = ids_tk.astype(self.ids_ltk.dtype)[None]
        begins = self.num_layers, jnp.int32(0), jnp.int32(0)
        return StepRoutes(jax.lax.dynamic_update_slice(self.ids_ltk, ids, begins), self.num_layers + 1)

    def store(self, routes_nbx: jax.Array, slots_t: jax.Array) -> jax.Array:
        """Return `StatefulPool.routes` with each token's experts in its slot; slots outside of it are dropped."""
        block_size, num_tokens = routes_nbx.shape[1], len(slots_t)
        ids_tx = self.ids_ltk.transpose(1, 0, 2).reshape(num_tokens, -1)
        blocks_t = jnp.where(slots_t >= 0, slots_t // block_size, len(routes_nbx))
        return routes_nbx.at[blocks_t, slots_t % block_size].set(ids_tx, mode="drop")


def record_routes(carry: Any, ids_tk: jax.Array, group: int, layer: jax.Array) -> Any:
    """Return the carry with the experts of a layer's rows, and with the rows in the load of the physical experts.

    For the load, each device counts the rows that it routed, so devices exchange nothing.

    Args:
        carry: of the layers: a `StatefulPool`, or anything else for a pass that records nothing.
        ids_tk: physical experts of each row; P and more are none.
        group: the layer's KV group.
        layer: int32 scalar: the layer's index in that group.
    """
    if not isinstance(carry, StatefulPool):
        return carry
    if carry.routes is not None:
        carry = dataclasses.replace(carry, routes=carry.routes.add(ids_tk))
    if carry.expert_load is None:
        return carry
    load = carry.expert_load
    num_devices, num_experts = load.shape[2:]
    ids_dr = ids_tk.reshape(num_devices, -1)
    counts_dp = jnp.sum(ids_dr[..., None] == jnp.arange(num_experts), axis=1, dtype=jnp.int32)
    begins = (group, layer, 0, 0)
    old = jax.lax.dynamic_slice(load, begins, (1, 1, num_devices, num_experts))
    return dataclasses.replace(carry, expert_load=jax.lax.dynamic_update_slice(load, old + counts_dp, begins))


def read_expert_load(load: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return zeros in place of the load of experts, and the load summed over the devices, float32 `[G, L, P]`."""
    return jnp.zeros_like(load), jnp.sum(load.astype(jnp.float32), axis=2)


def read_states(
    carry: Any,
    rows: RecurrentRows,
    layer: jax.Array,
    blank: Sequence[tuple[tuple[int, ...], Any]],
    first: int = 0,
) -> list[jax.Array]:
    """Return the state of each row, `[S, ...]`: zeros for a sequence that begins, and if the carry has no states.

    Args:
        carry: of the layers: a `StatefulPool`, or anything else for a pass that keeps no state.
        layer: int32 scalar: index among the recurrent layers.
        blank: shape and type of one sequence's arrays.
        first: index of the first of these arrays in a layer.
    """
    num_rows = len(rows.slots_s)
    if not isinstance(carry, StatefulPool):
        return [jnp.zeros((num_rows, *shape), dtype) for shape, dtype in blank]
    found = [states[layer, rows.sources_s] for states in carry.states[first : first + len(blank)]]
    return [jnp.where(rows.is_first_s.reshape(-1, *[1] * (x.ndim - 1)), 0, x).astype(x.dtype) for x in found]


def write_states(carry: Any, rows: RecurrentRows, layer: jax.Array, states: Sequence[jax.Array], first: int = 0) -> Any:
    """Return the carry with the state of each row in its slot; arguments are as those of `read_states`."""
    if not isinstance(carry, StatefulPool):
        return carry
    last = first + len(states)
    written = (old.at[layer, rows.slots_s].set(new) for old, new in zip(carry.states[first:last], states, strict=True))
    return dataclasses.replace(carry, states=(*carry.states[:first], *written, *carry.states[last:]))


def short_convolution(
    u_te: jax.Array, window_sek: jax.Array, weights_ek: jax.Array, rows: RecurrentRows
) -> tuple[jax.Array, jax.Array]:
    """Return the causal depthwise convolution of each row, float32 `[T, E]`, and the windows after the step.

    Each output is the sum of K products. It depends on no other row, nor on where a prompt is cut.

    Args:
        window_sek: the K - 1 inputs before the step, oldest first, `[S, E, K - 1]`.
        weights_ek: `[E, K]`; the last one multiplies the token itself.
    """
    num_before = weights_ek.shape[1] - 1
    weights_ek = weights_ek.astype(jnp.float32)
    y_te = u_te.astype(jnp.float32) * weights_ek[:, num_before]
    for back in range(1, num_before + 1):
        earlier_te = jnp.pad(u_te, ((back, 0), (0, 0)))[: len(u_te)]
        column_t = jnp.clip(num_before - back + rows.offsets_t, 0, num_before - 1)
        kept_te = window_sek[rows.rows_t, :, column_t]
        x_te = jnp.where((rows.offsets_t >= back)[:, None], earlier_te, kept_te)
        y_te = y_te + x_te.astype(jnp.float32) * weights_ek[:, num_before - back]
    ends_s, lens_s, s = rows.starts_s1[1:], rows.lens_s, jnp.arange(len(window_sek))
    columns = []
    for column in range(num_before):
        back = num_before - column
        new_se = u_te[jnp.maximum(ends_s - back, 0)]
        old_se = window_sek[s, :, jnp.minimum(column + lens_s, num_before - 1)]
        columns.append(jnp.where((lens_s >= back)[:, None], new_se, old_se))
    return y_te, jnp.stack(columns, axis=-1).astype(window_sek.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Recurrence:
    """Inputs of a recurrence, float32.

    For each token and value head:

        S = decay * S + k u;  o = q S

    Attributes:
        q_tkd, k_tkd: queries and keys; each key head is that of H / K consecutive value heads.
        x_thv: u; for the gated delta rule the value, of which u is made.
        log_decays: logarithms of the decays, at most 0: `[T, H]`, or `[T, H, D]` if each row of S has its own.
        strengths_th: of the gated delta rule, whose u is strength * (x - k (decay * S)). None for Mamba-2.
    """

    q_tkd: jax.Array
    k_tkd: jax.Array
    x_thv: jax.Array
    log_decays: jax.Array
    strengths_th: jax.Array | None = None

    def map(self, function: Callable[[jax.Array], jax.Array]) -> Recurrence:
        """Return this with a function applied to each array."""
        mapped: Recurrence = jax.tree.map(function, self)
        return mapped


def gated_delta_rule(
    q_tkd: jax.Array, k_tkd: jax.Array, v_thv: jax.Array, log_decays: jax.Array, strengths_th: jax.Array
) -> Recurrence:
    """Return the gated delta rule (Yang et al. 2024, arXiv 2412.06464) of some tokens.

    Args:
        log_decays: `[T, H]`, or `[T, H, D]` for Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692).
    """
    return Recurrence(q_tkd, k_tkd, v_thv, log_decays, strengths_th)


def selective_scan(
    x_thp: jax.Array, b_tgn: jax.Array, c_tgn: jax.Array, steps_th: jax.Array, log_decays_th: jax.Array
) -> Recurrence:
    """Return the recurrence of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) of some tokens.

    Args:
        b_tgn, c_tgn: each group is that of H / G consecutive heads.
    """
    return Recurrence(c_tgn, b_tgn, x_thp * steps_th[:, :, None], log_decays_th)


def recur(
    one: Recurrence,
    carry: Any,
    rows: RecurrentRows,
    layer: jax.Array,
    blank: tuple[tuple[int, ...], Any],
    index: int,
) -> tuple[jax.Array, Any]:
    """Return the outputs of each row, float32 `[T, H, V]`, undefined for padding, and the carry with new states.

    Args:
        carry, layer, blank: as those of `read_states`.
        index: of the matrices, `[L, N, H, D, V]`, among the arrays of a layer.
    """
    kernel = rows.kernel
    if one.q_tkd.shape[1] % kernel.num_parts:
        group = one.x_thv.shape[1] // one.q_tkd.shape[1]
        q_thd, k_thd = (jnp.repeat(x, group, axis=1) for x in (one.q_tkd, one.k_tkd))
        one = dataclasses.replace(one, q_tkd=q_thd, k_tkd=k_thd)
    if kernel.backend == "cpu" and isinstance(carry, StatefulPool):
        old = carry.states[index]
        o_thv, states = kernel.split(_recur_in_place, (1, None, None, 2), (1, 2))(one, rows, layer, old)
        return o_thv, dataclasses.replace(carry, states=(*carry.states[:index], states, *carry.states[index + 1 :]))
    (state_shdv,) = read_states(carry, rows, layer, [blank], index)
    o_thv, state_shdv = kernel.split(update_rows, (1, 1, None), (1, 1))(one, state_shdv, rows)
    return o_thv, write_states(carry, rows, layer, [state_shdv], index)


def update_rows(one: Recurrence, state_shdv: jax.Array, rows: RecurrentRows) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of each row, float32 `[T, H, V]`, and the states after the step; in XLA."""
    return (_recur_by_blocks if rows.kernel.backend == "blocks" else _recur_by_tokens)(one, state_shdv, rows)


def _recur_by_tokens(one: Recurrence, states: jax.Array, rows: RecurrentRows) -> tuple[jax.Array, jax.Array]:
    """Run all tokens in a loop, in packed order.

    Each has the same operations on arrays of the same shapes, so that bits do not depend on other rows, nor on where a
    prompt is cut. XLA sums in another order for several rows at once.
    """
    group = one.x_thv.shape[1] // one.q_tkd.shape[1]
    q_thd, k_thd = (jnp.repeat(x, group, axis=1) for x in (one.q_tkd, one.k_tkd))
    decays_thd = jnp.exp(one.log_decays).reshape(*one.x_thv.shape[:2], -1)

    def run(token: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs, states = carry
        row = rows.rows_t[token]
        q, k, u = q_thd[token], k_thd[token], one.x_thv[token]
        source = jnp.where(rows.is_draft_s[row] & (token == rows.starts_s1[row]), row - 1, row)
        state = states[source] * decays_thd[token][:, :, None]
        if one.strengths_th is not None:
            u = (u - jnp.sum(state * k[:, :, None], axis=1)) * one.strengths_th[token, :, None]
        state = state + k[:, :, None] * u[:, None, :]
        return outputs.at[token].set(jnp.sum(state * q[:, :, None], axis=1)), states.at[row].set(state)

    return jax.lax.fori_loop(0, rows.starts_s1[-1], run, (jnp.zeros(one.x_thv.shape, jnp.float32), states))


def _recur_by_blocks(one: Recurrence, states: jax.Array, rows: RecurrentRows) -> tuple[jax.Array, jax.Array]:
    """Run short rows all at once, and the blocks of long rows one after another.

    Shapes of a block do not depend on the step, and unused places of a block are zeros. So the bits of a row do not
    depend on other rows. A row with a draft token runs all tokens of the sequence in the step, which are few.
    """
    num_tokens, num_rows, lens_s, starts_s = len(one.x_thv), len(states), rows.lens_s, rows.firsts_s
    short_len = rows.kernel.short_len
    is_short_s = (lens_s > 0) & (lens_s <= short_len)
    places_sc = starts_s[:, None] + jnp.arange(short_len)
    used_sc = (jnp.arange(short_len) < lens_s[:, None]) & is_short_s[:, None]
    short = one.map(lambda x: _masked(x[jnp.minimum(places_sc, num_tokens - 1)], used_sc))
    run_block = _run_block if one.log_decays.ndim == 2 else _run_channels
    o_schv, after = jax.vmap(run_block)(short, states)
    states = jnp.where(is_short_s[:, None, None, None], after, states)
    o_thv = _masked(o_schv[rows.rows_t, jnp.minimum(rows.offsets_t, short_len - 1)], is_short_s[rows.rows_t])
    # Long rows of n tokens have ceil(n / 64) blocks, which is at most n / (short_len + 1), and n / 64 + 1.
    most = min(num_tokens // (short_len + 1), num_tokens // BLOCK_LEN + num_rows)
    if not most:
        return o_thv, states
    num_blocks_s = jnp.where(lens_s > short_len, -(-lens_s // BLOCK_LEN), 0)
    ends_s = jnp.cumsum(num_blocks_s)
    padded = one.map(_pad_block)

    def run(block: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs, states = carry
        row = jnp.minimum(jnp.sum(block >= ends_s), num_rows - 1)
        before = (block - (ends_s[row] - num_blocks_s[row])) * BLOCK_LEN
        num_used = jnp.where(block < ends_s[-1], lens_s[row] - before, 0)
        begin = jnp.minimum(starts_s[row] + before, num_tokens)
        is_used_c = jnp.arange(BLOCK_LEN) < num_used
        tokens = padded.map(lambda x: _masked(jax.lax.dynamic_slice_in_dim(x, begin, BLOCK_LEN), is_used_c))
        o_chv, state = run_block(tokens, states[row])
        old_chv = jax.lax.dynamic_slice_in_dim(outputs, begin, BLOCK_LEN)
        o_chv = jnp.where(is_used_c[:, None, None], o_chv, old_chv)
        states = states.at[row].set(jnp.where(num_used > 0, state, states[row]))
        return jax.lax.dynamic_update_slice_in_dim(outputs, o_chv, begin, 0), states

    num_turns = most if rows.kernel.has_static_loops else ends_s[-1]
    o_thv, states = jax.lax.fori_loop(0, num_turns, run, (_pad_block(o_thv), states))
    return o_thv[:num_tokens], states


def _run_block(one: Recurrence, state_hdv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the outputs `[C, H, V]` of C tokens of a row, and the state after them.

    With the state S before the block and the decays d(t, j) of tokens j + 1 to t, u of a token depends on those before:

        u(t) = strength(t) * (x(t) - d(t) * k(t) S - sum over j < t of d(t, j) * (k(t) k(j)) u(j))

    These equations are a triangular matrix, whose inverse does not depend on S.
    """
    (num_tokens, num_keys, _), (_, num_heads, _) = one.q_tkd.shape, one.x_thv.shape
    grouped = num_keys, num_heads // num_keys
    x_kgcv = jnp.moveaxis(one.x_thv.reshape(num_tokens, *grouped, -1), 0, 2)
    logs_kgc = jnp.moveaxis(one.log_decays.reshape(num_tokens, *grouped), 0, 2)
    state_kgdv = state_hdv.reshape(*grouped, *state_hdv.shape[1:])
    is_later, is_seen = (jnp.tril(jnp.ones((num_tokens, num_tokens), bool), last) for last in (-1, 0))
    # One sum for each pair: differences of sums from the beginning would lose digits of small decays after large ones.
    sums_kgcj = jnp.cumsum(jnp.where(is_later, logs_kgc[..., :, None], 0), axis=-2)
    decays_kgcj = jnp.where(is_seen, jnp.exp(sums_kgcj), 0)
    since_kgc1 = jnp.exp(jnp.cumsum(logs_kgc, axis=-1))[..., None]
    if one.strengths_th is None:
        u_kgcv = x_kgcv
    else:
        strengths_kgc1 = jnp.moveaxis(one.strengths_th.reshape(num_tokens, *grouped), 0, 2)[..., None]
        keys_kcj = _product("ckd,jkd->kcj", one.k_tkd, one.k_tkd)
        known_kgcv = since_kgc1 * _product("ckd,kgdv->kgcv", one.k_tkd, state_kgdv)
        matrix_kgcj = jnp.where(is_later, strengths_kgc1 * decays_kgcj * keys_kcj[:, None], 0)
        u_kgcv = _product("kgcj,kgjv->kgcv", _inverse(matrix_kgcj), strengths_kgc1 * (x_kgcv - known_kgcv))
    scores_kgcj = decays_kgcj * _product("ckd,jkd->kcj", one.q_tkd, one.k_tkd)[:, None]
    o_kgcv = since_kgc1 * _product("ckd,kgdv->kgcv", one.q_tkd, state_kgdv)
    o_kgcv = o_kgcv + _product("kgcj,kgjv->kgcv", scores_kgcj, u_kgcv)
    written_kgdv = _product("ckd,kgcv->kgdv", one.k_tkd, decays_kgcj[..., -1, :, None] * u_kgcv)
    state_kgdv = since_kgc1[..., -1:, :] * state_kgdv + written_kgdv
    return jnp.moveaxis(o_kgcv, 2, 0).reshape(one.x_thv.shape), state_kgdv.reshape(state_hdv.shape)


def _run_channels(one: Recurrence, state_hdv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the same as `_run_block` if each channel of a key has a decay, which is part of the products."""
    num_tokens, num_heads, _ = one.x_thv.shape
    group = num_heads // one.q_tkd.shape[1]
    q_hcd, k_hcd = (jnp.repeat(x, group, axis=1).swapaxes(0, 1) for x in (one.q_tkd, one.k_tkd))
    u_hcv, logs_hcd = one.x_thv.swapaxes(0, 1), one.log_decays.swapaxes(0, 1)
    since_hcd = jnp.exp(jnp.cumsum(logs_hcd, axis=1))
    scores_hcj, keys_hcj = _multiply_decayed((q_hcd, k_hcd), k_hcd, logs_hcd)
    if one.strengths_th is not None:
        strengths_hc1 = one.strengths_th.T[..., None]
        known_hcv = _product("hcd,hdv->hcv", since_hcd * k_hcd, state_hdv)
        is_later = jnp.tril(jnp.ones((num_tokens, num_tokens), bool), -1)
        inverse_hcj = _inverse(jnp.where(is_later, strengths_hc1 * keys_hcj, 0))
        u_hcv = _product("hcj,hjv->hcv", inverse_hcj, strengths_hc1 * (u_hcv - known_hcv))
    o_hcv = _product("hcd,hdv->hcv", since_hcd * q_hcd, state_hdv) + _product("hcj,hjv->hcv", scores_hcj, u_hcv)
    written_hdv = _product("hcd,hcv->hdv", jnp.exp(_sum_later(logs_hcd)) * k_hcd, u_hcv)
    return o_hcv.swapaxes(0, 1), since_hcd[:, -1, :, None] * state_hdv + written_hdv


def _multiply_decayed(vectors: Sequence[jax.Array], k_hcd: jax.Array, logs_hcd: jax.Array) -> list[jax.Array]:
    """Return x(t) (d(t, j) * k(j)) for each of some vectors x and j <= t, and zeros for other pairs, `[H, C, C]`.

    Between parts of `SHORT_LEN` tokens, the decay d(t, j) is two factors, before and from the first token of t's part:

        . . j . | . . . . | . . t .
              └────────┘    └─┘

    Neither is above 1, so nothing overflows, and a product is zero only if it is too small for float32. Within a part,
    pairs at each distance are multiplied one by one. Logarithms are only added: see `_run_block`.
    """
    num_tokens, places = k_hcd.shape[1], np.arange(k_hcd.shape[1])
    starts_p, apart = places[::SHORT_LEN], places[:, None] - places
    parts = len(starts_p), min(SHORT_LEN, num_tokens)
    is_before_pc1 = (places < starts_p[:, None])[..., None]
    before_hpcd = jnp.exp(_sum_later(jnp.where(is_before_pc1, logs_hcd[:, None], 0)))
    k_hpcd = jnp.where(is_before_pc1, before_hpcd * k_hcd[:, None], 0)
    inside_hpcd = jnp.exp(jnp.cumsum(logs_hcd.reshape(len(logs_hcd), *parts, -1), axis=2))
    found = [
        _product("hpcd,hpjd->hpcj", x.reshape(inside_hpcd.shape) * inside_hpcd, k_hpcd).reshape(-1, *apart.shape)
        for x in vectors
    ]
    sums_hcd, earlier_hcd = jnp.zeros_like(logs_hcd), logs_hcd
    for distance in range(parts[1]):
        is_pair = (apart == distance) & (places[:, None] % SHORT_LEN >= distance)
        decayed_hcd = jnp.exp(sums_hcd) * k_hcd
        for index, x in enumerate(vectors):
            found[index] = jnp.where(is_pair, jnp.sum(x * decayed_hcd, axis=-1, keepdims=True), found[index])
        sums_hcd = sums_hcd + earlier_hcd
        earlier_hcd, k_hcd = (jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :num_tokens] for x in (earlier_hcd, k_hcd))
    return found


def _sum_later(logs: jax.Array) -> jax.Array:
    """Return the sum over all later tokens for each token, `[..., C, D]`."""
    later = jnp.concatenate((logs[..., 1:, :], jnp.zeros_like(logs[..., :1, :])), axis=-2)
    return jnp.flip(jnp.cumsum(jnp.flip(later, axis=-2), axis=-2), axis=-2)


def _inverse(matrix: jax.Array) -> jax.Array:
    """Return the inverse of I + A for strictly lower triangular A, `[..., C, C]`.

    Blocks on the diagonal are inverted, then pairs of them are joined: each of 1 token, 2, 4, ... This sums as few
    large numbers as substitution does. Powers of A would lose all digits if tokens repeat.
    """
    length = matrix.shape[-1]
    inverse, size = jnp.broadcast_to(jnp.eye(length), matrix.shape), 1
    while size < length:
        block = np.arange(length) // size
        joins = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        below = jnp.where(joins, matrix, 0)
        if size > 1:
            below = _product("...ij,...jk->...ik", inverse, _product("...ij,...jk->...ik", below, inverse))
        inverse, size = inverse - below, 2 * size
    return inverse


_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _masked(x: jax.Array, is_used: jax.Array) -> jax.Array:
    """Return zeros in place of unused entries of the first axes."""
    return jnp.where(is_used.reshape(*is_used.shape, *[1] * (x.ndim - is_used.ndim)), x, 0)


def _pad_block(x: jax.Array) -> jax.Array:
    """Append a block of zeros."""
    return jnp.pad(x, ((0, BLOCK_LEN), *[(0, 0)] * (x.ndim - 1)))


def _recur_in_place(
    one: Recurrence, rows: RecurrentRows, layer: jax.Array, states: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of each row, and `states`, which are donated, after the step; by the library's kernel."""
    if (reason := unsupported_cpu_reason()) is not None:
        raise InternalError(f"no kernel can update states in place: {reason}")
    shapes = (jax.ShapeDtypeStruct(one.x_thv.shape, jnp.float32), jax.ShapeDtypeStruct(states.shape, jnp.float32))
    run = jax.ffi.ffi_call(f"{NAME}_recur", shapes, input_output_aliases={9: 1})
    strengths = jnp.zeros((0,), jnp.float32) if one.strengths_th is None else one.strengths_th
    sources_s = jnp.where(rows.is_first_s, _ZEROS, jnp.where(rows.is_draft_s, _ROW_BEFORE, rows.sources_s))
    numbers = (x.astype(jnp.int32) for x in (jnp.asarray(layer), rows.starts_s1, sources_s, rows.slots_s))
    o_thv, states = run(
        *(one.q_tkd, one.k_tkd, one.x_thv, jnp.exp(one.log_decays), strengths, *numbers, states),
        max_width=np.int64(rows.kernel.max_width),
        max_threads=np.int64(rows.kernel.max_threads),
    )
    return o_thv, states


@functools.cache
def unsupported_cpu_reason() -> str | None:
    """Return why the library's kernel cannot run, or None."""
    found = register("recur")
    return found if isinstance(found, str) else None
