"""Optional OpenTelemetry traces, from the poll that notices something to the post that answers it.

On when OTEL_EXPORTER_OTLP_ENDPOINT is set and the extra `otel` is installed. A task is a span; the headers of the
messages that it sends name it as the parent. Spans say which thread they are about, never what is said there.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

#: OpenTelemetry's own variable: where spans are sent, by OTLP over HTTP.
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
#: The header of W3C Trace Context.
PARENT_HEADER = "traceparent"
#: Ticks of the scheduler, several each second. What they find begins a trace of its own.
UNTRACED = ("fleet.poll", "fleet.reconcile")


@functools.cache
def _tracer() -> Any:
    """Return this process's tracer, None when nothing is traced. Its exporter's thread begins with the first task."""
    if not os.environ.get(ENDPOINT):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("nothing is traced: %s is set, but the extra `otel` is not installed", ENDPOINT)
        return None
    name = os.environ.get("OTEL_SERVICE_NAME", "blobhub-fleet")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("fleet")


def headers() -> dict[str, str]:
    """Return the headers by which a task message names the present span as its parent."""
    if _tracer() is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {PARENT_HEADER: carrier[PARENT_HEADER]} if PARENT_HEADER in carrier else {}


@contextmanager
def span(name: str, parent: object, about: Mapping[str, str | int]) -> Iterator[None]:
    """Trace a task below the span that its message names in PARENT_HEADER, `parent`."""
    if _tracer() is None or name in UNTRACED:
        yield
        return
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({PARENT_HEADER: str(parent or "")})
    attributes = {f"fleet.{key}": value for key, value in about.items()}
    with _tracer().start_as_current_span(
        name, context, SpanKind.CONSUMER, attributes, record_exception=False, set_status_on_exception=False
    ) as begun:
        try:
            yield
        except Exception as error:
            begun.set_status(Status(StatusCode.ERROR, type(error).__name__))  # its words may quote somebody
            raise
