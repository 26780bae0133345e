"""The background thread of a publisher: sends what is queued, keeps it for replays, answers those and digests.

It owns every socket, and a turn of its loop sends a bounded number of batches, so that no kind of work starves another.
It runs beside the engine under Python's lock, so readers that ask get a share of a processor between them, not more.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from typing import NamedTuple

import msgspec
import zmq

from kvmesh.events.answers import Answers, PublisherStatistics
from kvmesh.events.arrears import Arrears
from kvmesh.events.encoding import END_SEQUENCE, EventEncoding, encode_batch
from kvmesh.events.live import LiveBlocks
from kvmesh.events.published import PublishedSet
from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.net.zap import ZapServer
from kvmesh.protocol.events import EventBatch
from kvmesh.telemetry import get_logger

__all__ = ["SHUTDOWN_S", "BatchSender", "PublisherStatistics", "QueuedBatch", "SenderSockets"]

SHUTDOWN_S = 1.0
"""How long a stopping publisher may still send what is queued."""

MAX_LOST_BATCHES = 1024
"""Batches that found no room in the queue and are still told to who asks for the state."""

BATCHES_A_TURN = 64
"""Sent before replays are looked at: some milliseconds."""

_SEND_ERRORS = (zmq.ZMQError, FaultInjectedError, msgspec.MsgspecError, OverflowError, TypeError, ValueError)

_log = get_logger("events")


class QueuedBatch(NamedTuple):
    """A batch with its number."""

    sequence: int
    batch: EventBatch


class SenderSockets(NamedTuple):
    """Bound, and of one context."""

    context: zmq.Context[zmq.Socket[bytes]]
    stream: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None
    zap: ZapServer | None
    shares_context: bool
    """Whether the context is the process's own, which others use, too."""

    def close(self, linger_ms: int = 0) -> None:
        """Close all of them, giving the stream so long to get rid of what it has."""
        self.stream.close(linger=linger_ms)
        if self.replay is not None:
            self.replay.close()
        if self.zap is not None:
            self.zap.close()
        if not self.shares_context:
            self.context.term()


class BatchSender:
    """What the thread does; :meth:`run` is its body.

    Args:
        sockets: closed at the end.
        queue: batches to send, oldest first; others append to it.
        wake: eventfd that is written after that.
        topic: first frame of every message.
        encoding: of the events.
        data_parallel_rank: told in every batch.
        buffer_steps: batches kept for replay.
        published: what digests are answered from.
        statistics: the fields that the thread counts.
    """

    def __init__(
        self,
        sockets: SenderSockets,
        queue: deque[QueuedBatch],
        wake: int,
        *,
        topic: str,
        encoding: EventEncoding,
        data_parallel_rank: int | None,
        buffer_steps: int,
        published: PublishedSet | None,
        statistics: PublisherStatistics,
    ) -> None:
        self._sockets = sockets
        self._queue = queue
        self._wake = wake
        self._topic = topic.encode()
        self._encoding: EventEncoding = encoding
        self._rank = data_parallel_rank
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._live = LiveBlocks()
        self._statistics = statistics
        self._arrears = Arrears()
        self._answers: Answers | None = None
        if sockets.replay is not None:
            self._answers = Answers(
                sockets.replay,
                self._topic,
                kept=self._kept,
                state=self._state,
                published=published,
                statistics=statistics,
            )
        self._last = -1
        """Number of the latest batch that ``_live`` has taken in."""
        self.lost: deque[QueuedBatch] = deque(maxlen=MAX_LOST_BATCHES)
        """Batches that were dropped: others append to it."""
        self.stopping = False
        """Set, then ``wake`` written: send what is queued, within :data:`SHUTDOWN_S`, and end."""

    def run(self) -> None:
        """Work until :attr:`stopping`."""
        sockets, answers = self._sockets, self._answers
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if sockets.zap is not None:
            poller.register(sockets.zap.socket, zmq.POLLIN)
        try:
            while not self.stopping:
                rest_s = 0.0 if answers is None else answers.rest_s()
                if sockets.replay is not None:
                    poller.register(sockets.replay, 0 if rest_s else zmq.POLLIN)
                ready = dict(poller.poll(self._wait_ms(rest_s)))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._send_queued(BATCHES_A_TURN)
                if answers is not None and not rest_s and (answers.waiting or sockets.replay in ready):
                    answers.answer_next()
                if sockets.zap is not None and sockets.zap.socket in ready:
                    sockets.zap.answer()
            end_s = time.monotonic() + SHUTDOWN_S
            while self._queue and time.monotonic() < end_s:
                self._send_queued(1)
        finally:
            sockets.close(linger_ms=int(SHUTDOWN_S * 1000))

    def _send_queued(self, limit: int) -> None:
        for _ in range(limit):
            if not self._queue:
                return
            sequence, batch = self._queue.popleft()
            try:
                self._take_in_lost(len(self.lost), sequence)
                if self._arrears:
                    batch.events[:0] = self._arrears.take()
                batch.events = self._live.take_in(batch.events)
                self._last = sequence
                fault_point("events.before_send")
                payload = encode_batch(batch, self._encoding)
                self._sockets.stream.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            except Exception as error:  # without this thread nobody would hear of anything any more
                self._failed(batch, error)
                continue
            self._kept.append((sequence, payload))
            self._statistics.published_total += 1

    def _take_in_lost(self, count: int, before: int) -> None:
        """What was dropped is true all the same: of the oldest so many batches, those before a number."""
        for _ in range(count):
            if not self.lost or self.lost[0].sequence >= before:
                return
            self._last, batch = self.lost.popleft()
            self._live.take_in(batch.events)

    def _failed(self, batch: EventBatch, error: Exception) -> None:
        """A hole: readers see it by the number. It is not kept for replays, for nobody could have had it."""
        self._arrears.note(batch.events)
        self._statistics.send_failures_total += 1
        failures = self._statistics.send_failures_total
        if failures & (failures - 1) == 0:
            expected = isinstance(error, _SEND_ERRORS)
            _log.warning(
                "KV event batches could not be sent",
                failures=failures,
                error=str(error),
                exc_info=None if expected else error,
            )

    def _wait_ms(self, rest_s: float) -> int | None:
        """How long the loop may sleep; the wake-up and the sockets that are looked at end that, too."""
        if self._queue or (not rest_s and self._answers is not None and self._answers.waiting):
            return 0
        return math.ceil(rest_s * 1000) if rest_s else None

    def _state(self) -> list[tuple[int, bytes]]:
        """Everything that is held, under the number of the last batch that it covers, be that one sent or lost.

        That batch itself follows, where it is kept: by it the reader will know this publisher again.
        """
        # The engine's thread goes on meanwhile. What it has put into the queue before it lost a batch is there by now.
        count = len(self.lost)
        self._take_in_lost(count, self._queue[0].sequence if self._queue else END_SEQUENCE)
        batch = EventBatch(time.time(), list(self._live.events()), self._rank)
        state = [(self._last, encode_batch(batch, self._encoding))] if self._last >= 0 else []
        return [*state, *(kept for kept in self._kept if kept[0] == self._last)]
