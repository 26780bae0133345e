"""What an engine's settings, its model and the size of its cache allow: limits of the intake and of the scheduler."""

from __future__ import annotations

from kvmesh.cache.base import CacheManager
from kvmesh.config import WorkerSettings
from kvmesh.engine.context_cap import context_kv_cap, has_context_workspace
from kvmesh.engine.intake import IntakeLimits
from kvmesh.engine.plan import SchedulerLimits
from kvmesh.engine.reservation import PeakPages, longest_fitting
from kvmesh.models.base import CausalLM
from kvmesh.telemetry import get_logger

__all__ = ["intake_limits", "rebalance_interval", "scheduler_limits"]

_log = get_logger("engine.limits")


def intake_limits(settings: WorkerSettings, model: CausalLM, manager: CacheManager, *, transfers: bool) -> IntakeLimits:
    """What a request may ask for; ``transfers``: whether the engine has a transceiver."""
    peak = PeakPages(manager.pages_needed, manager.layout.tokens_per_block, settings.max_num_tokens)
    return IntakeLimits(
        vocab_size=model.config.vocab_size,
        max_seq_len=model.max_seq_len,
        max_cached_tokens=longest_fitting(peak.of_context, manager.reservable_pages(), model.max_seq_len),
        max_num_tokens=settings.max_num_tokens,
        chunked_prefill=settings.enable_chunked_prefill,
        max_queue=settings.max_queue,
        transfers=transfers,
        pipelined=transfers and settings.cache_transceiver_config.enable_pipelined_transfer,
    )


def scheduler_limits(settings: WorkerSettings, model: CausalLM, manager: CacheManager) -> SchedulerLimits:
    """What one step may hold; a setting without effect on this model is named in the log."""
    cache = settings.kv_cache_config
    cap = cache.fp8_context_mla_kv_len_cap
    has_workspace = has_context_workspace(manager.layout)
    if cap is not None and not has_workspace:
        _log.warning("setting has no effect here", setting=f"kv_cache_config.fp8_context_mla_kv_len_cap={cap}")
    effective_cap = context_kv_cap(
        cap,
        max_batch_size=settings.max_batch_size,
        max_num_tokens=settings.max_num_tokens,
        max_seq_len=model.max_seq_len,
    )
    return SchedulerLimits(
        max_batch_size=settings.max_batch_size,
        max_num_tokens=settings.max_num_tokens,
        chunked_prefill=settings.enable_chunked_prefill,
        policy=settings.scheduler_policy,
        # Without reuse nobody finds what another one computes.
        prefix_aware=settings.enable_prefix_aware_scheduling and cache.enable_block_reuse,
        context_kv_cap_tokens=effective_cap if has_workspace else None,
        disk_prefetch_num_reqs=cache.disk_prefetch_num_reqs if cache.enable_block_reuse else 0,
    )


def rebalance_interval(settings: WorkerSettings) -> int | None:
    """Steps between two looks at how pools share the memory; None: they are left as they are."""
    cache = settings.kv_cache_config
    return cache.kv_pool_rebalance_config.check_interval if cache.enable_kv_pool_rebalance else None
