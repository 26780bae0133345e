"""§2 ``iteration_stats_interval`` and §3.10: records of iterations, whose figures add up over the gap."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cache.flows import GroupFlows
from kvmesh.cache.pages import PageCounts
from kvmesh.cache.stats import CacheCounters, CacheStats, GroupPages, LevelStats
from kvmesh.cache.tallies import GroupTally
from kvmesh.engine.cache_report import Pin, counters_of, flows_of, pages_by_age, tiers_of, uses_of
from kvmesh.engine.counters import EngineCounters
from kvmesh.engine.iterations import IterationLog
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.cache_report import GroupFlows as GroupReportFlows
from kvmesh.protocol.cache_report import GroupUse, IterationRecord
from kvmesh.protocol.engine import EngineStats, FromEngine, IterationRecords

TIERS = ("gpu", "host")
PAGE_BYTES = (4096, 512)
"""By layer group."""


def pool(total: int, free: int, evictable: int) -> PageCounts:
    taken = total - free - evictable
    return PageCounts(**{**dict.fromkeys(PageCounts._fields, 0), "total": total, "free": free,
                         "evictable": evictable, "locked": taken})  # fmt: skip


def cache(*pools: PageCounts, **counters: int) -> CacheStats:
    empty = dict.fromkeys(CacheStats._fields, 0)
    return CacheStats(**{**empty, "flows": (), "tallies": (), "pools": pools, "counters": CacheCounters(**counters)})  # type: ignore[arg-type]


def log_of(interval: int, growth: list[dict[str, int]]) -> list[IterationRecord]:
    """The records of iterations in which the cache's counters grow as told."""
    log = IterationLog(interval, TIERS, PAGE_BYTES, ManualClock(5.0))
    counters = CacheCounters()
    for iteration, grown in enumerate(growth, start=1):
        for name, value in grown.items():
            setattr(counters, name, getattr(counters, name) + value)
        log.note(cache_of(counters), EngineCounters(iteration), running=1, waiting=0)
    return log.take()


def cache_of(counters: CacheCounters) -> CacheStats:
    return cache()._replace(counters=replace(counters))


def test_deltas_accumulate_over_the_gap() -> None:
    """§2 CHECK: N=3: reuse 1, 2, 4 blocks in 3 iterations -> one record with 7."""
    [record] = log_of(3, [{"reused_full_blocks": 1}, {"reused_full_blocks": 2}, {"reused_full_blocks": 4}])
    assert (record.reused_blocks, record.iterations, record.iteration) == (7, 3, 3)
    assert record.counters == {"reused_full_blocks": 7}


def test_an_unfinished_interval_is_told_with_its_last_iteration() -> None:
    log = IterationLog(3, TIERS, PAGE_BYTES, ManualClock())
    for iteration in (1, 2):
        log.note(cache(reused_full_blocks=iteration), EngineCounters(iteration), running=0, waiting=0)
        assert log.take() == []
    log.note(cache(reused_full_blocks=9), EngineCounters(3), running=2, waiting=5)
    [record] = log.take()
    assert (record.reused_blocks, record.running, record.waiting) == (9, 2, 5)
    assert log.take() == [], "each record is given once"


def test_every_record_counts_from_the_one_before() -> None:
    """§3.10: reused are full and partial ones; hit rate = reused / (reused + missed)."""
    first, second, third = log_of(
        1,
        [
            {"reused_full_blocks": 2, "reused_partial_blocks": 1, "missed_blocks": 1},
            {"missed_blocks": 5, "offloaded_pages": 3, "offloaded_bytes": 3 << 12},
            {},
        ],
    )
    assert (first.reused_blocks, first.missed_blocks, first.cache_hit_rate) == (3, 1, 0.75)
    assert (second.reused_blocks, second.missed_blocks, second.cache_hit_rate) == (0, 5, 0.0)
    assert second.counters == {"missed_blocks": 5, "offloaded_pages": 3, "offloaded_bytes": 3 << 12}
    assert (third.cache_hit_rate, third.counters) == (None, {})


def test_tokens_of_the_engine() -> None:
    log = IterationLog(2, TIERS, PAGE_BYTES, ManualClock())
    for iteration in range(1, 5):
        counters = EngineCounters(iteration, prompt_tokens=10 * iteration, generated_tokens=iteration)
        log.note(cache(), counters, running=0, waiting=0)
    assert [(one.prompt_tokens, one.generated_tokens) for one in log.take()] == [(20, 2), (20, 2)]


