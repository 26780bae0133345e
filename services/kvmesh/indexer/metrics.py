"""Metrics of the indexer that have labels: events by dialect, and each worker's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvmesh.events.feeds import Feeds
from kvmesh.events.index import PrefixIndex

__all__ = ["FeedCollector"]

PREFIX = "kvmesh_indexer"

MAX_LABELLED = 1024
"""Ranks with series of their own; of more, the first ones have them and the sums are in the other metrics."""


class FeedCollector(Collector):
    """Reads the feeds at scrape time.

    Args:
        index: for the blocks.
        feeds: None while the service is starting.
    """

    def __init__(self, index: PrefixIndex, feeds: Callable[[], Feeds | None]) -> None:
        self._index = index
        self._feeds = feeds

    def collect(self) -> Iterable[Metric]:
        """See ``prometheus_client.registry.Collector``."""
        labels = ["worker", "rank"]
        events = CounterMetricFamily(f"{PREFIX}_events", "Events by their dialect", labels=["dialect"])
        blocks = GaugeMetricFamily(f"{PREFIX}_worker_blocks", "Blocks that a rank holds, in all tiers", labels=labels)
        connected = GaugeMetricFamily(f"{PREFIX}_worker_connected", "Whether its stream stands", labels=labels)
        sequence = GaugeMetricFamily(f"{PREFIX}_worker_last_sequence", "Its last batch that was applied", labels=labels)
        resets = CounterMetricFamily(f"{PREFIX}_worker_resets", "How often all was read anew", labels=labels)
        rejected = CounterMetricFamily(
            f"{PREFIX}_worker_rejected_events", "Events that could not be used", labels=labels
        )
        feeds = self._feeds()
        if feeds is not None:
            for dialect, count in feeds.dialects().items():
                events.add_metric([dialect], count)
            for source, subscriber in list(feeds.subscribers())[:MAX_LABELLED]:
                of = [source.instance_id, str(source.dp_rank)]
                blocks.add_metric(of, self._index.num_held(source))
                connected.add_metric(of, subscriber.connected)
                sequence.add_metric(of, subscriber.applied)
                resets.add_metric(of, subscriber.statistics.resets_total)
                rejected.add_metric(of, subscriber.statistics.rejected_events_total)
        return [events, blocks, connected, sequence, resets, rejected]
