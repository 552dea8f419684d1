"""The CPU kernel of adapters: LoRA deltas in one call, which reads only the adapters that rows use.

core.cc multiplies, kernel.cc distributes the work; this module has the call, and the check for a library.

Each row of a result is a function of that row and its adapter alone, to the last bit. It does not depend on the other
rows, their number or the number of threads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import InternalError
from jpaged.kernels.cpu.library import MAX_WIDTH, NAME, register
from jpaged.kernels.lora.reference import AdaptedMatrix

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


_MAX_PARTS = 3
"""As in kernel.cc."""


@dataclass(frozen=True, slots=True)
class CpuLora:
    """The library's function, as registered with XLA.

    Attributes:
        max_width: floats of the widest vectors to use, if the processor has them: 16, 8 or 4.
        max_threads: maximum threads of XLA's pool; 0 is all.
    """

    max_width: int = MAX_WIDTH
    max_threads: int = 0

    def adapt(
        self, x_te: Float[Array, "T E"], adapters_t: Int[Array, "T"], num_rows: Int[Array, ""], matrix: AdaptedMatrix
    ) -> Float[Array, "T N"]:
        """Return the deltas of the rows in use, the first ones, float32; undefined for rows with slot 0."""
        num_columns = sum(b.shape[2] for b in matrix.b)
        run = jax.ffi.ffi_call(f"{NAME}_adapt", jax.ShapeDtypeStruct((len(x_te), num_columns), jnp.float32))
        empty = jnp.zeros((0,), x_te.dtype)
        b = (*matrix.b, *(empty,) * (_MAX_PARTS - len(matrix.b)))
        y_tn: jax.Array = run(
            *(x_te, adapters_t, num_rows.astype(jnp.int32), matrix.a, *b),
            num_groups=np.int64(matrix.num_groups),
            max_width=np.int64(self.max_width),
            max_threads=np.int64(self.max_threads),
        )
        return y_tn


@functools.cache
def kernel() -> CpuLora | str:
    """Return the package's kernel, or the reason why there is none."""
    found = register("adapt")
    return found if isinstance(found, str) else CpuLora()


def loaded() -> CpuLora:
    """Return the package's kernel, for packed matrices, whose kernel is in the same library.

    Raises:
        InternalError: there is none.
    """
    found = kernel()
    if isinstance(found, str):
        raise InternalError(f"no kernel can add adapters to a packed matrix: {found}")
    return found