def test_what_happened_to_pages_by_tier_and_layer_group() -> None:
    """§3.10: per iteration and life cycle."""
    log = IterationLog(1, TIERS, PAGE_BYTES, ManualClock())
    states = [
        (GroupFlows(0, 0, reused_full=3), GroupFlows(0, 1), GroupFlows(1, 0), GroupFlows(1, 1)),
        (GroupFlows(0, 0, reused_full=5), GroupFlows(0, 1), GroupFlows(1, 0), GroupFlows(1, 1, offloaded=4)),
        (GroupFlows(0, 0, reused_full=5), GroupFlows(0, 1), GroupFlows(1, 0), GroupFlows(1, 1, offloaded=4)),
    ]
    for iteration, flows in enumerate(states, start=1):
        log.note(cache()._replace(flows=flows), EngineCounters(iteration), running=0, waiting=0)
    assert [one.groups for one in log.take()] == [
        [GroupReportFlows(tier="gpu", group=0, reused_full=3)],
        [
            GroupReportFlows(tier="gpu", group=0, reused_full=2),
            GroupReportFlows(tier="host", group=1, offloaded=4, offloaded_bytes=4 * 512),
        ],
        [],
    ]
    assert flows_of(states[1], TIERS, PAGE_BYTES) == (
        GroupReportFlows(tier="gpu", group=0, reused_full=5),
        GroupReportFlows(tier="gpu", group=1),
        GroupReportFlows(tier="host", group=0),
        GroupReportFlows(tier="host", group=1, offloaded=4, offloaded_bytes=4 * 512),
    )


def test_what_sequences_were_given_by_layer_group() -> None:
    """§3.10: per iteration and life cycle; a group of which nothing is to be told is left out."""
    log = IterationLog(1, TIERS, PAGE_BYTES, ManualClock())
    states = [
        (GroupTally(0, allocated=3, new=2, missed=2, reused_partial=1), GroupTally(1)),
        (GroupTally(0, allocated=3, new=2, missed=2, reused_partial=1), GroupTally(1, lookups=1, misses=1)),
        (
            GroupTally(0, allocated=5, new=4, missed=2, generated=2, reused_partial=1),
            GroupTally(1, lookups=1, misses=1),
        ),
    ]
    for iteration, tallies in enumerate(states, start=1):
        log.note(cache()._replace(tallies=tallies), EngineCounters(iteration), running=0, waiting=0)
    assert [one.uses for one in log.take()] == [
        [GroupUse(group=0, allocated=3, new=2, missed=2, reused_partial=1)],
        [GroupUse(group=1, lookups=1, misses=1)],
        [GroupUse(group=0, allocated=2, new=2, generated=2)],
    ]
    assert uses_of(states[0]) == (
        GroupUse(group=0, allocated=3, new=2, missed=2, reused_partial=1),
        GroupUse(group=1),
    )


def test_peaks_are_of_each_record_alone() -> None:
    """§3.10: peak available, unavailable and evictable per pool group, reset on read."""
    log = IterationLog(2, TIERS, PAGE_BYTES, ManualClock())
    states = [(pool(10, 10, 0), pool(4, 0, 1)), (pool(10, 2, 5), pool(4, 4, 0)), (pool(10, 1, 0), pool(4, 2, 2))]
    for iteration, pools in enumerate([*states, states[-1]], start=1):
        log.note(cache(*pools), EngineCounters(iteration), running=0, waiting=0)
    first, second = log.take()
    assert [(peak.available, peak.unavailable, peak.evictable) for peak in first.pools] == [(10, 3, 5), (4, 3, 1)]
    assert [(peak.available, peak.unavailable, peak.evictable) for peak in second.pools] == [(1, 9, 0), (4, 0, 2)]


@given(
    st.integers(1, 7), st.lists(st.dictionaries(st.sampled_from(list(counters_of(CacheCounters()))), st.integers(0, 9)))
)
def test_records_lose_nothing(interval: int, growth: list[dict[str, int]]) -> None:
    records = log_of(interval, growth)
    assert len(records) == len(growth) // interval
    told = growth[: len(records) * interval]
    for name in counters_of(CacheCounters()):
        assert sum(one.counters.get(name, 0) for one in records) == sum(grown.get(name, 0) for grown in told)


@pytest.mark.parametrize(
    ("ages_s", "by_age"),
    [
        ([], (0, 0, 0, 0)),
        ([0.0, 0.99], (2, 0, 0, 0)),
        ([1.0, 9.9], (0, 2, 0, 0)),
        ([10.0, 59.0, 60.0, 7200.0], (0, 0, 2, 2)),
    ],
)
def test_pinned_pages_by_age(ages_s: list[float], by_age: tuple[int, ...]) -> None:
    assert pages_by_age([Pin(100.0 - age_s, 1) for age_s in ages_s], 100.0) == by_age
    weighed = pages_by_age([Pin(100.0 - age_s, 7) for age_s in ages_s], 100.0)
    assert weighed == tuple(7 * count for count in by_age)


def test_the_cache_s_figures_reach_the_front_as_they_are() -> None:
    levels = [
        LevelStats(0, "gpu", (10, 4), (3, 1), (GroupPages(0, None, 1, 2, 3, 1), GroupPages(1, 64, 0, 0, 1, 2))),
        LevelStats(1, "disk", (7, 0), (7, 0), ()),
    ]
    stats = EngineStats()
    stats.cache.tiers = tiers_of(levels)
    stats.cache.counters = counters_of(CacheCounters(damaged_pages=2))
    records = IterationRecords(log_of(1, [{"reused_full_blocks": 1}]))
    for message in (stats, records):
        sent = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(sent, type=FromEngine) == message
    group = stats.cache.tiers[0].groups[1]
    assert (group.window, group.locked, group.pinned, group.held, group.evictable) == (64, 0, 0, 1, 2)
    assert (stats.cache.tiers[1].tier, stats.cache.tiers[1].free) == ("disk", (7, 0))
    assert stats.cache.counters["damaged_pages"] == 2
