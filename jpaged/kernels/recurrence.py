"""Recurrent layers over packed rows: states, short convolutions, the delta rule and Mamba-2. XLA is the reference.

A sequence has a slot in each array of states, `[L, N, ...]`, and slot 0 is for padding. A step reads the state of each
row from one slot and writes it to another. So a fork costs no copy: the first step reads the parent's slot.

    slot      0   1   2   3   4
    row 0         r                     the last holder of a slot writes it in place
    row 1             r   w             a slot that others share is read, and the result is in a new one
    row 2                     w         a sequence that begins reads nothing: its state is zero

All rows are read before the first one is written, so one row may take over the slot of another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """The rows of a step, as recurrent layers read them.

    Attributes:
        starts_s1: first packed token of each row, and the end.
        is_first_s: the row begins its sequence.
        sources_s: slot from which the state is read.
        slots_s: slot to which it is written; 0 for padding.
        rows_t: row of each token.
        offsets_t: tokens of the same row before each token.
    """

    starts_s1: jax.Array
    is_first_s: jax.Array
    sources_s: jax.Array
    slots_s: jax.Array
    rows_t: jax.Array
    offsets_t: jax.Array

    @classmethod
    def of(
        cls,
        starts_s1: jax.Array,
        is_first_s: jax.Array,
        sources_s: jax.Array,
        slots_s: jax.Array,
        num_tokens: int,
    ) -> RecurrentRows:
        """Return the rows of a step of `num_tokens` packed tokens, including padding."""
        t, last = jnp.arange(num_tokens, dtype=jnp.int32), len(starts_s1) - 2
        rows_t = jnp.minimum((t[:, None] >= starts_s1[None, 1:]).sum(axis=1, dtype=jnp.int32), last)
        return cls(starts_s1, is_first_s, sources_s, slots_s, rows_t, t - starts_s1[rows_t])

    @classmethod
    def one(cls, num_tokens: int) -> RecurrentRows:
        """Return a single row, which begins its sequence."""
        zero = jnp.zeros(1, jnp.int32)
        return cls.of(jnp.array([0, num_tokens], jnp.int32), jnp.ones(1, bool), zero, zero, num_tokens)

    @property
    def lens_s(self) -> jax.Array:
        """Tokens of each row."""
        return self.starts_s1[1:] - self.starts_s1[:-1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StatefulPool:
    """The KV pool together with the states of recurrent layers, and the load of experts.

    Attributes:
        kv: the pool.
        states: for each array of a layer, `[L, N, ...]`: all recurrent layers and slots.
        expert_load: int32 `[G, L, D, P]`: rows that each physical expert has computed, by the device that routed them;
            None if experts are not balanced. Layers have their places in the pool.
    """

    kv: Any
    states: tuple[Any, ...] = ()
    expert_load: Any = None

    def with_kv(self, kv: Any) -> StatefulPool:
        """Return the states with another pool."""
        return dataclasses.replace(self, kv=kv)


def count_expert_load(carry: Any, ids_tk: jax.Array, group: int, layer: jax.Array) -> Any:
    """Return the carry with the rows of a step added to the load of a layer's physical experts.

    Each device counts the rows that it routed, so devices exchange nothing.

    Args:
        carry: of the layers: a `StatefulPool`, or anything else for a pass that counts no load.
        ids_tk: physical experts of each row; P and more are none.
        group: the layer's KV group.
        layer: int32 scalar: the layer's index in that group.
    """
    if not isinstance(carry, StatefulPool) or carry.expert_load is None:
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
    carry: Any, rows: RecurrentRows, layer: jax.Array, blank: Sequence[tuple[tuple[int, ...], Any]]
) -> list[jax.Array]:
    """Return the state of each row, `[S, ...]`: zeros for a sequence that begins, and if the carry has no states.

    Args:
        carry: of the layers: a `StatefulPool`, or anything else for a pass that keeps no state.
        layer: int32 scalar: index among the recurrent layers.
        blank: shape and type of one sequence's arrays.
    """
    num_rows = len(rows.slots_s)
    if not isinstance(carry, StatefulPool):
        return [jnp.zeros((num_rows, *shape), dtype) for shape, dtype in blank]
    found = [states[layer, rows.sources_s] for states in carry.states]
    return [jnp.where(rows.is_first_s.reshape(-1, *[1] * (x.ndim - 1)), 0, x).astype(x.dtype) for x in found]


def write_states(carry: Any, rows: RecurrentRows, layer: jax.Array, states: Sequence[jax.Array]) -> Any:
    """Return the carry with the state of each row in its slot."""
    if not isinstance(carry, StatefulPool):
        return carry
    written = (old.at[layer, rows.slots_s].set(new) for old, new in zip(carry.states, states, strict=True))
    return dataclasses.replace(carry, states=tuple(written))


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


def gated_delta_rule(
    q_tkd: jax.Array,
    k_tkd: jax.Array,
    v_thv: jax.Array,
    decays_th: jax.Array,
    strengths_th: jax.Array,
    state_shdv: jax.Array,
    rows: RecurrentRows,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of each row, float32 `[T, H, V]`, and the states after the step.

    For each token and value head (Yang et al. 2024, arXiv 2412.06464):

        S = decay * S;  S = S + strength * k (v - k S);  o = q S

    Tokens are computed in a loop, in packed order. Each has the same operations on arrays of the same shapes, so that
    bits do not depend on other rows, nor on where a prompt is cut. XLA sums in another order for several rows at once.

    Args:
        q_tkd, k_tkd: float32 `[T, K, D]`; each key head is that of H / K consecutive value heads.
        state_shdv: float32 `[S, H, D, V]`.
    """
    group = v_thv.shape[1] // q_tkd.shape[1]
    q_thd, k_thd = (jnp.repeat(x, group, axis=1) for x in (q_tkd, k_tkd))
    return _scan_rows(_delta_step, (q_thd, k_thd, v_thv, decays_th, strengths_th), v_thv.shape, state_shdv, rows)


