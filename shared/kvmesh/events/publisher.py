"""Sends event batches over ZMQ and replays the last ones; never makes the engine wait.

The engine's thread numbers a batch and leaves it in a bounded queue, from which ``sender``'s thread takes it. When the
queue is full the batch is dropped, and its number stays unused, so that every reader sees the hole.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from kvmesh.events.arrears import Arrears
from kvmesh.events.encoding import END_SEQUENCE, EventEncoding
from kvmesh.events.published import PublishedSet
from kvmesh.events.sender import SHUTDOWN_S, BatchSender, PublisherStatistics, QueuedBatch, SenderSockets
from kvmesh.net.address import BindError, choose_family, reachable_endpoint
from kvmesh.net.curve import CurveSecurity
from kvmesh.net.zap import ZapServer
from kvmesh.protocol.events import EventBatch, KvEvent
from kvmesh.telemetry import get_logger

__all__ = ["EventPublisher", "NullPublisher", "PublisherStatistics", "ZmqPublisher"]

_log = get_logger("events")


class EventPublisher(Protocol):
    """Where a step's events go."""

    endpoint: str | None
    """What subscribers connect to; None when nothing is published."""
    replay_endpoint: str | None

    def start(self) -> None:
        """Bind and begin. Idempotent."""

    def publish(self, events: Sequence[KvEvent]) -> bool:
        """Send one batch; False when it was dropped. Never waits. An empty batch is not sent."""

    def shutdown(self) -> None:
        """Send what is queued, within a second, and free the ports. Idempotent, also when never started."""

    def statistics(self) -> PublisherStatistics:
        """Counters since construction."""


class NullPublisher:
    """Publishes nothing."""

    endpoint: str | None = None
    replay_endpoint: str | None = None

    def start(self) -> None:
        """See :meth:`EventPublisher.start`."""

    def publish(self, events: Sequence[KvEvent]) -> bool:
        """See :meth:`EventPublisher.publish`."""
        return not events

    def shutdown(self) -> None:
        """See :meth:`EventPublisher.shutdown`."""

    def statistics(self) -> PublisherStatistics:
        """See :meth:`EventPublisher.statistics`."""
        return PublisherStatistics()


