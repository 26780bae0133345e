"""One subscription for each publisher, from the membership or registered by hand; fills the index."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import anyio
import anyio.lowlevel
import structlog
import zmq
from anyio.abc import TaskGroup

from kvmesh.events.endpoints import EndpointError
from kvmesh.events.feeds.feed import Feed, feeds_of
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.keyed import KeyRing
from kvmesh.events.subscriber import Batch, Connected, Disconnected, EventSubscriber, Reset, SubscriberStatistics
from kvmesh.net.curve import CurveSecurity
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.telemetry import get_logger

__all__ = ["FeedObserver", "Feeds"]

_log = get_logger("events.feeds")


class FeedObserver(Protocol):
    """Sees what goes into the index, in order; runs on the event loop and must not wait."""

    def applied(self, feed: Feed, batch: Batch) -> None:
        """A batch has been taken in."""

    def cleared(self, feed: Feed) -> None:
        """Everything that the source held is void."""


class _Running(NamedTuple):
    feed: Feed
    subscriber: EventSubscriber | None
    """None for an approximate feed."""
    scope: anyio.CancelScope


class Feeds:
    """Starts, replaces and ends subscriptions; all of them live in ``tasks``.

    Args:
        index: to fill.
        tasks: of the service.
        context: of the sockets.
        observer: sees what goes in.
        security: keys of the publishers that belong to the mesh; None: they are plain.
        keys: of workers that tell keyed names instead of tokens.
    """

    def __init__(
        self,
        index: PrefixIndex,
        tasks: TaskGroup,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        observer: FeedObserver | None = None,
        security: CurveSecurity | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        self._index = index
        self._tasks = tasks
        self._context = context
        self._observer = observer
        self._security = security
        self._keys = keys
        self._running: dict[Source, _Running] = {}
        self._tidying = False
        self._ended = dict.fromkeys(SubscriberStatistics.__struct_fields__, 0)
        """What subscriptions that are over had counted: totals do not go back."""

    def hear(self, event: MemberEvent) -> None:
        """A change of the membership."""
        member = event.member
        if event.kind in ("left", "dead"):
            self._gone(member)
            return
        try:
            feeds = feeds_of(member)
        except EndpointError as error:
            _log.warning("a worker's events cannot be followed", instance_id=member.instance_id, error=str(error))
            return
        for feed in feeds:
            self.follow(feed)

    def follow(self, feed: Feed) -> None:
        """Follow a publisher; one that is followed already goes on undisturbed, an older life of its source ends."""
        running = self._running.get(feed.source)
        if running is not None:
            if running.feed == feed or running.feed.epoch > feed.epoch:
                return
            self._end(running)
        subscriber = None
        if feed.endpoint is not None:
            subscriber = EventSubscriber(
                feed.endpoint,
                feed.replay_endpoint,
                context=self._context,
                security=self._security if feed.in_mesh else None,
                keys=self._keys,
            )
            if self._keys is not None:
                # An index that was restored holds blocks of workers whose events are yet to come.
                self._keys.expect(feed.block_size)
        running = self._running[feed.source] = _Running(feed, subscriber, anyio.CancelScope())
        self._index.add(
            feed.source,
            model=feed.model,
            tenant=feed.tenant,
            lora=feed.lora,
            salt=feed.salt,
            single_group=feed.single_group,
        )
        if subscriber is not None:
            self._tasks.start_soon(self._run, feed, subscriber, running.scope)

    def stop(self, instance_id: str, dp_rank: int | None = None) -> list[Feed]:
        """Stop following a worker, or one of its ranks, and forget its blocks at once; gives what was followed."""
        ending = [
            running
            for source, running in self._running.items()
            if source.instance_id == instance_id and dp_rank in (None, source.dp_rank)
        ]
        for running in ending:
            self._end(running)
        return [running.feed for running in ending]

    def feed(self, source: Source) -> Feed | None:
        """What is followed of a source."""
        running = self._running.get(source)
        return None if running is None else running.feed

    def describe(self) -> list[dict[str, object]]:
        """Who is followed, and how it goes; with the keys of Dynamo's ``/workers`` among ours."""
        return [_described(running, self._index.num_held(running.feed.source)) for running in self._running.values()]

    def statistics(self) -> dict[str, float]:
        """Sums over all subscriptions, those that are over included."""
        totals: dict[str, float] = dict(self._ended)
        subscribers = [running.subscriber for running in self._running.values() if running.subscriber is not None]
        for subscriber in subscribers:
            for name in totals:
                totals[name] += getattr(subscriber.statistics, name)
        return {
            "feeds": len(subscribers),
            "feeds_connected": sum(subscriber.connected for subscriber in subscribers),
            "feeds_approximate": len(self._running) - len(subscribers),
            **{f"feed_{name}": total for name, total in totals.items()},
        }

    async def _run(self, feed: Feed, subscriber: EventSubscriber, scope: anyio.CancelScope) -> None:
        structlog.contextvars.clear_contextvars()  # those of the request that registered it
        with scope:
            _log.info("following", instance_id=feed.source.instance_id, endpoint=feed.endpoint)
            try:
                await subscriber.run(lambda item: self._take(feed, item))
            except zmq.ZMQError as error:
                _log.error(
                    "cannot follow", instance_id=feed.source.instance_id, endpoint=feed.endpoint, error=str(error)
                )

    def _take(self, feed: Feed, item: Batch | Reset | Disconnected | Connected) -> None:
        match item:
            case Batch():
                self._index.apply(feed.source, item.records.records)
                if self._observer is not None:
                    self._observer.applied(feed, item)
            case Reset():
                _log.warning("a worker's blocks are read anew", instance_id=feed.source.instance_id, why=item.reason)
                self._clear(feed)
            case Disconnected():
                # It stops, or has died, which the coordinator says. Its blocks come back with the same life of it.
                _log.info("a worker's event stream broke off", instance_id=feed.source.instance_id)
                self._index.hide(feed.source)
            case Connected():
                self._index.show(feed.source)
        self._tidy()

    def _clear(self, feed: Feed) -> None:
        self._index.clear(feed.source)
        if self._observer is not None:
            self._observer.cleared(feed)

    def _gone(self, member: Member) -> None:
        for source, running in list(self._running.items()):
            if source.instance_id == member.instance_id and running.feed.epoch <= member.epoch:
                self._end(running)

    def _end(self, running: _Running) -> None:
        running.scope.cancel()
        del self._running[running.feed.source]
        if running.subscriber is not None:
            for name in self._ended:
                self._ended[name] += getattr(running.subscriber.statistics, name)
        self._index.remove(running.feed.source)
        if self._observer is not None:
            self._observer.cleared(running.feed)
        self._tidy()

    def _tidy(self) -> None:
        """Take what has departed out of the index's trees, a little at a time."""
        if self._index.reclaimable and not self._tidying:
            self._tidying = True
            self._tasks.start_soon(self._reclaim)

    async def _reclaim(self) -> None:
        while self._index.reclaim():
            await anyio.lowlevel.checkpoint()
        self._tidying = False


def _described(running: _Running, blocks: int) -> dict[str, object]:
    feed, subscriber = running.feed, running.subscriber
    rank = str(feed.source.dp_rank)
    connected = subscriber is not None and subscriber.connected
    status = "approximate" if subscriber is None else "active" if connected else "pending"
    return {
        "instance_id": feed.source.instance_id,
        "dp_rank": feed.source.dp_rank,
        "model": feed.model,
        "tenant": feed.tenant,
        "endpoint": feed.endpoint,
        "replay_endpoint": feed.replay_endpoint,
        "epoch": feed.epoch,
        "block_size": feed.block_size or None,
        "events": "none" if subscriber is None else "zmq",
        "connected": connected,
        "last_sequence": -1 if subscriber is None else subscriber.applied,
        "blocks": blocks,
        "rejected_events": {} if subscriber is None else subscriber.rejected,
        "model_name": feed.model,
        "tenant_id": feed.tenant,
        "source": "none" if subscriber is None else "zmq",
        "status": status,
        "endpoints": {} if feed.endpoint is None else {rank: feed.endpoint},
        "listeners": {} if feed.endpoint is None else {rank: {"endpoint": feed.endpoint, "status": status}},
    }
