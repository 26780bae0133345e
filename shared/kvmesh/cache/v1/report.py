"""The V1 cache in numbers: pages by state, level and layer group."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.cache.layout import PageLayout
from kvmesh.cache.pages import PageCounts
from kvmesh.cache.stats import GroupPages, LevelStats
from kvmesh.cache.v1.block import BlockState
from kvmesh.cache.v1.usage import BlockUsage, LevelUse

__all__ = ["level_stats", "page_counts", "reservable_pages"]


def page_counts(use: LevelUse) -> PageCounts:
    """Pages of one pool and level by state, in constant time."""
    counts = use.counts
    return PageCounts(
        total=use.free.capacity,
        free=len(use.free),
        evictable=counts[BlockState.EVICTABLE],
        held=counts[BlockState.HELD],
        locked=counts[BlockState.LOCKED],
        pinned=counts[BlockState.PINNED],
        quarantined=counts[BlockState.QUARANTINED],
    )


def reservable_pages(use: LevelUse) -> int:
    """Pages that sequences can own in all: those that no lease pins alone."""
    return use.free.capacity - use.counts[BlockState.PINNED] - use.counts[BlockState.QUARANTINED]


def level_stats(layout: PageLayout, usage: BlockUsage, tiers: Sequence[str]) -> list[LevelStats]:
    """Each level in detail, in time linear in layer groups and levels."""
    return [
        LevelStats(
            level,
            tier,
            tuple(levels[level].free.capacity for levels in usage.pools),
            tuple(len(levels[level].free) for levels in usage.pools),
            tuple(
                _group_pages(group.group_id, group.window, usage.pools[group.pool][level].group_counts[group.group_id])
                for group in layout.groups
            ),
        )
        for level, tier in enumerate(tiers)
    ]


def _group_pages(group: int, window: int | None, tally: list[int]) -> GroupPages:
    return GroupPages(
        group,
        window,
        locked=tally[BlockState.LOCKED],
        pinned=tally[BlockState.PINNED] + tally[BlockState.QUARANTINED],
        held=tally[BlockState.HELD],
        evictable=tally[BlockState.EVICTABLE],
    )
