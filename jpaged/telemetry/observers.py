"""Observers of a server's requests, by its options; there are none by default."""

from __future__ import annotations

from jpaged.config import TelemetryOptions
from jpaged.service.records import RequestObserver
from jpaged.telemetry.logs import RequestLog


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
