"""How many pages the cache gets: the smallest of the limits that ``KvCacheConfig`` states (semantics §2)."""

from __future__ import annotations

import math

from kvmesh.cache.layout import PageLayout
from kvmesh.config import KvCacheConfig

__all__ = ["SizingError", "device_quota_bytes", "plan_pages"]


class SizingError(ValueError):
    """The limits leave no room for a cache, or there is no limit at all; the message says which."""


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


def plan_pages(config: KvCacheConfig, layout: PageLayout, *, free_bytes: int) -> list[int]:
    """Pages of each pool of ``layout``; every layer group gets the same number of blocks.

    ``max_tokens`` is rounded up to whole blocks and then by ``max_util_for_resume``, so that a sequence of that many
    tokens can be resumed.

    Args:
        config: the limits.
        layout: page sizes.
        free_bytes: free device memory after loading the weights (on a CPU the stated budget).

    Raises:
        SizingError: no limit is set, or they leave no room for one block.
    """
    fraction = config.free_gpu_memory_fraction
    token_bytes = None
    if config.max_tokens is not None:
        blocks = math.ceil(layout.num_blocks(config.max_tokens) / config.max_util_for_resume)
        token_bytes = blocks * layout.bytes_per_block
    quota = device_quota_bytes(
        fraction_bytes=None if fraction is None else int(free_bytes * fraction),
        max_bytes=config.max_gpu_total_bytes or None,
        token_bytes=token_bytes,
    )
    # A limit may be larger than the machine.
    blocks = min(quota, free_bytes) // layout.bytes_per_block
    if blocks < 1:
        raise SizingError(
            f"a KV cache of {min(quota, free_bytes)} bytes has no room for one block of {layout.tokens_per_block} "
            f"tokens ({layout.bytes_per_block} bytes); give the server more device memory or a larger limit"
        )
    return [blocks * len(pool.groups) for pool in layout.pools]
