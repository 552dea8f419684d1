"""W3C trace context of the caller: a server's spans become part of the caller's trace."""

from __future__ import annotations

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Metadata = tuple[tuple[str, str | bytes], ...]

_PROPAGATOR = TraceContextTextMapPropagator()


def with_trace(metadata: Metadata) -> Metadata:
    """Return metadata with the current span of OpenTelemetry, if the program has one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return (*metadata, *carrier.items()) if carrier else metadata
