"""KV cache manager V1: window pools, a prioritised LRU of leaf blocks, and a secondary pool in host memory."""

from kvmesh.cache.v1.manager import V1CacheManager
from kvmesh.cache.v1.settings import V1Settings, ignored_by_v1

__all__ = ["V1CacheManager", "V1Settings", "ignored_by_v1"]
