"""What a kernel that samples takes of each row, and what it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt32

SMALLEST = 1e-30
"""What smaller temperatures and top_p count as: above the subnormal numbers, which devices round to 0."""


class RowOutputs(NamedTuple):
    """What there is of each row.

    Attributes:
        token_ids_r: the sampled tokens.
        is_sound_r: False where a row has NaN or plus infinity, or nothing is left to sample.
        logprobs_r: of the tokens, `[0]` where not wanted.
        ranks_r: 1 and the number of tokens that are likelier, `[0]` where not wanted.
        top_ids_rk: the likeliest tokens in order, of equals the lower one first.
        top_logprobs_rk: theirs.
    """

    token_ids_r: Int[Array, "R"]
    is_sound_r: Bool[Array, "R"]
    logprobs_r: Float[Array, "..."]
    ranks_r: Int[Array, "..."]
    top_ids_rk: Int[Array, "R K"]
    top_logprobs_rk: Float[Array, "R K"]


class RowInputs(NamedTuple):
    """How each row is sampled, as `jpaged.engine.executor.ROW_FIELDS` tells it, in the order of the call."""

    temperature_r: Float[Array, "R"]
    top_k_r: Int[Array, "R"]
    top_p_r: Float[Array, "R"]
    min_p_r: Float[Array, "R"]
    seeds_r2: UInt32[Array, "R 2"]
    sequence_indices_r: Int[Array, "R"]
    positions_r: Int[Array, "R"]
    banned_token_ids_rx: Int[Array, "R X"]


class SamplingKernel(Protocol):
    """Samples a token a row, where one device has all columns of the logits. Hashable: static under jit."""

    def sample(
        self, logits_rv: Float[Array, "R V"], how: RowInputs, *, has_logprobs: bool, num_top: int = 0
    ) -> RowOutputs:
        """Samples a token a row.

        Args:
            logits_rv: float32.
            how: of each row.
            has_logprobs: log-probabilities and ranks are wanted, too.
            num_top: the likeliest tokens that are wanted besides (K), at most V; 0 without log-probabilities.
        """
        ...
