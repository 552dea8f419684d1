"""Rotary position embedding: inverse frequencies on the host, cosines and sines of positions on the device.

The frequencies follow transformers' `modeling_rope_utils` in float32, operation by operation: at position 100 000 one
unit in the last place of a frequency turns a head by 0.006 rad.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return radians per position of each pair of dimensions, float32 `[D/2]`; 0 for pairs that are not rotated.

    For `dynamic` and `longrope` they are those of short sequences.
    """
    rotated = _rotated(rope, rope.num_rotated(head_dim))
    return np.pad(rotated, (0, head_dim // 2 - len(rotated)))


def _rotated(rope: RopeConfig, num_dims: int) -> np.ndarray:
    frequencies = np.float32(1) / _wavelengths(rope.theta, num_dims)
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, num_dims)
    if rope.kind == "longrope":
        return _longrope(rope, num_dims, rope.short_factor)
    if rope.kind == "proportional":
        is_rotated = np.arange(len(frequencies)) < int(rope.fraction * num_dims // 2)
        return np.where(is_rotated, frequencies / np.float32(rope.factor), np.float32(0))
    return frequencies


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor of cos and sin; its square scales attention logits (YaRN, section 3.4; LongRoPE)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        length = math.log(rope.original_max_position_embeddings)
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / length)
    if rope.kind != "yarn":
        return 1.0
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def cos_sin(
    rope: RopeConfig,
    head_dim: int,
    positions_t: jax.Array,
    rope_lens_t: jax.Array,
    axes_3t: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of every token's angles.

    Args:
        head_dim: D.
        positions_t: position of each token in its sequence, int32 `[T]`.
        rope_lens_t: length that each token's base is computed for, int32 `[T]`; read by `dynamic` and `longrope`. It is
            max(position + 1, prompt length), so the keys of a prompt do not depend on its chunks, and equal those of
            transformers' generate. In a model that recomputes all keys beyond a length (`DecoderConfig.outgrows_keys`),
            it is at least that length, plus one from there on.

        axes_3t: positions of the sections of frequencies, int32 `[3, T]`; None if all are the token's.

    Returns:
        cos and sin, float32 `[T, D/2]`; pairs that are not rotated have 1 and 0.
    """
    positions_td = positions_t[:, None]
    if axes_3t is not None and rope.sections:
        positions_td = axes_3t[_axes(rope)].T
    angles_td = positions_td.astype(jnp.float32) * _get_frequencies(rope, head_dim, rope_lens_t)
    if rope.kind == "dynamic":
        angles_td = angles_td * _dynamic_stretch(rope, head_dim, rope_lens_t)
    is_rotated_d = np.arange(head_dim // 2) < rope.num_rotated(head_dim) // 2
    scale_d = np.where(is_rotated_d, np.float32(attention_factor(rope)), np.float32(1))
    return jnp.cos(angles_td) * scale_d, jnp.sin(angles_td) * scale_d


def _axes(rope: RopeConfig) -> np.ndarray:
    """Return the axis by whose position each pair rotates: 0 of time, 1 of rows, 2 of columns."""
    if not rope.has_turns:
        return np.repeat(np.arange(3), rope.sections)
    pairs = np.arange(sum(rope.sections))
    turns = pairs % 3
    return np.where(pairs < 3 * np.array(rope.sections)[turns], turns, 0)


def _get_frequencies(rope: RopeConfig, head_dim: int, rope_lens_t: jax.Array) -> jax.Array:
    short_d = inverse_frequencies(rope, head_dim)
    if rope.kind != "longrope":
        return jnp.asarray(short_d)
    rotated = _longrope(rope, rope.num_rotated(head_dim), rope.long_factor)
    long_d = np.pad(rotated, (0, len(short_d) - len(rotated)))
    return jnp.where((rope_lens_t > rope.original_max_position_embeddings)[:, None], long_d, short_d)


def apply(x_thd: jax.Array, cos_td: jax.Array, sin_td: jax.Array) -> jax.Array:
    """Rotate dimension i against i + D/2 of every head, in float32; returns the type of the input."""
    first, second = jnp.split(x_thd.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_td[:, None, :], sin_td[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_thd.dtype)


def _wavelengths(theta: float, head_dim: int) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def _dynamic_stretch(rope: RopeConfig, head_dim: int, rope_lens_t: jax.Array) -> jax.Array:
    """Return the factor of NTK-aware scaling: the base grows by growth^(D / (D - 2)), so frequency i shrinks.

    It shrinks by growth^(-2i / (D - 2)). As a factor on the frequencies it is exactly one up to the length of
    pretraining, and needs no power of the base on the device.
    """
    num_dims, original = rope.num_rotated(head_dim), jnp.float32(rope.original_max_position_embeddings)
    lengths_t = jnp.maximum(rope_lens_t.astype(jnp.float32), original)
    growth_t = rope.factor * lengths_t / original - (rope.factor - 1)
    exponents_d = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(num_dims - 2)
    return jnp.exp(-jnp.log(growth_t)[:, None] * exponents_d)


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Stretch long wavelengths, keep short ones, and blend those between (Llama 3.1)."""
    original = rope.original_max_position_embeddings
    wavelengths = np.float32(2 * math.pi) / frequencies
    is_long = wavelengths > original / rope.low_freq_factor
    is_short = wavelengths < original / rope.high_freq_factor
    factor = np.float32(rope.factor)
    span = rope.high_freq_factor - rope.low_freq_factor
    if span == 0:
        return np.where(is_long, frequencies / factor, frequencies).astype(np.float32)
    blend = (np.float32(original) / wavelengths - np.float32(rope.low_freq_factor)) / np.float32(span)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    return np.where(is_long, frequencies / factor, np.where(is_short, frequencies, blended)).astype(np.float32)


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return a ramp over the dimensions from extrapolation to interpolation (YaRN, section 3.2)."""
    wavelengths = _wavelengths(rope.theta, head_dim)
    extrapolated = np.float32(1) / wavelengths
    interpolated = np.float32(1) / (np.float32(rope.factor) * wavelengths)

    def dimension(num_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / width, 0, 1)
    keep = 1 - ramp
    return (interpolated * (1 - keep) + extrapolated * keep).astype(np.float32)


def _longrope(rope: RopeConfig, num_dims: int, factors: tuple[float, ...]) -> np.ndarray:
    """Stretch each wavelength by a separate factor (LongRoPE, Ding et al. 2024)."""
    return (np.float32(1) / (np.array(factors, np.float32) * _wavelengths(rope.theta, num_dims))).astype(np.float32)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
