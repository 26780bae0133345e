"""The trace of the request that is being served: the exemplar that leads from a slow bucket to one of its requests."""

from __future__ import annotations

from contextvars import ContextVar

from opentelemetry.trace import Span, format_trace_id

__all__ = ["begin", "current", "note"]

_current: ContextVar[dict[str, str] | None] = ContextVar("kvmesh_exemplar", default=None)


def begin() -> None:
    """A request comes in; what the task served before is none of its business."""
    _current.set(None)


def note(span: Span) -> None:
    """The request's span. One that is not recorded is no exemplar: nobody could find it."""
    if span.is_recording():
        _current.set({"trace_id": format_trace_id(span.get_span_context().trace_id)})


def current() -> dict[str, str] | None:
    """Labels for ``Histogram.observe(..., exemplar)``; None where the request is not traced."""
    return _current.get()
