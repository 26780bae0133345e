"""Prometheus metrics of a worker's engines: their statistics and their caches, by rank where there are several."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from prometheus_client import Gauge
from prometheus_client.registry import Collector

from kvmesh.protocol.cache_report import CacheReport
from kvmesh.protocol.engine import EngineStats
from kvmesh.telemetry.metrics import LabelledCollector, Metrics, StatisticsCollector
from kvmesh.worker.cache_metrics import CacheCollector

__all__ = ["RANK_LABEL", "collect_engines", "expose_world_size"]

RANK_LABEL = "dp_rank"
"""On every series of an engine whose server has several attention data-parallel ranks."""


def expose_world_size(metrics: Metrics, world_size: int) -> None:
    """Expose how many ranks a server has, of all kinds together."""
    text = "Attention data-parallel, tensor-parallel and pipeline-parallel ranks together"
    Gauge("kvmesh_world_size", text, registry=metrics.registry).set(world_size)


def collect_engines(metrics: Metrics, dp_size: int, read: Callable[[int], EngineStats | None]) -> None:
    """Expose the engines of a server.

    Args:
        metrics: of the server.
        dp_size: its attention data-parallel ranks.
        read: gives the latest statistics of a rank; None while there is no engine.
    """
    for build in (_statistics, _cache):
        ranks = {str(rank): build(read, rank) for rank in range(dp_size)}
        metrics.collect(ranks["0"] if dp_size == 1 else LabelledCollector(RANK_LABEL, ranks))


def _statistics(read: Callable[[int], EngineStats | None], rank: int) -> Collector:
    def figures() -> Mapping[str, float]:
        stats = read(rank)
        if stats is None:
            return {}
        statistics = msgspec.structs.asdict(stats)
        del statistics["cache"]  # has metrics of its own
        # In OpenMetrics `x` and `x_total` would be two families of one name.
        statistics["events_unfetched"] = statistics.pop("events_buffered")
        return statistics

    return StatisticsCollector("kvmesh_engine", figures)


def _cache(read: Callable[[int], EngineStats | None], rank: int) -> Collector:
    def report() -> CacheReport | None:
        stats = read(rank)
        return None if stats is None else stats.cache

    return CacheCollector(report)
