"""Inputs and outputs of sampling for each row."""

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