class ZmqPublisher:
    """A PUB socket for the stream and a ROUTER for replays.

    Args:
        endpoint: what to bind for the stream, already this rank's.
        replay_endpoint: what to bind for replays, or None.
        topic: first frame of every message.
        topic_model: when given and ``topic`` is empty, the topic is ``kv@HOST:PORT@MODEL`` (llm-d's form).
        hwm: high-water mark of the PUB socket, in messages.
        max_queue_size: batches that may wait for the thread.
        buffer_steps: batches kept for replay.
        data_parallel_rank: told in every batch.
        encoding: of the events.
        published: digests of what is told, for readers that ask.
        security: keys of both sockets; None: they are plain.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        topic_model: str | None = None,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        buffer_steps: int = 10_000,
        data_parallel_rank: int | None = 0,
        encoding: EventEncoding = "map",
        published: PublishedSet | None = None,
        security: CurveSecurity | None = None,
    ) -> None:
        self.endpoint: str | None = None
        self.replay_endpoint: str | None = None
        self._bind = endpoint
        self._bind_replay = replay_endpoint
        self.topic = topic
        self._topic_model = topic_model
        self._hwm = hwm
        self._max_queue_size = max_queue_size
        self._buffer_steps = buffer_steps
        self._rank = data_parallel_rank
        self._encoding: EventEncoding = encoding
        self._published = published
        self._security = security
        self._sequence = 0
        """Of the next batch."""
        self._queue: deque[QueuedBatch] = deque()
        self._arrears = Arrears()
        self._statistics = PublisherStatistics()
        self._sender: BatchSender | None = None
        self._thread: threading.Thread | None = None
        self._wake = -1

    def start(self) -> None:
        """See :meth:`EventPublisher.start`.

        Raises:
            OSError: an endpoint cannot be bound; nothing stays open.
        """
        if self._thread is not None:
            return
        sockets = self._open()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sender = BatchSender(
            sockets,
            self._queue,
            self._wake,
            topic=self.topic,
            encoding=self._encoding,
            data_parallel_rank=self._rank,
            buffer_steps=self._buffer_steps,
            published=self._published,
            statistics=self._statistics,
        )
        self._thread = threading.Thread(target=self._sender.run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> bool:
        """See :meth:`EventPublisher.publish`."""
        if not events:
            return True
        # The number is taken before the queue is tried: a dropped batch must leave a hole.
        sequence = self._take_number()
        if len(self._queue) >= self._max_queue_size or self._thread is None:
            self._drop(sequence, events)
            return False
        self._enqueue(sequence, [*self._arrears.take(), *events] if self._arrears else list(events))
        return True

    def shutdown(self) -> None:
        """See :meth:`EventPublisher.shutdown`."""
        thread, self._thread = self._thread, None
        if thread is None or self._sender is None:
            return
        if self._arrears:
            # Nobody waits for the engine any more, so these find room beyond the queue's bound.
            self._enqueue(self._take_number(), self._arrears.take())
        self._sender.stopping = True
        os.eventfd_write(self._wake, 1)
        # Twice: the queue has its time, and then what the socket holds.
        thread.join(2 * SHUTDOWN_S)
        if not thread.is_alive():
            os.close(self._wake)

    def statistics(self) -> PublisherStatistics:
        """See :meth:`EventPublisher.statistics`."""
        return msgspec.structs.replace(self._statistics, queued=len(self._queue))

    def _take_number(self) -> int:
        sequence = self._sequence
        # The highest number closes replays; after all the others a reader sees what a restart looks like.
        self._sequence = (sequence + 1) % END_SEQUENCE
        if self._published is not None:
            self._published.commit(sequence)
        return sequence

    def _enqueue(self, sequence: int, events: list[KvEvent]) -> None:
        self._statistics.events_total += len(events)
        self._queue.append(QueuedBatch(sequence, EventBatch(time.time(), events, self._rank)))
        os.eventfd_write(self._wake, 1)

    def _drop(self, sequence: int, events: Sequence[KvEvent]) -> None:
        self._arrears.note(events)
        if self._sender is not None:
            self._sender.lost.append(QueuedBatch(sequence, EventBatch(time.time(), list(events), self._rank)))
        self._statistics.dropped_total += 1
        dropped = self._statistics.dropped_total
        if dropped & (dropped - 1) == 0:
            reason = "the publisher is not running" if self._thread is None else "the queue is full"
            _log.warning(f"KV event batches dropped: {reason}", dropped=dropped, queue=len(self._queue))

    def _open(self) -> SenderSockets:
        # Inside one process only sockets of one context find each other.
        shares = any(bind is not None and bind.startswith("inproc://") for bind in (self._bind, self._bind_replay))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance() if shares else zmq.Context()
        opened: list[zmq.Socket[bytes] | ZapServer] = []
        try:
            zap = None
            if self._security is not None:
                zap = ZapServer(context, self._security)
                opened.append(zap)
            stream = context.socket(zmq.PUB)
            opened.append(stream)
            stream.set_hwm(self._hwm)
            stream.linger = 0
            self.endpoint = self._bind_socket(stream, self._bind, "endpoint")
            if not self.topic and self._topic_model is not None:
                self.topic = f"kv@{self.endpoint.partition('://')[2]}@{self._topic_model}"
            replay = None
            if self._bind_replay is not None:
                replay = context.socket(zmq.ROUTER)
                opened.append(replay)
                replay.linger = 0
                # A whole replay fits one reader's queue. Who asks again without reading is broken off, not waited for;
                # without ROUTER_MANDATORY the rest would be thrown away and its end still promised.
                replay.sndhwm = self._buffer_steps + 2
                replay.router_mandatory = True
                self.replay_endpoint = self._bind_socket(replay, self._bind_replay, "replay_endpoint")
        except (OSError, zmq.ZMQError) as error:
            for each in opened:
                each.close()
            if not shares:
                context.term()
            raise OSError(f"cannot publish KV events: {error}") from error
        return SenderSockets(context, stream, replay, zap, shares)

    def _bind_socket(self, socket: zmq.Socket[bytes], endpoint: str, setting: str) -> str:
        """Bind, and give the endpoint that others connect to."""
        if self._security is not None:
            self._security.apply_server(socket)
        choose_family(socket, endpoint)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            # With the rank that the port counts up from its base.
            raise BindError(f"kv_cache_config.kv_events_config.{setting}", endpoint, error.errno or 0) from error
        return reachable_endpoint(endpoint, str(socket.get_string(zmq.LAST_ENDPOINT)))
