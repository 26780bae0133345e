"""The device-only cache manager behind the interface of :mod:`kvmesh.cache.base`, until that one has tiers itself."""
# ruff: noqa: ARG002 - what a device-only cache needs not know

from __future__ import annotations

from typing import Any

from kvmesh.cache.layout import PageLayout
from kvmesh.cache.manager import KvCache, KvCacheManager, MatchInfo
from kvmesh.cache.stats import LevelStats
from kvmesh.hashing import ReuseScope, TokenIds
from kvmesh.protocol.retention import RetentionConfig

__all__ = ["DeviceCacheManager"]


class _DeviceCache:
    """A sequence's cache; nothing is ever lost, and no snapshot point bounds a chunk."""

    lost = False

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @staticmethod
    def chunk_end(_start: int, end: int) -> int:
        return end


class DeviceCacheManager:
    """Delegates to a :class:`KvCacheManager`; one level, no state, no rebalancing."""

    can_suspend = False
    tiers = ("gpu",)

    def __init__(self, manager: KvCacheManager) -> None:
        self._manager = manager
        self.layout: PageLayout = manager.layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def match(self, scope: ReuseScope, token_ids: TokenIds, *, block_keys: list[bytes] | None = None) -> MatchInfo:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return self._manager.match(scope, token_ids, block_keys=block_keys)

    def create(
        self,
        scope: ReuseScope,
        token_ids: TokenIds,
        request_id: str,
        *,
        block_keys: list[bytes] | None = None,
        retention: RetentionConfig | None = None,
        conversation_id: str | None = None,
        reuse: bool = True,
    ) -> _DeviceCache:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        if not reuse:
            token_ids, block_keys = token_ids[:1], []
        return _DeviceCache(self._manager.create(scope, token_ids, request_id, block_keys=block_keys))

    def prefetch(self, scope: ReuseScope, token_ids: TokenIds, *, block_keys: list[bytes] | None = None) -> int:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return 0

    def tick(self, now_s: float) -> None:
        """See :class:`~kvmesh.cache.base.CacheManager`."""

    def pages_needed(self, *, history: int, capacity: int) -> list[int]:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        blocks = self.layout.num_blocks(capacity)
        return [blocks * len(pool.groups) for pool in self.layout.pools]

    def available_pages(self) -> list[int]:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return [counts.free + counts.evictable for counts in self._manager.stats().pools]

    def reservable_pages(self) -> list[int]:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return [counts.total - counts.held - counts.quarantined for counts in self._manager.stats().pools]

    def rebalance(self, now_s: float) -> bool:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return False

    def wants_rebalance(self, now_s: float) -> bool:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return False

    def level_stats(self) -> list[LevelStats]:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        pools = self._manager.stats().pools
        free = tuple(counts.free for counts in pools)
        return [LevelStats(0, "gpu", tuple(counts.total for counts in pools), free, ())]
