"""Random numbers as a function of (seed, sequence index, position, token) and of nothing else.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), written out: the
samples of a request must not change with the version or the settings of a library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry_2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return two uint32 words for every counter of two words, under a key of two words; arguments broadcast."""
    schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << distance) | (y >> (32 - distance))) ^ x
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def exponentials(
    seeds_r2: UInt32[Array, "R 2"], sequence_indices_r: Int[Array, "R"], positions_r: Int[Array, "R"], vocab_size: int
) -> Float[Array, "R V"]:
    """Return independent exponential variables of mean 1, one per token of the vocabulary; all above 0, all finite.

    A row's key is the hash of the sequence index and position under the request's seed. Token v takes the first word of
    counter v in the vocabulary's first half, and the second word of counter v - half in the other.
    """
    key_r1 = row_keys(seeds_r2, sequence_indices_r, positions_r)
    half = (vocab_size + 1) // 2
    counter_v = jnp.arange(half, dtype=jnp.uint32)[None, :]
    words = threefry_2x32(key_r1, (counter_v, jnp.zeros_like(counter_v)))
    return _exponentials(jnp.concatenate(words, axis=1)[:, :vocab_size])


def get_exponentials(
    seeds_r2: UInt32[Array, "R 2"],
    sequence_indices_r: Int[Array, "R"],
    positions_r: Int[Array, "R"],
    token_ids_v: Int[Array, "V"],
    vocab_size: int,
) -> Float[Array, "R V"]:
    """Return the columns of `exponentials` of these tokens, at twice the work per token."""
    key_r1 = row_keys(seeds_r2, sequence_indices_r, positions_r)
    half = (vocab_size + 1) // 2
    is_first_v = token_ids_v < half
    counter_v = jnp.where(is_first_v, token_ids_v, token_ids_v - half).astype(jnp.uint32)[None, :]
    words = threefry_2x32(key_r1, (counter_v, jnp.zeros_like(counter_v)))
    return _exponentials(jnp.where(is_first_v, *words))


def row_keys(seeds_r2: jax.Array, sequence_indices_r: jax.Array, positions_r: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each row's key, two words [R, 1]: the hash of the sequence index and position under the request's seed."""
    place_r = sequence_indices_r.astype(jnp.uint32), positions_r.astype(jnp.uint32)
    key_r = threefry_2x32((seeds_r2[:, 0], seeds_r2[:, 1]), place_r)
    return key_r[0][:, None], key_r[1][:, None]


def _exponentials(bits_rv: jax.Array) -> jax.Array:
    # Small exponentials decide a sample. They come from small u, which float32 resolves finely; u = 1 is infinite.
    u_rv = jnp.minimum((bits_rv.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log1p(-u_rv)
