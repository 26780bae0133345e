"""How many pages each level of the cache gets: the limits that ``KvCacheConfig`` states (semantics §2, §3.8)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from kvmesh.cache.demand import (
    Limits,
    constraint_pages,
    fit_floors,
    longest_request,
    minimum_pages,
    pages_bytes,
    token_pages,
)
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.ratios import InitialRatio, Ratio, SizingError, byte_ratio, exact, initial_ratio, pages_for_ratio
from kvmesh.config import KvCacheConfig

__all__ = [
    "LevelPlan",
    "SizingError",
    "auto_host_bytes",
    "device_quota_bytes",
    "device_reserve_pages",
    "plan_levels",
]


class LevelPlan(NamedTuple):
    """The levels of a cache, the device first."""

    tiers: tuple[str, ...]
    """``gpu``, ``host`` or ``disk`` by level."""
    num_pages: tuple[tuple[int, ...], ...]
    """By level and pool."""
    level_bytes: tuple[int, ...]
    """What each level may take; its pages take no more."""
    floors: tuple[tuple[int, ...], ...]
    """Least pages by level and pool; moving memory between pools keeps them, so that the longest request still fits."""
    ratio: tuple[float, ...]
    """Shares of the device's bytes by pool that were asked for, before floors and whole pages."""
    longest_request_tokens: int
    """The longest request that the device level can serve, at most ``max_seq_len``."""
    notes: tuple[str, ...]
    """Warnings for the log."""

    @property
    def device_bytes(self) -> int:
        """What the device level may take."""
        return self.level_bytes[0]


def plan_levels(
    config: KvCacheConfig,
    layout: PageLayout,
    *,
    free_device_bytes: int,
    available_host_bytes: int,
    ranks_per_host: int = 1,
    memlock_bytes: int | None = None,
    max_seq_len: int,
    max_batch_size: int,
    max_num_tokens: int,
    page_locked: bool = False,
) -> LevelPlan:
    """Tiers, and the pages of every pool in each.

    The device level is split as :func:`kvmesh.cache.ratios.initial_ratio` says, with
    :func:`kvmesh.cache.demand.fit_floors` as least pages; colder levels keep its proportions of page counts.

    Args:
        config: the limits. ``use_kv_cache_manager_v2`` False means V1, which has no disk tier, and a host tier only
            where its size is stated; ``auto`` must have been resolved.
        layout: page sizes.
        free_device_bytes: free device memory after loading the weights (on a CPU the stated budget).
        available_host_bytes: memory of the host that can be had without swapping.
        ranks_per_host: engine ranks that share the host.
        memlock_bytes: RLIMIT_MEMLOCK, None for no limit.
        max_seq_len: longest request in tokens.
        max_batch_size: requests that decode at a time.
        max_num_tokens: tokens of a step.
        page_locked: whether the host tier is page-locked, so that ``memlock_bytes`` counts.

    Raises:
        SizingError: no limit is set, ``avg_seq_len`` is too long, or a level has no room for one page of every layer
            group.
    """
    max_util = exact(config.max_util_for_resume) if config.may_use_v2 else Fraction(1)
    limits = Limits(max_seq_len, max_batch_size, max_num_tokens, max_util)
    initial = initial_ratio(config, layout, limits)
    notes = [] if initial.note is None else [initial.note]
    quota, device_pages, device_floors = _device_level(config, layout, limits, initial, free_device_bytes)
    longest = longest_request(device_pages, layout, limits)
    alone = constraint_pages(layout, limits._replace(max_seq_len=longest, max_batch_size=1))
    device_floors = [max(counts) for counts in zip(device_floors, alone, strict=True)]
    notes += _room_notes(device_pages, layout, limits, quota, longest)
    tiers, levels, level_bytes, floors = ["gpu"], [device_pages], [quota], [device_floors]

    automatic = auto_host_bytes(
        quota,
        available_host_bytes,
        ranks_per_host=ranks_per_host,
        memlock_bytes=memlock_bytes,
        page_locked=page_locked,
    )
    least = minimum_pages(layout)
    needed = pages_bytes(least, layout)
    cold, cold_notes = _cold_tiers(config, quota, automatic)
    notes += cold_notes
    for tier, size, stated in cold:
        if size < needed:
            problem = f"a {tier} tier of {size} bytes has no room for one page of every layer group ({needed} bytes)"
            if stated:
                raise SizingError(f"{problem}; raise {tier}_cache_size, or set it to 0 for no such tier")
            notes.append(f"{problem}: there is none")
            continue
        tiers.append(tier)
        levels.append(pages_for_ratio(byte_ratio(device_pages, layout), size, layout, least))
        level_bytes.append(size)
        floors.append(least)
    return LevelPlan(
        tiers=tuple(tiers),
        num_pages=tuple(tuple(pages) for pages in levels),
        level_bytes=tuple(level_bytes),
        floors=tuple(tuple(pages) for pages in floors),
        ratio=tuple(float(share) for share in initial.ratio),
        longest_request_tokens=longest,
        notes=tuple(notes),
    )


