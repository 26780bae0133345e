"""Numbers about the cache: gauges of its pages and counters since it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.cache.flows import GroupFlows
from kvmesh.cache.pages import PageCounts
from kvmesh.cache.tallies import GroupTally

__all__ = ["CacheCounters", "CacheStats", "GroupPages", "LevelStats"]


@dataclass(slots=True)
class CacheCounters:
    """Counters that only grow; the cache's own thread is their only writer.

    The first six are sums over layer groups, made when somebody asks: a block counts once in each group.
    """

    reused_full_blocks: int = 0
    reused_partial_blocks: int = 0
    missed_blocks: int = 0
    """Pages for blocks with prompt tokens that had to be computed or received."""
    generated_blocks: int = 0
    """Pages for blocks of generated tokens only."""
    allocated_pages: int = 0
    """Pages given to sequences, without scratch slots."""
    new_pages: int = 0
    """Those of them that did not begin as a copy of a reused page."""
    prompt_tokens: int = 0
    """Tokens of all sequences at their first creation."""
    cached_tokens: int = 0
    """Those of them whose KV was found."""
    recomputed_tokens: int = 0
    """Tokens of released sequences that were not found when these went on; in none of the figures above."""
    evicted_pages: int = 0
    copied_pages: int = 0
    """Pages copied to the device: blocks that were found in part, and states."""
    rebased_pages: int = 0
    """Pages freed because another sequence had committed the same block first."""
    stored_blocks: int = 0
    removed_blocks: int = 0
    suspended: int = 0
    """Suspensions, but of sequences that had not gone on since the last."""
    resumed: int = 0
    """Sequences that went on after one; their first resumption does not count."""
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
    tallies: tuple[GroupTally, ...] = ()
    """By layer group."""


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
    usable: bool = True
    """False: it has failed and takes no pages any more."""
