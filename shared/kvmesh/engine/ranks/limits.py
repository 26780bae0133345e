"""What a server's cache settings mean for an engine of several ranks: pure arithmetic."""

from __future__ import annotations

from typing import Any

from kvmesh.cache.layout import LayerGroupLayout, PageLayout
from kvmesh.config import ConfigError, KvCacheConfig

__all__ = ["cache_config_of_ranks"]


def cache_config_of_ranks(config: KvCacheConfig, whole: PageLayout, layout: PageLayout) -> KvCacheConfig:
    """The settings of the one cache manager that keeps all ranks' pages.

    Sizes in bytes are stated for each rank, as in TensorRT-LLM; ``pool_ratio`` is stated for the layer groups of the
    model, and each rank's part of a group gets the same share of the group's memory as of its bytes. Pools exchange
    memory where those of one rank would.

    Args:
        config: as the server was given it.
        whole: the page layout of the model on one rank.
        layout: that of the engine's ranks.

    Raises:
        ConfigError: ``pool_ratio`` does not have one entry for each layer group of the model.
    """
    num_ranks = layout.num_ranks
    if num_ranks == 1:
        return config
    update: dict[str, Any] = {"max_gpu_total_bytes": config.max_gpu_total_bytes * num_ranks}
    if len(whole.pools) == 1:
        update["enable_kv_pool_rebalance"] = False  # Ranks need equally many pages of one group.
    if config.host_cache_size is not None and config.host_cache_size > 0:
        update["host_cache_size"] = config.host_cache_size * num_ranks
    if config.disk_cache_size:
        update["disk_cache_size"] = config.disk_cache_size * num_ranks
    if config.pool_ratio is not None:
        if len(config.pool_ratio) != len(whole.groups):
            raise ConfigError(
                f"kv_cache_config.pool_ratio has {len(config.pool_ratio)} entries, but the model has "
                f"{len(whole.groups)} layer groups"
            )
        update["pool_ratio"] = [_share(group, config.pool_ratio, whole, layout) for group in layout.groups]
    return config.model_copy(update=update)


def _share(part: LayerGroupLayout, ratio: list[float], whole: PageLayout, layout: PageLayout) -> float:
    alike = [group for group in layout.groups if (group.kind, group.window) == (part.kind, part.window)]
    index = next(group.group_id for group in whole.groups if (group.kind, group.window) == (part.kind, part.window))
    return ratio[index] * part.page_bytes / sum(group.page_bytes for group in alike)
