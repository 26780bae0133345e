"""Publishers that connect to this side instead of being connected to: one bound socket for all of them."""

from __future__ import annotations

from kvmesh.events.listener import EventListener, StreamName
from kvmesh.events.ordered import OrderedStream
from kvmesh.events.reading import Reading

__all__ = ["ListenedStream", "named_by_topic"]

_TOPIC_PREFIX = "kv@"


class ListenedStream(Reading):
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
    def order(self) -> OrderedStream:
        """See :class:`Reading`."""
        return self._listener.streams.get(self.name, self._none)

    def resync(self, reason: str) -> None:
        """See :class:`Reading`."""
        self._listener.resync(self.name, reason)


def named_by_topic(topic: str) -> tuple[str, str] | None:
    """Instance and model from ``kv@INSTANCE@MODEL``, as llm-d's publishers call themselves; None for other topics."""
    if not topic.startswith(_TOPIC_PREFIX):
        return None
    instance, at, model = topic.removeprefix(_TOPIC_PREFIX).partition("@")
    return (instance, model) if instance and at and model else None
