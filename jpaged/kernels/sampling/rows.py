"""Inputs and outputs of sampling for each row, and the noise with which rows sample.

The noise is a function of (seed, sequence index, position, token) and of nothing else. Threefry-2x32 with 20 rounds
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is written out: the samples of a request must not
change with the version or the settings of a library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt32

SMALLEST = 1e-30
"""Minimum of temperatures and top_p, which are raised to it: above subnormal numbers, which devices round to 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling inputs of each row: `engine.executor.ROW_FIELDS` on the device, which documents meanings and limits."""

    temperature_r: Float[Array, "R"]
    top_k_r: Int[Array, "R"]
    top_p_r: Float[Array, "R"]
    min_p_r: Float[Array, "R"]
    seeds_r2: UInt32[Array, "R 2"]
    sequence_indices_r: Int[Array, "R"]
    positions_r: Int[Array, "R"]
    is_padding_r: Int[Array, "R"]
    banned_token_ids_rx: Int[Array, "R X"]

    @property
    def num_in_use(self) -> Int[Array, ""]:
        """Rows before the padding."""
        return len(self.is_padding_r) - jnp.sum(self.is_padding_r)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens, and their log-probabilities in the model's own distribution, before any processing.

    Attributes:
        token_ids_r: the tokens.
        is_sound_r: False for rows with NaN or plus infinity, or with no token left to sample; their tokens are
            meaningless.
        logprobs_r: their log-probabilities, or None; meaningless if the row is not sound.
        ranks_r: 1 plus the number of likelier tokens, or None.
        top_ids_rk: the likeliest tokens in order, of equals the lower one first, or None.
        top_logprobs_rk: their log-probabilities, or None.
    """

    token_ids_r: Int[Array, "R"]
    is_sound_r: Bool[Array, "R"]
    logprobs_r: Float[Array, "R"] | None = None
    ranks_r: Int[Array, "R"] | None = None
    top_ids_rk: Int[Array, "R K"] | None = None
    top_logprobs_rk: Float[Array, "R K"] | None = None


class SamplingKernel(Protocol):
    """Samples a token per row, if one device has all columns of the logits. Hashable: static under jit."""

    def sample(
        self, logits_rv: Float[Array, "R V"], how: RowSampling, *, has_logprobs: bool, num_top: int = 0
    ) -> SampledTokens:
        """Sample a token per row.

        Args:
            logits_rv: float32.
            how: sampling inputs of each row.
            has_logprobs: also return log-probabilities and ranks.
            num_top: number of likeliest tokens to return (K), at most V; 0 without log-probabilities.
        """
        ...


@runtime_checkable
class FedSamplingKernel(SamplingKernel, Protocol):
    """A kernel that can wait for masks from the host, which restrict each row's tokens."""

    def sample_fed(
        self, logits_rv: Float[Array, "R V"], how: RowSampling, number: Int[Array, ""], step: Int[Array, ""]
    ) -> tuple[SampledTokens, Int[Array, ""]]:
        """Sample a token per row, from those that the mask channel allows in a step.

        Args:
            logits_rv: float32.
            how: sampling inputs of each row.
            number: of the mask channel; 0 is none, which allows all tokens.
            step: of the program, from 0.

        Returns:
            the tokens, and the step's `jpaged.engine.executor.StepDirective`. Tokens of a void step are meaningless.
        """
        ...


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
