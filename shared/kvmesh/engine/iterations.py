"""Records of what iterations did: counters' growth over ``iteration_stats_interval`` of them, and peaks (§3.10)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

from kvmesh.cache.flows import GroupFlows
from kvmesh.cache.stats import CacheStats
from kvmesh.cache.tallies import GroupTally
from kvmesh.engine.cache_report import COUNTER_NAMES, counter_values, flows_of, uses_of
from kvmesh.engine.counters import EngineCounters
from kvmesh.net.clock import Clock
from kvmesh.protocol.cache_report import IterationRecord, PoolPeaks

__all__ = ["IterationLog"]


class IterationLog:
    """Takes note of every iteration that computes.

    Args:
        interval: iterations of one record.
        tiers: names of the cache's levels.
        page_bytes: by layer group.
        clock: for time stamps.
    """

    def __init__(self, interval: int, tiers: Sequence[str], page_bytes: Sequence[int], clock: Clock) -> None:
        self._interval = interval
        self._tiers = tiers
        self._page_bytes = page_bytes
        self._clock = clock
        self._iterations = 0
        """Since the last record."""
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._before: tuple[int, ...] = (0,) * len(COUNTER_NAMES)
        """Counters at the last record."""
        self._flows_before: tuple[GroupFlows, ...] = ()
        self._tallies_before: tuple[GroupTally, ...] = ()
        self._peaks: list[PoolPeaks] = []
        self._records: list[IterationRecord] = []

    def __len__(self) -> int:
        return len(self._records)

    def note(self, cache: CacheStats, engine: EngineCounters, *, running: int, waiting: int) -> None:
        """An iteration that computed has ended with these numbers; it counts for the peaks, too."""
        self._iterations += 1
        self.note_peaks(cache)
        if self._iterations == self._interval:
            self._records.append(self._record(cache, engine, running, waiting))

    def take(self) -> list[IterationRecord]:
        """The records made since the last call, oldest first."""
        records, self._records = self._records, []
        return records

    def note_peaks(self, cache: CacheStats) -> None:
        """The pools are in this state, now in the middle of an iteration."""
        if not self._peaks:
            self._peaks = [PoolPeaks() for _ in cache.pools]
        for peaks, pool in zip(self._peaks, cache.pools, strict=True):
            available = pool.free + pool.evictable
            peaks.available = max(peaks.available, available)
            peaks.unavailable = max(peaks.unavailable, pool.total - available)
            peaks.evictable = max(peaks.evictable, pool.evictable)

    def _record(self, cache: CacheStats, engine: EngineCounters, running: int, waiting: int) -> IterationRecord:
        now = counter_values(cache.counters)
        grown = map(sub, now, self._before)
        growth = {name: by for name, by in zip(COUNTER_NAMES, grown, strict=True) if by}
        reused = growth.get("reused_full_blocks", 0) + growth.get("reused_partial_blocks", 0)
        missed = growth.get("missed_blocks", 0)
        record = IterationRecord(
            iteration=engine.iteration,
            iterations=self._iterations,
            unix_ns=self._clock.unix_ns(),
            running=running,
            waiting=waiting,
            prompt_tokens=engine.prompt_tokens - self._prompt_tokens,
            generated_tokens=engine.generated_tokens - self._generated_tokens,
            reused_blocks=reused,
            missed_blocks=missed,
            cache_hit_rate=reused / (reused + missed) if reused + missed else None,
            counters=growth,
            groups=list(
                flows_of(cache.flows, self._tiers, self._page_bytes, self._flows_before or _nothing(cache.flows))
            ),
            uses=list(uses_of(cache.tallies, self._tallies_before or [GroupTally(one.group) for one in cache.tallies])),
            pools=self._peaks,
        )
        self._iterations, self._peaks, self._before = 0, [], now
        self._flows_before, self._tallies_before = cache.flows, cache.tallies
        self._prompt_tokens, self._generated_tokens = engine.prompt_tokens, engine.generated_tokens
        return record


def _nothing(flows: Sequence[GroupFlows]) -> list[GroupFlows]:
    """The flows of a cache before anything happened."""
    return [GroupFlows(flow.level, flow.group) for flow in flows]
