"""One subscription for each publisher, from the membership or registered by hand; fills the index."""

from __future__ import annotations

from typing import NamedTuple

import anyio
import anyio.lowlevel
import structlog
import zmq
from anyio.abc import TaskGroup

from kvmesh.events.endpoints import EndpointError, rank_endpoint
from kvmesh.events.index import DEFAULT_TENANT, PrefixIndex, Source
from kvmesh.events.records import LoraKey
from kvmesh.events.subscriber import Batch, Connected, Disconnected, EventSubscriber, Reset, SubscriberStatistics
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.telemetry import get_logger

__all__ = ["Feed", "Feeds"]

_log = get_logger("indexer.feeds")


class Feed(NamedTuple):
    """What to follow, and what its blocks are of. Feeds of one source that differ in anything are different lives."""

    source: Source
    model: str
    endpoint: str
    replay_endpoint: str | None = None
    epoch: int = 0
    tenant: str = DEFAULT_TENANT
    lora: LoraKey = None
    """Adapter of blocks that name none."""
    salt: str | None = None
    """Salt of blocks that name none."""
    single_group: bool = False
    """It tells one layer group only, the widest."""


class _Running(NamedTuple):
    feed: Feed
    subscriber: EventSubscriber
    scope: anyio.CancelScope


class Feeds:
    """Starts, replaces and ends subscriptions; all of them live in ``tasks``.

    Args:
        index: to fill.
        tasks: of the service.
        context: of the sockets.
    """

    def __init__(self, index: PrefixIndex, tasks: TaskGroup, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._index = index
        self._tasks = tasks
        self._context = context
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
            feeds = _feeds_of(member)
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
        subscriber = EventSubscriber(feed.endpoint, feed.replay_endpoint, context=self._context)
        running = self._running[feed.source] = _Running(feed, subscriber, anyio.CancelScope())
        self._index.add(
            feed.source,
            model=feed.model,
            tenant=feed.tenant,
            lora=feed.lora,
            salt=feed.salt,
            single_group=feed.single_group,
        )
        self._tasks.start_soon(self._run, running)

    def stop(self, instance_id: str, dp_rank: int | None = None) -> bool:
        """Stop following a worker, or one of its ranks, and forget its blocks at once; False when it was unknown."""
        ending = [
            running
            for source, running in self._running.items()
            if source.instance_id == instance_id and dp_rank in (None, source.dp_rank)
        ]
        for running in ending:
            self._end(running)
        return bool(ending)

    def describe(self) -> list[dict[str, object]]:
        """Who is followed, and how it goes."""
        return [
            {
                "instance_id": feed.source.instance_id,
                "dp_rank": feed.source.dp_rank,
                "model": feed.model,
                "tenant": feed.tenant,
                "endpoint": feed.endpoint,
                "replay_endpoint": feed.replay_endpoint,
                "epoch": feed.epoch,
                "connected": subscriber.connected,
                "last_sequence": subscriber.applied,
                "blocks": self._index.num_held(feed.source),
                "rejected_events": subscriber.rejected,
            }
            for feed, subscriber, _scope in self._running.values()
        ]

    def statistics(self) -> dict[str, float]:
        """Sums over all subscriptions, those that are over included."""
        totals: dict[str, float] = dict(self._ended)
        for running in self._running.values():
            for name in totals:
                totals[name] += getattr(running.subscriber.statistics, name)
        connected = sum(running.subscriber.connected for running in self._running.values())
        return {
            "feeds": len(self._running),
            "feeds_connected": connected,
            **{f"feed_{name}": total for name, total in totals.items()},
        }

    async def _run(self, running: _Running) -> None:
        feed = running.feed
        structlog.contextvars.clear_contextvars()  # those of the request that registered it
        with running.scope:
            _log.info("following", instance_id=feed.source.instance_id, endpoint=feed.endpoint)
            try:
                await running.subscriber.run(lambda item: self._take(feed, item))
            except zmq.ZMQError as error:
                _log.error(
                    "cannot follow", instance_id=feed.source.instance_id, endpoint=feed.endpoint, error=str(error)
                )

    def _take(self, feed: Feed, item: Batch | Reset | Disconnected | Connected) -> None:
        match item:
            case Batch():
                self._index.apply(feed.source, item.records.records)
            case Reset():
                _log.warning("a worker's blocks are read anew", instance_id=feed.source.instance_id, why=item.reason)
                self._index.clear(feed.source)
            case Disconnected():
                # It stops, or has died, which the coordinator says. Its blocks come back with the same life of it.
                _log.info("a worker's event stream broke off", instance_id=feed.source.instance_id)
                self._index.hide(feed.source)
            case Connected():
                self._index.show(feed.source)
        self._tidy()

    def _gone(self, member: Member) -> None:
        for source, running in list(self._running.items()):
            if source.instance_id == member.instance_id and running.feed.epoch <= member.epoch:
                self._end(running)

    def _end(self, running: _Running) -> None:
        running.scope.cancel()
        del self._running[running.feed.source]
        for name in self._ended:
            self._ended[name] += getattr(running.subscriber.statistics, name)
        self._index.remove(running.feed.source)
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


def _feeds_of(member: Member) -> list[Feed]:
    """A feed for each rank of a member; none for one that does not publish.

    Raises:
        EndpointError: its endpoints cannot be those of so many ranks.
    """
    stream, replay = member.events_endpoint, member.replay_endpoint
    if stream is None:
        return []
    return [
        Feed(
            Source(member.instance_id, rank),
            member.model,
            rank_endpoint(stream, rank),
            None if replay is None else rank_endpoint(replay, rank),
            member.epoch,
            single_group=member.events_single_group,
        )
        for rank in range(member.dp_size)
    ]
