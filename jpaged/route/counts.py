"""What a router counts."""

from __future__ import annotations

from collections import Counter


class Counts:
    """Written on the router's event loop, read on the thread of a scrape.

    Attributes:
        ended: calls that have ended here, by method and status.
        begun: calls that were begun at a server, by it; of one call several where it was tried again.
        retried: calls that were tried again because a server was gone, turned them away or failed, by it.
        resumed: streams that went on at a server behind what had come of them, by it.
        messages: messages of streams that were passed on, by the server that they came from.
        tokens: tokens in them.
        open: calls that are open here.
    """

    def __init__(self) -> None:
        self.ended = Counter[tuple[str, str]]()
        self.begun = Counter[str]()
        self.retried = Counter[str]()
        self.resumed = Counter[str]()
        self.messages = Counter[str]()
        self.tokens = Counter[str]()
        self.open = 0

    def forget(self, target: str) -> None:
        """A server is none any more."""
        for count in (self.begun, self.retried, self.resumed, self.messages, self.tokens):
            count.pop(target, None)

    def note_open(self, by: int) -> None:
        """Calls have come or gone."""
        self.open += by
