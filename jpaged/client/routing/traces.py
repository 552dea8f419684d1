"""The W3C trace context of whoever calls: a server's spans become those of the caller's own trace."""

from __future__ import annotations

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Metadata = tuple[tuple[str, str | bytes], ...]

_PROPAGATOR = TraceContextTextMapPropagator()


def with_trace(metadata: Metadata) -> Metadata:
    """Return metadata with the span that is current here, where the program has one (OpenTelemetry)."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return (*metadata, *carrier.items()) if carrier else metadata
