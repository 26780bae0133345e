"""One publisher that is followed: its subscription, what it delivers, and whether the index agrees with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

import anyio
import structlog
import zmq

from kvmesh.events.digests import Digest, DigestAnswer, DigestKey, DigestPoller
from kvmesh.events.feeds.drift import Drift, DriftWatch
from kvmesh.events.feeds.feed import Feed
from kvmesh.events.feeds.gate import Gate
from kvmesh.events.feeds.listening import ListenedStream
from kvmesh.events.feeds.retelling import told_again
from kvmesh.events.index import PrefixIndex
from kvmesh.events.items import Batch, Connected, Disconnected, Item, Reset
from kvmesh.events.keyed import KeyRing, is_readable
from kvmesh.events.listener import Admission, EventListener, StreamName
from kvmesh.events.owners import Owners
from kvmesh.events.reading import Reading
from kvmesh.events.subscriber import EventSubscriber, Watermark
from kvmesh.net.clock import Clock
from kvmesh.net.curve import CurveSecurity
from kvmesh.telemetry import get_logger

__all__ = ["FeedObserver", "Following"]

FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
"""Until a publisher is tried again whose sockets could not be had."""

_log = get_logger("events.feeds")


class FeedObserver(Protocol):
    """Sees what goes into the index, in order; runs on the event loop and must not wait."""

    def applied(self, feed: Feed, batch: Batch) -> None:
        """A batch has been taken in."""

    def cleared(self, feed: Feed) -> None:
        """Everything that the source held is void."""

    def hidden(self, feed: Feed, *, hidden: bool) -> None:
        """Whether the source's blocks are left out of answers, as it may be gone; also told when it is as before."""


