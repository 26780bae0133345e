"""One trace per request across every process: W3C trace context and spans made from recorded times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvmesh.telemetry import exemplars

__all__ = ["Tracing"]

AttributeValue = str | bool | int | float

_propagator = TraceContextTextMapPropagator()
FLUSH_TIMEOUT_MS = 2000
"""How long a stopping process waits for its last spans to be sent."""


class Tracing:
    """The tracer of one process.

    Without an exporter no span is recorded, yet trace ids are made and passed on, so that a log line and a
    neighbour that does export still agree on them.
    """

    def __init__(self, service: str, *, instance_id: str = "", exporter: SpanExporter | None = None) -> None:
        resource = Resource.create({"service.name": f"kvmesh-{service}", "service.instance.id": instance_id})
        if exporter is None:
            self._provider = TracerProvider(
                resource=resource, sampler=ParentBased(ALWAYS_OFF, remote_parent_sampled=ALWAYS_OFF)
            )
        else:
            self._provider = TracerProvider(resource=resource)
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.enabled = exporter is not None
        self._tracer = self._provider.get_tracer("kvmesh")

    @classmethod
    def configure(cls, service: str, *, instance_id: str = "", otlp_endpoint: str | None = None) -> Tracing:
        """Export to an OTLP/HTTP collector (e.g. ``http://localhost:4318``) when one is given."""
        if not otlp_endpoint:
            return cls(service, instance_id=instance_id)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        url = otlp_endpoint.rstrip("/")
        if not url.endswith("/v1/traces"):
            url += "/v1/traces"
        return cls(service, instance_id=instance_id, exporter=OTLPSpanExporter(endpoint=url))

    def extract(self, headers: Mapping[str, str]) -> Context:
        """The caller's context from ``traceparent`` and ``tracestate`` headers (W3C Trace Context)."""
        return _propagator.extract({key.lower(): value for key, value in headers.items()})

    def headers(self, context: Context) -> dict[str, str]:
        """Headers that hand ``context`` to the next hop."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, context)
        return carrier

    @contextmanager
    def span(
        self, name: str, parent: Context, *, kind: SpanKind = SpanKind.INTERNAL, **attributes: AttributeValue
    ) -> Iterator[tuple[Span, Context]]:
        """A span around a ``with`` block; gives the span and the context below it. An exception marks it failed.

        One of kind ``SERVER`` becomes the exemplar of what is measured of its request.
        """
        span = self._tracer.start_span(name, parent, kind=kind, attributes=attributes)
        if kind is SpanKind.SERVER:
            exemplars.note(span)
        try:
            yield span, trace.set_span_in_context(span, parent)
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            span.end()

    def record(self, name: str, parent: Context, start_ns: int, end_ns: int, **attributes: AttributeValue) -> Context:
        """A span that has already happened, from times another process wrote down (Unix nanoseconds).

        Returns:
            The context below it, for spans of its parts; ``parent`` where there is no such span.
        """
        if not self.enabled or not start_ns or end_ns < start_ns:
            return parent
        span = self._tracer.start_span(name, parent, start_time=start_ns, attributes=attributes)
        span.end(end_ns)
        return trace.set_span_in_context(span, parent)

    def close(self) -> None:
        """Send what is left, within :data:`FLUSH_TIMEOUT_MS`."""
        if self.enabled:
            self._provider.force_flush(FLUSH_TIMEOUT_MS)
        self._provider.shutdown()
