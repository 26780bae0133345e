"""What an engine caches: the layout of its model's pages, whole and cut for its ranks, and the settings that fit it."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.cache.factory import resolve_manager
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.sharding import shard_requirements
from kvmesh.config import KvCacheConfig, WorkerSettings
from kvmesh.config.cache_effects import model_settings_without_effect
from kvmesh.engine.ranks.limits import cache_config_of_ranks
from kvmesh.models.base import CausalLM
from kvmesh.telemetry import get_logger

__all__ = ["CachePlan", "plan_cache"]

_log = get_logger("engine.cache")


class CachePlan(NamedTuple):
    """What the cache of an engine keeps.

    Attributes:
        config: the settings, with the manager that they mean for this model.
        whole: pages as an engine of one rank has them, of which events tell.
        layout: pages as the ranks have them; ``whole`` where there is one.
    """

    config: KvCacheConfig
    whole: PageLayout
    layout: PageLayout


def plan_cache(settings: WorkerSettings, model: CausalLM) -> CachePlan:
    """Plan the cache of a model; settings that have no effect on it are named in the log.

    Raises:
        ConfigError: the settings cannot be met by ranks.
        LayoutError: the model's pages cannot be laid out.
        SizingError: the settings contradict each other.
    """
    requirements = model.cache_requirements()
    tokens_per_block = settings.kv_cache_config.tokens_per_block
    whole = PageLayout.build(requirements, tokens_per_block)
    layout = PageLayout.build(
        shard_requirements(requirements, settings.tensor_parallel_size, settings.pipeline_parallel_size),
        tokens_per_block,
    )
    windowed = any(group.window is not None for group in whole.groups)
    config = resolve_manager(
        cache_config_of_ranks(settings.kv_cache_config, whole, layout),
        # V1 splits its memory between windows once and for all.
        model_prefers_v2=windowed,
    )
    for note in model_settings_without_effect(
        config, num_layers=model.config.num_layers, num_pools=len(whole.pools), windowed=windowed
    ):
        _log.warning("setting has no effect here", setting=note)
    return CachePlan(config, whole, layout)
