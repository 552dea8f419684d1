"""The recurrent layers of decoders: LFM2's convolution, the gated delta rule, Kimi Delta Attention, and Mamba-2.

A recurrent layer replaces attention: it reads the state of each row from its slot, and writes it back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.recurrence import (
    RecurrentRows,
    gated_delta_rule,
    read_states,
    recur,
    selective_scan,
    short_convolution,
    write_states,
)
from jpaged.models.decoder.config import DecoderConfig, DeltaShape
from jpaged.models.decoder.modules import Attention, AttentionModule, DecoderLayer, Shared
from jpaged.models.layers import Attend, Linear, Module, Norm, Param, RandomKeys, RMSNorm, normal
from jpaged.models.stack import LayerPlace


class GatedConvolution(Module):
    """A short convolution between two gates (LFM2): out(c * conv(b * x)), with b, c and x from one projection."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        width = config.hidden_size
        self.project = Linear(width, (3, width), False, dtype, rngs)
        self.taps = Param(normal(rngs.next_key(), (width, config.conv_len), dtype))
        self.out = Linear(width, (width,), False, dtype, rngs)

    def attend(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """See `AttentionModule`; the state is the window of b * x, `[E * (K - 1)]`."""
        rows, taps_ek = shared.recurrent, self.taps[...]
        assert rows is not None
        projected = self.project(x_te, shared.rows, norm=norm)
        b_te, c_te, x_te = (projected[:, part] for part in range(3))
        (state_sf,) = read_states(carry, rows, place.index, place.kind.blank_states(x_te.dtype))
        window_sek = state_sf.reshape(len(state_sf), len(taps_ek), -1)
        y_te, window_sek = short_convolution(b_te * x_te, window_sek, taps_ek, rows)
        carry = write_states(carry, rows, place.index, [window_sek.reshape(state_sf.shape)])
        return c_te * y_te.astype(x_te.dtype), carry


class ConvolutionLayer(DecoderLayer):
    """A layer with attention or a gated convolution (LFM2)."""

    @staticmethod
    def make_recurrent(config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> AttentionModule:
        """See `DecoderLayer`."""
        return GatedConvolution(config, dtype, rngs)


class GatedAttention(Attention):
    """Attention multiplied by the sigmoid of another projection of the same states (Qwen3-Next)."""

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        super().__init__(config, dtype, rngs)
        self.gate = Linear(config.hidden_size, (config.num_heads * config.head_dim,), False, dtype, rngs)

    def attend(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """See `AttentionModule`."""
        gate = self.gate(x_te, shared.rows, norm=norm)
        o, carry = super().attend(x_te, norm, shared, attend, carry, place)
        return _times(o, jax.nn.sigmoid(gate.astype(jnp.float32))), carry


class GatedDeltaNet(Module):
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464), after a short convolution.

    Columns of the projections, and so channels of the convolution, are grouped by key head, so that devices split them
    by heads. A key head has several value heads.

        project   [E, Kh * (2 * Dk + 2 * r * Dv)]     queries, keys, values and gates of each key head
        control   [E, Kh * 2 * r]                     write strengths and decays of the value heads
    """

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        delta, width = config.delta, config.hidden_size
        assert delta is not None
        self.delta = delta
        self.project = Linear(
            width, (delta.num_key_heads * (delta.num_channels + delta.value_width),), False, dtype, rngs
        )
        self.control = Linear(width, (2 * delta.num_value_heads,), False, dtype, rngs)
        num_channels = delta.num_key_heads * delta.num_channels
        self.taps = Param(normal(rngs.next_key(), (num_channels, config.conv_len), dtype))
        self.log_rate = Param(jnp.zeros((delta.num_value_heads,), jnp.float32))
        self.step_bias = Param(jnp.ones((delta.num_value_heads,), jnp.float32))
        self.norm = RMSNorm(delta.value_dim, config.norm_eps, dtype)
        self.out = Linear(delta.num_value_heads * delta.value_dim, (width,), False, dtype, rngs)

    def attend(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """See `AttentionModule`; the state is the convolution's window, and a matrix for each value head."""
        rows, delta, dtype = shared.recurrent, self.delta, x_te.dtype
        assert rows is not None
        num_tokens, group = len(x_te), delta.num_value_heads // delta.num_key_heads
        projected = self.project(x_te, shared.rows, norm=norm).reshape(num_tokens, delta.num_key_heads, -1)
        mixed, gates = projected[..., : delta.num_channels], projected[..., delta.num_channels :]
        control = self.control(x_te, shared.rows, norm=norm).astype(jnp.float32)
        strengths, rates = jnp.split(control.reshape(num_tokens, delta.num_key_heads, 2 * group), 2, axis=-1)
        (q, k, v), carry = _convolve_heads(mixed, self.taps[...], delta, rows, carry, place)
        step_th = jax.nn.softplus(rates.reshape(num_tokens, -1) + self.step_bias[...])
        log_decays_th = -jnp.exp(self.log_rate[...]) * step_th
        rule = gated_delta_rule(q, k, v, log_decays_th, jax.nn.sigmoid(strengths.reshape(num_tokens, -1)))
        o_thv, carry = recur(rule, carry, rows, place.index, place.kind.blank_states(dtype)[1], 1)
        o_thv = self.norm(o_thv.astype(dtype))
        gates = gates.reshape(o_thv.shape).astype(jnp.float32)
        return _times(o_thv, jax.nn.silu(gates)).reshape(num_tokens, -1), carry


def _convolve_heads(
    mixed_tkc: jax.Array, taps_ck: jax.Array, delta: DeltaShape, rows: RecurrentRows, carry: Any, place: LayerPlace
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Any]:
    """Return queries, keys and values of the delta rule, float32 `[T, heads, dim]`, and the carry with new windows.

    Args:
        mixed_tkc: projections of each key head: its query, its key and its values.
    """
    dtype, num_tokens = mixed_tkc.dtype, len(mixed_tkc)
    (window_sf,) = read_states(carry, rows, place.index, place.kind.blank_states(dtype)[:1])
    window_sck = window_sf.reshape(len(window_sf), len(taps_ck), -1)
    y_tc, window_sck = short_convolution(mixed_tkc.reshape(num_tokens, -1), window_sck, taps_ck, rows)
    carry = write_states(carry, rows, place.index, [window_sck.reshape(window_sf.shape)])
    y_tc = jax.nn.silu(y_tc.astype(dtype).astype(jnp.float32)).astype(dtype)
    heads = y_tc.astype(jnp.float32).reshape(num_tokens, delta.num_key_heads, -1)
    q, k, v = jnp.split(heads, (delta.key_dim, 2 * delta.key_dim), axis=-1)
    v = v.reshape(num_tokens, delta.num_value_heads, delta.value_dim)
    return (_unit(q) * delta.key_dim**-0.5, _unit(k), v), carry


class ChannelDelta(Module):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692): the delta rule with a decay of each channel of a key.

    Decays and the gates of outputs are products of two matrices, whose inner width R is that of a head.

        project   [E, H * 3 * D]     queries, keys and values of each head
        control   [E, H]             write strengths
        down      [E, 2, R]          into decays and gates
        decay     [R, H * D]
        gate      [R, H * D]
    """

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        delta, width = config.delta, config.hidden_size
        assert delta is not None
        self.delta = delta
        num_heads, rank = delta.num_key_heads, delta.key_dim
        outputs, num_channels = num_heads * rank, num_heads * delta.num_channels
        self.project = Linear(width, (num_channels,), False, dtype, rngs)
        self.control = Linear(width, (num_heads,), False, dtype, rngs)
        self.down = Linear(width, (2, rank), False, dtype, rngs)
        self.decay = Linear(rank, (outputs,), False, dtype, rngs)
        self.gate = Linear(rank, (outputs,), False, dtype, rngs)
        self.taps = Param(normal(rngs.next_key(), (num_channels, config.conv_len), dtype))
        self.log_rate = Param(jnp.zeros((num_heads,), jnp.float32))
        self.step_bias = Param(jnp.ones((outputs,), jnp.float32))
        self.norm = RMSNorm(delta.value_dim, config.norm_eps, dtype)
        self.out = Linear(outputs, (width,), False, dtype, rngs)

    def attend(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """See `AttentionModule`; the state is the convolution's window, and a matrix for each head."""
        rows, delta, dtype, num_tokens = shared.recurrent, self.delta, x_te.dtype, len(x_te)
        assert rows is not None
        mixed = self.project(x_te, shared.rows, norm=norm).reshape(num_tokens, delta.num_key_heads, -1)
        strengths_th = jax.nn.sigmoid(self.control(x_te, shared.rows, norm=norm).astype(jnp.float32))
        down_t2r = self.down(x_te, shared.rows, norm=norm)
        rates, gates = self.decay(down_t2r[:, 0], shared.rows), self.gate(down_t2r[:, 1], shared.rows)
        (q_thd, k_thd, v_thv), carry = _convolve_heads(mixed, self.taps[...], delta, rows, carry, place)
        steps_thd = jax.nn.softplus(rates.astype(jnp.float32) + self.step_bias[...]).reshape(q_thd.shape)
        log_decays_thd = -jnp.exp(self.log_rate[...])[:, None] * steps_thd
        rule = gated_delta_rule(q_thd, k_thd, v_thv, log_decays_thd, strengths_th)
        o_thv, carry = recur(rule, carry, rows, place.index, place.kind.blank_states(dtype)[1], 1)
        gates_thv = jax.nn.sigmoid(gates.astype(jnp.float32).reshape(o_thv.shape))
        return _times(self.norm(o_thv.astype(dtype)), gates_thv).reshape(num_tokens, -1), carry


class DeltaLayer(DecoderLayer):
    """A layer with gated attention or the gated delta rule (Qwen3-Next)."""

    @staticmethod
    def make_attention(config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> AttentionModule:
        """See `DecoderLayer`."""
        return GatedAttention(config, dtype, rngs)

    @staticmethod
    def make_recurrent(config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> AttentionModule:
        """See `DecoderLayer`."""
        return GatedDeltaNet(config, dtype, rngs)


class ActivatedConvolution(Module):
    """The short convolution of some channels of Mamba-2, with a bias and silu."""

    def __init__(self, width: int, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        assert config.mamba is not None
        self.taps = Param(normal(rngs.next_key(), (width, config.conv_len), dtype))
        self.bias = Param(jnp.zeros((width,), dtype)) if config.mamba.has_bias else None

    def __call__(self, u_tc: jax.Array, window_sf: jax.Array, rows: RecurrentRows) -> tuple[jax.Array, jax.Array]:
        """Map `[T, C]` to float32 `[T, C]`, and the windows `[S, C * (K - 1)]` to those after the step."""
        taps_ck, dtype = self.taps[...], u_tc.dtype
        y_tc, window_sck = short_convolution(u_tc, window_sf.reshape(len(window_sf), len(taps_ck), -1), taps_ck, rows)
        if self.bias is not None:
            y_tc = y_tc + self.bias[...].astype(jnp.float32)
        y_tc = jax.nn.silu(y_tc.astype(dtype).astype(jnp.float32)).astype(dtype)
        return y_tc.astype(jnp.float32), window_sck.reshape(window_sf.shape)


class Mamba2(Module):
    """A selective state space (Dao and Gu 2024, arXiv 2405.21060), after a short convolution.

    Devices split heads. All of them have the groups, which are few, and the step sizes.

        project   [E, 2, H * P]           gates, and channels of the heads
        control   [E, 2 * G * N + H]      the groups' vectors b and c, and step sizes of the heads
    """

    def __init__(self, config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> None:
        mamba, width = config.mamba, config.hidden_size
        assert mamba is not None
        self.mamba, self.eps = mamba, config.norm_eps
        self.project = Linear(width, (2, mamba.width), False, dtype, rngs)
        self.control = Linear(width, (mamba.group_width + mamba.num_heads,), False, dtype, rngs)
        self.channels = ActivatedConvolution(mamba.width, config, dtype, rngs)
        self.groups = ActivatedConvolution(mamba.group_width, config, dtype, rngs)
        self.log_rate = Param(jnp.zeros((mamba.num_heads,), jnp.float32))
        self.step_bias = Param(jnp.ones((mamba.num_heads,), jnp.float32))
        self.skip = Param(jnp.ones((mamba.num_heads,), jnp.float32))
        self.scale = Param(jnp.ones((mamba.width,), dtype))
        self.out = Linear(mamba.width, (width,), False, dtype, rngs)

    def attend(
        self, x_te: jax.Array, norm: Norm | None, shared: Shared, attend: Attend, carry: Any, place: LayerPlace
    ) -> tuple[jax.Array, Any]:
        """See `AttentionModule`; the state is two windows of the convolution, and a matrix for each head."""
        rows, mamba, dtype, num_tokens = shared.recurrent, self.mamba, x_te.dtype, len(x_te)
        assert rows is not None
        projected = self.project(x_te, shared.rows, norm=norm)
        control = self.control(x_te, shared.rows, norm=norm)
        *of_windows, of_matrices = place.kind.blank_states(dtype)
        channels_sf, groups_sf = read_states(carry, rows, place.index, of_windows)
        x_tc, channels_sf = self.channels(projected[:, 1], channels_sf, rows)
        b_c_tc, groups_sf = self.groups(control[:, : mamba.group_width], groups_sf, rows)
        carry = write_states(carry, rows, place.index, [channels_sf, groups_sf])
        b_tgn, c_tgn = jnp.moveaxis(b_c_tc.reshape(num_tokens, 2, mamba.num_groups, mamba.state_dim), 1, 0)
        steps_th = jax.nn.softplus(control[:, mamba.group_width :].astype(jnp.float32) + self.step_bias[...])
        x_thp = x_tc.reshape(num_tokens, mamba.num_heads, mamba.head_dim)
        scan = selective_scan(x_thp, b_tgn, c_tgn, steps_th, -jnp.exp(self.log_rate[...]) * steps_th)
        y_thp, carry = recur(scan, carry, rows, place.index, of_matrices, 2)
        y_tc = (y_thp + self.skip[...][:, None] * x_thp).astype(dtype).reshape(num_tokens, -1)
        return self._gated_norm(y_tc, projected[:, 0]), carry

    def _gated_norm(self, y_tc: jax.Array, gates_tc: jax.Array) -> jax.Array:
        """Return the outputs times their gates, divided by the root mean square of each group."""
        gated_tc = y_tc.astype(jnp.float32) * jax.nn.silu(gates_tc.astype(jnp.float32))
        grouped_tgc = gated_tc.reshape(len(y_tc), self.mamba.num_groups, -1)
        means_tg1 = jnp.mean(jnp.square(grouped_tgc), axis=-1, keepdims=True)
        normed_tc = (grouped_tgc * jax.lax.rsqrt(means_tg1 + self.eps)).reshape(y_tc.shape)
        return normed_tc.astype(y_tc.dtype) * self.scale[...]


class MambaLayer(DecoderLayer):
    """A layer with attention or Mamba-2."""

    @staticmethod
    def make_recurrent(config: DecoderConfig, dtype: np.dtype, rngs: RandomKeys) -> AttentionModule:
        """See `DecoderLayer`."""
        return Mamba2(config, dtype, rngs)


def _unit(x: jax.Array) -> jax.Array:
    """Divide each head by its length."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _times(x: jax.Array, factor: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
