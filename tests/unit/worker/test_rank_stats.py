"""The statistics of several ranks: sums for the server, and metrics with a label."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvmesh.protocol.cache_report import CacheReport, GroupFlows, GroupReport, GroupUse, TierReport
from kvmesh.protocol.engine import EngineStats
from kvmesh.telemetry.metrics import Metrics
from kvmesh.worker.engine_metrics import collect_engines
from kvmesh.worker.rank_stats import summed, summed_reports


def group(number: int, locked: int, evictable: int) -> GroupReport:
    return GroupReport(group=number, window=None, locked=locked, pinned=0, held=0, evictable=evictable)


GPU = TierReport(level=0, tier="gpu", total=(10, 4), free=(7, 1), groups=(group(0, 1, 2), group(1, 3, 0)))
HOST = TierReport(level=1, tier="host", total=(5, 5), free=(5, 5), groups=(), usable=False)
FIRST = CacheReport(
    tiers=(GPU, HOST),
    pinned_pages_by_age=(1, 0, 0, 2),
    flows=(GroupFlows(tier="gpu", group=0, reused_full=2),),
    uses=(GroupUse(group=0, allocated=4),),
    counters={"stored_blocks": 2},
)
SECOND = CacheReport(
    tiers=(GPU,),
    pinned_pages_by_age=(1, 1, 0, 0),
    flows=(GroupFlows(tier="gpu", group=0, reused_full=3), GroupFlows(tier="host", group=0, onboarded=1)),
    uses=(GroupUse(group=0, allocated=1, missed=1), GroupUse(group=1, hits=1)),
    counters={"stored_blocks": 1, "removed_blocks": 5},
)


def test_of_one_rank_nothing_changes() -> None:
    stats = EngineStats(running=3, cache=FIRST)
    assert summed([stats]) is stats


def test_figures_add_up() -> None:
    total = summed([EngineStats(running=1, pages_total=14, cache=FIRST), EngineStats(running=2, pages_total=10)])
    assert (total.running, total.pages_total, total.waiting) == (3, 24, 0)
    assert total.cache.tiers == FIRST.tiers


def test_reports_add_up_by_tier_and_layer_group() -> None:
    assert summed_reports([FIRST, SECOND]) == CacheReport(
        tiers=(
            TierReport(level=0, tier="gpu", total=(20, 8), free=(14, 2), groups=(group(0, 2, 4), group(1, 6, 0))),
            HOST,
        ),
        pinned_pages_by_age=(2, 1, 0, 2),
        flows=(GroupFlows(tier="gpu", group=0, reused_full=5), GroupFlows(tier="host", group=0, onboarded=1)),
        uses=(GroupUse(group=0, allocated=5, missed=1), GroupUse(group=1, hits=1)),
        counters={"stored_blocks": 3, "removed_blocks": 5},
    )


def lines_of(ranks: Sequence[EngineStats | None]) -> list[str]:
    metrics = Metrics()
    collect_engines(metrics, len(ranks), lambda rank: ranks[rank])
    return [line for line in metrics.render().decode().splitlines() if line.startswith(("kvmesh_e", "kvmesh_c"))]


def test_series_of_several_ranks_have_a_label() -> None:
    lines = lines_of([EngineStats(running=1, cache=FIRST), EngineStats(running=2, cache=SECOND)])
    assert 'kvmesh_engine_running{dp_rank="0"} 1.0' in lines
    assert 'kvmesh_engine_running{dp_rank="1"} 2.0' in lines
    assert 'kvmesh_cache_free_pages{dp_rank="1",pool="0",tier="gpu"} 7.0' in lines
    assert all("dp_rank=" in line for line in lines)


def test_those_of_one_engine_have_none() -> None:
    lines = lines_of([EngineStats(running=1, cache=FIRST)])
    assert "kvmesh_engine_running 1.0" in lines
    assert not any("dp_rank" in line for line in lines)


def test_no_two_families_have_one_name() -> None:
    """In OpenMetrics a counter's family is called without its ``_total``."""
    metrics = Metrics()
    collect_engines(metrics, 1, lambda _rank: EngineStats(cache=FIRST))
    page = metrics.answer("application/openmetrics-text")[0].decode()
    names = [family.name for family in text_string_to_metric_families(page)]  # type: ignore[no-untyped-call]
    assert "kvmesh_engine_events_unfetched" in names


def test_before_there_are_engines_there_are_no_series() -> None:
    assert lines_of([None, None]) == []
