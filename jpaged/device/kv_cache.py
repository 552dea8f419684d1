"""The pool's one array. How many blocks it gets is `jpaged.device.programs.memory_plan`'s to say.

Every step donates the array and gets it back updated. `KVPool` is the only holder: between `take` and `put` it is
spent, and touching it raises.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jpaged.errors import InternalError
from jpaged.kernels.kv_layout import KVLayout


class KVPool:
    """Holds the pool's array while no step has it."""

    def __init__(self, layout: KVLayout, sharding: Sharding) -> None:
        zeros = jax.jit(lambda: jnp.zeros(layout.shape, layout.storage_dtype), out_shardings=sharding)
        self._array: jax.Array | None = zeros()

    def take(self) -> jax.Array:
        """Hands the array out to be donated.

        Raises:
            InternalError: a step that took it never gave it back, or the pool was released.
        """
        if self._array is None:
            raise InternalError("the KV pool is spent: a step failed after it was donated, or it was released")
        array, self._array = self._array, None
        return array

    def put(self, array: jax.Array) -> None:
        """Takes the array that a step returned."""
        if self._array is not None:
            raise InternalError("the KV pool was given back twice")
        self._array = array

    def wait(self) -> None:
        """Returns when everything that writes to the array has run."""
        if self._array is not None:
            self._array.block_until_ready()

    def release(self) -> None:
        """Frees the memory. Idempotent."""
        if self._array is not None:
            self._array.delete()
            self._array = None
