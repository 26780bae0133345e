"""Prometheus metrics of a worker's KV cache: pages by tier, layer group and state, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvmesh.protocol.cache_report import PIN_AGE_BOUNDS_S, CacheReport

__all__ = ["PIN_AGES", "CacheCollector"]

STATES = ("locked", "pinned", "held", "evictable")

PIN_AGES = (
    f"under {PIN_AGE_BOUNDS_S[0]:g} s",
    *(f"{low:g} to {high:g} s" for low, high in pairwise(PIN_AGE_BOUNDS_S)),
    f"over {PIN_AGE_BOUNDS_S[-1]:g} s",
)
"""Labels of the age classes of :attr:`CacheReport.pinned_pages_by_age`."""

_DOCUMENTATION = {
    "missed_blocks": "Blocks with prompt tokens that had to be computed or received; one counts in each layer group",
    "generated_blocks": "New blocks of generated tokens only; one counts in each layer group",
    "allocated_pages": "Pages given to sequences, without scratch slots",
    "new_pages": "Pages given to sequences that did not begin as a copy of a reused page",
    "recomputed_tokens": "Tokens of released sequences that were not found when these went on",
    "evicted_pages": "Reusable pages given away",
    "copied_pages": "Pages copied to the device: blocks that were found in part, and states",
    "rebased_pages": "Pages freed because another sequence had committed the same block first",
    "stored_blocks": "Blocks that became reusable",
    "removed_blocks": "Blocks that are reusable no more",
    "suspended": "Sequences put aside",
    "resumed": "Sequences taken up again",
    "offloaded_pages": "Pages moved to a colder tier",
    "offloaded_bytes": "Bytes moved to a colder tier",
    "onboarded_pages": "Pages moved to a warmer tier",
    "onboarded_bytes": "Bytes moved to a warmer tier",
    "dropped_pages": "Unreferenced pages that left the last tier that would have them",
    "rebalances": "Times that memory moved between pools",
    "damaged_pages": "Pages of a cold tier that were not what had been written; each became a miss",
}
_FLOWS = {
    "reused_full": "Pages of a layer group found on a tier, whole",
    "reused_partial": "Pages of a layer group found on a tier, for their leading tokens",
    "copied": "Pages of a layer group copied from a tier to the device",
    "offloaded": "Pages of a layer group that came to a tier from a warmer one",
    "onboarded": "Pages of a layer group that left a tier for a warmer one",
    "dropped": "Pages of a layer group that left a tier for nowhere",
    "damaged": "Pages of a layer group on a tier that were not what had been written",
}
_FLOW_BYTES = ("copied", "offloaded", "onboarded", "dropped")
_USES = {
    "allocated": "Pages of a layer group given to sequences, without scratch slots",
    "new": "Pages of a layer group given to sequences that did not begin as a copy",
    "missed": "New pages of a layer group for blocks with prompt tokens",
    "generated": "New pages of a layer group for blocks of generated tokens only",
}
_REUSED = {"reused_full_blocks": "full", "reused_partial_blocks": "partial"}
_RESULTS = {"aligned_hits": "hit_aligned", "unaligned_hits": "hit_unaligned", "misses": "miss"}
_ELSEWHERE = frozenset({"prompt_tokens", "cached_tokens"})
"""The engine has these already, as it counts them."""


class CacheCollector(Collector):
    """Reads the engine's latest report at scrape time.

    Args:
        read: the report; None while there is no engine.
    """

    def __init__(self, read: Callable[[], CacheReport | None]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """See ``prometheus_client.registry.Collector``."""
        report = self._read()
        if report is not None:
            yield from _tiers(report)
            yield from _flows(report)
            yield from _uses(report)
            yield from _counters(report)


def _tiers(report: CacheReport) -> Iterable[Metric]:
    pages = GaugeMetricFamily(
        "kvmesh_cache_pages",
        "Used pages of a layer group on a tier, each in one state",
        labels=("tier", "group", "state"),
    )
    capacity = GaugeMetricFamily("kvmesh_cache_capacity_pages", "Pages of a pool on a tier", labels=("tier", "pool"))
    free = GaugeMetricFamily("kvmesh_cache_free_pages", "Free pages of a pool on a tier", labels=("tier", "pool"))
    usable = GaugeMetricFamily(
        "kvmesh_cache_tier_usable", "1 while a tier takes pages, 0 once it has failed", labels=("tier",)
    )
    for tier in report.tiers:
        usable.add_metric((tier.tier,), float(tier.usable))
        for pool, (total, left) in enumerate(zip(tier.total, tier.free, strict=True)):
            capacity.add_metric((tier.tier, str(pool)), total)
            free.add_metric((tier.tier, str(pool)), left)
        for group in tier.groups:
            for state in STATES:
                pages.add_metric((tier.tier, str(group.group), state), getattr(group, state))
    pinned = GaugeMetricFamily(
        "kvmesh_cache_pinned_pages", "Pages that transfers pin, by how long they have", labels=("age",)
    )
    for age, count in zip(PIN_AGES, report.pinned_pages_by_age, strict=True):
        pinned.add_metric((age,), count)
    yield from (pages, capacity, free, usable, pinned)


def _flows(report: CacheReport) -> Iterable[Metric]:
    for name, text in _FLOWS.items():
        family = CounterMetricFamily(f"kvmesh_cache_tier_{name}_pages", text, labels=("tier", "group"))
        for flow in report.flows:
            family.add_metric((flow.tier, str(flow.group)), getattr(flow, name))
        yield family
    for name in _FLOW_BYTES:
        text = _FLOWS[name].replace("Pages", "Bytes of pages", 1)
        family = CounterMetricFamily(f"kvmesh_cache_tier_{name}_bytes", text, labels=("tier", "group"))
        for flow in report.flows:
            family.add_metric((flow.tier, str(flow.group)), getattr(flow, f"{name}_bytes"))
        yield family


def _uses(report: CacheReport) -> Iterable[Metric]:
    for name, text in _USES.items():
        family = CounterMetricFamily(f"kvmesh_cache_group_{name}_pages", text, labels=("group",))
        for use in report.uses:
            family.add_metric((str(use.group),), getattr(use, name))
        yield family
    found = CounterMetricFamily(
        "kvmesh_cache_state_lookups", "Prompts for which a recurrent state was looked for", labels=("group", "result")
    )
    tokens = CounterMetricFamily(
        "kvmesh_cache_state_tokens", "Tokens of prompts for which a state was looked for", labels=("group", "result")
    )
    for use in report.uses:
        if use.lookups:
            group = str(use.group)
            for result in ("aligned_hits", "unaligned_hits", "misses"):
                found.add_metric((group, _RESULTS[result]), getattr(use, result))
            tokens.add_metric((group, "reused"), use.reused_tokens)
            tokens.add_metric((group, "unreused"), use.unreused_tokens)
    yield from (found, tokens)


def _counters(report: CacheReport) -> Iterable[Metric]:
    reused = CounterMetricFamily("kvmesh_cache_reused_blocks", "Prompt blocks whose KV was found", labels=("match",))
    for name, value in report.counters.items():
        if name in _REUSED:
            reused.add_metric((_REUSED[name],), value)
        elif name not in _ELSEWHERE:
            text = _DOCUMENTATION.get(name, name.replace("_", " "))
            yield CounterMetricFamily(f"kvmesh_cache_{name}", text, value=value)
    yield reused
