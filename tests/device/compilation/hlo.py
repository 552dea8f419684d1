"""What a compiled program does to arrays of the pool's size."""

from __future__ import annotations

import jax

from benchmarks.made_arrays import made_arrays


def pool_sized_operations(executable: jax.stages.Compiled, num_elements: int) -> set[str]:
    """Operations that make an array of so many elements, other than those that work in place."""
    return {made.opcode for made in made_arrays(executable, {num_elements})}
