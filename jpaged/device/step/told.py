"""Log-probabilities and hidden states in flight to the host: a bounded number of device bytes at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 64 << 20
"""Maximum bytes on one device; a row of all log-probabilities of Llama 3 is half a MiB."""


@dataclass(slots=True, eq=False)
class _Told:
    array: jax.Array | None
    value: NDArray[np.generic] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that a device holds of it."""
        if self.array is None:
            return 0
        return math.prod(self.array.sharding.shard_shape(self.array.shape)) * self.array.dtype.itemsize

    def land(self) -> NDArray[np.generic]:
        """Wait for the array, and free it on the device."""
        if self.value is None:
            self.value, self.array = np.asarray(self.array), None
        return self.value


class ToldArrays:
    """Holds device arrays until the host has them. Those that no caller waits for are dropped as others are added."""

    def __init__(self) -> None:
        self._on_the_way: deque[_Told] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes that a device holds of all of them."""
        return sum(told.num_bytes for told in self._on_the_way)

    def add(self, array: jax.Array) -> Callable[[], NDArray[np.generic]]:
        """Start the copy to the host, and return a function that waits for it.

        Over the limit of bytes, wait for the oldest copies first.

        Raises:
            JaxRuntimeError: the device failed in a copy that was waited for.
        """
        told = _Told(array)
        copies: Any = array  # jax's annotations lack the method
        copies.copy_to_host_async()
        self._on_the_way.append(told)
        while len(self._on_the_way) > 1 and self.num_bytes > MOST_BYTES:
            self._on_the_way.popleft().land()

        def wait() -> NDArray[np.generic]:
            value = told.land()
            while self._on_the_way and self._on_the_way[0].array is None:
                self._on_the_way.popleft()
            return value

        return wait

    def release(self) -> None:
        """Drop all of them. Idempotent."""
        self._on_the_way.clear()
