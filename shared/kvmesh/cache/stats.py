"""Numbers about the cache: gauges of its pages and counters since it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.cache.pages import PageCounts

__all__ = ["CacheCounters", "CacheStats"]


@dataclass(slots=True)
class CacheCounters:
    """Counters that only grow; the cache's own thread is their only writer."""

    prompt_tokens: int = 0
    """Tokens of all sequences at their creation."""
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


class CacheStats(NamedTuple):
    """A snapshot: pages by state over all pools, per pool, and a copy of the counters."""

    total: int
    free: int
    evictable: int
    held: int
    locked: int
    quarantined: int
    open_sequences: int
    open_leases: int
    cached_blocks: int
    pools: tuple[PageCounts, ...]
    counters: CacheCounters
