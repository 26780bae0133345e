"""Prometheus metrics: one registry a process, and the HTTP metrics that every service has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

__all__ = ["LATENCY_BUCKETS_S", "LabelledCollector", "Metrics", "StatisticsCollector"]

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)
"""From a proxy hop to the request deadline."""

OPENMETRICS = "application/openmetrics-text"


class Metrics:
    """The registry of one service, and its HTTP metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.http_requests = Counter(
            "kvmesh_http_requests_total", "HTTP requests answered", ["route", "status"], registry=self.registry
        )
        self.http_seconds = Histogram(
            "kvmesh_http_request_seconds",
            "Time from a request's head to its last byte",
            ["route"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.http_in_flight = Gauge("kvmesh_http_in_flight", "HTTP requests being served", registry=self.registry)
        self.drain_deadline = Gauge(
            "kvmesh_drain_deadline_seconds",
            "While the service stops: when its drain is to be over, in seconds since 1970; else 0",
            registry=self.registry,
        )

    def collect_statistics(
        self, prefix: str, read: Callable[[], Mapping[str, float]], documentation: Mapping[str, str] | None = None
    ) -> None:
        """Expose a ``statistics()`` mapping: keys ending in ``_total`` become counters, the others gauges."""
        self.registry.register(StatisticsCollector(prefix, read, documentation))

    def collect(self, collector: Collector) -> None:
        """Expose what a collector of one's own yields."""
        self.registry.register(collector)

    def render(self) -> bytes:
        """The exposition as plain text, without exemplars."""
        return generate_latest(self.registry)

    def answer(self, accept: str) -> tuple[bytes, str]:
        """The exposition for a scraper.

        Args:
            accept: its ``Accept``; who prefers OpenMetrics gets that, with exemplars.

        Returns:
            Body, and its content type.
        """
        if _prefers_openmetrics(accept):
            body: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return self.render(), CONTENT_TYPE_LATEST


def _prefers_openmetrics(accept: str) -> bool:
    """Whether an ``Accept`` header (RFC 9110 §12.5.1) names OpenMetrics, and text not before it."""
    weights: dict[str, float] = {}
    for one in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in one.split(";"))
        given = [value for name, _, value in (p.partition("=") for p in parameters) if name.strip() == "q"]
        try:
            weight = float(given[0]) if given else 1.0
        except ValueError:
            weight = 0.0
        weights[kind] = max(weights.get(kind, 0.0), weight)
    wanted = weights.get(OPENMETRICS, 0.0)
    return wanted > 0 and wanted >= weights.get("text/plain", 0.0)


class StatisticsCollector(Collector):
    """Reads an object's own statistics at scrape time, so that no number is kept twice."""

    def __init__(
        self, prefix: str, read: Callable[[], Mapping[str, float]], documentation: Mapping[str, str] | None = None
    ) -> None:
        self._prefix = prefix
        self._read = read
        self._documentation = documentation or {}

    def collect(self) -> Iterable[Metric]:
        """See ``prometheus_client.registry.Collector``."""
        for key, value in self._read().items():
            name = f"{self._prefix}_{key}"
            text = self._documentation.get(key, key.replace("_", " "))
            if key.endswith("_total"):
                yield CounterMetricFamily(name.removesuffix("_total"), text, value=value)
            else:
                yield GaugeMetricFamily(name, text, value=value)


class LabelledCollector(Collector):
    """Collectors of the same series as one: each one's samples get its value of a label.

    Args:
        label: name of the label.
        collectors: by value.
    """

    def __init__(self, label: str, collectors: Mapping[str, Collector]) -> None:
        self._label = label
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        """See ``prometheus_client.registry.Collector``."""
        families: dict[str, Metric] = {}
        for value, collector in self._collectors.items():
            for metric in collector.collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [
                    sample._replace(labels={**sample.labels, self._label: value}) for sample in metric.samples
                ]
        yield from families.values()
