"""What the audit learns of a request: the service's record of it, noted in the call that it came by.

A request that goes on when its call is answered, as those of a batch do, or that came by none, is a line of its own.
"""

from __future__ import annotations

from jpaged.access.entry import Entry, current
from jpaged.access.gate import Gate
from jpaged.service.records import RequestRecord


class NotedRequests:
    """Notes each request in the call that is being answered. It is one of the service's observers."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def begin(self, record: RequestRecord) -> None:
        """Nothing is known yet."""

    def end(self, record: RequestRecord) -> None:
        """Note what was asked for, what it took, and how it ended."""
        entry = current()
        is_apart = entry is None or entry.is_closed
        if entry is None or entry.is_closed:
            key = None if entry is None else entry.key
            entry = Entry(face="background", method=record.operation, peer="", key=key, tenant=record.tenant)
        entry.note_request(record.request_id, record.model, record.adapter)
        entry.note_use(record.usage.prompt_tokens, record.usage.completion_tokens)
        entry.note_error(record.reason)
        if is_apart:
            entry.began(record.began_s)
            self._gate.close(entry, record.status)
