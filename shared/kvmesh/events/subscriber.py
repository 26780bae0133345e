"""Follows one publisher: live stream, replay of what was missed, restarts; delivers what can be applied in order.

The reader hears :class:`Reset` whenever what it knows of the publisher is void, and then everything that the publisher
still keeps. Nothing is lost in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import anyio
import anyio.lowlevel
import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvmesh.events.decoding import BatchError, decode_batch
from kvmesh.events.polling import readable, receive
from kvmesh.events.records import RecordBatch
from kvmesh.events.replay import REPLAY_SILENCE_S, KeptBatch, ReplayFailedError, ReplayRequest
from kvmesh.events.tracking import Arrival, SequenceTracker
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.telemetry import get_logger

__all__ = ["Batch", "Connected", "Deliver", "Disconnected", "EventSubscriber", "Reset", "SubscriberStatistics"]

REPLAY_COOLDOWN_S = 30.0
"""After a failed replay the next is not tried sooner: each costs its silence, during which the stream waits."""

CONFIRM_AFTER_S = 0.5
"""After a connection the publisher is asked once more: what it sent before it knew of the subscription is in neither
the stream nor the first replay."""

BURST_S = 0.001
"""How long messages are worked off before other tasks get a turn."""

STREAM_QUEUE = 10_000
"""Live messages that wait here, during a replay for example; more of them wait at the publisher."""

HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
"""A publisher that vanished without a word (power, network) counts as disconnected after this."""

_MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED

_log = get_logger("events.subscriber")


class Batch(NamedTuple):
    """Records to apply, in order."""

    sequence: int
    topic: str
    records: RecordBatch
    replayed: bool


class Reset(NamedTuple):
    """Everything known of this publisher is void; what it still keeps follows."""

    reason: str


class Disconnected(NamedTuple):
    """The connection broke: the publisher may be gone."""


class Connected(NamedTuple):
    """The connection stands, and what was missed meanwhile has been delivered."""


Deliver = Callable[[Batch | Reset | Disconnected | Connected], None]
"""Takes one item; runs on the event loop and must not block."""


class SubscriberStatistics(msgspec.Struct):
    """What one subscription has been through."""

    batches_total: int = 0
    events_total: int = 0
    events_map_total: int = 0
    events_array_total: int = 0
    rejected_events_total: int = 0
    """Events left out because they could not be used; their batches went on."""
    unreadable_batches_total: int = 0
    duplicates_total: int = 0
    gaps_total: int = 0
    replays_total: int = 0
    replay_failures_total: int = 0
    restarts_total: int = 0
    disconnections_total: int = 0
    resets_total: int = 0


class EventSubscriber:
    """One subscription; :meth:`run` it for as long as it is wanted.

    Args:
        endpoint: of the publisher's stream.
        replay_endpoint: of its replay service, None when it has none.
        context: of the sockets; one a process is enough.
        topic: prefix to subscribe to.
        clock: of the cooldown and the confirmation.
        replay_silence_s: longest pause between two answers of a replay.
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
    ) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.connected = False
        self.statistics = SubscriberStatistics()
        self.rejected: dict[str, int] = {}
        """Rejected events by reason."""
        self._context = context
        self._topic = topic
        self._replay_silence_s = replay_silence_s
        self._clock = clock or SystemClock()
        self._tracker = SequenceTracker()
        self._last_payload = b""
        self._deliver: Deliver = _ignore
        self._no_replay_before_s = 0.0
        self._confirm_at_s: float | None = None
        self._ever_connected = False

    @property
    def applied(self) -> int:
        """Sequence number of the last batch delivered, -1 before the first."""
        return self._tracker.applied

    async def run(self, deliver: Deliver) -> NoReturn:
        """Deliver for ever, beginning with what the publisher still keeps.

        A publisher that is not there yet is waited for; one that goes away is connected to again.

        Raises:
            zmq.ZMQError: the endpoint is not one.
        """
        self._deliver = deliver
        stream = self._context.socket(zmq.SUB)
        monitor = stream.get_monitor_socket(_MONITORED)
        try:
            stream.linger = 0
            stream.rcvhwm = STREAM_QUEUE
            stream.heartbeat_ivl = HEARTBEAT_MS
            stream.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
            stream.reconnect_ivl_max = 1000
            stream.subscribe(self._topic.encode())
            stream.connect(self.endpoint)
            await self._follow(stream, monitor)
        finally:
            stream.disable_monitor()
            monitor.close()
            stream.close()

    async def _follow(self, stream: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> NoReturn:
        turn_ends_s = self._clock.monotonic_s() + BURST_S
        while True:
            # The connection's story comes first: what a new connection brings may be another life's.
            if (story := receive(monitor)) is not None:
                await self._connection_changed(stream, int(parse_monitor_message(story)["event"]))
            elif (frames := receive(stream)) is not None:
                await self._take_live(frames)
            else:
                await self._idle(stream, monitor)
            if self._clock.monotonic_s() >= turn_ends_s:
                await anyio.lowlevel.checkpoint()
                turn_ends_s = self._clock.monotonic_s() + BURST_S

    async def _idle(self, *sockets: zmq.Socket[bytes]) -> None:
        wait_s = None if self._confirm_at_s is None else max(0.0, self._confirm_at_s - self._clock.monotonic_s())
        if not await readable(*sockets, timeout_s=wait_s):
            self._confirm_at_s = None
            await self._catch_up()

    async def _connection_changed(self, stream: zmq.Socket[bytes], event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            if self.connected:
                self.connected = False
                self.statistics.disconnections_total += 1
                self._deliver(Disconnected())
            return
        again, self._ever_connected = self._ever_connected, True
        self._tracker.connect()
        if self.replay_endpoint is not None:
            if again:
                # What has come so far may be of either life. The replay has all that this life keeps.
                while receive(stream) is not None:
                    self.statistics.duplicates_total += 1
            self._no_replay_before_s = 0.0
            if not await self._catch_up() and not self._tracker.knows_nothing:
                self._reset("the connection was lost and the replay service does not answer")
            self._confirm_at_s = self._clock.monotonic_s() + CONFIRM_AFTER_S
        elif again:
            self._reset("the connection was lost and nothing can be replayed")
        self.connected = True
        self._deliver(Connected())

    async def _take_live(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self.statistics.unreadable_batches_total += 1
            return
        message = KeptBatch(int.from_bytes(frames[1], "big"), frames[0], frames[2])
        arrival = self._tracker.arrive(message.sequence)
        if arrival is Arrival.RESTART:
            # Or a message that came twice, or late: a replay tells.
            if not await self._catch_up():
                self._restarted("the publisher counts anew")
            self._tracker.see(message.sequence)
        elif arrival is Arrival.GAP:
            if not self._tracker.knows_nothing:
                self.statistics.gaps_total += 1
            await self._catch_up()
            if self._tracker.judge(message.sequence) is Arrival.GAP and not self._tracker.knows_nothing:
                self._lost_batches(message.sequence)  # there is no replay
            self._tracker.see(message.sequence)
        self._take(message, replayed=False)

    async def _catch_up(self) -> bool:
        """Deliver what the publisher keeps beyond what was applied; False when it cannot be asked or falls silent.

        The last applied batch is asked for once more. If it comes back as it was, the publisher is the one that was
        followed all along; sequence numbers alone cannot tell one that restarted and overtook the old numbers.
        """
        if self.replay_endpoint is None or self._clock.monotonic_s() < self._no_replay_before_s:
            return False
        self.statistics.replays_total += 1
        start = max(self._tracker.applied, 0)
        rebuilding = recognised = self._tracker.knows_nothing
        try:
            async with ReplayRequest(self._context, self.replay_endpoint, start, self._replay_silence_s) as replay:
                while (message := await replay.next()) is not None:
                    if not recognised:
                        recognised = True
                        if message.sequence == start and message.payload == self._last_payload:
                            continue
                        if message.sequence == start:
                            self._restarted("another life of the publisher has taken its numbers")
                            break
                    if not rebuilding and self._tracker.judge(message.sequence) is Arrival.GAP:
                        self._lost_batches(message.sequence)
                        break
                    self._take(message, replayed=True)
                    await anyio.lowlevel.checkpoint()
                else:
                    if recognised:
                        return True
                    self._restarted("the publisher has sent less than was heard of it")
        except ReplayFailedError as error:
            self.statistics.replay_failures_total += 1
            self._no_replay_before_s = self._clock.monotonic_s() + REPLAY_COOLDOWN_S
            # Without a connection the publisher is gone, and the rest of the mesh knows.
            level = logging.WARNING if self.connected else logging.INFO
            _log.log(level, "replay failed", endpoint=self.replay_endpoint, start=start, error=str(error))
            return False
        return await self._catch_up()  # from nothing, so this recognises whatever comes

    def _take(self, message: KeptBatch, *, replayed: bool) -> None:
        """Deliver one message, unless it has been."""
        if self._tracker.judge(message.sequence) is Arrival.DUPLICATE:
            self.statistics.duplicates_total += 1
            return
        try:
            records = decode_batch(message.payload)
        except BatchError as error:
            self._unreadable(message.sequence, error)
        else:
            self._count(records)
            self._deliver(Batch(message.sequence, message.topic.decode(errors="replace"), records, replayed))
        self._tracker.apply(message.sequence)
        self._last_payload = message.payload

    def _unreadable(self, sequence: int, error: BatchError) -> None:
        """What it said is lost, removals perhaps among it."""
        self.statistics.unreadable_batches_total += 1
        if _is_power_of_two(self.statistics.unreadable_batches_total):
            _log.warning("unreadable batch", endpoint=self.endpoint, sequence=sequence, error=str(error))
        if not self._tracker.knows_nothing:
            self._reset("a batch was unreadable")

    def _count(self, records: RecordBatch) -> None:
        statistics = self.statistics
        statistics.batches_total += 1
        statistics.events_total += len(records.records)
        statistics.events_map_total += records.dialects.get("map", 0)
        statistics.events_array_total += records.dialects.get("array", 0)
        for reason, count in records.rejected.items():
            statistics.rejected_events_total += count
            total = self.rejected[reason] = self.rejected.get(reason, 0) + count
            if _is_power_of_two(total):
                _log.warning("event left out", endpoint=self.endpoint, reason=reason, so_far=total)

    def _lost_batches(self, sequence: int) -> None:
        self._reset(f"{sequence - self._tracker.applied - 1} batches are missing and cannot be replayed")

    def _restarted(self, reason: str) -> None:
        self.statistics.restarts_total += 1
        self._tracker.connect()
        self._reset(reason)

    def _reset(self, reason: str) -> None:
        self._tracker.forget()
        self.statistics.resets_total += 1
        self._deliver(Reset(reason))


def _ignore(_item: object) -> None:
    """Stands in until :meth:`EventSubscriber.run`."""


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
