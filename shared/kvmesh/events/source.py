"""What the executor holds of KV events: a sink for the cache, one call after each step, and what was collected."""

from __future__ import annotations

import msgspec

from kvmesh.cache.events import EventSink
from kvmesh.events.buffer import EventBuffer, LatestEvents
from kvmesh.events.buffered import BufferedSink
from kvmesh.events.gather import EventGatherer
from kvmesh.events.names import EventHashAlgo
from kvmesh.events.publisher import EventPublisher
from kvmesh.events.sink import StreamSink

__all__ = ["BufferedSource", "EventSource", "EventStatistics", "StreamSource"]


class EventStatistics(msgspec.Struct):
    """What was told since the start. ``blocks`` are those of all layer groups that are told."""

    published_total: int = 0
    """Batches sent to subscribers."""
    dropped_total: int = 0
    """Batches that were not: the queue was full, or they could not be sent."""
    blocks_stored_total: int = 0
    blocks_removed_total: int = 0
    blocks_moved_total: int = 0
    """Moves between levels; in the buffered path also changes of priority."""
    blocks_suppressed_total: int = 0
    """Left out of the stream: not full, not covered, or after such a block."""
    blocks_non_target_total: int = 0
    """Left out of the stream: of another layer group."""
    blocks_dropped_total: int = 0
    """Left out of the stream: above the most that one step may tell."""
    buffered: int = 0
    """Events that wait to be fetched."""
    buffered_total: int = 0
    """Events that were put into the buffer or made room before."""
    buffer_dropped_total: int = 0
    """Events that made room for newer ones before anybody had them."""


class EventSource:
    """A source that tells nothing: events are off.

    Args:
        hash_algo: how blocks would be named (``/server_info`` says it either way).
    """

    def __init__(self, hash_algo: EventHashAlgo) -> None:
        self.hash_algo = hash_algo

    @property
    def sink(self) -> EventSink | None:
        """What the cache manager tells; None: it collects nothing."""
        return None

    @property
    def endpoint(self) -> str | None:
        """What subscribers connect to, once started; None when nothing is published."""
        return None

    @property
    def replay_endpoint(self) -> str | None:
        """Where lost batches are asked for."""
        return None

    def start(self) -> None:
        """Bind the ports.

        Raises:
            OSError: one of them is taken.
        """

    def flush(self) -> None:
        """A step is over: pass on what it changed, if anything. Never waits."""

    def due_in_s(self) -> float | None:
        """Seconds until :meth:`flush` must be called although nothing happens, None when it need not be."""
        return None

    def fetch(self, confirmed: int) -> LatestEvents:
        """The buffered events; see :meth:`~kvmesh.events.buffer.EventBuffer.get_latest_events`. Never waits."""
        return LatestEvents(confirmed, [])

    def shutdown(self) -> None:
        """Flush and free the ports."""

    def statistics(self) -> EventStatistics:
        """Counters since construction."""
        return EventStatistics()


class StreamSource(EventSource):
    """The streaming path."""

    def __init__(self, hash_algo: EventHashAlgo, sink: StreamSink, publisher: EventPublisher) -> None:
        super().__init__(hash_algo)
        self._sink = sink
        self._publisher = publisher

    @property
    def sink(self) -> EventSink:
        """See :class:`EventSource`."""
        return self._sink

    @property
    def endpoint(self) -> str | None:
        """See :class:`EventSource`."""
        return self._publisher.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """See :class:`EventSource`."""
        return self._publisher.replay_endpoint

    def start(self) -> None:
        """See :class:`EventSource`."""
        self._publisher.start()

    def flush(self) -> None:
        """See :class:`EventSource`."""
        self._publisher.publish(self._sink.take())

    def shutdown(self) -> None:
        """See :class:`EventSource`."""
        self.flush()
        self._publisher.shutdown()

    def statistics(self) -> EventStatistics:
        """See :class:`EventSource`."""
        sent, told = self._publisher.statistics(), self._sink.statistics
        return EventStatistics(
            published_total=sent.published_total,
            dropped_total=sent.dropped_total + sent.send_failures_total,
            blocks_stored_total=told.stored_total,
            blocks_removed_total=told.removed_total,
            blocks_moved_total=told.moved_total,
            blocks_suppressed_total=told.suppressed_total,
            blocks_non_target_total=told.non_target_total,
            blocks_dropped_total=told.dropped_total,
        )


class BufferedSource(EventSource):
    """The buffered path: events wait until they are fetched."""

    def __init__(
        self, hash_algo: EventHashAlgo, sink: BufferedSink, gatherer: EventGatherer, buffer: EventBuffer
    ) -> None:
        super().__init__(hash_algo)
        self._sink = sink
        self._gatherer = gatherer
        self._buffer = buffer

    @property
    def sink(self) -> EventSink:
        """See :class:`EventSource`."""
        return self._sink

    def flush(self) -> None:
        """See :class:`EventSource`."""
        self._gatherer.flush(self._sink.take())

    def due_in_s(self) -> float | None:
        """See :class:`EventSource`."""
        return self._gatherer.due_in_s()

    def fetch(self, confirmed: int) -> LatestEvents:
        """See :class:`EventSource`."""
        return self._buffer.get_latest_events(0.0, confirmed=confirmed)

    def statistics(self) -> EventStatistics:
        """See :class:`EventSource`."""
        told = self._sink.statistics
        return EventStatistics(
            blocks_stored_total=told.stored_blocks_total,
            blocks_removed_total=told.removed_blocks_total,
            blocks_moved_total=told.updated_blocks_total,
            buffered=len(self._buffer),
            buffered_total=told.events_total,
            buffer_dropped_total=self._buffer.dropped_total + self._gatherer.dropped_total,
        )
