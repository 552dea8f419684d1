"""Who watches the requests of a server, by its options. Nobody does unless it is asked for."""

from __future__ import annotations

from jpaged.config import TelemetryOptions
from jpaged.service.records import RequestObserver
from jpaged.telemetry.logs import RequestLog


class Observers:
    """The log of requests, and traces.

    Attributes:
        all: for the service to tell.

    Raises:
        InvalidArgument: the collector's address cannot be one.
    """

    def __init__(self, options: TelemetryOptions) -> None:
        self.all: tuple[RequestObserver, ...] = (RequestLog(),) if options.enable_log_requests else ()
        self._traces = None
        if options.otlp_traces_endpoint is not None:
            from jpaged.telemetry.traces import Traces, exporter_to  # half a second that few need

            self._traces = Traces(exporter_to(options.otlp_traces_endpoint))
            self.all += (self._traces,)

    def stop(self) -> None:
        """Send what is left; blocks for a while."""
        if self._traces is not None:
            self._traces.stop()
