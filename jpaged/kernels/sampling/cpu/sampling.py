"""Rows of logits to tokens, and optionally to their log-probabilities, in one call.

The result of a row is a function of that row alone, to the last bit. Its token depends neither on the other rows, nor
on threads, nor on the requested log-probabilities. The noise has the bits of the specification, which uses other
logarithms: only if rounding decides between two tokens may the two differ. Logits of padding rows are not read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.cpu.library import MAX_WIDTH, NAME, register
from jpaged.kernels.sampling.rows import RowSampling, SampledTokens

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_ARGUMENTS = (
    *("temperature_r", "top_k_r", "top_p_r", "min_p_r"),
    *("seeds_r2", "sequence_indices_r", "positions_r", "banned_token_ids_rx", "is_padding_r"),
)
"""The function's arguments from `RowSampling`, in its order."""


@dataclass(frozen=True, slots=True)
class CpuSampling:
    """The library's function, as registered with XLA: a `jpaged.kernels.sampling.SamplingKernel`.

    Attributes:
        max_width: floats of the widest vectors to use, if the processor has them: 16, 8 or 4.
        max_threads: maximum threads of XLA's pool; 0 is all.
    """

    max_width: int = MAX_WIDTH
    max_threads: int = 0

    def sample(
        self, logits_rv: Float[Array, "R V"], how: RowSampling, *, has_logprobs: bool, num_top: int = 0
    ) -> SampledTokens:
        """Sample a token per row."""
        return self._sample(logits_rv, how, jnp.zeros(2, jnp.int32), has_logprobs=has_logprobs, num_top=num_top)[0]

    def sample_fed(
        self, logits_rv: Float[Array, "R V"], how: RowSampling, number: Int[Array, ""], step: Int[Array, ""]
    ) -> tuple[SampledTokens, Int[Array, ""]]:
        """Sample a token per row, from those that the mask channel allows in a step."""
        sampled, verdict_1 = self._sample(logits_rv, how, jnp.stack([number, step]), has_logprobs=False, num_top=0)
        return sampled, verdict_1[0]

    def _sample(
        self, logits_rv: jax.Array, how: RowSampling, fed_2: jax.Array, *, has_logprobs: bool, num_top: int
    ) -> tuple[SampledTokens, jax.Array]:
        num_rows = logits_rv.shape[0]
        num_told = num_rows if has_logprobs else 0
        shapes = [
            *(jax.ShapeDtypeStruct((num_rows,), jnp.int32), jax.ShapeDtypeStruct((num_rows,), jnp.bool_)),
            *(jax.ShapeDtypeStruct((num_told,), jnp.float32), jax.ShapeDtypeStruct((num_told,), jnp.int32)),
            *(jax.ShapeDtypeStruct((num_rows, num_top), dtype) for dtype in (jnp.int32, jnp.float32)),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ]
        run = jax.ffi.ffi_call(f"{NAME}_sample", shapes)
        limits = {"max_width": np.int64(self.max_width), "max_threads": np.int64(self.max_threads)}
        *told, verdict_1 = run(logits_rv, *(getattr(how, name) for name in _ARGUMENTS), fed_2, **limits)
        return SampledTokens(*told[: 2 + 2 * has_logprobs + 2 * (num_top > 0)]), verdict_1


@functools.cache
def kernel() -> CpuSampling | str:
    """Return the package's kernel, or the reason why there is none."""
    found = register("sample")
    return found if isinstance(found, str) else CpuSampling()
