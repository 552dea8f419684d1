"""Blocks that come over from another server: they are checked, and written where they belong.

Threads write. A call that goes away ends the landing before it gives the blocks back: none is written to afterwards.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence

from jpaged.engine.executor import HostBlocks
from jpaged.errors import InternalError
from jpaged.service.roles.answers import Block


class Landing:
    """The blocks of one prompt.

    Args:
        wanted: keys of all that was asked for.
        homes: where each is written, of those for which there is room.
    """

    def __init__(self, blocks: HostBlocks, wanted: Sequence[bytes], homes: Mapping[bytes, int]) -> None:
        self._blocks = blocks
        self._wanted = frozenset(wanted)
        self._homes = dict(homes)
        self._lock = threading.Lock()
        self._is_over = False

    def take(self, blocks: Sequence[Block]) -> dict[bytes, int]:
        """Write blocks; those that are whole now, with their places. On a thread.

        Raises:
            InternalError: one is none that was asked for, of another size, or not what its digest says.
        """
        whole = dict[bytes, int]()
        for block in blocks:
            if block.key not in self._wanted:
                raise InternalError(f"block {block.key.hex()[:16]} came, which nobody asked for")
            if len(block.contents) != self._blocks.bytes_per_block:
                raise InternalError(
                    f"a block of {len(block.contents)} bytes came; blocks here have {self._blocks.bytes_per_block}"
                )
            if digest_of(block.key, block.contents) != block.digest:
                raise InternalError(f"block {block.key.hex()[:16]} is not what its digest says")
            home = self._homes.pop(block.key, None)
            if home is None:
                continue
            with self._lock:
                if self._is_over:
                    return {}
                self._blocks.view(home)[:] = block.contents
            whole[block.key] = home
        return whole

    def end(self) -> None:
        """Write nothing any more; waits for a block that is being written."""
        with self._lock:
            self._is_over = True


def digest_of(key: bytes, contents: bytes) -> bytes:
    """SHA-256 of a block's key and contents."""
    digest = hashlib.sha256(key)
    digest.update(contents)
    return digest.digest()
