"""Audit of requests: copies the service's record of a request to the call's audit entry.

A request gets a separate audit line if its call was answered before it ended (as in a batch), or if there is no call.
"""

from __future__ import annotations

from jpaged.access.entry import Entry, current
from jpaged.access.gate import Gate
from jpaged.service.records import RequestRecord


class NotedRequests:
    """Observer of the service that notes each request in the current call's audit entry."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def begin(self, record: RequestRecord) -> None:
        """Do nothing: a new record holds nothing to note."""

    def end(self, record: RequestRecord) -> None:
        """Note the request's model and adapter, its token counts and its outcome."""
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
