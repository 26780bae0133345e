"""A KV cache manager from the public configuration: which one, how large, on which tiers."""

from __future__ import annotations

import os
from pathlib import Path

from kvmesh.cache.base import CacheManager
from kvmesh.cache.device import Device, DeviceMemoryError
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.events import EventSink
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.machine_limits import check_bookkeeping, machine_notes
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.probe import available_host_bytes, memlock_limit_bytes
from kvmesh.cache.rebalance import RebalanceTuner
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.sizing import LevelPlan, device_reserve_pages, plan_levels
from kvmesh.cache.storage import Storage
from kvmesh.cache.v1 import V1CacheManager, V1Settings, ignored_by_v1
from kvmesh.config import ConfigError, KvCacheConfig
from kvmesh.net.clock import Clock
from kvmesh.telemetry import get_logger

__all__ = ["create_manager", "resolve_manager"]

_log = get_logger("cache.factory")


def resolve_manager(config: KvCacheConfig, *, model_prefers_v2: bool) -> KvCacheConfig:
    """``config`` with ``use_kv_cache_manager_v2: auto`` replaced by what the model prefers."""
    if config.use_kv_cache_manager_v2 != "auto":
        return config
    _log.info("KV cache manager chosen by the model", manager="V2" if model_prefers_v2 else "V1")
    return config.model_copy(update={"use_kv_cache_manager_v2": model_prefers_v2})


def create_manager(
    config: KvCacheConfig,
    layout: PageLayout,
    device: Device,
    *,
    event_sink: EventSink | None,
    clock: Clock,
    max_seq_len: int,
    max_batch_size: int,
    max_num_tokens: int,
    ranks_per_host: int = 1,
    share_host_tier: bool = False,
) -> CacheManager:
    """Size the cache, allocate its tiers and make its manager.

    Args:
        config: the public configuration, with ``use_kv_cache_manager_v2`` resolved.
        layout: of the model's pages.
        device: its level 0.
        event_sink: told of every change of what is reusable.
        clock: monotonic time.
        max_seq_len: longest request in tokens.
        max_batch_size: requests of a step.
        max_num_tokens: tokens of a step.
        ranks_per_host: engines of this server that each take such a cache from the same host.
        share_host_tier: whether peers may map the host tier's memory.

    Raises:
        ConfigError: V1 is asked for what only V2 has; the disk tier cannot be made; the system refuses the memory of a
            host tier of a stated size.
        SizingError: the limits leave no room, or a level has too many pages.
        DeviceMemoryError: the device has too little memory, or cannot reserve addresses for the pool rebalance.

    A host tier whose size is not stated, or whose memory cannot be page-locked (semantics §2 ``host_cache_size``), is
    left out where its memory cannot be had.
    """
    settings = V1Settings.from_config(config) if config.use_kv_cache_manager_v2 is False else None
    machine_bytes = available_host_bytes()
    # A CPU device takes its pages from the same memory, and has not touched them yet.
    available_bytes = machine_bytes - (device.free_bytes * ranks_per_host if device.is_host_memory else 0)
    plan = plan_levels(
        config,
        layout,
        free_device_bytes=device.free_bytes,
        available_host_bytes=max(0, available_bytes),
        memlock_bytes=memlock_limit_bytes(),
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        ranks_per_host=ranks_per_host,
        page_locked=not device.is_host_memory,
    )
    check_bookkeeping(plan, layout, machine_bytes)
    taken_bytes = plan.device_bytes if device.is_host_memory else 0
    machine = machine_notes(
        config,
        plan,
        host_bytes=max(0, machine_bytes - taken_bytes) if machine_bytes else None,
        disk_free_bytes=_free_space(config.disk_cache_path) if config.disk_cache_size else None,
    )
    rebalance = settings is None and config.enable_kv_pool_rebalance and len(layout.pools) > 1
    try:
        storage = Storage(
            layout,
            plan.num_pages,
            plan.tiers,
            device,
            disk_path=None if config.disk_cache_path is None else Path(config.disk_cache_path),
            device_reserve=device_reserve_pages(plan, layout, plan.device_bytes) if rebalance else None,
            host_reserve=_host_reserve(plan, layout, rebalance=rebalance) if share_host_tier else None,
        )
    except TierFailedError as failure:
        if (error := _start_error(config, plan, failure, machine_bytes)) is not None:
            raise error from failure
        _log.error("no host tier: its memory cannot be had", reason=failure.reason)
        return create_manager(
            config.model_copy(update={"host_cache_size": 0}),
            layout,
            device,
            event_sink=event_sink,
            clock=clock,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            ranks_per_host=ranks_per_host,
            share_host_tier=share_host_tier,
        )
    for note in (*plan.notes, *machine, *(ignored_by_v1(config) if settings is not None else ())):
        _log.warning("cache settings", note=note)
    _log.info("cache tiers", **{tier: list(pages) for tier, pages in zip(plan.tiers, plan.num_pages, strict=True)})
    if settings is not None:
        return V1CacheManager(layout, storage, plan.num_pages, plan.tiers, settings, event_sink=event_sink, clock=clock)
    return KvCacheManager(
        layout,
        storage,
        plan.num_pages,
        CacheSettings.from_config(config),
        event_sink,
        max_pages=_most_pages(plan, layout) if rebalance else None,
        tuner=RebalanceTuner(
            config.kv_pool_rebalance_config,
            layout,
            now_s=clock.monotonic_s(),
            level_bytes=plan.level_bytes,
            floors=plan.floors,
        )
        if rebalance
        else None,
    )


def _host_reserve(plan: LevelPlan, layout: PageLayout, *, rebalance: bool) -> list[int] | None:
    """By pool, the most pages that it may have in the host tier; None where there is none."""
    if "host" not in plan.tiers:
        return None
    level = plan.tiers.index("host")
    if not rebalance:
        return list(plan.num_pages[level])
    return [plan.level_bytes[level] // pool.page_bytes for pool in layout.pools]


def _start_error(
    config: KvCacheConfig, plan: LevelPlan, failure: TierFailedError, machine_bytes: int
) -> ConfigError | None:
    """What to tell who configured a tier that cannot be made; None where the cache does without it."""
    cause, size = failure.__cause__, plan.level_bytes[failure.level]
    if plan.tiers[failure.level] == "host":
        stated = config.host_cache_size is not None and config.host_cache_size > 0
        if not stated or isinstance(cause, DeviceMemoryError):
            return None
        return ConfigError(
            f"kv_cache_config.host_cache_size of {size} bytes cannot be had: {failure.reason} (available: "
            f"{machine_bytes} bytes); lower it, leave it unset for an automatic size, or set it to 0 for no host tier"
        )
    if isinstance(cause, MemoryError):
        return ConfigError(
            f"kv_cache_config.disk_cache_size of {size} bytes cannot be had: no host memory for its checksums and "
            f"copies: {failure.reason}; lower it, or set it to 0 for no disk tier"
        )
    return ConfigError(
        f"kv_cache_config.disk_cache_path {config.disk_cache_path} cannot be used: {failure.reason}; name a directory "
        "on a local file system that this user may write to, or set disk_cache_size to 0 for no disk tier"
    )


def _free_space(path: str | None) -> int | None:
    """Bytes that this user can still write to the file system of a directory; None where nobody knows."""
    if path is None:
        return None
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


def _most_pages(plan: LevelPlan, layout: PageLayout) -> list[int]:
    """By pool, as many pages as fit if it had every level to itself."""
    return [sum(size // pool.page_bytes for size in plan.level_bytes) for pool in layout.pools]
