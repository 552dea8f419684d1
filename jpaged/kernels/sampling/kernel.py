"""Rows of logits to tokens, and to what the model's own distribution says of them, in one call.

What becomes of a row is a function of that row alone, to the last bit: neither the other rows, nor the threads, nor
what else is told of it show in its token. The noise has the bits of the specification, which takes other logarithms of
them: where rounding decides between two tokens, and there alone, the two may differ.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import Backend
from jpaged.kernels.cpu.library import MAX_WIDTH, NAME, register

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt32


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


@dataclass(frozen=True, slots=True)
class SamplingKernel:
    """The library's function, as XLA knows it.

    Attributes:
        max_width: floats of the widest vectors to use, where the processor has them: 16, 8 or 4.
        max_threads: of XLA's pool, at most; 0 is all.
    """

    max_width: int = MAX_WIDTH
    max_threads: int = 0

    def sample(
        self, logits_rv: Float[Array, "R V"], how: RowInputs, *, has_logprobs: bool, num_top: int = 0
    ) -> RowOutputs:
        """Samples a token a row.

        Args:
            logits_rv: float32.
            has_logprobs: log-probabilities and ranks are wanted, too.
            num_top: the likeliest tokens that are wanted besides (K), at most V; 0 without log-probabilities.
        """
        num_rows = logits_rv.shape[0]
        num_told = num_rows if has_logprobs else 0
        shapes = [
            *(jax.ShapeDtypeStruct((num_rows,), jnp.int32), jax.ShapeDtypeStruct((num_rows,), jnp.bool_)),
            *(jax.ShapeDtypeStruct((num_told,), jnp.float32), jax.ShapeDtypeStruct((num_told,), jnp.int32)),
            *(jax.ShapeDtypeStruct((num_rows, num_top), dtype) for dtype in (jnp.int32, jnp.float32)),
        ]
        run = jax.ffi.ffi_call(f"{NAME}_sample", shapes)
        limits = {"max_width": np.int64(self.max_width), "max_threads": np.int64(self.max_threads)}
        return RowOutputs(*run(logits_rv, *how, **limits))


@functools.cache
def kernel() -> SamplingKernel | str:
    """The package's own kernel, or why there is none."""
    found = register("sample")
    return found if isinstance(found, str) else SamplingKernel()


def choose_kernel(attention_backend: Backend, num_devices: int) -> SamplingKernel | None:
    """The kernel for logits that lie on so many devices; None where XLA samples.

    It goes with the attention of CPUs, whose library it is in: where that runs, so does this.
    """
    found = kernel() if attention_backend == "cpu" and num_devices == 1 else None
    return found if isinstance(found, SamplingKernel) else None
