"""Follows one publisher by connecting to it: live stream, replay of what was missed, restarts, lost connections."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import anyio.lowlevel
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvmesh.events.items import Batch, Connected, Deliver, Disconnected, Reset, SubscriberStatistics
from kvmesh.events.keyed import KeyRingPart
from kvmesh.events.ordered import OrderedStream
from kvmesh.events.polling import readable, receive
from kvmesh.events.reading import Reading
from kvmesh.events.replay import REPLAY_SILENCE_S, KeptBatch, ReplayService
from kvmesh.events.watermark import Watermark
from kvmesh.net.address import choose_family
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.curve import CurveSecurity
from kvmesh.telemetry import get_logger

__all__ = [
    "Batch",
    "Connected",
    "Deliver",
    "Disconnected",
    "EventSubscriber",
    "Reset",
    "SubscriberStatistics",
    "Watermark",
]

BURST_S = 0.001
"""How long messages are worked off before other tasks get a turn."""

STREAM_QUEUE = 10_000
"""Live messages that wait here, during a replay for example; more of them wait at the publisher."""

HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
"""A publisher that vanished without a word (power, network) counts as disconnected after this."""

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED

_log = get_logger("events.subscriber")


class EventSubscriber(Reading):
    """One subscription; :meth:`run` it for as long as it is wanted.

    Args:
        endpoint: of the publisher's stream.
        replay_endpoint: of its replay service, None when it has none.
        context: of the sockets; one a process is enough.
        topic: prefix to subscribe to.
        clock: of the cooldown and the confirmation.
        replay_silence_s: longest pause between two answers of a replay.
        resume_from: :attr:`watermark` of an earlier subscription whose state the reader still has. It goes on from
            there if the publisher still has that batch and can prove it, else the reader hears :class:`Reset` first.
        security: keys, where the publisher asks for some.
        keys: by which keyed events may be read.
        with_state: the publisher is one of KVMesh, and is asked for the state of what it no longer keeps, too.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        topic: str = "",
        clock: Clock | None = None,
        replay_silence_s: float = REPLAY_SILENCE_S,
        resume_from: Watermark | None = None,
        security: CurveSecurity | None = None,
        keys: KeyRingPart | None = None,
        with_state: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self._context = context
        self._topic = topic
        self._clock = clock or SystemClock()
        replays = None
        if replay_endpoint is not None:
            replays = ReplayService(replay_endpoint, context=context, silence_s=replay_silence_s, security=security)
        self._ordered = OrderedStream(
            endpoint,
            replays,
            clock=self._clock,
            resume_from=resume_from,
            keys=keys,
            with_state=with_state,
        )
        self._security = security
        self._refused_total = 0
        self._asked = asyncio.Event()
        """Something besides the sockets wants the loop's attention."""
        self._resync_reason: str | None = None
        self._received: list[bytes] | None = None
        """The message of the stream that is next."""

    @property
    def order(self) -> OrderedStream:
        """See :class:`Reading`."""
        return self._ordered

    def resync(self, reason: str = "asked to") -> None:
        """Soon deliver :class:`Reset` and everything that is kept, as if a gap had been seen.

        To be called in the thread of the event loop.
        """
        self._resync_reason = reason
        self._asked.set()

    def broke_off(self) -> None:
        """:meth:`run` has ended by an error: the publisher counts as disconnected until it runs again."""
        self._ordered.closed()

    async def run(self, deliver: Deliver) -> NoReturn:
        """Deliver for ever, beginning with what the publisher still keeps.

        A publisher that is not there yet is waited for; one that goes away is connected to again.

        Raises:
            zmq.ZMQError: the endpoint is not one.
        """
        self._ordered.deliver = deliver
        self._received = None
        stream = self._context.socket(zmq.SUB)
        monitor = stream.get_monitor_socket(_MONITORED)
        try:
            stream.linger = 0
            stream.rcvhwm = STREAM_QUEUE
            stream.heartbeat_ivl = HEARTBEAT_MS
            stream.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
            stream.reconnect_ivl_max = 1000
            stream.subscribe(self._topic.encode())
            if self._security is not None:
                self._security.apply_client(stream)
            choose_family(stream, self.endpoint)
            stream.connect(self.endpoint)
            await self._follow(stream, monitor)
        finally:
            stream.disable_monitor()
            monitor.close()
            stream.close()

    async def _follow(self, stream: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> NoReturn:
        turn_ends_s = self._clock.monotonic_s() + BURST_S
        while True:
            # The connection's story comes first: what a new connection brings may be another life's. It is asked for
            # after the message, or that could be of a connection that came up between the two.
            self._received = self._received or receive(stream)
            if (story := receive(monitor)) is not None:
                await self._connection_changed(stream, int(parse_monitor_message(story)["event"]))
            elif self._resync_reason is not None:
                reason, self._resync_reason = self._resync_reason, None
                await self._ordered.resync(reason)
            elif self._received is not None:
                frames, self._received = self._received, None
                await self._take_live(frames)
            else:
                await self._idle(stream, monitor)
            if self._clock.monotonic_s() >= turn_ends_s:
                await anyio.lowlevel.checkpoint()
                turn_ends_s = self._clock.monotonic_s() + BURST_S

    async def _idle(self, *sockets: zmq.Socket[bytes]) -> None:
        if not await readable(*sockets, timeout_s=self._ordered.due_in_s(), happened=self._asked):
            await self._ordered.check()
        self._asked.clear()

    async def _connection_changed(self, stream: zmq.Socket[bytes], event: int) -> None:
        if event & _REFUSED:
            self._refused()
        elif event == zmq.EVENT_DISCONNECTED:
            self._ordered.closed()
        else:
            await self._ordered.opened(lambda: self._discard(stream))

    def _refused(self) -> None:
        """One side asks for keys and the other has none, or others; it is tried again without an end."""
        self._refused_total += 1
        if self._refused_total & (self._refused_total - 1) == 0:
            _log.warning(
                "a publisher refuses the connection; check the curve keys of both sides",
                endpoint=self.endpoint,
                with_keys=self._security is not None,
                so_far=self._refused_total,
            )

    async def _take_live(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._ordered.statistics.unreadable_batches_total += 1
            return
        await self._ordered.take_live(KeptBatch(int.from_bytes(frames[1], "big"), frames[0], frames[2]))

    def _discard(self, stream: zmq.Socket[bytes]) -> int:
        count = 0 if self._received is None else 1
        self._received = None
        while receive(stream) is not None:
            count += 1
        return count
