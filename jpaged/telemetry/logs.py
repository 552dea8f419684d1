"""The log: lines of text or JSON, and a line for each request that has ended, without its prompt and its text."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from jpaged import json_text
from jpaged.service.records import RequestRecord, parts_of

_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_REQUESTS = logging.getLogger("jpaged.requests")
_FIELDS = "jpaged_fields"


class JsonFormatter(logging.Formatter):
    """A JSON object a line: time, level, logger, message; an error's trace; and the fields of a request's line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json_text.dumps(line | record.__dict__.get(_FIELDS, {}), ensure_ascii=False)


def set_up_logs(log_format: str, *, has_requests: bool) -> None:
    """Have what is logged go to standard error, in `text` or `json`; of requests, too, where that is asked for."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT_FORMAT))
    # force: a library that was imported before may have set its own format
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _REQUESTS.setLevel(logging.INFO if has_requests else logging.WARNING)


class RequestLog:
    """Writes a line for each request that has ended."""

    def begin(self, record: RequestRecord) -> None:
        """Wait for its end."""

    def end(self, record: RequestRecord) -> None:
        """Write its line; whether it is shown is the logger's to say."""
        if _REQUESTS.isEnabledFor(logging.INFO):
            fields = fields_of(record)
            text = " ".join(f"{name}={_in_a_line(value)}" for name, value in fields.items())
            _REQUESTS.info("request %s", text, extra={_FIELDS: fields | {"message": "request"}})


def _in_a_line(value: Any) -> Any:
    """Return a value as it is, but in quotes where it could be taken for more than one, or for another line."""
    is_plain = not isinstance(value, str) or (value.isprintable() and not set(value) & {" ", '"'})
    return value if is_plain else json_text.dumps(value)


def fields_of(record: RequestRecord) -> dict[str, Any]:
    """Return what is told of a request; what is not known is left out."""
    usage, times = record.usage, record.times
    found: dict[str, Any] = {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "face": record.caller.face,
        "peer": record.caller.peer,
        "key_id": record.caller.key_id,
        "user": record.caller.user,
        "traceparent": record.headers.get("traceparent", ""),
        "operation": record.operation,
        "model": record.model,
        "adapter": record.adapter,
        "status": record.status,
        "reason": record.reason,
        "finish_reasons": ",".join(record.finish_reasons[i] for i in sorted(record.finish_reasons)),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "duration_s": round(record.ended_s - record.began_s, 6),
    }
    if times is not None:
        parts = [part for part in parts_of(times) if part[0] != "preempted"]
        found |= {f"{name}_s": round(end_s - begin_s, 6) for name, begin_s, end_s in parts}
        found["preemptions"] = len(times.preempted_s) // 2
    return {name: value for name, value in found.items() if value != ""}
