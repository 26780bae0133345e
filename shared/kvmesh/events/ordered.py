"""One publisher's messages, put in order: fills gaps by replays, notices other lives, says when all is void.

The reader hears :class:`Reset` whenever what it knows of the publisher is void, and then everything that the publisher
still keeps. Nothing is lost in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvmesh.events.decoding import BatchError, decode_batch
from kvmesh.events.items import Batch, Connected, Deliver, Disconnected, Reset, SubscriberStatistics
from kvmesh.events.keyed import KeyRingPart
from kvmesh.events.quarantine import Quarantine
from kvmesh.events.records import RecordBatch
from kvmesh.events.replay import KeptBatch, ReplayFailedError, Replays
from kvmesh.events.tracking import Arrival, SequenceTracker
from kvmesh.events.watermark import Watermark, payload_digest
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.telemetry import get_logger

__all__ = ["CONFIRM_AFTER_S", "REPLAY_COOLDOWN_S", "OrderedStream"]

REPLAY_COOLDOWN_S = 30.0
"""After a failed replay the next is not tried sooner: each costs its silence, during which the stream waits. Doubled
with every failure in a row."""

LONGEST_COOLDOWN_S = 600.0

CONFIRM_AFTER_S = 0.5
"""After a connection the publisher is asked once more: what it sent before it knew of the subscription is in neither
the stream nor the first replay."""

_log = get_logger("events.subscriber")


class OrderedStream:
    """Used from one task at a time.

    Args:
        publisher: its name in the log.
        replays: its replay service, None when it has none.
        clock: of the cooldown and the confirmation.
        resume_from: where an earlier reader stood whose state is still there; the publisher is asked whether its batch
            of that number is still the same.
        keys: by which keyed events may be read.
        with_state: the publisher can tell what it no longer keeps, too.
    """

    def __init__(
        self,
        publisher: str,
        replays: Replays | None,
        *,
        clock: Clock | None = None,
        resume_from: Watermark | None = None,
        keys: KeyRingPart | None = None,
        with_state: bool = False,
    ) -> None:
        self.deliver: Deliver = _ignore
        self.connected = False
        self.statistics = SubscriberStatistics()
        self.dialects: dict[str, int] = {}
        """Events by the dialect they were written in."""
        self._publisher = publisher
        self._replays = replays
        self._keys = keys
        self._with_state = with_state
        self._clock = clock or SystemClock()
        self._quarantine = Quarantine(publisher, self._clock)
        self._tracker = SequenceTracker()
        self._last: bytes | Watermark = b""
        """Payload of the last batch, or what an earlier reader kept of it."""
        self._from_state = False
        """Whether that payload is what the publisher holds, told under the number of its last batch."""
        self._first = 0
        """Number of the first batch since the last reset."""
        self._one_life = True
        """Whether the live stream is of the life that was applied. What is applied from a replay can be of a later one:
        messages of the earlier may still wait, or their connection stand."""
        self._awaited: KeptBatch | None = None
        """The live message because of which a replay is asked for."""
        self._cooldown_s = REPLAY_COOLDOWN_S
        self._no_replay_before_s = 0.0
        self._incomplete = False
        """Whether the publisher may still keep something from before ``_first``."""
        self._confirm_at_s: float | None = None
        self._ever_opened = False
        if resume_from is not None:
            self._tracker.apply(resume_from.sequence)
            self._last = resume_from

    @property
    def applied(self) -> int:
        """Sequence number of the last batch delivered, -1 before the first."""
        return self._tracker.applied

    @property
    def watermark(self) -> Watermark | None:
        """The last batch delivered; None before the first."""
        if self._tracker.knows_nothing:
            return None
        return self._last if isinstance(self._last, Watermark) else Watermark(self.applied, payload_digest(self._last))

    @property
    def rejected(self) -> dict[str, int]:
        """Rejected events by reason."""
        return dict(self._quarantine.totals)

    def due_in_s(self) -> float | None:
        """Seconds until :meth:`check` must be called although nothing happens, None when it need not be."""
        times = [] if self._confirm_at_s is None else [self._confirm_at_s]
        if self._incomplete and self.connected:
            times.append(self._no_replay_before_s)
        return max(0.0, min(times) - self._clock.monotonic_s()) if times else None

    async def check(self) -> None:
        """Do what is due."""
        now_s = self._clock.monotonic_s()
        if self._incomplete and self.connected and now_s >= self._no_replay_before_s:
            self._confirm_at_s = None
            await self._catch_up(anew=True)
        elif self._confirm_at_s is not None and now_s >= self._confirm_at_s:
            self._confirm_at_s = None
            await self._catch_up()

    async def opened(self, discard: Callable[[], int]) -> None:
        """A connection stands, the first or another one.

        Args:
            discard: throws away the live messages that have come so far and says how many those were.
        """
        again, self._ever_opened = self._ever_opened, True
        self._tracker.connect()
        if self._replays is not None:
            if again:
                # What has come so far may be of either life. The replay has all that this life keeps.
                self.statistics.duplicates_total += discard()
            self._no_replay_before_s = 0.0
            if not await self._catch_up() and not self._tracker.knows_nothing:
                self._reset("the connection was lost and the replay service does not answer")
            self._confirm_at_s = self._clock.monotonic_s() + CONFIRM_AFTER_S
        elif again or not self._tracker.knows_nothing:
            self._reset("the connection was lost and nothing can be replayed")
        self.connected = True
        self.deliver(Connected())

    def closed(self) -> None:
        """The connection broke."""
        if self.connected:
            self.connected = False
            self.statistics.disconnections_total += 1
            self.deliver(Disconnected())

    async def resync(self, reason: str) -> None:
        """Forget everything and read what the publisher still keeps."""
        self._reset(reason)
        await self._catch_up()

    async def take_live(self, message: KeptBatch) -> None:
        """A message of the stream, after what is missing before it."""
        arrival = self._tracker.arrive(message.sequence)
        follows = arrival is Arrival.DUPLICATE or (arrival is Arrival.NEXT and self._one_life)
        if not follows and not await self._belongs(message, arrival):
            self.statistics.duplicates_total += 1
            return
        self._take(message, replayed=False)

    async def _belongs(self, message: KeptBatch, arrival: Arrival) -> bool:
        """Catch up with what is before a message; False when it turns out to be the last word of an earlier life."""
        if arrival is Arrival.GAP and not self._tracker.knows_nothing:
            self.statistics.gaps_total += 1
        self._awaited = message
        answered = await self._catch_up()
        self._awaited = None
        judged = self._tracker.judge(message.sequence)
        if self._tracker.knows_nothing:
            judged = Arrival.NEXT
        elif judged is not Arrival.DUPLICATE and answered:
            return False  # whoever sends a message keeps it, and it is not kept
        elif judged is Arrival.NEXT and not self._one_life:
            self._reset("what was replayed and what is sent may be of two lives")
        if arrival is Arrival.RESTART:
            if answered:
                self._tracker.connect()  # it came twice, or late; those after it are judged by its number again
            else:
                self._restarted("the publisher counts anew")
        elif judged is Arrival.GAP:
            self._lost_batches(message.sequence)
        self._tracker.see(message.sequence)
        return True

    async def _catch_up(self, *, anew: bool = False) -> bool:
        """Deliver what the publisher keeps beyond what was applied; False when it cannot be asked or falls silent.

        The last applied batch is asked for once more. If it comes back as it was, the publisher is the one that was
        followed all along; sequence numbers alone cannot tell one that restarted and overtook the old numbers.

        Args:
            anew: ask for everything; what is known is dropped when the answer begins, and only for an answer that
                begins earlier.
        """
        if self._replays is None or self._clock.monotonic_s() < self._no_replay_before_s:
            return False
        self.statistics.replays_total += 1
        start = 0 if anew else max(self._tracker.applied, 0)
        rebuilding = recognised = anew or self._tracker.knows_nothing
        try:
            async with self._replays.ask(start, with_state=self._with_state and rebuilding) as replay:
                while (message := await replay.next()) is not None:
                    if anew:
                        anew = False
                        begins = 0 if self._with_state else message.sequence  # a state has its last batch's number
                        if begins >= self._first and not self._tracker.knows_nothing:
                            self._incomplete = False
                            return True
                        self._reset("what was missing is to be had again")
                    if not recognised:
                        recognised = True
                        if message.sequence == start and self._is_last(message.payload):
                            continue
                        if message.sequence == start:
                            self._restarted("another life of the publisher has taken its numbers")
                        else:
                            self._lost_batches(message.sequence, "nor can the publisher prove that it is the same")
                        break
                    if not rebuilding and self._tracker.judge(message.sequence) is Arrival.GAP:
                        self._lost_batches(message.sequence)
                        break
                    self._take(message, replayed=True)
                else:
                    self._cooldown_s = REPLAY_COOLDOWN_S
                    if recognised:
                        self._incomplete = self._incomplete and not rebuilding
                        return True
                    self._restarted("the publisher has sent less than was heard of it")
        except ReplayFailedError as error:
            self._replay_failed(start, error)
            return False
        return await self._catch_up()  # from nothing, so this recognises whatever comes

    def _replay_failed(self, start: int, error: ReplayFailedError) -> None:
        self.statistics.replay_failures_total += 1
        self._no_replay_before_s = self._clock.monotonic_s() + self._cooldown_s
        self._cooldown_s = min(2 * self._cooldown_s, LONGEST_COOLDOWN_S)
        self._incomplete = self._incomplete or self._tracker.knows_nothing
        # Without a connection the publisher is gone, and the rest of the mesh knows.
        level = logging.WARNING if self.connected else logging.INFO
        _log.log(level, "replay failed", publisher=self._publisher, start=start, error=str(error))

    def _take(self, message: KeptBatch, *, replayed: bool) -> None:
        """Deliver one message, unless it has been."""
        if self._tracker.judge(message.sequence) is Arrival.DUPLICATE:
            if replayed and self._from_state and message.sequence == self.applied:
                self._last, self._from_state = message.payload, False  # the batch that the state was told under
            else:
                self.statistics.duplicates_total += 1
            self._compare(message, replayed=replayed)
            return
        try:
            records = decode_batch(message.payload, self._keys)
        except BatchError:
            self._unreadable(message)
        else:
            self._count(records)
            self.deliver(Batch(message.sequence, message.topic.decode(errors="replace"), records, replayed))
        if self._tracker.knows_nothing:
            self._first = message.sequence
            self._one_life = not replayed
        self._from_state = replayed and self._with_state and self._tracker.knows_nothing
        self._tracker.apply(message.sequence)
        self._last = message.payload
        self._compare(message, replayed=replayed)

    def _compare(self, message: KeptBatch, *, replayed: bool) -> None:
        """The same batch from the stream and from a replay: both are of one life."""
        if self._one_life:
            return
        if replayed:
            awaited = self._awaited  # of its topic older engines' replays say nothing
            self._one_life = awaited is not None and awaited[::2] == message[::2]
        elif message.sequence == self.applied:
            self._one_life = self._is_last(message.payload)

    def _unreadable(self, message: KeptBatch) -> None:
        """What it said is lost, removals perhaps among it. A replay would bring the same bytes."""
        self.statistics.unreadable_batches_total += 1
        self._quarantine.unreadable(message.payload, message.sequence)
        if not self._tracker.knows_nothing:
            self._reset("a batch was unreadable")

    def _count(self, records: RecordBatch) -> None:
        self.statistics.batches_total += 1
        self.statistics.events_total += len(records.records)
        for dialect, count in records.dialects.items():
            self.dialects[dialect] = self.dialects.get(dialect, 0) + count
        if records.rejected:
            self.statistics.rejected_events_total += sum(records.rejected.values())
            self._quarantine.add(records)

    def _is_last(self, payload: bytes) -> bool:
        if isinstance(self._last, Watermark):
            return self._last.digest == payload_digest(payload)
        return self._last == payload

    def _lost_batches(self, sequence: int, besides: str = "and cannot be replayed") -> None:
        self._reset(f"{sequence - self._tracker.applied - 1} batches are missing, {besides}")

    def _restarted(self, reason: str) -> None:
        self.statistics.restarts_total += 1
        self._tracker.connect()
        self._reset(reason)

    def _reset(self, reason: str) -> None:
        self._tracker.forget()
        if self._replays is not None and self._clock.monotonic_s() < self._no_replay_before_s:
            self._incomplete = True
        self.statistics.resets_total += 1
        self.deliver(Reset(reason))


def _ignore(_item: object) -> None:
    """Stands in until somebody listens."""
