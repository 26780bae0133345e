"""Binds one socket and waits for publishers to connect; tells them apart by topic and rank.

vLLM and SGLang connect when their endpoint has no ``*`` in it, and llm-d's central mode has all of them connect to one
reader. Each publisher is then followed like one that was connected to: replay (where it offers one), gaps, restarts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple, NoReturn

import anyio
import anyio.lowlevel
import zmq
from anyio.abc import TaskGroup
from zmq.utils.monitor import parse_monitor_message

from kvmesh.events.decoding import BatchError, rank_of
from kvmesh.events.items import Deliver
from kvmesh.events.keyed import KeyRingPart
from kvmesh.events.ordered import OrderedStream
from kvmesh.events.polling import readable, receive
from kvmesh.events.replay import REPLAY_SILENCE_S, KeptBatch, ReplayService
from kvmesh.events.subscriber import BURST_S, HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from kvmesh.events.watermark import Watermark
from kvmesh.net.address import choose_family
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.curve import CurveSecurity
from kvmesh.telemetry import get_logger

__all__ = ["Admission", "EventListener", "StreamName"]

WAITING_MESSAGES = 10_000
"""Of one publisher, during a replay for example. What comes on top is dropped, and replayed as any gap is."""

MAX_MESSAGE_BYTES = 1 << 28
"""A connection that brings a longer message is closed: nobody knows whose word it is."""

_MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

_NO_CONNECTION = -1
"""Where the transport does not tell connections apart."""

_log = get_logger("events.listener")


class StreamName(NamedTuple):
    """Who sent a message: nothing but this tells one publisher from another."""

    topic: str
    rank: int
    """That the batches say, 0 where they say none."""


class Admission(NamedTuple):
    """How a publisher is followed."""

    deliver: Deliver
    replay_endpoint: str | None = None
    resume_from: Watermark | None = None
    keys: KeyRingPart | None = None
    """By which its keyed events may be read."""


Admit = Callable[[StreamName], Admission | None]
"""Asked when a publisher is first heard of; None: it is not wanted, and asked about again with its next message."""


class EventListener:
    """One bound socket; :meth:`run` it for as long as it is wanted.

    Args:
        endpoint: to bind.
        admit: decides who is followed.
        context: of the sockets; one a process is enough.
        topic: prefix to subscribe to.
        clock: of cooldowns and confirmations.
        replay_silence_s: longest pause between two answers of a replay.
        security: keys; publishers must then know this side's.
    """

    def __init__(
        self,
        endpoint: str,
        admit: Admit,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        topic: str = "",
        clock: Clock | None = None,
        replay_silence_s: float = REPLAY_SILENCE_S,
        security: CurveSecurity | None = None,
    ) -> None:
        self.bound_endpoint = ""
        """Where publishers connect to, once :meth:`run` has bound it."""
        self.ignored_total = 0
        """Messages of publishers that are not wanted, or of a connection that another one has followed."""
        self.unreadable_total = 0
        """Messages that do not say whose they are."""
        self._endpoint = endpoint
        self._admit = admit
        self.context = context
        self._topic = topic
        self._clock = clock or SystemClock()
        self._replay_silence_s = replay_silence_s
        self._security = security
        self._streams: dict[StreamName, OrderedStream] = {}
        self.streams: Mapping[StreamName, OrderedStream] = self._streams
        """Who is followed."""
        self._followed: dict[StreamName, _Followed] = {}
        self._connections: dict[int, set[StreamName]] = {}
        """Who was heard on each connection that stands."""
        self._gone: set[int] = set()
        """Connections that are over, of which messages may still wait."""

    def resync(self, name: StreamName, reason: str = "asked to") -> None:
        """Soon read one publisher anew; unknown ones are passed over. In the thread of the event loop."""
        if (followed := self._followed.get(name)) is not None:
            followed.put(_Resync(reason))

    def retire(self, name: StreamName) -> None:
        """Stop following a publisher; its next message has it admitted again. In the thread of the event loop."""
        if (followed := self._followed.pop(name, None)) is not None:
            del self._streams[name]
            followed.scope.cancel()
            for names in self._connections.values():
                names.discard(name)

    async def run(self) -> None:
        """Follow whoever connects, for ever.

        Raises:
            zmq.ZMQError: the endpoint cannot be bound.
        """
        stream = self.context.socket(zmq.SUB)
        monitor = stream.get_monitor_socket(_MONITORED)
        try:
            stream.linger = 0
            stream.rcvhwm = WAITING_MESSAGES
            stream.maxmsgsize = MAX_MESSAGE_BYTES
            stream.heartbeat_ivl = HEARTBEAT_MS
            stream.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
            stream.subscribe(self._topic.encode())
            if self._security is not None:
                self._security.apply_server(stream)
            choose_family(stream, self._endpoint)
            stream.bind(self._endpoint)
            self.bound_endpoint = stream.get_string(zmq.LAST_ENDPOINT)
            async with anyio.create_task_group() as tasks:
                await self._listen(stream, monitor, tasks)
        finally:
            stream.disable_monitor()
            monitor.close()
            stream.close()

    async def _listen(self, stream: zmq.Socket[bytes], monitor: zmq.Socket[bytes], tasks: TaskGroup) -> NoReturn:
        turn_ends_s = self._clock.monotonic_s() + BURST_S
        message: tuple[int, list[bytes]] | None = None
        while True:
            # The connections' story comes first: what a new connection brings may be another life's. It is asked for
            # after the message, or that could be of a connection that came up between the two.
            message = message or _receive(stream)
            if (story := receive(monitor)) is not None:
                event = parse_monitor_message(story)
                self._connection_changed(int(event["event"]), int(event["value"]))
            elif message is not None:
                self._take(*message, tasks)
                message = None
            else:
                await readable(stream, monitor)
            if self._clock.monotonic_s() >= turn_ends_s:
                await anyio.lowlevel.checkpoint()
                turn_ends_s = self._clock.monotonic_s() + BURST_S

    def _connection_changed(self, event: int, connection: int) -> None:
        # A number is given away again as soon as its connection has ended.
        if event == zmq.EVENT_ACCEPTED:
            self._gone.discard(connection)
            return
        self._gone.add(connection)
        for name in self._connections.pop(connection, ()):
            self._followed[name].connection = None
            self._followed[name].put(_CLOSED)

    def _take(self, connection: int, frames: list[bytes], tasks: TaskGroup) -> None:
        try:
            topic, number, payload = frames
            name = StreamName(topic.decode(), rank_of(payload) or 0)
        except (ValueError, BatchError):
            self.unreadable_total += 1
            return
        followed = self._followed.get(name) or self._follow(name, tasks)
        if followed is None or len(number) != 8:
            self.ignored_total += 1
            return
        if followed.connection not in (None, connection) and connection in self._gone:
            self.ignored_total += 1  # the rest of an earlier connection, perhaps of an earlier life
            return
        if followed.connection != connection and connection not in self._gone:
            self._connections.setdefault(connection, set()).add(name)
            if followed.connection is not None:
                self._connections[followed.connection].discard(name)
            followed.connection = connection
            followed.put(_OPENED)
        followed.put(KeptBatch(int.from_bytes(number, "big"), topic, payload))

    def _follow(self, name: StreamName, tasks: TaskGroup) -> _Followed | None:
        admission = self._admit(name)
        if admission is None:
            return None
        replays = None
        if admission.replay_endpoint is not None:
            replays = ReplayService(
                admission.replay_endpoint,
                context=self.context,
                silence_s=self._replay_silence_s,
                security=self._security,
            )
        ordered = OrderedStream(
            f"{name.topic} rank {name.rank}",
            replays,
            clock=self._clock,
            resume_from=admission.resume_from,
            keys=admission.keys,
        )
        ordered.deliver = admission.deliver
        followed = self._followed[name] = _Followed(ordered)
        self._streams[name] = ordered
        tasks.start_soon(followed.run)
        return followed


class _Opened(NamedTuple):
    """The publisher was heard on another connection than before."""


class _Closed(NamedTuple):
    """The connection that it was heard on last has ended."""


class _Resync(NamedTuple):
    reason: str


_OPENED = _Opened()
_CLOSED = _Closed()


class _Followed:
    """One publisher: what has come of it, and the task that works it off."""

    def __init__(self, ordered: OrderedStream) -> None:
        self.ordered = ordered
        self.connection: int | None = None
        self.scope = anyio.CancelScope()
        self._waiting: deque[KeptBatch | _Opened | _Closed | _Resync] = deque()
        self._something_waits = asyncio.Event()
        self._failures_total = 0

    def put(self, item: KeptBatch | _Opened | _Closed | _Resync) -> None:
        """Leave an item; messages beyond the bound are dropped, which their numbers will show."""
        if len(self._waiting) < WAITING_MESSAGES or not isinstance(item, KeptBatch):
            self._waiting.append(item)
            self._something_waits.set()

    async def run(self) -> None:
        with self.scope:
            turns = 0
            while True:
                if self._waiting:
                    item = self._waiting.popleft()
                    await self._isolated(partial(self._work_off, item))
                    turns += 1
                    if turns % 64 == 0:
                        await anyio.lowlevel.checkpoint()
                    continue
                self._something_waits.clear()
                with anyio.move_on_after(self.ordered.due_in_s()) as wait:
                    await self._something_waits.wait()
                if wait.cancelled_caught:
                    await self._isolated(self.ordered.check)

    async def _isolated(self, work: Callable[[], Awaitable[None]]) -> None:
        """What goes wrong with one publisher is nobody else's; what it costs of its stream its numbers will show."""
        try:
            await work()
        except Exception:
            self._failures_total += 1
            if self._failures_total & (self._failures_total - 1) == 0:
                _log.exception("a message of a publisher could not be dealt with", so_far=self._failures_total)

    async def _work_off(self, item: KeptBatch | _Opened | _Closed | _Resync) -> None:
        match item:
            case KeptBatch():
                await self.ordered.take_live(item)
            case _Opened():
                await self.ordered.opened(lambda: 0)  # what the old connection brought has been worked off
            case _Closed():
                self.ordered.closed()
            case _Resync():
                await self.ordered.resync(item.reason)


def _receive(stream: zmq.Socket[bytes]) -> tuple[int, list[bytes]] | None:
    """The next message and the connection that it came on; None when there is none now."""
    try:
        frames = stream.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    try:
        connection = int(frames[0].get(zmq.SRCFD))
    except zmq.ZMQError:  # ipc and inproc
        connection = _NO_CONNECTION
    return connection, [frame.bytes for frame in frames]
