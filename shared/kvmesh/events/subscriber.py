"""Follows one publisher: live stream, replay of what was missed, restarts; gives a sequence that can be applied.

The reader hears :class:`Reset` whenever what it knew about the publisher is worth nothing, and then everything that the
publisher still keeps. Losses are never passed over in silence.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import NamedTuple, Self

import anyio
import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvmesh.events.decoding import DecodedBatch, PayloadError, decode_payload
from kvmesh.events.tracking import Arrival, SequenceTracker
from kvmesh.telemetry import get_logger

__all__ = ["Batch", "EventSubscriber", "Reset", "SubscriberStatistics"]

REPLAY_SILENCE_S = 2.0
"""Longest pause between two messages of a replay; after it the replay counts as failed."""
REPLAY_RETRY_S = 30.0
"""After a failed replay the next is not tried sooner: a publisher without the service must not be asked at each gap."""
_END = 2**64 - 1

_log = get_logger("events.subscriber")


class Reset(NamedTuple):
    """Everything known about this publisher is void."""

    reason: str


class Batch(NamedTuple):
    """Events to apply, in order."""

    sequence: int
    topic: str
    decoded: DecodedBatch


class SubscriberStatistics(msgspec.Struct):
    """What one subscription has been through."""

    batches_total: int = 0
    duplicates_total: int = 0
    gaps_total: int = 0
    replays_total: int = 0
    replay_failures_total: int = 0
    restarts_total: int = 0
    reconnections_total: int = 0
    resets_total: int = 0
    unreadable_total: int = 0


class EventSubscriber:
    """An async context manager around one subscription; iterate :meth:`items`.

    Args:
        endpoint: of the publisher's stream.
        replay_endpoint: of its replay service, None when it has none.
        topic: prefix to subscribe to.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._context: zmq.asyncio.Context | None = None
        self._stream: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._lost = False
        self._tracker = SequenceTracker()
        self._no_replay_before_s = 0.0
        self.statistics = SubscriberStatistics()

    async def __aenter__(self) -> Self:
        """Connect; does not wait for the publisher."""
        self._context = zmq.asyncio.Context()
        self._stream = self._context.socket(zmq.SUB)
        self._stream.set_hwm(0)
        self._stream.linger = 0
        monitored = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self._stream.get_monitor_socket(monitored)
        self._stream.connect(self._endpoint)
        self._stream.subscribe(self._topic.encode())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect."""
        if self._stream is not None:
            self._stream.disable_monitor()
            self._stream.close()
        if self._monitor is not None:
            self._monitor.close()  # a context with an open socket never ends
        if self._context is not None:
            self._context.term()

    async def items(self) -> AsyncIterator[Reset | Batch]:
        """What is to be applied, for ever. Begins with what the publisher still keeps."""
        assert self._stream is not None, "items() needs the async with block"
        async for kept in self._replayed(0):
            yield kept
        poller = zmq.asyncio.Poller()
        poller.register(self._stream, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            # First the connection's story: what a new connection brings may be another life's.
            if self._monitor in ready and await self._reconnected():
                self._tracker.restart()
                yield self._reset("the connection was lost and made again")
                async for kept in self._replayed(0):
                    yield kept
            if self._stream not in ready:
                continue
            frames = await self._stream.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != 8:
                self.statistics.unreadable_total += 1
                continue
            topic, number, payload = frames
            sequence = int.from_bytes(number, "big")
            async for item in self._live(sequence, topic, payload):
                yield item

    async def _reconnected(self) -> bool:
        """Whether the connection was made again after a loss.

        Sequence numbers alone cannot tell a publisher that has restarted and overtaken the old numbers meanwhile.
        """
        assert self._monitor is not None
        again = False
        while await self._monitor.poll(0):
            event = (await recv_monitor_message(self._monitor))["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._lost = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._lost:
                self._lost = False
                again = True
        self.statistics.reconnections_total += again
        return again

    async def _live(self, sequence: int, topic: bytes, payload: bytes) -> AsyncIterator[Reset | Batch]:
        arrival = self._tracker.arrive(sequence)
        if arrival is Arrival.RESTART:
            self.statistics.restarts_total += 1
            self._tracker.restart()
            yield self._reset("the publisher counts anew")
            async for kept in self._replayed(0):
                yield kept
            arrival = self._tracker.arrive(sequence)
        if arrival is Arrival.GAP:
            self.statistics.gaps_total += 1
            async for item in self._close_gap(sequence):
                yield item
            arrival = Arrival.NEXT if sequence > self._tracker.applied else Arrival.DUPLICATE
        if arrival is Arrival.DUPLICATE:
            self.statistics.duplicates_total += 1
        elif (live := self._batch(sequence, topic, payload)) is not None:
            yield live

    async def _close_gap(self, sequence: int) -> AsyncIterator[Reset | Batch]:
        """Bring the index to just before ``sequence``; resets when the missing part is not to be had."""
        first = self._tracker.applied + 1
        replayed = [item async for item in self._replayed(first)]
        if replayed and replayed[0].sequence == first and self._tracker.applied + 1 >= sequence:
            for item in replayed:
                yield item
            return
        if first == 0 and replayed:  # nothing was known, so nothing is lost: take what there is
            for item in replayed:
                yield item
            return
        yield self._reset(f"{sequence - first} batches are missing and cannot be replayed")
        self._tracker.applied = -1
        async for item in self._replayed(0):
            yield item

    async def _replayed(self, start: int) -> AsyncIterator[Batch]:
        """What the publisher keeps from ``start`` on; nothing when it cannot be asked."""
        if self._replay_endpoint is None or time.monotonic() < self._no_replay_before_s:
            return
        assert self._context is not None
        self.statistics.replays_total += 1
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.linger = 0
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while (message := await self._replay_message(socket)) is not None:
                sequence, topic, payload = message
                if sequence == _END or not payload:
                    return
                if sequence > self._tracker.applied and (batch := self._batch(sequence, topic, payload)) is not None:
                    yield batch
            self.statistics.replay_failures_total += 1
            self._no_replay_before_s = time.monotonic() + REPLAY_RETRY_S
            _log.warning("replay failed", endpoint=self._replay_endpoint, start=start)
        finally:
            socket.close()

    async def _replay_message(self, socket: zmq.asyncio.Socket) -> tuple[int, bytes, bytes] | None:
        with anyio.move_on_after(REPLAY_SILENCE_S):
            frames = await socket.recv_multipart()
            if frames and not frames[0]:
                frames = frames[1:]  # the delimiter
            if len(frames) < 2:
                return _END, b"", b""
            # Engines before mid-2026 leave the topic out.
            topic = frames[-3] if len(frames) > 2 else b""
            return int.from_bytes(frames[-2], "big"), topic, frames[-1]
        return None

    def _batch(self, sequence: int, topic: bytes, payload: bytes) -> Batch | None:
        self._tracker.apply(sequence)
        try:
            decoded = decode_payload(payload)
        except PayloadError as error:
            self.statistics.unreadable_total += 1
            _log.warning("unreadable batch left out", endpoint=self._endpoint, sequence=sequence, error=str(error))
            return None
        self.statistics.batches_total += 1
        self.statistics.unreadable_total += decoded.unreadable
        return Batch(sequence, topic.decode(errors="replace"), decoded)

    def _reset(self, reason: str) -> Reset:
        self.statistics.resets_total += 1
        return Reset(reason)
