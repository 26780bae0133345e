"""Acceptance 7: metrics show the cache per tier and layer group, with pins by age."""

from __future__ import annotations

from kvmesh.cache.stats import CacheCounters
from kvmesh.engine.cache_report import counters_of
from kvmesh.protocol.cache_report import CacheReport, GroupFlows, GroupReport, GroupUse, TierReport
from kvmesh.telemetry.metrics import Metrics
from kvmesh.worker.cache_metrics import CacheCollector

REPORT = CacheReport(
    tiers=(
        TierReport(
            level=0,
            tier="gpu",
            total=(100, 40),
            free=(60, 1),
            groups=(
                GroupReport(group=0, window=None, locked=10, pinned=5, held=5, evictable=20),
                GroupReport(group=1, window=512, locked=3, pinned=0, held=0, evictable=36),
            ),
        ),
        TierReport(level=1, tier="host", total=(50, 0), free=(50, 0), groups=(), usable=False),
    ),
    flows=(
        GroupFlows(tier="gpu", group=1, reused_full=7, dropped=3),
        GroupFlows(tier="host", group=1, offloaded=12, offloaded_bytes=48, onboarded=2, damaged=1),
    ),
    uses=(
        GroupUse(group=0, allocated=9, new=8, missed=5, generated=3, reused_full=2, reused_partial=1),
        GroupUse(
            group=1, lookups=5, hits=3, misses=2, reused_tokens=40, unreused_tokens=60, aligned_hits=2, unaligned_hits=1
        ),
    ),
    pinned_pages_by_age=(4, 0, 1, 2),
    counters=counters_of(
        CacheCounters(
            prompt_tokens=9, reused_full_blocks=7, reused_partial_blocks=2, offloaded_bytes=4096, damaged_pages=1
        )
    ),
)


def samples(report: CacheReport | None) -> dict[str, str]:
    metrics = Metrics()
    metrics.collect(CacheCollector(lambda: report))
    lines = metrics.render().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line.startswith("kvmesh_cache"))


def test_pages_by_tier_group_and_state() -> None:
    found = samples(REPORT)
    assert found['kvmesh_cache_pages{group="0",state="locked",tier="gpu"}'] == "10.0"
    assert found['kvmesh_cache_pages{group="0",state="pinned",tier="gpu"}'] == "5.0"
    assert found['kvmesh_cache_pages{group="1",state="evictable",tier="gpu"}'] == "36.0"
    assert found['kvmesh_cache_free_pages{pool="1",tier="gpu"}'] == "1.0"
    assert found['kvmesh_cache_capacity_pages{pool="0",tier="host"}'] == "50.0"
    assert found['kvmesh_cache_tier_usable{tier="gpu"}'] == "1.0"
    assert found['kvmesh_cache_tier_usable{tier="host"}'] == "0.0"


def test_hits_and_moves_by_tier_and_group() -> None:
    found = samples(REPORT)
    assert found['kvmesh_cache_tier_reused_full_pages_total{group="1",tier="gpu"}'] == "7.0"
    assert found['kvmesh_cache_tier_dropped_pages_total{group="1",tier="gpu"}'] == "3.0"
    assert found['kvmesh_cache_tier_offloaded_pages_total{group="1",tier="host"}'] == "12.0"
    assert found['kvmesh_cache_tier_offloaded_bytes_total{group="1",tier="host"}'] == "48.0"
    assert found['kvmesh_cache_tier_onboarded_pages_total{group="1",tier="host"}'] == "2.0"
    assert found['kvmesh_cache_tier_damaged_pages_total{group="1",tier="host"}'] == "1.0"


def test_what_sequences_were_given_by_group() -> None:
    """§3.10: allocated, new, missed, generated; lookups of states."""
    found = samples(REPORT)
    given = {name: found[f'kvmesh_cache_group_{name}_pages_total{{group="0"}}'] for name in ("allocated", "new")}
    assert given == {"allocated": "9.0", "new": "8.0"}
    assert found['kvmesh_cache_group_missed_pages_total{group="0"}'] == "5.0"
    assert found['kvmesh_cache_group_generated_pages_total{group="0"}'] == "3.0"
    states = {name: value for name, value in found.items() if name.startswith("kvmesh_cache_state")}
    assert states == {
        'kvmesh_cache_state_lookups_total{group="1",result="hit_aligned"}': "2.0",
        'kvmesh_cache_state_lookups_total{group="1",result="hit_unaligned"}': "1.0",
        'kvmesh_cache_state_lookups_total{group="1",result="miss"}': "2.0",
        'kvmesh_cache_state_tokens_total{group="1",result="reused"}': "40.0",
        'kvmesh_cache_state_tokens_total{group="1",result="unreused"}': "60.0",
    }


def test_pins_by_age() -> None:
    found = samples(REPORT)
    ages = {name: value for name, value in found.items() if name.startswith("kvmesh_cache_pinned_pages")}
    assert ages == {
        'kvmesh_cache_pinned_pages{age="under 1 s"}': "4.0",
        'kvmesh_cache_pinned_pages{age="1 to 10 s"}': "0.0",
        'kvmesh_cache_pinned_pages{age="10 to 60 s"}': "1.0",
        'kvmesh_cache_pinned_pages{age="over 60 s"}': "2.0",
    }


def test_counters_have_units_and_end_in_total() -> None:
    found = samples(REPORT)
    assert found['kvmesh_cache_reused_blocks_total{match="full"}'] == "7.0"
    assert found['kvmesh_cache_reused_blocks_total{match="partial"}'] == "2.0"
    assert found["kvmesh_cache_offloaded_bytes_total"] == "4096.0"
    assert found["kvmesh_cache_damaged_pages_total"] == "1.0"
    assert "kvmesh_cache_prompt_tokens_total" not in found, "kvmesh_engine_prompt_tokens_total has them"


def test_no_engine_no_figures() -> None:
    assert samples(None) == {}
