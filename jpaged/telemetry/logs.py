"""Log of text or JSON lines, with a line for each finished request, without prompt and output.

`Observers` are the observers of a server's requests, by its options: this log and traces. There are none by default.
"""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from typing import Any

from jpaged import json_text
from jpaged.config import TelemetryOptions
from jpaged.errors import printable
from jpaged.service.calls import RequestObserver, RequestRecord, get_parts

_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_REQUESTS = logging.getLogger("jpaged.requests")
_FIELDS, _NOTE = "jpaged_fields", "jpaged_note"
_MAX_BURST, _TRACE_COST = 50, 10
_MAX_TEMPLATES = 1000
"""Maximum number of templates with a budget: those of libraries may contain values."""


class JsonFormatter(logging.Formatter):
    """JSON object per line: time, level, logger, message, traceback of an error, and fields of a request's line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage() + _get_note(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return printable(json_text.dumps(line | record.__dict__.get(_FIELDS, {}), ensure_ascii=False))


class TextFormatter(logging.Formatter):
    """Line of text with escaped control characters, because messages quote clients and other servers."""

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without the trace of an error."""
        return printable(super().formatMessage(record)) + _get_note(record)

    def formatException(self, ei: Any) -> str:
        """Return the trace of an error, whose message may have control characters."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


class RepeatLimit(logging.Filter):
    """Rate limit of repeated lines, such as those that a client or a broken peer causes with each call.

    Lines of one logger with one template share a budget of `_MAX_BURST`, refilled by one per second. A line costs one,
    and a line with a traceback ten. The last line before a pause notes the pause. The first one after it has the number
    of dropped lines. Lines of requests are not limited.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._budgets: dict[tuple[str, str], _Budget] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the line is written."""
        if record.name == _REQUESTS.name:
            return True
        key = record.name, str(record.msg)
        with self._lock:
            budget = self._budgets.pop(key, None) or _Budget(record.created)
            self._budgets[key] = budget  # most recently used last
            if len(self._budgets) > _MAX_TEMPLATES:
                del self._budgets[next(iter(self._budgets))]
            note = budget.take(_TRACE_COST if record.exc_info else 1, record.created)
        record.__dict__[_NOTE] = note
        return note is not None


class _Budget:
    """Budget of one template; `take` returns a note for the line, or None if the line is dropped."""

    def __init__(self, now_s: float) -> None:
        self._num_left, self._now_s, self._num_dropped = float(_MAX_BURST), now_s, 0

    def take(self, cost: int, now_s: float) -> str | None:
        self._num_left = min(_MAX_BURST, self._num_left + max(0.0, now_s - self._now_s))
        self._now_s = now_s
        if self._num_left < cost:
            self._num_dropped += 1
            return None
        self._num_left -= cost
        note = f" [{self._num_dropped} lines like this were dropped]" if self._num_dropped else ""
        self._num_dropped = 0
        return note or (" [more lines like this are dropped for a while]" if self._num_left < cost else "")


def _get_note(record: logging.LogRecord) -> str:
    return record.__dict__.get(_NOTE) or ""


def set_up_logs(log_format: str, *, has_requests: bool) -> None:
    """Log to standard error in `text` or `json` format, with a line per request if `has_requests`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(RepeatLimit())
    # force: a library that was imported before may have set another format
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _REQUESTS.setLevel(logging.INFO if has_requests else logging.WARNING)


class RequestLog:
    """Observer that logs a line for each finished request."""

    def begin(self, record: RequestRecord) -> None:
        """Do nothing until the request ends."""

    def end(self, record: RequestRecord) -> None:
        """Log the request's line, if the logger's level allows it."""
        if _REQUESTS.isEnabledFor(logging.INFO):
            fields = build_fields(record)
            text = " ".join(f"{name}={_in_a_line(value)}" for name, value in fields.items())
            _REQUESTS.info("request %s", text, extra={_FIELDS: fields | {"message": "request"}})


def _in_a_line(value: Any) -> Any:
    """Return a value, in quotes if it could be taken for several values or another line."""
    is_plain = not isinstance(value, str) or (value.isprintable() and not set(value) & {" ", '"'})
    return value if is_plain else json_text.dumps(value)


def build_fields(record: RequestRecord) -> dict[str, Any]:
    """Return the known fields of a request's log line."""
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
        parts = [part for part in get_parts(times) if part[0] != "preempted"]
        found |= {f"{name}_s": round(end_s - begin_s, 6) for name, begin_s, end_s in parts}
        found["preemptions"] = len(times.preempted_s) // 2
    return {name: value for name, value in found.items() if value != ""}


class Observers:
    """Request log and traces.

    Attributes:
        all: observers that the service notifies.

    Raises:
        InvalidArgument: the collector's address is invalid.
    """

    def __init__(self, options: TelemetryOptions) -> None:
        self.all: tuple[RequestObserver, ...] = (RequestLog(),) if options.enable_log_requests else ()
        self._traces = None
        if options.otlp_traces_endpoint is not None:
            from jpaged.telemetry.traces import Traces, exporter_to  # half a second that few servers need

            self._traces = Traces(exporter_to(options.otlp_traces_endpoint))
            self.all += (self._traces,)

    def stop(self) -> None:
        """Send pending spans; may block for a while."""
        if self._traces is not None:
            self._traces.stop()
