"""What the audit learns of a request: the service's record of it, noted in the call that it came by."""

from __future__ import annotations

from jpaged.access.entry import current
from jpaged.service.records import RequestRecord


class NotedRequests:
    """Notes each request in the call that is being answered. It is one of the service's observers."""

    def begin(self, record: RequestRecord) -> None:
        """Nothing is known yet."""

    def end(self, record: RequestRecord) -> None:
        """Note what was asked for, what it took, and how it ended."""
        entry = current()
        if entry is not None:
            entry.note_request(record.request_id, record.model, record.adapter)
            entry.note_use(record.usage.prompt_tokens, record.usage.completion_tokens)
            entry.note_error(record.reason)
