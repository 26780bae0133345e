"""What the router's own metrics show before anything has happened."""

from __future__ import annotations

from kvmesh.router.metrics import OUTCOMES, RouterMetrics
from kvmesh.telemetry.metrics import Metrics


def series(metrics: Metrics) -> dict[str, float]:
    """Requests that ended, by labels."""
    name = "kvmesh_router_requests_total"
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(name)]
    return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}


def test_a_counter_of_requests_is_there_before_the_first_one() -> None:
    """Else the first error would look like a counter that has always stood at one: no rate sees it."""
    metrics = Metrics()
    own = RouterMetrics(metrics)
    wanted = {f'{{api="{api}",outcome="{outcome}"}}' for api in ("chat", "completions") for outcome in OUTCOMES}
    assert series(metrics) == dict.fromkeys(wanted, 0.0)
    own.ended("chat", "server_error")
    assert series(metrics) == {**dict.fromkeys(wanted, 0.0), '{api="chat",outcome="server_error"}': 1.0}
