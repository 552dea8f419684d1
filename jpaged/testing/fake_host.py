"""The host blocks of a fake: its tokens and their digests, as bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InternalError


class FakeHostBlocks:
    """Implements `jpaged.engine.executor.HostBlocks`; swap-outs complete at once."""

    def __init__(self, host: NDArray[np.int64], block_size: int, identity: bytes) -> None:
        self._host = host
        self._identity = identity
        self._block_size = block_size
        self.bytes_per_block = block_size * host.shape[1] * host.itemsize

    def view(self, block_id: int) -> memoryview:
        """Return the tokens of a block and their digests."""
        rows = self._host[block_id * self._block_size : (block_id + 1) * self._block_size]
        if block_id < 1 or len(rows) < self._block_size:
            raise InternalError(f"there is no host block {block_id}")
        return rows.reshape(-1).view(np.uint8).data

    def have_landed(self, block_ids: Sequence[int]) -> bool:
        return True

    def kv_identity(self) -> bytes:
        """Return a hash shared by all fakes that write the same numbers."""
        return hashlib.sha256(self._identity).digest()