class Following:
    """Of a feed that publishes.

    Args:
        feed: what to follow; it has an endpoint.
        index: to fill; knows the source.
        context: of the sockets.
        clock: of rests between repairs.
        gate: of the index.
        tidy: called after whatever may have left something to reclaim in the index.
        observer: sees what goes in.
        security: keys, where the publisher asks for some.
        keys: by which keyed events may be read.
        listener: that it connects to, where the feed has a topic.
        anti_entropy_interval_s: how often the publisher is asked for its digests; 0: never.
        resume_from: where a process before this one stood whose blocks the index still has.
    """

    def __init__(
        self,
        feed: Feed,
        index: PrefixIndex,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        *,
        gate: Gate,
        tidy: Callable[[], None],
        observer: FeedObserver | None = None,
        security: CurveSecurity | None = None,
        keys: KeyRing | None = None,
        listener: EventListener | None = None,
        anti_entropy_interval_s: float = 0.0,
        resume_from: Watermark | None = None,
    ) -> None:
        assert feed.endpoint is not None, "it publishes"
        self.feed = feed
        self.drifts_total = 0
        self.failures_total = 0
        """Items that could not be taken in: defects, each with a traceback in the log."""
        self._ended = False
        self._index = index
        self._clock = clock
        self._gate = gate
        self._tidy = tidy
        self._keys = None if keys is None else keys.part(feed.block_size)
        self._observer = observer
        self.disconnected_at_s = clock.monotonic_s()
        self._resume_from = resume_from
        self._owners = Owners(feed.owner, unsure=resume_from is not None)
        self._context = context
        self._security = security
        self._tells_again = resume_from is not None and observer is not None
        self._subscriber: EventSubscriber | None = None
        self.stream: Reading
        if feed.topic is not None and listener is not None:
            self.stream = ListenedStream(listener, StreamName(feed.topic, feed.source.dp_rank))
        else:
            self.stream = self._subscriber = EventSubscriber(
                feed.endpoint,
                feed.replay_endpoint,
                context=context,
                security=security,
                keys=self._keys,
                resume_from=resume_from,
                with_state=feed.in_mesh,
            )
        self.watch = DriftWatch(anti_entropy_interval_s)
        self._poller: DigestPoller | None = None
        if anti_entropy_interval_s and feed.replay_endpoint is not None:
            self._poller = DigestPoller(
                context,
                feed.replay_endpoint,
                self._told,
                on_ask=lambda: self.watch.asked((self.stream.applied, self._held())),
                interval_s=anti_entropy_interval_s,
                security=security,
            )

    async def run(self) -> None:
        """Follow until cancelled."""
        structlog.contextvars.clear_contextvars()  # those of the request that registered it
        feed = self.feed
        _log.info("following", instance_id=feed.source.instance_id, endpoint=feed.endpoint)
        rest_s = FIRST_REST_S
        while True:
            try:
                async with anyio.create_task_group() as tasks:
                    if self._poller is not None:
                        tasks.start_soon(self._poller.run)
                    if self._subscriber is not None:
                        await self._tell_again()
                        await self._subscriber.run(self._take)
                return
            except* Exception as errors:
                # The border of error isolation: one publisher is not followed for a while, the others are.
                expected, defects = errors.split(zmq.ZMQError)
                _log.error(
                    "cannot follow",
                    instance_id=feed.source.instance_id,
                    endpoint=feed.endpoint,
                    error="; ".join(map(str, (expected or errors).exceptions)),
                    again_in_s=rest_s,
                    exc_info=defects,
                )
            if self._subscriber is not None:
                self._subscriber.broke_off()  # what it removes meanwhile is not heard
            await anyio.sleep(rest_s)
            rest_s = min(2 * rest_s, LONGEST_REST_S)

    def admission(self) -> Admission:
        """How the listener follows it."""
        resume_from, self._resume_from = self._resume_from, None
        return Admission(self._take, self.feed.replay_endpoint, resume_from, self._keys)

    async def told_again(self) -> AsyncGenerator[Batch, None]:
        """What the publisher holds, asked for once more; nothing while it is not connected."""
        if self._ended or not self.stream.connected or self.stream.applied < 0:
            return
        async with aclosing(self._told_up_to(self.stream.applied)) as batches:
            async for batch in batches:
                yield batch

    async def _tell_again(self) -> None:
        """Tell the observer of what the index has from a snapshot, before it hears what came later."""
        if not self._tells_again or self._observer is None or self._resume_from is None:
            return
        self._observer.hidden(self.feed, hidden=True)  # until it has proved to be the same
        self._observer.cleared(self.feed)
        async with aclosing(self._told_up_to(self._resume_from.sequence)) as batches:
            async for batch in batches:
                self._observer.applied(self.feed, batch)
        self._tells_again = False

    def _told_up_to(self, last: int) -> AsyncGenerator[Batch, None]:
        return told_again(self.feed, last, self._context, security=self._security, keys=self._keys)

    def _take(self, item: Item) -> None:
        if self._gate.closed:
            self._gate.wait(lambda: self._apply(item))
        else:
            self._apply(item)

    def _apply(self, item: Item) -> None:
        if self._ended:
            return
        try:
            self._take_in(item)
        except Exception:
            # A batch may be half in. Nobody may rely on what this publisher holds; the others are as before.
            self.failures_total += 1
            if self.failures_total & (self.failures_total - 1) == 0:
                _log.exception(
                    "a worker's events could not be taken in and its blocks are dropped",
                    instance_id=self.feed.source.instance_id,
                    so_far=self.failures_total,
                )
            self._index.clear(self.feed.source)
            self._owners.clear()
            self.watch.void()
            if self._observer is not None:
                self._observer.cleared(self.feed)
        self._tidy()

    def _take_in(self, item: Item) -> None:
        feed = self.feed
        match item:
            case Batch():
                item = item._replace(records=self._owners.resolve(item.records))
                self._index.apply(feed.source, item.records.records)
                if self.watch.wants(item.sequence):
                    self._judge(self.watch.applied(item.sequence, self._held()))
                if self._observer is not None:
                    self._observer.applied(feed, item)
            case Reset():
                _log.warning("a worker's blocks are read anew", instance_id=feed.source.instance_id, why=item.reason)
                self._index.clear(feed.source)
                self._owners.clear()
                self.watch.void()
                if self._observer is not None:
                    self._observer.cleared(feed)
            case Disconnected():
                # It stops, or has died, which the coordinator says. Its blocks come back with the same life of it.
                _log.info("a worker's event stream broke off", instance_id=feed.source.instance_id)
                self._index.hide(feed.source)
                self.disconnected_at_s = self._clock.monotonic_s()
                if self._observer is not None:
                    self._observer.hidden(feed, hidden=True)
            case Connected():
                self._index.show(feed.source)
                if self._observer is not None:
                    self._observer.hidden(feed, hidden=False)

    def end(self) -> None:
        """What still waits at the gate is of no interest any more."""
        self._ended = True
        if self._keys is not None:
            self._keys.close()

    def _told(self, answer: DigestAnswer) -> None:
        if self.stream.connected and not self._gate.closed:
            # Without its key a keyed block is not held, and that is no drift.
            digests = {key: of for key, of in answer.digests.items() if is_readable(key.salt, self._keys)}
            answer = answer._replace(digests=digests)
            self._judge(self.watch.told(answer, (self.stream.applied, self._held())))

    def _held(self) -> dict[DigestKey, Digest] | None:
        digests = self._index.digests(self.feed.source)
        if digests is None:
            return None
        lora, salt = self.feed.lora, self.feed.salt
        # What the publisher does not name is the feed's own.
        return {
            DigestKey(tier, None if scope.lora == lora else scope.lora, None if scope.salt == salt else scope.salt): of
            for (tier, scope), of in digests.items()
        }

    def _judge(self, drift: Drift | None) -> None:
        if drift is None:
            return
        self.drifts_total += 1
        name, rank = self.feed.source
        repair = self.watch.repair(self._clock.monotonic_s())
        said = {
            f"{key.tier.name.lower()}{'' if key.lora is None else f' lora {key.lora}'}": count
            for key, count in drift.differences.items()
        }
        _log.warning(
            "the index is wrong about a worker",
            instance_id=name,
            dp_rank=rank,
            sequence=drift.sequence,
            blocks_too_many=said or "a batch is missing",
            repaired=repair,
        )
        if repair:
            self.watch.void()
            self.stream.resync("the index is wrong about it")
