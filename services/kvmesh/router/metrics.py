"""The router's own metrics, beside those that are read from each object's ``statistics()``."""

from __future__ import annotations

from typing import get_args

from prometheus_client import Counter, Histogram

from kvmesh.protocol.openai.requests import ApiKind
from kvmesh.telemetry.metrics import LATENCY_BUCKETS_S, Metrics

__all__ = ["RouterMetrics"]

_STAGE_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)
_SHARE_BUCKETS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
OUTCOMES = ("ok", "client_error", "server_error", "timeout", "cancelled")


class RouterMetrics:
    """Counters and histograms of requests."""

    def __init__(self, metrics: Metrics) -> None:
        registry = metrics.registry
        self._requests = Counter(
            "kvmesh_router_requests_total", "Requests that ended, by outcome", ["api", "outcome"], registry=registry
        )
        # All there from the first scrape on: a counter that appears with its first event seems never to have moved.
        for api in get_args(ApiKind):
            for outcome in OUTCOMES:
                self._requests.labels(api, outcome)
        stages = Histogram(
            "kvmesh_router_stage_seconds",
            "Time that the router adds: waiting for a place, tokenizing, asking for matches",
            ["stage"],
            buckets=_STAGE_BUCKETS_S,
            registry=registry,
        )
        self.queue_s = stages.labels("queue")
        self.tokenize_s = stages.labels("tokenize")
        self.match_s = stages.labels("match")
        self.first_byte_s = Histogram(
            "kvmesh_router_first_byte_seconds",
            "From a request's arrival to the first byte of its answer's body",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.matched_share = Histogram(
            "kvmesh_router_matched_share",
            "Largest share of a prompt that any server held; 0 throughout means that events and prompts do not fit",
            buckets=_SHARE_BUCKETS,
            registry=registry,
        )

    def ended(self, api: str, outcome: str) -> None:
        """A request is over, with one of :data:`OUTCOMES`."""
        self._requests.labels(api, outcome).inc()
