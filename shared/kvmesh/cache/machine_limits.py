"""What the machine has for the levels that are planned: sizes above it are told, impossible ones refused."""

from __future__ import annotations

from kvmesh.cache.layout import PageLayout
from kvmesh.cache.sizing import LevelPlan, SizingError
from kvmesh.config import KvCacheConfig

__all__ = ["MAX_LEVEL_PAGES", "PAGE_BOOKKEEPING_BYTES", "check_bookkeeping", "machine_notes"]

MAX_LEVEL_PAGES = 100_000_000
"""Pages of one level whose bookkeeping can still be built in seconds, not minutes."""
PAGE_BOOKKEEPING_BYTES = 250
"""Host memory for the states, links, queues and checksums of one page, about."""

_LEVEL_SETTINGS = {"gpu": "max_tokens or max_gpu_total_bytes", "host": "host_cache_size", "disk": "disk_cache_size"}
"""What makes each level smaller."""


def check_bookkeeping(plan: LevelPlan, layout: PageLayout, available_host_bytes: int) -> None:
    """Refuse levels of so many pages that the cache could not keep account of them.

    Args:
        plan: the levels.
        layout: page sizes.
        available_host_bytes: memory of the host that can be had without swapping; 0 where it is not known.

    Raises:
        SizingError: a level has more than :data:`MAX_LEVEL_PAGES` pages, or the accounts of all have no room.
    """
    pages = [sum(counts) for counts in plan.num_pages]
    most = max(range(len(pages)), key=pages.__getitem__)
    tier, size = plan.tiers[most], plan.level_bytes[most]
    problem = (
        f"a {tier} tier of {size} bytes would have {pages[most]} pages of "
        f"{min(pool.page_bytes for pool in layout.pools)} bytes or more"
    )
    advice = (
        f"lower {_LEVEL_SETTINGS[tier]}, or raise tokens_per_block ({layout.tokens_per_block}) for fewer, larger pages"
    )
    if pages[most] > MAX_LEVEL_PAGES:
        raise SizingError(f"{problem}; a level may have {MAX_LEVEL_PAGES}: {advice}")
    needed = sum(pages) * PAGE_BOOKKEEPING_BYTES
    if 0 < available_host_bytes < needed:
        raise SizingError(
            f"{problem}; the bookkeeping of all {sum(pages)} pages takes about {needed} bytes of host memory, of which "
            f"{available_host_bytes} are available: {advice}"
        )


def machine_notes(
    config: KvCacheConfig, plan: LevelPlan, *, host_bytes: int | None, disk_free_bytes: int | None
) -> list[str]:
    """Warnings about tiers whose stated sizes are above what the machine has; they fill as pages come.

    Args:
        config: states the sizes.
        plan: made of it.
        host_bytes: memory of the host that can be had for a host tier; None where it is not known.
        disk_free_bytes: free space of the file system with ``disk_cache_path``; None where it is not known.
    """
    sizes = dict(zip(plan.tiers, plan.level_bytes, strict=True))
    host, disk = sizes.get("host", 0), sizes.get("disk", 0)
    notes = []
    if host_bytes is not None and host == config.host_cache_size and host > host_bytes:
        notes.append(
            f"host_cache_size of {host} bytes is above the {host_bytes} bytes of host memory that are available: as "
            "the tier fills, the machine may swap, or end this process for want of memory"
        )
    if disk_free_bytes is not None and disk > disk_free_bytes:
        notes.append(
            f"disk_cache_size of {disk} bytes is above the {disk_free_bytes} bytes that are free on the file system of "
            f"disk_cache_path {config.disk_cache_path}: once that is full, the tier takes no more pages"
        )
    return notes
