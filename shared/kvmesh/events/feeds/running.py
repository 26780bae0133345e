"""What is followed of one source, how it is described, and what all together have counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import anyio

from kvmesh.events.feeds.feed import Feed
from kvmesh.events.feeds.following import Following
from kvmesh.events.items import SubscriberStatistics

__all__ = ["Running", "Totals", "described"]


class Running:
    """What is followed of one source."""

    __slots__ = ("by_hand", "feed", "following", "scope")

    def __init__(self, feed: Feed, following: Following | None, *, by_hand: bool) -> None:
        self.feed = feed
        self.following = following
        """None for an approximate feed."""
        self.by_hand = by_hand
        self.scope = anyio.CancelScope()


class Totals:
    """Sums over all subscriptions. Those that are over stay in them: totals do not go back."""

    def __init__(self) -> None:
        self._ended = _sums(())
        self._ended_dialects: dict[str, int] = {}

    def ended(self, following: Following) -> None:
        """A subscription is over."""
        self._ended = self.statistics([following])
        self._ended_dialects = self.dialects([following])

    def statistics(self, followed: Iterable[Following]) -> dict[str, int]:
        """By name of the metric."""
        return {name: count + self._ended[name] for name, count in _sums(followed).items()}

    def dialects(self, followed: Iterable[Following]) -> dict[str, int]:
        """Events by the dialect they were written in."""
        totals = dict(self._ended_dialects)
        for following in followed:
            for name, count in following.stream.dialects.items():
                totals[name] = totals.get(name, 0) + count
        return totals


def described(running: Running, blocks: int) -> Mapping[str, object]:
    """How it goes with one source; with the keys of Dynamo's ``/workers`` among ours.

    Args:
        running: what is followed of it.
        blocks: that it holds.
    """
    feed = running.feed
    subscriber = None if running.following is None else running.following.stream
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


def _sums(followed: Iterable[Following]) -> dict[str, int]:
    followed = list(followed)
    names = SubscriberStatistics.__struct_fields__
    return {
        **{f"feed_{name}": sum(getattr(each.stream.statistics, name) for each in followed) for name in names},
        "drift_total": sum(each.drifts_total for each in followed),
        "feed_failures_total": sum(each.failures_total for each in followed),
        "drift_checks_total": sum(each.watch.compared_total for each in followed),
        "drift_checks_missed_total": sum(each.watch.missed_total for each in followed),
    }
