"""Interface of prefill servers as a decode server sees them, independent of the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from jpaged.service.prefixes.parts import Piece
from jpaged.service.roles.first_tokens import FirstToken
from jpaged.types import Request


class PrefillAnswer(Protocol):
    """One computed prompt. The prefill server keeps its blocks until they are transferred or `close` is called.

    Attributes:
        target: address of the server that computed it.
        tokens: the first token of each sequence.
        num_cached_tokens: prompt tokens that were cached there.
    """

    target: str
    tokens: Sequence[FirstToken]
    num_cached_tokens: int

    def pieces(self) -> AsyncIterator[Sequence[Piece]]:
        """Yield its blocks in pieces; raise JpagedError if they end early."""

    def close(self) -> None:
        """Release the server. Idempotent."""


class PrefillServers(Protocol):
    """Servers of the prefill role."""

    async def ask(
        self, request: Request, num_known: int, kv_identity: bytes, wait_s: float, timeout_s: float
    ) -> PrefillAnswer:
        """Request the prefill of a prompt, and wait for the first token of each sequence.

        Args:
            num_known: leading blocks of the prompt that are not to be sent.
            kv_identity: KV fingerprint of this server's blocks.
            wait_s: timeout of the first tokens.
            timeout_s: timeout of the whole call, including the blocks.

        Raises:
            TimeoutError: the tokens did not come in time.
            JpagedError: no server could compute it.
        """

    async def close(self) -> None:
        """Close the connections."""