def selective_scan(
    x_thp: jax.Array,
    b_tgn: jax.Array,
    c_tgn: jax.Array,
    steps_th: jax.Array,
    decays_th: jax.Array,
    state_shnp: jax.Array,
    rows: RecurrentRows,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of Mamba-2 for each row, float32 `[T, H, P]`, and the states after the step.

    For each token and head (Dao and Gu 2024, arXiv 2405.21060):

        S = decay * S + b (step * x);  y = c S

    Bits depend on nothing that those of `gated_delta_rule` do not depend on.

    Args:
        b_tgn, c_tgn: float32 `[T, G, N]`; each group is that of H / G consecutive heads.
        state_shnp: float32 `[S, H, N, P]`.
    """
    group = x_thp.shape[1] // b_tgn.shape[1]
    b_thn, c_thn = (jnp.repeat(x, group, axis=1) for x in (b_tgn, c_tgn))
    return _scan_rows(_ssm_step, (x_thp, b_thn, c_thn, steps_th, decays_th), x_thp.shape, state_shnp, rows)


def _scan_rows(
    step: Callable[..., tuple[jax.Array, jax.Array]],
    inputs: tuple[jax.Array, ...],
    shape: tuple[int, ...],
    states: jax.Array,
    rows: RecurrentRows,
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of a shape, and the states after all tokens; see `gated_delta_rule`.

    Args:
        step: maps (state, *inputs) of a token to (outputs, state).
    """

    def run(token: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs, states = carry
        row = rows.rows_t[token]
        output, state = step(states[row], *(x[token] for x in inputs))
        return outputs.at[token].set(output), states.at[row].set(state)

    return jax.lax.fori_loop(0, rows.starts_s1[-1], run, (jnp.zeros(shape, jnp.float32), states))


def _ssm_step(
    state: jax.Array, x: jax.Array, b: jax.Array, c: jax.Array, step: jax.Array, decay: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs `[H, P]` of a token, and the state `[H, N, P]` after it."""
    state = state * decay[:, None, None] + b[:, :, None] * (x * step[:, None])[:, None, :]
    return jnp.sum(state * c[:, :, None], axis=1), state


def _delta_step(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, strength: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs `[H, V]` of a token, and the state `[H, D, V]` after it."""
    state = state * decay[:, None, None]
    known = jnp.sum(state * k[:, :, None], axis=1)
    state = state + k[:, :, None] * ((v - known) * strength[:, None])[:, None, :]
    return jnp.sum(state * q[:, :, None], axis=1), state
