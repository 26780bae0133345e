"""Settings of the KV cache that do nothing beside others, or with the model: notes for the log, never a refusal."""

from __future__ import annotations

from collections.abc import Iterator

from kvmesh.config.block_reuse import BlockReuseConfig
from kvmesh.config.kv_cache import KvCacheConfig

__all__ = ["cache_settings_without_effect", "model_settings_without_effect"]

_NO_REUSE = "enable_block_reuse is off"
_NO_DISK = "without disk_cache_size there is no disk tier"


def cache_settings_without_effect(cache: KvCacheConfig) -> list[str]:
    """Fields that were set and do nothing beside the others, as ``path=value (why)``.

    With V1 that is for fields that both managers have; ``kvmesh.cache.v1.ignored_by_v1`` has the rest.
    """
    return [f"kv_cache_config.{note}" for note in (*_idle(cache), *_without_reuse(cache))]


def model_settings_without_effect(
    cache: KvCacheConfig, *, num_layers: int, num_pools: int, windowed: bool
) -> list[str]:
    """Fields that were set and do nothing with this model, as ``path=value (why)``.

    Args:
        cache: the settings.
        num_layers: of the model, with attention or recurrent states.
        num_pools: of the device level.
        windowed: whether a layer group has a sliding window.
    """
    return [f"kv_cache_config.{note}" for note in _with_model(cache, num_layers, num_pools, windowed)]


def _idle(cache: KvCacheConfig) -> Iterator[str]:
    reuse = cache.block_reuse_config
    if reuse.policy != "per_conversation" and reuse.max_num_turns != BlockReuseConfig().max_num_turns:
        yield f"block_reuse_config.max_num_turns={reuse.max_num_turns} (policy is {reuse.policy}, not per_conversation)"
    if not cache.enable_kv_pool_rebalance:
        rebalance = cache.kv_pool_rebalance_config
        for name, field in type(rebalance).model_fields.items():
            if (value := getattr(rebalance, name)) != field.default:
                yield f"kv_pool_rebalance_config.{name}={value!r} (enable_kv_pool_rebalance is off)"
    if not cache.disk_cache_size:
        if cache.disk_cache_path is not None:
            yield f"disk_cache_path={cache.disk_cache_path!r} ({_NO_DISK})"
        if cache.disk_prefetch_num_reqs and cache.may_use_v2:
            yield f"disk_prefetch_num_reqs={cache.disk_prefetch_num_reqs} ({_NO_DISK})"


def _without_reuse(cache: KvCacheConfig) -> Iterator[str]:
    """Nothing of it is refused elsewhere. Cold tiers are not here: suspended sequences go there, too."""
    if cache.enable_block_reuse:
        return
    reuse = cache.block_reuse_config
    if reuse.policy != "all_reusable":
        yield f"block_reuse_config.policy={reuse.policy!r} ({_NO_REUSE})"
    if cache.disk_prefetch_num_reqs and cache.disk_cache_size:
        yield f"disk_prefetch_num_reqs={cache.disk_prefetch_num_reqs} ({_NO_REUSE})"
    if cache.cold_tier_offload_min_priority is not None:
        yield f"cold_tier_offload_min_priority={cache.cold_tier_offload_min_priority} ({_NO_REUSE})"
    if not cache.enable_partial_reuse:
        yield f"enable_partial_reuse=False ({_NO_REUSE})"


def _with_model(cache: KvCacheConfig, num_layers: int, num_pools: int, windowed: bool) -> Iterator[str]:
    windows = cache.max_attention_window or []
    if len(windows) > num_layers:
        yield (
            f"max_attention_window={windows} (the model has {num_layers} layers: the last {len(windows) - num_layers} "
            "of these windows are for none)"
        )
    if cache.enable_kv_pool_rebalance and num_pools == 1:
        yield "enable_kv_pool_rebalance=True (this model's cache has one pool: there is nothing to move between)"
    if windowed:
        return
    if cache.enable_swa_scratch_reuse:
        yield "enable_swa_scratch_reuse=True (no layer of this model has a sliding window)"
    if rewind := cache.block_reuse_config.swa_endpoint_rewind_tokens:
        yield f"block_reuse_config.swa_endpoint_rewind_tokens={rewind} (no layer of this model has a sliding window)"
