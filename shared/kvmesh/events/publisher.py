"""Sends event batches over ZMQ and replays the last ones; never makes the engine wait.

One background thread owns both sockets. The executor numbers a batch and leaves it in a bounded queue; when the queue
is full the batch is dropped, and its number stays unused, so that every reader sees the hole.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import zmq

from kvmesh.events.encoding import END_SEQUENCE, EventEncoding, encode_batch
from kvmesh.net.address import reachable_endpoint
from kvmesh.net.faults import fault_point
from kvmesh.protocol.events import EventBatch, KvEvent
from kvmesh.telemetry import get_logger

__all__ = ["EventPublisher", "NullPublisher", "PublisherStatistics", "ZmqPublisher"]

SHUTDOWN_S = 1.0
"""How long a stopping publisher may still send what is queued."""

_log = get_logger("events")


class PublisherStatistics(msgspec.Struct):
    """What was sent and lost, in batches unless said otherwise."""

    published_total: int = 0
    dropped_total: int = 0
    send_failures_total: int = 0
    replays_total: int = 0
    queued: int = 0
    events_total: int = 0


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


class _Batch(NamedTuple):
    sequence: int
    batch: EventBatch


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
        self._sequence = 0
        self._queue: deque[_Batch] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._statistics = PublisherStatistics()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake = -1

    def start(self) -> None:
        """See :meth:`EventPublisher.start`.

        Raises:
            OSError: an endpoint cannot be bound; nothing stays open.
        """
        if self._thread is not None:
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets: list[zmq.Socket[bytes]] = []
        try:
            stream = context.socket(zmq.PUB)
            sockets.append(stream)
            stream.set_hwm(self._hwm)
            stream.linger = 0
            self.endpoint = _bind(stream, self._bind)
            if not self.topic and self._topic_model is not None:
                self.topic = f"kv@{self.endpoint.partition('://')[2]}@{self._topic_model}"
            replay = None
            if self._bind_replay is not None:
                replay = context.socket(zmq.ROUTER)
                sockets.append(replay)
                replay.linger = 0
                # A whole replay fits one reader's queue. Who asks again without reading is broken off, not waited for;
                # without ROUTER_MANDATORY the rest would be thrown away and its end still promised.
                replay.sndhwm = self._buffer_steps + 1
                replay.router_mandatory = True
                self.replay_endpoint = _bind(replay, self._bind_replay)
        except zmq.ZMQError as error:
            for socket in sockets:
                socket.close()
            context.term()
            raise OSError(f"cannot publish KV events: {error}") from error
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=(context, stream, replay), name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> bool:
        """See :meth:`EventPublisher.publish`."""
        if not events:
            return True
        # The number is taken before the queue is tried: a dropped batch must leave a hole.
        sequence = self._sequence
        self._sequence += 1
        if len(self._queue) >= self._max_queue_size or self._thread is None:
            self._statistics.dropped_total += 1
            dropped = self._statistics.dropped_total
            if dropped & (dropped - 1) == 0:
                _log.warning("KV event batches dropped: the queue is full", dropped=dropped, queue=len(self._queue))
            return False
        self._statistics.events_total += len(events)
        self._queue.append(_Batch(sequence, EventBatch(time.time(), list(events), self._rank)))
        os.eventfd_write(self._wake, 1)
        return True

    def shutdown(self) -> None:
        """See :meth:`EventPublisher.shutdown`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        thread.join(SHUTDOWN_S + 1.0)
        os.close(self._wake)

    def statistics(self) -> PublisherStatistics:
        """See :meth:`EventPublisher.statistics`."""
        return msgspec.structs.replace(self._statistics, queued=len(self._queue))

    def _run(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        stream: zmq.Socket[bytes],
        replay: zmq.Socket[bytes] | None,
    ) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if replay is not None:
            poller.register(replay, zmq.POLLIN)
        try:
            while not self._stopping:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._send_queued(stream, None)
                if replay is not None and replay in ready:
                    self._answer(replay)
            self._send_queued(stream, time.monotonic() + SHUTDOWN_S)
        finally:
            stream.close(linger=int(SHUTDOWN_S * 1000))
            if replay is not None:
                replay.close()
            context.term()

    def _send_queued(self, stream: zmq.Socket[bytes], until_s: float | None) -> None:
        topic = self.topic.encode()
        while self._queue and (until_s is None or time.monotonic() < until_s):
            sequence, batch = self._queue.popleft()
            fault_point("events.before_send")
            payload = encode_batch(batch, self._encoding)
            try:
                stream.send_multipart([topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            except zmq.ZMQError:
                self._statistics.send_failures_total += 1  # a hole, which readers repair by replay
                continue
            self._kept.append((sequence, payload))
            self._statistics.published_total += 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            _log.warning("malformed replay request ignored", frames=len(frames))
            return
        client, _, start = frames
        first = int.from_bytes(start, "big")
        topic = self.topic.encode()
        self._statistics.replays_total += 1
        try:
            for sequence, payload in self._kept:
                if sequence >= first:
                    replay.send_multipart([client, b"", topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            replay.send_multipart([client, b"", b"", END_SEQUENCE.to_bytes(8, "big"), b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.warning("replay broken off: the reader does not read", error=str(error))


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind, and give the endpoint that others connect to."""
    socket.bind(endpoint)
    return reachable_endpoint(endpoint, str(socket.get_string(zmq.LAST_ENDPOINT)))
