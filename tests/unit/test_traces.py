"""Needs the extra `otel`; without it, only that nothing is traced then."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from fleet import traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

needs_sdk = pytest.mark.skipif(importlib.util.find_spec("opentelemetry.sdk") is None, reason="no OpenTelemetry SDK")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The spans that have ended."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr(traces, "_tracer", lambda: tracer)
    return exporter.get_finished_spans


def test_without_an_endpoint_nothing_is_traced_and_a_message_has_no_parent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(traces.ENDPOINT, raising=False)
    traces._tracer.cache_clear()
    with traces.span("fleet.activate", PARENT, {"thread": "a"}):
        assert traces.headers() == {}


@needs_sdk
def test_what_a_task_nudges_is_traced_below_it(spans: Any):
    with traces.span("fleet.poll_sessions", None, {}):
        headers = traces.headers()
    with traces.span("fleet.activate", headers[traces.PARENT_HEADER], {"thread": "a/b", "epoch": 7}):
        pass
    first, second = spans()
    assert (first.parent, second.parent.span_id) == (None, first.context.span_id)
    assert first.context.trace_id == second.context.trace_id
    assert dict(second.attributes) == {"fleet.thread": "a/b", "fleet.epoch": 7}


@needs_sdk
def test_a_tick_of_the_scheduler_is_not_traced_and_no_parent_of_anything(spans: Any):
    with traces.span("fleet.poll", None, {}):
        assert traces.headers() == {}
    assert spans() == ()


@needs_sdk
@pytest.mark.parametrize("parent", ["", "nonsense", 7, "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 100_000])
def test_a_header_that_is_none_begins_a_trace_of_its_own(spans: Any, parent: object):
    with traces.span("fleet.activate", parent, {}):
        pass
    assert spans()[0].parent is None


@needs_sdk
def test_a_failure_is_told_by_its_kind_alone(spans: Any):
    with pytest.raises(ValueError, match="what somebody said"), traces.span("fleet.activate", None, {}):
        raise ValueError("what somebody said")
    (span,) = spans()
    assert (span.status.is_ok, span.status.description) == (False, "ValueError")
    assert "said" not in span.to_json()
