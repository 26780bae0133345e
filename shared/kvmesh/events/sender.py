"""The background thread of a publisher: sends what is queued, keeps it for replays, answers those and digests.

It owns every socket, and a turn of its loop sends a bounded number of batches, so that no kind of work starves another.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import zmq

from kvmesh.events.arrears import Arrears
from kvmesh.events.digests import DIGEST_REQUEST, answer_frames
from kvmesh.events.encoding import END_SEQUENCE, STATE_REQUEST, EventEncoding, encode_batch
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


class PublisherStatistics(msgspec.Struct):
    """What was sent and lost, in batches unless said otherwise."""

    published_total: int = 0
    dropped_total: int = 0
    """Not queued, because the queue was full."""
    send_failures_total: int = 0
    """Queued and not sent."""
    replays_total: int = 0
    digests_total: int = 0
    """Requests for digests that were answered."""
    malformed_requests_total: int = 0
    queued: int = 0
    events_total: int = 0


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
        self._published = published
        self._statistics = statistics
        self._arrears = Arrears()
        self._unanswered_total = 0
        self._last = -1
        """Number of the latest batch that ``_live`` has taken in."""
        self.lost: deque[QueuedBatch] = deque(maxlen=MAX_LOST_BATCHES)
        """Batches that were dropped: others append to it."""
        self.stopping = False
        """Set, then ``wake`` written: send what is queued, within :data:`SHUTDOWN_S`, and end."""

    def run(self) -> None:
        """Work until :attr:`stopping`."""
        sockets = self._sockets
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if sockets.replay is not None:
            poller.register(sockets.replay, zmq.POLLIN)
        if sockets.zap is not None:
            poller.register(sockets.zap.socket, zmq.POLLIN)
        try:
            while not self.stopping:
                # Without a queue only the wake-up and the sockets have anything to do, and each ends the wait.
                ready = dict(poller.poll(0 if self._queue else None))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._send_queued(BATCHES_A_TURN)
                if sockets.replay is not None and sockets.replay in ready:
                    self._answer_safely(sockets.replay)
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
                self._take_in_lost(sequence)
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

    def _take_in_lost(self, before: int) -> None:
        """What was dropped is true all the same."""
        while self.lost and self.lost[0].sequence < before:
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

    def _answer_safely(self, replay: zmq.Socket[bytes]) -> None:
        """What one request makes go wrong costs its reader an answer, and nobody the thread."""
        try:
            self._answer(replay)
        except Exception as error:
            self._unanswered_total += 1
            if self._unanswered_total & (self._unanswered_total - 1) == 0:
                _log.error("a request could not be answered", so_far=self._unanswered_total, exc_info=error)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """One request: ``[client, "", start]``, ``[client, "", "state"]`` or ``[client, "", "digest"]``."""
        frames = replay.recv_multipart()
        if len(frames) == 3 and not frames[1]:
            if len(frames[2]) == 8:
                self._replay(replay, frames[0], int.from_bytes(frames[2], "big"))
                return
            if frames[2] == STATE_REQUEST:
                self._tell_state(replay, frames[0])
                return
            if frames[2] == DIGEST_REQUEST and self._published is not None:
                self._tell_digests(replay, frames[0], self._published)
                return
        self._statistics.malformed_requests_total += 1
        malformed = self._statistics.malformed_requests_total
        if malformed & (malformed - 1) == 0:
            _log.warning("malformed replay requests ignored", frames=len(frames), so_far=malformed)

    def _tell_state(self, replay: zmq.Socket[bytes], client: bytes) -> None:
        """Everything that is held, under the number of the last batch that it covers, be that one sent or lost.

        That batch itself follows, where it is kept: by it the reader will know this publisher again.
        """
        self._take_in_lost(self._queue[0].sequence if self._queue else END_SEQUENCE)
        batch = EventBatch(time.time(), list(self._live.events()), self._rank)
        state = [(self._last, encode_batch(batch, self._encoding))] if self._last >= 0 else []
        last = [kept for kept in self._kept if kept[0] == self._last]
        self._send_kept(replay, client, [*state, *last])

    def _replay(self, replay: zmq.Socket[bytes], client: bytes, first: int) -> None:
        self._send_kept(replay, client, [kept for kept in self._kept if kept[0] >= first])

    def _send_kept(self, replay: zmq.Socket[bytes], client: bytes, batches: Iterable[tuple[int, bytes]]) -> None:
        self._statistics.replays_total += 1
        try:
            for sequence, payload in batches:
                frames = [client, b"", self._topic, sequence.to_bytes(8, "big"), payload]
                replay.send_multipart(frames, zmq.NOBLOCK)
            replay.send_multipart([client, b"", b"", END_SEQUENCE.to_bytes(8, "big"), b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.warning("replay broken off: the reader does not read", error=str(error))

    def _tell_digests(self, replay: zmq.Socket[bytes], client: bytes, published: PublishedSet) -> None:
        self._statistics.digests_total += 1
        try:
            replay.send_multipart([client, *answer_frames(*published.answer())], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.warning("a digest could not be told: the reader does not read", error=str(error))
