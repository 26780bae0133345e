"""What can be known to be wrong with a worker's settings before anything is started. Never imports torch."""

from __future__ import annotations

import os
from pathlib import Path

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.ratios import SizingError
from kvmesh.cache.sharding import shard_requirements
from kvmesh.cache.sizing import plan_levels
from kvmesh.config import ConfigError, WorkerSettings
from kvmesh.config.attention_dp import rank_memory_bytes
from kvmesh.config.startup import refuse_impossible, refuse_unsupported
from kvmesh.config.transfer_backend import Resolved, TransceiverConfigError, resolve
from kvmesh.config.transfer_facts import server_facts
from kvmesh.config.v2_only import refuse_v2_only
from kvmesh.engine.ranks.limits import cache_config_of_ranks
from kvmesh.models.attention_windows import effective_windows
from kvmesh.models.config import ModelConfig, read_config
from kvmesh.models.sharding import shard_of
from kvmesh.models.store import ModelSource
from kvmesh.worker.transfer_preflight import check_staging_memory, check_transfer_settings

__all__ = ["check_model", "check_settings", "may_have_gpu"]

_GPU_FILE = Path("/dev/nvidiactl")
"""There where a CUDA device can be."""


def may_have_gpu() -> bool:
    """Whether ``device: auto`` may turn out to be CUDA on this machine."""
    return _GPU_FILE.exists()


def check_settings(settings: WorkerSettings) -> None:
    """Refuse settings that no model makes possible.

    Raises:
        ConfigError: the message names the fields and says what to do.
    """
    refuse_unsupported(settings)
    if not settings.kv_cache_config.may_use_v2:
        refuse_v2_only(settings.kv_cache_config)
    resolved = _resolved(settings)
    if resolved is None:
        return
    if not settings.cluster_secret:
        raise ConfigError(
            f"cache_transceiver_config.backend {settings.cache_transceiver_config.backend} needs a cluster secret: set "
            "KVMESH_CLUSTER_SECRET or cluster_secret_file to the same on all servers, or leave backend out where "
            "nothing is transferred"
        )
    check_transfer_settings(settings, resolved.runtime)


def _resolved(settings: WorkerSettings) -> Resolved | None:
    # With 'auto' the engine may still find a GPU: what only then is wrong, it says itself.
    facts = server_facts(settings, "cuda" if settings.device == "cuda" else "cpu")
    try:
        return resolve(settings.cache_transceiver_config, os.environ, facts)
    except TransceiverConfigError as error:
        raise ConfigError(str(error)) from error


def check_model(settings: WorkerSettings, source: ModelSource) -> None:
    """Refuse settings that are impossible with this model; only the checkpoint's head is read.

    Raises:
        ConfigError: the message names the fields and says what to do.
        ModelError: the model is not supported.
    """
    config = read_config(source)
    limit = settings.max_seq_len or config.max_seq_len
    if limit > config.max_seq_len:
        raise ConfigError(
            f"max_seq_len {limit} exceeds the {config.max_seq_len} tokens that {source.name} takes; "
            "lower it, or leave it out"
        )
    refuse_impossible(settings, max_seq_len=limit)
    if not settings.enable_attention_dp:
        for rank in range(settings.ranks_per_engine):
            shard_of(config, settings.tensor_parallel_size, settings.pipeline_parallel_size, rank)
    _check_cache(settings, config, limit)


def _check_cache(settings: WorkerSettings, config: ModelConfig, max_seq_len: int) -> None:
    """Refuse a cache that the engine could not make.

    Its sizes are judged for a CPU device only, whose memory is stated; the memory of a GPU the engine learns itself.
    """
    cache = settings.kv_cache_config
    windows = effective_windows(config.windows, cache.max_attention_window, max_seq_len)
    if cache.use_kv_cache_manager_v2 == "auto":
        # As the engine chooses.
        cache = cache.model_copy(update={"use_kv_cache_manager_v2": any(window is not None for window in windows)})
        if not cache.may_use_v2:
            refuse_v2_only(cache)
    if settings.device == "cuda" or (settings.device == "auto" and may_have_gpu()):
        return
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    layers = [
        LayerCacheSpec(
            layer_index=index,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            window=window,
        )
        for index, window in enumerate(windows)
    ]
    requirements = CacheRequirements(tuple(layers))
    whole = PageLayout.build(requirements, cache.tokens_per_block)
    layout = whole
    if not settings.enable_attention_dp:
        parts = shard_requirements(requirements, settings.tensor_parallel_size, settings.pipeline_parallel_size)
        layout = PageLayout.build(parts, cache.tokens_per_block)
    try:
        plan_levels(
            cache_config_of_ranks(cache, whole, layout),
            layout,
            free_device_bytes=rank_memory_bytes(settings),
            available_host_bytes=0,  # an automatic host tier is never too small: there is none then
            max_seq_len=max_seq_len,
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
        )
    except SizingError as error:
        raise ConfigError(str(error)) from error
    resolved = _resolved(settings)
    if resolved is not None and resolved.runtime == "CPP":
        check_staging_memory(settings, layout)
