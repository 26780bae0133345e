"""Publishers that connect to this side instead of being connected to: one bound socket for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvmesh.events.items import SubscriberStatistics
from kvmesh.events.listener import EventListener, StreamName
from kvmesh.events.ordered import OrderedStream
from kvmesh.events.watermark import Watermark

__all__ = ["ListenedStream", "Stream", "named_by_topic"]

_TOPIC_PREFIX = "kv@"


class Stream(Protocol):
    """What is known of a subscription, however it came about."""

    @property
    def connected(self) -> bool:
        """Whether the connection stands and nothing is missing."""

    @property
    def applied(self) -> int:
        """Sequence number of the last batch delivered, -1 before the first."""

    @property
    def watermark(self) -> Watermark | None:
        """Where a later subscription can resume."""

    @property
    def statistics(self) -> SubscriberStatistics:
        """What it has been through."""

    @property
    def rejected(self) -> Mapping[str, int]:
        """Rejected events by reason."""

    @property
    def dialects(self) -> Mapping[str, int]:
        """Events by the dialect they were written in."""

    def resync(self, reason: str) -> None:
        """Read everything anew."""


class ListenedStream:
    """A publisher of a listener; it need not have come yet.

    Args:
        listener: that it connects to.
        name: by which it is told from others.
    """

    def __init__(self, listener: EventListener, name: StreamName) -> None:
        self._listener = listener
        self.name = name
        self._none = OrderedStream(name.topic, None)

    @property
    def _ordered(self) -> OrderedStream:
        return self._listener.streams.get(self.name, self._none)

    @property
    def connected(self) -> bool:
        """See :class:`Stream`."""
        return self._ordered.connected

    @property
    def applied(self) -> int:
        """See :class:`Stream`."""
        return self._ordered.applied

    @property
    def watermark(self) -> Watermark | None:
        """See :class:`Stream`."""
        return self._ordered.watermark

    @property
    def statistics(self) -> SubscriberStatistics:
        """See :class:`Stream`."""
        return self._ordered.statistics

    @property
    def rejected(self) -> Mapping[str, int]:
        """See :class:`Stream`."""
        return self._ordered.rejected

    @property
    def dialects(self) -> Mapping[str, int]:
        """See :class:`Stream`."""
        return self._ordered.dialects

    def resync(self, reason: str) -> None:
        """See :class:`Stream`."""
        self._listener.resync(self.name, reason)


def named_by_topic(topic: str) -> tuple[str, str] | None:
    """Instance and model from ``kv@INSTANCE@MODEL``, as llm-d's publishers call themselves; None for other topics."""
    if not topic.startswith(_TOPIC_PREFIX):
        return None
    instance, at, model = topic.removeprefix(_TOPIC_PREFIX).partition("@")
    return (instance, model) if instance and at and model else None
