"""What sampling takes of each row, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt32

SMALLEST = 1e-30
"""What smaller temperatures and top_p count as: above the subnormal numbers, which devices round to 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each row is sampled: `engine.executor.ROW_FIELDS` on the device, where their meanings and limits are told."""

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
class Sampled:
    """The sampled tokens, and what the model's own distribution (before everything else) says of them.

    Attributes:
        token_ids_r: the tokens.
        is_sound_r: whether a row's logits are such that its token means something: False where a row has NaN or plus
            infinity, or nothing is left to sample.
        logprobs_r: their log-probabilities, or None; they mean nothing where the row is not sound.
        ranks_r: 1 and the number of tokens that are likelier, or None.
        top_ids_rk: the likeliest tokens in order, of equals the lower one first, or None.
        top_logprobs_rk: theirs, or None.
    """

    token_ids_r: Int[Array, "R"]
    is_sound_r: Bool[Array, "R"]
    logprobs_r: Float[Array, "R"] | None = None
    ranks_r: Int[Array, "R"] | None = None
    top_ids_rk: Int[Array, "R K"] | None = None
    top_logprobs_rk: Float[Array, "R K"] | None = None


class SamplingKernel(Protocol):
    """Samples a token a row, where one device has all columns of the logits. Hashable: static under jit."""

    def sample(
        self, logits_rv: Float[Array, "R V"], how: RowSampling, *, has_logprobs: bool, num_top: int = 0
    ) -> Sampled:
        """Samples a token a row.

        Args:
            logits_rv: float32.
            how: of each row.
            has_logprobs: log-probabilities and ranks are wanted, too.
            num_top: the likeliest tokens that are wanted besides (K), at most V; 0 without log-probabilities.
        """
        ...


@runtime_checkable
class FedSamplingKernel(SamplingKernel, Protocol):
    """A kernel that can wait for masks of the host: which tokens each row may have."""

    def sample_fed(
        self, logits_rv: Float[Array, "R V"], how: RowSampling, number: Int[Array, ""], step: Int[Array, ""]
    ) -> tuple[Sampled, Int[Array, ""]]:
        """Samples a token a row, of those that a feed gives to a step.

        Args:
            logits_rv: float32.
            how: of each row.
            number: the feed's; 0 is none, and each row has all tokens.
            step: of the program that is fed, from 0.

        Returns:
            the tokens, and what becomes of the step, a `jpaged.engine.executor.Verdict`. The tokens of one that is void
            mean nothing.
        """
        ...
