"""Numbers about the cache: gauges of its pages and counters since it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.cache.flows import GroupFlows
from kvmesh.cache.pages import PageCounts

__all__ = ["CacheCounters", "CacheStats", "GroupPages", "LevelStats"]


@dataclass(slots=True)
class CacheCounters:
    """Counters that only grow; the cache's own thread is their only writer."""

    prompt_tokens: int = 0
    """Tokens at their creation of all sequences that got pages; those created in vain are not counted."""
    cached_tokens: int = 0
    """Those of them whose KV was found."""
    reused_full_blocks: int = 0
    reused_partial_blocks: int = 0
    missed_blocks: int = 0
    allocated_pages: int = 0
    evicted_pages: int = 0
    copied_pages: int = 0
    rebased_pages: int = 0
    """Pages freed because another sequence had committed the same block first."""
    stored_blocks: int = 0
    removed_blocks: int = 0
    suspended: int = 0
    resumed: int = 0
    """Resumptions after a suspension; the first one is not counted."""
    offloaded_pages: int = 0
    """Pages moved to a colder level."""
    offloaded_bytes: int = 0
    onboarded_pages: int = 0
    """Pages moved to a warmer level."""
    onboarded_bytes: int = 0
    dropped_pages: int = 0
    """Unreferenced pages that left the last level that would have them."""
    rebalances: int = 0
    """Times that memory moved between pools."""
    damaged_pages: int = 0
    """Pages of a cold tier whose content was not what had been written; each became a miss."""

    def note_prompt(self, num_tokens: int, cached: int, tokens_per_block: int) -> None:
        """A sequence of ``num_tokens`` tokens begins, of which the first ``cached`` were found."""
        full, partial = divmod(cached, tokens_per_block)
        self.prompt_tokens += num_tokens
        self.cached_tokens += cached
        self.reused_full_blocks += full
        self.reused_partial_blocks += partial > 0
        self.missed_blocks += -(-num_tokens // tokens_per_block) - full - (partial > 0)


class CacheStats(NamedTuple):
    """A snapshot: device pages by state over all pools, per pool, and a copy of the counters."""

    total: int
    free: int
    evictable: int
    held: int
    locked: int
    pinned: int
    quarantined: int
    open_sequences: int
    open_leases: int
    cached_blocks: int
    pools: tuple[PageCounts, ...]
    counters: CacheCounters
    flows: tuple[GroupFlows, ...] = ()
    """By level, then layer group."""


class GroupPages(NamedTuple):
    """Pages of one layer group on one level, by state."""

    group: int
    window: int | None
    locked: int
    pinned: int
    held: int
    evictable: int


class LevelStats(NamedTuple):
    """One cache level in detail."""

    level: int
    tier: str
    """``gpu``, ``host`` or ``disk``."""
    total: tuple[int, ...]
    """Slots by pool."""
    free: tuple[int, ...]
    """Free slots by pool."""
    groups: tuple[GroupPages, ...]
