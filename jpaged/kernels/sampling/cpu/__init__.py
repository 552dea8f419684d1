"""The CPU kernel of sampling: core.cc samples a row, kernel.cc distributes rows over threads.

row.h        a row and the pass over it
floors.h     truncation of a row
noise.h      the draw from the remaining tokens
feed.h       masks that the host supplies to a running program; `Feed` is the host's side

The result of a row is a function of that row alone, to the last bit. Its token depends neither on the other rows, nor
on threads, nor on the requested log-probabilities. The noise has the bits of the specification, which uses other
logarithms: only if rounding decides between two tokens may the two differ. Logits of padding rows are not read.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jpaged.kernels.cpu.library import MAX_WIDTH, NAME, library, register
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


_TIMEOUT_MS = 50


@dataclass(slots=True)
class Feed:
    """An open mask channel. Used by one thread at a time, except for `interrupt`.

    Attributes:
        number: its name for a program; above 0.
        num_rows: rows of the masks (R).
        num_words: words of a mask (W); 0 for a program that waits for no masks, which only `interrupt` affects.
    """

    number: int
    num_rows: int
    num_words: int

    @classmethod
    def open(cls, num_rows: int, num_words: int) -> Feed:
        """Open a channel for a program that is about to start."""
        return cls(_functions().jpaged_feed_open(num_rows, num_words), num_rows, num_words)

    def give(self, mask_rw: NDArray[np.int32], verdict: int) -> None:
        """Send the masks of the next step, which are copied.

        Raises:
            ValueError: they have another shape or type.
        """
        if mask_rw.shape != (self.num_rows, self.num_words) or mask_rw.dtype != np.int32:
            raise ValueError(f"masks are {mask_rw.dtype}{mask_rw.shape}, not int32{(self.num_rows, self.num_words)}")
        _functions().jpaged_feed_give(self.number, np.ascontiguousarray(mask_rw).ctypes.data, verdict)

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]] | None:
        """Return the sampled tokens of the latest step with masks, and whether logits were finite, `[R]` each.

        Return None on timeout.
        """
        drawn_2r = np.empty((2, self.num_rows), np.int32)
        if not _functions().jpaged_feed_wait(self.number, drawn_2r.ctypes.data, _TIMEOUT_MS):
            return None
        return drawn_2r[0], drawn_2r[1] != 0

    def interrupt(self) -> None:
        """Let the current step of a program without masks be the last. Thread-safe; no-op if the channel is closed."""
        _functions().jpaged_feed_interrupt(self.number)

    def num_steps(self) -> int:
        """Return the number of executed steps of a program without masks that has ended; 0 if the channel is closed."""
        return int(_functions().jpaged_feed_num_steps(self.number))

    def close(self) -> None:
        """Close the channel: a waiting step becomes void. Idempotent."""
        _functions().jpaged_feed_close(self.number)


@functools.cache
def _functions() -> ctypes.CDLL:
    found = library()
    if isinstance(found, str):
        raise OSError(found)
    number, pointer, size = ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64
    found.jpaged_feed_open.argtypes, found.jpaged_feed_open.restype = (size, size), number
    found.jpaged_feed_give.argtypes, found.jpaged_feed_give.restype = (number, pointer, number), ctypes.c_bool
    found.jpaged_feed_wait.argtypes, found.jpaged_feed_wait.restype = (number, pointer, size), ctypes.c_bool
    found.jpaged_feed_interrupt.argtypes, found.jpaged_feed_interrupt.restype = (number,), ctypes.c_bool
    found.jpaged_feed_num_steps.argtypes, found.jpaged_feed_num_steps.restype = (number,), size
    found.jpaged_feed_close.argtypes, found.jpaged_feed_close.restype = (number,), None
    return found
