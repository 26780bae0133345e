"""From what was measured to percentiles and throughput; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

__all__ = ["Distribution", "GroupSummary", "RequestRecord", "summarize"]


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as its client saw it; times in seconds."""

    group: str
    started_s: float
    """Since the start of the run."""
    duration_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    gaps_s: list[float] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    outcome: str = "ok"
    """``ok``, ``unfinished`` (the run ended first), or what went wrong."""


class Distribution(msgspec.Struct, kw_only=True):
    """Of one quantity, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values_s: Sequence[float]) -> Distribution | None:
        """None of nothing."""
        if not values_s:
            return None
        ordered = sorted(value * 1e3 for value in values_s)
        return cls(
            count=len(ordered),
            mean=sum(ordered) / len(ordered),
            p50=_percentile(ordered, 0.5),
            p90=_percentile(ordered, 0.9),
            p99=_percentile(ordered, 0.99),
            max=ordered[-1],
        )


class GroupSummary(msgspec.Struct, kw_only=True):
    """Of all requests of one group."""

    group: str
    outcomes: dict[str, int]
    wall_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None


def summarize(records: Iterable[RequestRecord], wall_s: float) -> list[GroupSummary]:
    """One summary a group, in order of first appearance.

    Latencies count requests that ended well, and the pieces of those that the end of the run cut off; throughput
    counts every token that arrived.
    """
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    return [_summary(group, members, wall_s) for group, members in groups.items()]


def _summary(group: str, records: list[RequestRecord], wall_s: float) -> GroupSummary:
    good = [record for record in records if record.outcome in ("ok", "unfinished")]
    done = [record for record in records if record.outcome == "ok"]
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.completion_tokens for record in good)
    return GroupSummary(
        group=group,
        outcomes=dict(Counter(record.outcome for record in records)),
        wall_s=wall_s,
        requests_per_s=len(done) / wall_s,
        prompt_tokens_per_s=prompt_tokens / wall_s,
        output_tokens_per_s=output_tokens / wall_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=output_tokens,
        ttft_ms=Distribution.of_seconds([record.ttft_s for record in good if record.ttft_s is not None]),
        tpot_ms=Distribution.of_seconds([record.tpot_s for record in good if record.tpot_s is not None]),
        itl_ms=Distribution.of_seconds([gap for record in good for gap in record.gaps_s]),
        e2e_ms=Distribution.of_seconds([record.duration_s for record in done]),
    )


def _percentile(ordered: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the closest ranks."""
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
