"""One subscription per worker, from the membership or registered by hand; feeds the index."""

from __future__ import annotations

import math
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from kvmesh.events.subscriber import EventSubscriber, Reset, SubscriberStatistics
from kvmesh.indexer.index import PrefixIndex, Source
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.telemetry import get_logger

__all__ = ["Feed", "Feeds"]

_log = get_logger("indexer.feeds")


class Feed(NamedTuple):
    """What to follow. Two feeds of one instance that differ in anything are different lives of it."""

    instance_id: str
    model: str
    endpoint: str
    replay_endpoint: str | None = None
    epoch: int = 0


class Feeds:
    """Starts, replaces and ends the subscriptions; all of them live in ``tasks``."""

    def __init__(self, index: PrefixIndex, tasks: TaskGroup) -> None:
        self._index = index
        self._tasks = tasks
        self._running: dict[str, tuple[Feed, anyio.CancelScope]] = {}
        self._subscribers: dict[str, EventSubscriber] = {}

    def hear(self, event: MemberEvent) -> None:
        """A change of the membership."""
        if event.kind in ("left", "dead"):
            running = self._running.get(event.member.instance_id)
            if running is not None and running[0].epoch <= event.member.epoch:
                self.stop(event.member.instance_id)
        elif (feed := _feed_of(event.member)) is not None:
            self.follow(feed)

    def follow(self, feed: Feed) -> None:
        """Follow a worker; a feed that is followed already goes on undisturbed, another of its instance ends."""
        running = self._running.get(feed.instance_id)
        if running is not None:
            if running[0] == feed or running[0].epoch > feed.epoch:
                return
            self.stop(feed.instance_id)
        scope = anyio.CancelScope()
        self._running[feed.instance_id] = (feed, scope)
        self._tasks.start_soon(self._run, feed, scope)

    def stop(self, instance_id: str) -> bool:
        """Stop following a worker and forget its blocks at once; False when it was not followed."""
        running = self._running.pop(instance_id, None)
        if running is None:
            return False
        running[1].cancel()
        self._subscribers.pop(instance_id, None)
        self._index.remove_instance(instance_id)
        return True

    def feeds(self) -> list[Feed]:
        """Who is followed."""
        return [feed for feed, _scope in self._running.values()]

    def statistics(self) -> dict[str, float]:
        """Sums over the subscriptions that run now."""
        totals = dict.fromkeys(SubscriberStatistics.__struct_fields__, 0.0)
        for subscriber in self._subscribers.values():
            for name in totals:
                totals[name] += getattr(subscriber.statistics, name)
        return {"feeds": float(len(self._running)), **totals}

    async def _run(self, feed: Feed, scope: anyio.CancelScope) -> None:
        with scope:
            async with EventSubscriber(feed.endpoint, feed.replay_endpoint) as subscriber:
                self._subscribers[feed.instance_id] = subscriber
                self._index.add_source(Source(feed.instance_id), feed.model)
                _log.info("following", instance_id=feed.instance_id, endpoint=feed.endpoint)
                async for item in subscriber.items():
                    if isinstance(item, Reset):
                        _log.warning("a worker's blocks are read anew", instance_id=feed.instance_id, why=item.reason)
                        for source in self._index.sources(feed.instance_id):
                            self._index.clear(source)
                        continue
                    source = Source(feed.instance_id, item.decoded.data_parallel_rank)
                    self._index.add_source(source, feed.model)
                    for event in item.decoded.events:
                        self._index.apply(source, event)


def _feed_of(member: Member) -> Feed | None:
    """The feed of a member that publishes; None for one that does not, or that may not yet be followed."""
    if member.events_endpoint is None or not math.isfinite(member.epoch):
        return None
    return Feed(member.instance_id, member.model, member.events_endpoint, member.replay_endpoint, member.epoch)
