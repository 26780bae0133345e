"""The part of ``KvCacheConfig`` that decides how the V1 manager behaves."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.cache.settings import DEFAULT_OFFLOAD_MIN_PRIORITY
from kvmesh.config import KvCacheConfig
from kvmesh.config.v2_only import refuse_v2_only

__all__ = ["V1Settings", "ignored_by_v1"]


@dataclass(frozen=True, slots=True)
class V1Settings:
    """Behaviour of the cache; the fields mean what they mean in ``KvCacheConfig``."""

    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    cold_tier_offload_min_priority: int = DEFAULT_OFFLOAD_MIN_PRIORITY

    @classmethod
    def from_config(cls, config: KvCacheConfig) -> V1Settings:
        """Take the settings from the public configuration.

        Raises:
            ConfigError: it asks for what only V2 has; one message names everything.
        """
        refuse_v2_only(config)
        minimum = config.cold_tier_offload_min_priority
        return cls(
            enable_block_reuse=config.enable_block_reuse,
            enable_partial_reuse=config.enable_partial_reuse,
            copy_on_partial_reuse=config.copy_on_partial_reuse,
            cold_tier_offload_min_priority=DEFAULT_OFFLOAD_MIN_PRIORITY if minimum is None else minimum,
        )


def ignored_by_v1(config: KvCacheConfig) -> list[str]:
    """Settings that change nothing with V1, in words for who set them; event hashes have a warning of their own."""
    manager = "with KV cache manager V1"
    notes: list[str] = []
    if config.disk_prefetch_num_reqs:
        notes.append(f"disk_prefetch_num_reqs has no effect {manager}: it has no disk tier")
    if config.max_util_for_resume != KvCacheConfig.model_fields["max_util_for_resume"].default:
        notes.append(f"max_util_for_resume holds no sequence back {manager}")
    return notes
