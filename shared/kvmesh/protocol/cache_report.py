"""What an engine tells about its KV cache: pages by tier and layer group now, and what iterations did to them."""

from __future__ import annotations

import msgspec

__all__ = [
    "PIN_AGE_BOUNDS_S",
    "CacheReport",
    "GroupFlows",
    "GroupReport",
    "GroupUse",
    "IterationRecord",
    "PoolPeaks",
    "TierReport",
]

PIN_AGE_BOUNDS_S = (1.0, 10.0, 60.0)
"""Upper bounds of all age classes of :attr:`CacheReport.pinned_pages_by_age` but the last, which has none."""


class GroupReport(msgspec.Struct, kw_only=True, frozen=True):
    """Pages of one layer group on one tier, each in one state."""

    group: int
    window: int | None
    """Tokens of its attention window; None: full attention."""
    locked: int
    """Running sequences use them."""
    pinned: int
    """Transfers use them."""
    held: int
    """Suspended sequences will use them; they may move to a colder tier."""
    evictable: int
    """Nobody uses them: reusable, and the first to go."""


class GroupFlows(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What happened to pages of one layer group on one tier, since start or within a record's iterations."""

    tier: str
    group: int
    reused_full: int = 0
    """Found here for a prompt, whole."""
    reused_partial: int = 0
    """Found here for a prompt, for its leading tokens."""
    copied: int = 0
    """Copied from here to the device: blocks that were found in part, and states."""
    copied_bytes: int = 0
    offloaded: int = 0
    """Came here from a warmer tier."""
    offloaded_bytes: int = 0
    onboarded: int = 0
    """Left for a warmer tier."""
    onboarded_bytes: int = 0
    dropped: int = 0
    """Left for nowhere: nobody needed them."""
    dropped_bytes: int = 0
    damaged: int = 0
    """Were not what had been written here; each became a miss."""


class GroupUse(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What sequences found and were given of one layer group, since start or within a record's iterations.

    A sequence counts from its first computed step on. A page is a block in the group.
    """

    group: int
    allocated: int = 0
    """Pages given to sequences, without scratch slots."""
    new: int = 0
    """Those of them that did not begin as a copy of a reused page."""
    missed: int = 0
    """New pages for blocks with prompt tokens."""
    generated: int = 0
    """New pages for blocks of generated tokens only."""
    reused_full: int = 0
    """Blocks found, whole."""
    reused_partial: int = 0
    """Blocks found for their leading tokens."""
    lookups: int = 0
    """State groups: prompts for which a state was looked for."""
    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    """State groups: leading tokens that the found states stand for."""
    unreused_tokens: int = 0
    """The other tokens of those prompts."""
    aligned_hits: int = 0
    """States found at the end of a block."""
    unaligned_hits: int = 0
    """States found inside a block."""


class TierReport(msgspec.Struct, kw_only=True, frozen=True):
    """One tier."""

    level: int
    tier: str
    """``gpu`` (the device, on a CPU build too), ``host`` or ``disk``."""
    total: tuple[int, ...]
    """Pages by pool."""
    free: tuple[int, ...]
    """Free pages by pool."""
    groups: tuple[GroupReport, ...]
    usable: bool = True
    """False: it has failed, takes no pages any more and is off until the server starts again."""


class CacheReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The cache of one engine."""

    tiers: tuple[TierReport, ...] = ()
    """A second old at most while anything changes."""
    pinned_pages_by_age: tuple[int, ...] = (0,) * (len(PIN_AGE_BOUNDS_S) + 1)
    """Pages that transfers pin, by how long they have; a page of two transfers counts in both."""
    flows: tuple[GroupFlows, ...] = ()
    """Since start, by tier, then layer group."""
    uses: tuple[GroupUse, ...] = ()
    """Since start, by layer group."""
    counters: dict[str, int] = {}
    """Since start, by the names of :class:`kvmesh.cache.stats.CacheCounters`."""


class PoolPeaks(msgspec.Struct, kw_only=True):
    """The most device pages of one pool in any of a record's iterations: when it had its pages, and at its end."""

    available: int = 0
    """Free or evictable."""
    unavailable: int = 0
    evictable: int = 0


class IterationRecord(msgspec.Struct, kw_only=True):
    """What ``iteration_stats_interval`` iterations did (semantics §3.10)."""

    iteration: int
    """The last of them."""
    iterations: int
    unix_ns: int
    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    reused_blocks: int
    missed_blocks: int
    cache_hit_rate: float | None
    """``reused / (reused + missed)`` over all layer groups; None when no block was asked for."""
    counters: dict[str, int]
    """Growth of the cache's counters, without those that stood still."""
    groups: list[GroupFlows]
    """What happened to pages by tier and layer group, without those to which nothing did."""
    uses: list[GroupUse]
    """What sequences found and were given by layer group, without those of which nothing."""
    pools: list[PoolPeaks]
