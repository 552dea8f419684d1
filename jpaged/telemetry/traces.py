"""OpenTelemetry spans: one for each request, and one each for its queue, prefill, decode and preemptions.

    chat demo                  ├──────────────────────────────────────────┤     child of the caller's span
        queue                  ├───┤
        prefill                    ├────┤
        decode                          ├─────────────────────────────────┤
        preempted                             ├─────┤

Names and attributes are those of the GenAI conventions (https://opentelemetry.io/docs/specs/semconv/gen-ai/); prompts
and outputs are never included. The response returns the span's context to the caller as `traceparent`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes import client_attributes, error_attributes
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jpaged.errors import InvalidArgument
from jpaged.service.calls import RequestRecord, get_parts
from jpaged.types import SamplingParams, is_loopback
from jpaged.version import __version__

_LOG = logging.getLogger(__name__)
_SCOPE = "jpaged"
_PROVIDER = "jpaged"
_FLUSH_TIMEOUT_S = 2.0
_MAX_INT = 2**63 - 1
"""Largest integer of OTLP, which has signed ones of 64 bits."""
Attribute = str | int | float | bool | Sequence[str]


class Traces:
    """Observer that creates the spans of a service's requests.

    Args:
        processor: receives finished spans; `exporter_to` creates one.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        resource = Resource.create({SERVICE_VERSION: __version__})  # includes OTEL_* variables of the environment
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _SCOPE}))
        self._processor = processor
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer(_SCOPE, __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[RequestRecord, Span] = {}

    def begin(self, record: RequestRecord) -> None:
        """Start the span of a request, as a child of the caller's span."""
        parent = self._propagator.extract(record.caller.trace, Context())
        span = self._tracer.start_span(record.operation, parent, SpanKind.SERVER, start_time=_ns(record.began_s))
        self._open[record] = span
        headers: dict[str, str] = {}
        self._propagator.inject(headers, set_span_in_context(span, Context()))
        record.answers_with(headers)

    def end(self, record: RequestRecord) -> None:
        """End the span of a request, and create those of the request's parts."""
        span = self._open.pop(record)
        if span.is_recording():
            span.update_name(f"{record.operation} {record.model}".rstrip())
            span.set_attributes(_get_attributes(record))
            if record.status != "OK":
                span.set_status(StatusCode.ERROR, record.status)
            self._add_phases(span, record)
        span.end(_ns(record.ended_s))

    def stop(self) -> None:
        """Send pending spans for at most two seconds, then drop them."""
        # The SDK's flush ignores its timeout, and its shutdown waits for 30 s: neither may delay the end of the server.
        flush = threading.Thread(target=self._provider.shutdown, name="jpaged-flush-traces", daemon=True)
        flush.start()
        flush.join(_FLUSH_TIMEOUT_S)
        if flush.is_alive() and isinstance(self._processor, BatchSpanProcessor):
            _LOG.warning("the trace collector did not answer within %g s: the last spans are lost", _FLUSH_TIMEOUT_S)
            self._processor.span_exporter.shutdown()  # ends its retries, and the pending call

    def _add_phases(self, span: Span, record: RequestRecord) -> None:
        if record.times is None:
            return
        inside, offset_s = set_span_in_context(span, Context()), record.clock_offset_s
        for name, begin_s, end_s in get_parts(record.times):
            part = self._tracer.start_span(name, inside, start_time=_ns(begin_s + offset_s))
            part.end(_ns(end_s + offset_s))


def exporter_to(endpoint: str) -> SpanProcessor:
    """Create a processor that sends spans to a collector, in batches and on a separate thread.

    Raises:
        InvalidArgument: the endpoint has no host, or has a user.
    """
    named = endpoint if "://" in endpoint else f"http://{endpoint}"
    parts = urlsplit(named)
    if parts.username is not None or parts.password is not None:
        problem = "has a user, which gRPC does not send: set OTEL_EXPORTER_OTLP_HEADERS instead"
        raise InvalidArgument("otlp_traces_endpoint", problem)
    try:
        has_host = parts.hostname and parts.scheme in ("http", "https") and (parts.port or True)
    except ValueError:  # the port is not a number, or out of range
        has_host = None
    if not has_host:
        raise InvalidArgument("otlp_traces_endpoint", f"{endpoint!r} is neither host:port nor an http or https URL")
    is_direct = is_loopback(parts.hostname or "")
    options: Any = (("grpc.enable_http_proxy", 0),) if is_direct else None  # typed for strings only
    try:
        exporter = OTLPSpanExporter(endpoint=named, insecure=parts.scheme == "http", channel_options=options)
    except ValueError as error:  # from OTEL_* variables of the environment
        raise InvalidArgument("otlp_traces_endpoint", f"{endpoint}: the exporter cannot be created: {error}") from None
    return BatchSpanProcessor(exporter)


def _get_attributes(record: RequestRecord) -> Mapping[str, Attribute]:
    usage, times = record.usage, record.times
    found: dict[str, Attribute | None] = {
        gen_ai.GEN_AI_OPERATION_NAME: record.operation,
        gen_ai.GEN_AI_PROVIDER_NAME: _PROVIDER,
        gen_ai.GEN_AI_REQUEST_MODEL: record.adapter or record.model,
        gen_ai.GEN_AI_RESPONSE_MODEL: record.model,
        gen_ai.GEN_AI_RESPONSE_ID: record.request_id,
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens,
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens,
        gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: usage.cached_tokens,
        gen_ai.GEN_AI_RESPONSE_FINISH_REASONS: [record.finish_reasons[i] for i in sorted(record.finish_reasons)],
        client_attributes.CLIENT_ADDRESS: record.caller.peer,
        error_attributes.ERROR_TYPE: record.reason,
        "jpaged.face": record.caller.face,
        "jpaged.tenant": record.tenant,
        "jpaged.preemptions": None if times is None else len(times.preempted_s) // 2,
    }
    if times is not None and times.first_token_s is not None:
        found[gen_ai.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = times.first_token_s - times.arrival_s
    if record.sampling is not None:
        found |= _sampling_attributes(record.sampling)
    return {name: _encodable(value) for name, value in found.items() if value not in (None, "", [])}


def _encodable(value: Attribute) -> Attribute:
    """Return the value in valid UTF-8: one invalid string would lose the whole batch of spans."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return [one.encode(errors="replace").decode() for one in value] if isinstance(value, Sequence) else value


def _sampling_attributes(sampling: SamplingParams) -> Mapping[str, Attribute | None]:
    has_signed_seed = sampling.seed is None or sampling.seed <= _MAX_INT
    return {
        gen_ai.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_num_tokens,
        gen_ai.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        gen_ai.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        gen_ai.GEN_AI_REQUEST_TOP_K: sampling.top_k or None,
        gen_ai.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        gen_ai.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty or None,
        gen_ai.GEN_AI_REQUEST_SEED: sampling.seed if has_signed_seed else None,
        "jpaged.seed": None if has_signed_seed else str(sampling.seed),
        gen_ai.GEN_AI_REQUEST_CHOICE_COUNT: sampling.n,
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
