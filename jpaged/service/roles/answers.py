"""What a decode server asks of prefill servers, whatever the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from jpaged.service.prefixes.parts import Piece
from jpaged.service.roles.first_tokens import FirstToken
from jpaged.types import Request


class PrefillAnswer(Protocol):
    """One prompt that was computed; its blocks are held there until they have come, or `close`.

    Attributes:
        target: which server has computed it.
        tokens: the first of each sequence.
        num_cached_tokens: of the prompt that were cached there.
    """

    target: str
    tokens: Sequence[FirstToken]
    num_cached_tokens: int

    def pieces(self) -> AsyncIterator[Sequence[Piece]]:
        """Its blocks in pieces, some at a time; raises JpagedError where they end before their time."""

    def close(self) -> None:
        """Let the server go; a second time nothing happens."""


class PrefillServers(Protocol):
    """Servers of the role prefill."""

    async def ask(
        self, request: Request, num_known: int, kv_identity: bytes, wait_s: float, timeout_s: float
    ) -> PrefillAnswer:
        """Have a prompt computed by one of them, and wait for the first token of each sequence.

        Args:
            num_known: leading blocks of the prompt that are not to be sent.
            kv_identity: of this server's blocks.
            wait_s: for the first tokens.
            timeout_s: of the whole call, the blocks included.

        Raises:
            TimeoutError: they did not come in time.
            JpagedError: none of them could.
        """

    async def close(self) -> None:
        """End the connections."""
