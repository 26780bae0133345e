"""The cache's statistics in the form that the front is told."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import attrgetter, sub
from typing import NamedTuple

from kvmesh.cache.flows import GroupFlows
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.stats import CacheCounters, LevelStats
from kvmesh.cache.tallies import GroupTally
from kvmesh.protocol.cache_report import PIN_AGE_BOUNDS_S, GroupReport, GroupUse, TierReport
from kvmesh.protocol.cache_report import GroupFlows as GroupFlowsReport

__all__ = [
    "COUNTER_NAMES",
    "Pin",
    "counter_values",
    "counters_of",
    "flows_of",
    "page_bytes_of",
    "pages_by_age",
    "tiers_of",
    "uses_of",
]

COUNTER_NAMES = tuple(field.name for field in fields(CacheCounters))

counter_values = attrgetter(*COUNTER_NAMES)
"""The counters in the order of :data:`COUNTER_NAMES`."""


_WITH_BYTES = ("copied", "offloaded", "onboarded", "dropped")


class Pin(NamedTuple):
    """Pages that one transfer pins."""

    since_s: float
    """Monotonic time of the transfer's beginning."""
    num_pages: int


def counters_of(counters: CacheCounters) -> dict[str, int]:
    """All counters by name."""
    return dict(zip(COUNTER_NAMES, counter_values(counters), strict=True))


def tiers_of(levels: Iterable[LevelStats]) -> tuple[TierReport, ...]:
    """Levels as tiers, in the same order."""
    return tuple(
        TierReport(
            level=level.level,
            tier=level.tier,
            total=level.total,
            free=level.free,
            groups=tuple(GroupReport(**group._asdict()) for group in level.groups),
            usable=level.usable,
        )
        for level in levels
    )


def page_bytes_of(layout: PageLayout) -> list[int]:
    """Bytes of a page by layer group."""
    return [layout.pools[group.pool].page_bytes for group in layout.groups]


def flows_of(
    flows: Sequence[GroupFlows], tiers: Sequence[str], page_bytes: Sequence[int], before: Sequence[GroupFlows] = ()
) -> tuple[GroupFlowsReport, ...]:
    """Flows by the names of their tiers: since start, or since ``before``, without those of nothing.

    Args:
        flows: of the cache.
        tiers: names of its levels.
        page_bytes: by layer group.
        before: earlier flows of the same cache.
    """
    reports = []
    for index, flow in enumerate(flows):
        counts = flow[2:] if not before else tuple(map(sub, flow[2:], before[index][2:]))
        if not before or any(counts):
            names = dict(zip(flow._fields[2:], counts, strict=True))
            names |= {f"{name}_bytes": names[name] * page_bytes[flow.group] for name in _WITH_BYTES}
            reports.append(GroupFlowsReport(tier=tiers[flow.level], group=flow.group, **names))
    return tuple(reports)


def uses_of(tallies: Sequence[GroupTally], before: Sequence[GroupTally] = ()) -> tuple[GroupUse, ...]:
    """Tallies of layer groups: since start, or since ``before``, without those of nothing."""
    reports = []
    for index, tally in enumerate(tallies):
        counts = tally[1:] if not before else tuple(map(sub, tally[1:], before[index][1:]))
        if not before or any(counts):
            reports.append(GroupUse(group=tally.group, **dict(zip(tally._fields[1:], counts, strict=True))))
    return tuple(reports)


def pages_by_age(pins: Iterable[Pin], now_s: float, bounds_s: Sequence[float] = PIN_AGE_BOUNDS_S) -> tuple[int, ...]:
    """Pinned pages by age class; an age on a bound belongs to the class above it."""
    pages = [0] * (len(bounds_s) + 1)
    for pin in pins:
        pages[bisect_right(bounds_s, now_s - pin.since_s)] += pin.num_pages
    return tuple(pages)