def device_quota_bytes(*, fraction_bytes: int | None, max_bytes: int | None, token_bytes: int | None) -> int:
    """The smallest of the limits that are set.

    Args:
        fraction_bytes: ``free_gpu_memory_fraction`` of the free memory.
        max_bytes: ``max_gpu_total_bytes``.
        token_bytes: what ``max_tokens`` tokens need.

    Raises:
        SizingError: none is set.
    """
    limits = [limit for limit in (fraction_bytes, max_bytes, token_bytes) if limit is not None]
    if not limits:
        raise SizingError(
            "quota not set: kv_cache_config needs max_tokens, max_gpu_total_bytes or free_gpu_memory_fraction"
        )
    return min(limits)


def auto_host_bytes(
    device_quota: int,
    available_bytes: int,
    *,
    ranks_per_host: int = 1,
    memlock_bytes: int | None = None,
    page_locked: bool = False,
) -> int:
    """Size of a host tier that the configuration leaves open (semantics §2 ``host_cache_size``).

    The smallest of the device's quota, half of the host's available memory shared by the ranks, and 80 % of
    RLIMIT_MEMLOCK. The last counts for page-locked memory only. Not positive when there is nothing to share.
    """
    size = min(device_quota, available_bytes // (2 * ranks_per_host))
    if page_locked and memlock_bytes is not None:
        size = min(size, memlock_bytes * 4 // 5)
    return size


def device_reserve_pages(plan: LevelPlan, layout: PageLayout, quota_bytes: int) -> list[int]:
    """The most pages that each device pool may ever have: the others keep their floors.

    Args:
        plan: states the floors.
        layout: page sizes.
        quota_bytes: of the device level.
    """
    floors = plan.floors[0]
    free = quota_bytes - pages_bytes(floors, layout)
    return [count + free // pool.page_bytes for count, pool in zip(floors, layout.pools, strict=True)]


def _device_level(
    config: KvCacheConfig, layout: PageLayout, limits: Limits, initial: InitialRatio, free_bytes: int
) -> tuple[int, list[int], list[int]]:
    """Quota in bytes, pages and least pages of the device level."""
    least = minimum_pages(layout)
    tokens = None if config.max_tokens is None else token_pages(config.max_tokens, layout, limits)
    fraction = config.free_gpu_memory_fraction
    quota = device_quota_bytes(
        fraction_bytes=None if fraction is None else int(free_bytes * exact(fraction)),
        max_bytes=config.max_gpu_total_bytes or None,
        token_bytes=None if tokens is None else _bytes_at_ratio(tokens, initial.ratio, layout),
    )
    # A limit may be larger than the machine.
    quota = min(quota, free_bytes)
    if (needed := pages_bytes(least, layout)) > quota:
        raise SizingError(
            f"a KV cache of {quota} bytes has no room for one block of {layout.tokens_per_block} "
            f"tokens ({needed} bytes); give the server more device memory or a larger limit"
        )
    base = tokens if tokens is not None and pages_bytes(tokens, layout) <= quota else least
    floors, fitted = fit_floors(layout, quota, limits, base)
    if initial.source == "pool_ratio" and fitted != limits:
        floors = least  # Constraints that cannot hold anyway do not outweigh what was asked for.
    return quota, pages_for_ratio(initial.ratio, quota, layout, floors), floors


def _bytes_at_ratio(pages: Sequence[int], ratio: Ratio, layout: PageLayout) -> int:
    """The least quota of which every pool's share pays its pages."""
    return max(
        math.ceil(count * pool.page_bytes / share)
        for count, pool, share in zip(pages, layout.pools, ratio, strict=True)
    )


def _room_notes(pages: Sequence[int], layout: PageLayout, limits: Limits, quota: int, longest: int) -> list[str]:
    """Warnings about requests that do not fit, which are refused or have to wait."""
    notes = []
    if longest < limits.max_seq_len:
        notes.append(
            f"a KV cache of {quota} bytes holds one request of at most {longest} tokens; max_seq_len is "
            f"{limits.max_seq_len}: longer ones are refused unless the server gets more device memory or a larger limit"
        )
    decodes = min(count // len(pool.groups) for count, pool in zip(pages, layout.pools, strict=True))
    if decodes < limits.max_batch_size:
        notes.append(
            f"a KV cache of {quota} bytes has pages for {decodes} requests at a time; max_batch_size is "
            f"{limits.max_batch_size}"
        )
    return notes


def _cold_tiers(config: KvCacheConfig, quota: int, automatic: int) -> tuple[list[tuple[str, int, bool]], list[str]]:
    """Name, bytes and whether the configuration states them, of each cold tier; and warnings."""
    host, disk = config.host_cache_size, config.disk_cache_size or 0
    if not config.may_use_v2:  # V1, which refuses a disk tier.
        return ([("host", host, True)] if host and host > 0 else []), []
    notes = []
    tiers = []
    if host is not None and host >= 0:
        tiers = [("host", host, True)] if host else []
    else:
        size = automatic if host is None else host
        if size <= 0:
            name = "an automatic host_cache_size" if host is None else "host_cache_size"
            notes.append(f"{name} of {size} bytes is not positive: the host tier gets the device's {quota} bytes")
            size = quota
        tiers = [("host", size, False)]
    return [*tiers, *([("disk", disk, True)] if disk else [])], notes
