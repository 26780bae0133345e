"""The part of ``KvCacheConfig`` that decides how the V1 manager behaves, and what of it only V2 has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvmesh.cache.settings import DEFAULT_OFFLOAD_MIN_PRIORITY
from kvmesh.config import KvCacheConfig
from kvmesh.config.errors import ConfigError

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
        problems = list(_v2_only(config))
        if problems:
            raise ConfigError(f"only KV cache manager V2 has: {'; '.join(problems)}; set use_kv_cache_manager_v2: true")
        minimum = config.cold_tier_offload_min_priority
        return cls(
            enable_block_reuse=config.enable_block_reuse,
            enable_partial_reuse=config.enable_partial_reuse,
            copy_on_partial_reuse=config.copy_on_partial_reuse,
            cold_tier_offload_min_priority=DEFAULT_OFFLOAD_MIN_PRIORITY if minimum is None else minimum,
        )


def _v2_only(config: KvCacheConfig) -> Iterator[str]:
    """Every setting whose promise V1 cannot keep (semantics §2, §2.1)."""
    reuse = config.block_reuse_config
    if config.disk_cache_size:
        yield f"a disk tier (disk_cache_size={config.disk_cache_size})"
    if config.enable_swa_scratch_reuse:
        yield "enable_swa_scratch_reuse"
    if config.enable_kv_pool_rebalance:
        yield "enable_kv_pool_rebalance"
    if config.mixed_precision_kv is not None:
        yield f"mixed-precision data types (dtype={config.dtype!r})"
    if reuse.policy != "all_reusable":
        yield f"block_reuse_config.policy={reuse.policy!r}"
    if reuse.swa_endpoint_rewind_tokens:
        yield "block_reuse_config.swa_endpoint_rewind_tokens"
    if reuse.enable_branch_snapshot:
        yield "block_reuse_config.enable_branch_snapshot"
    if config.mamba_state_config.has_additional_offsets:
        yield "additional snapshot offsets in mamba_state_config"


def ignored_by_v1(config: KvCacheConfig) -> list[str]:
    """Settings that change nothing with V1, in words for who set them; event hashes have a warning of their own."""
    manager = "with KV cache manager V1"
    notes: list[str] = []
    if config.disk_prefetch_num_reqs:
        notes.append(f"disk_prefetch_num_reqs has no effect {manager}: it has no disk tier")
    if config.max_util_for_resume != KvCacheConfig.model_fields["max_util_for_resume"].default:
        notes.append(f"max_util_for_resume holds no sequence back {manager}")
    return notes
