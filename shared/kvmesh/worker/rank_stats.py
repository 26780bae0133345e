"""The statistics of all attention data-parallel ranks of a server as those of one engine: sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import msgspec

from kvmesh.protocol.cache_report import CacheReport, GroupFlows, GroupReport, GroupUse, TierReport
from kvmesh.protocol.engine import EngineStats

__all__ = ["summed", "summed_reports"]

S = TypeVar("S", bound=msgspec.Struct)


def summed(ranks: Sequence[EngineStats]) -> EngineStats:
    """The sum of every figure; of one rank, its own statistics."""
    if len(ranks) == 1:
        return ranks[0]
    names = [name for name in EngineStats.__struct_fields__ if name != "cache"]
    figures = {name: sum(getattr(stats, name) for stats in ranks) for name in names}
    return EngineStats(**figures, cache=summed_reports([stats.cache for stats in ranks]))


def summed_reports(ranks: Sequence[CacheReport]) -> CacheReport:
    """One report of all caches: pages of the same tier, layer group or pool together.

    A tier is usable while that of every rank is.
    """
    tiers: dict[str, list[TierReport]] = {}
    for report in ranks:
        for tier in report.tiers:
            tiers.setdefault(tier.tier, []).append(tier)
    counters: Counter[str] = Counter()
    for report in ranks:
        counters.update(report.counters)
    return CacheReport(
        tiers=tuple(sorted((_tier(parts) for parts in tiers.values()), key=lambda tier: tier.level)),
        pinned_pages_by_age=_columns(report.pinned_pages_by_age for report in ranks),
        flows=_by_key([flow for report in ranks for flow in report.flows], GroupFlows, ("tier", "group")),
        uses=_by_key([use for report in ranks for use in report.uses], GroupUse, ("group",)),
        counters=dict(counters),
    )


def _tier(parts: Sequence[TierReport]) -> TierReport:
    return TierReport(
        level=parts[0].level,
        tier=parts[0].tier,
        total=_columns(part.total for part in parts),
        free=_columns(part.free for part in parts),
        groups=_by_key([group for part in parts for group in part.groups], GroupReport, ("group", "window")),
        usable=all(part.usable for part in parts),
    )


def _columns(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))


def _by_key(parts: Sequence[S], kind: type[S], keys: tuple[str, ...]) -> tuple[S, ...]:
    """Structs with equal ``keys`` added up in their other fields, in order of first appearance."""
    groups: dict[tuple[Hashable, ...], list[S]] = {}
    for part in parts:
        groups.setdefault(tuple(getattr(part, key) for key in keys), []).append(part)
    return tuple(
        kind(
            **dict(zip(keys, named, strict=True)),
            **{
                field: sum(getattr(part, field) for part in alike)
                for field in kind.__struct_fields__
                if field not in keys
            },
        )
        for named, alike in groups.items()
    )
