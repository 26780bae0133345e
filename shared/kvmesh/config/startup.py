"""What a server refuses when it starts: settings that are valid, but not built yet or impossible with its model."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvmesh.config.attention_dp import attention_dp_problems
from kvmesh.config.cache_effects import cache_settings_without_effect
from kvmesh.config.errors import ConfigError, NotSupportedYetError
from kvmesh.config.event_ports import event_port_problems
from kvmesh.config.kv_cache import KvCacheConfig
from kvmesh.config.mesh import MeshSettings
from kvmesh.config.service import ServiceSettings
from kvmesh.config.support import NO_EFFECT, PARTIAL, V1_ONLY, unsupported_fields
from kvmesh.config.worker import WorkerSettings

__all__ = ["refuse_impossible", "refuse_unsupported", "settings_without_effect"]


def refuse_unsupported(settings: ServiceSettings, *, cache_dtypes: Collection[str] | None = None) -> None:
    """Refuse settings whose behaviour this version does not have.

    Args:
        settings: of any service; those of a mesh stand for all its processes.
        cache_dtypes: data types of the model's cache; until they are known, it is only judged whether a model can
            have the one that is set.

    Raises:
        NotSupportedYetError: "not supported yet: ...", every blocker in one message.
    """
    blockers = list(_blockers(settings, cache_dtypes))
    if blockers:
        raise NotSupportedYetError(f"not supported yet: {'; '.join(blockers)}")


def refuse_impossible(
    settings: WorkerSettings,
    *,
    max_seq_len: int,
    encoder_decoder: bool = False,
) -> None:
    """Refuse settings that can never work on this server, whatever the version.

    Args:
        settings: of the server.
        max_seq_len: its sequence length in tokens.
        encoder_decoder: whether its model has cross attention.

    Raises:
        ConfigError: every problem in one message.
    """
    cache = settings.kv_cache_config
    problems = [*_block_problems(cache), *_size_problems(cache)]
    if cache.avg_seq_len is not None and cache.avg_seq_len > max_seq_len:
        problems.append(f"kv_cache_config.avg_seq_len {cache.avg_seq_len} is above max_seq_len {max_seq_len}")
    if encoder_decoder and cache.cross_kv_cache_fraction is None:
        problems.append("kv_cache_config.cross_kv_cache_fraction must be set for an encoder-decoder model")
    if not encoder_decoder and cache.cross_kv_cache_fraction is not None:
        problems.append("kv_cache_config.cross_kv_cache_fraction must not be set for a decoder-only model")
    if cache.mixed_precision_kv is not None and not cache.may_use_v2:
        problems.append(f"kv_cache_config.dtype {cache.dtype} requires use_kv_cache_manager_v2")
    if cache.mamba_ssm_stochastic_rounding and cache.mamba_ssm_cache_dtype not in ("auto", "float16"):
        problems.append("kv_cache_config.mamba_ssm_stochastic_rounding requires mamba_ssm_cache_dtype float16")
    problems += attention_dp_problems(settings)
    problems += _event_problems(settings)
    if problems:
        raise ConfigError("; ".join(problems))


def settings_without_effect(settings: WorkerSettings) -> list[str]:
    """Fields that were set and do nothing here, as ``path=value``, for one warning each when the server starts."""
    notes = []
    for prefix, config in (
        ("", settings),
        ("kv_cache_config.", settings.kv_cache_config),
        ("cache_transceiver_config.", settings.cache_transceiver_config),
    ):
        for name in sorted(NO_EFFECT.get(type(config), ())):
            value = config.__dict__[name]  # past the descriptors of deprecated fields, which warn
            if value != type(config).model_fields[name].default:
                notes.append(f"{prefix}{name}={value!r}")
    cache = settings.kv_cache_config
    if cache.use_kv_cache_manager_v2 is True and not getattr(cache, V1_ONLY):
        notes.append(f"kv_cache_config.{V1_ONLY}=False (V2 always copies)")
    return notes + cache_settings_without_effect(cache)


def _blockers(settings: ServiceSettings, cache_dtypes: Collection[str] | None) -> Iterator[str]:
    yield from unsupported_fields(settings)
    if isinstance(settings, WorkerSettings):
        yield from _worker_blockers(settings, cache_dtypes)
    elif isinstance(settings, MeshSettings):
        counts = {"context": settings.num_context, "generation": settings.num_generation}
        counts["aggregated"] = settings.num_aggregated
        for role, count in counts.items():
            if count:
                template: WorkerSettings = getattr(settings, role)
                yield from (f"{role}.{blocker}" for blocker in _blockers(template, cache_dtypes))
        yield from (f"router.{blocker}" for blocker in _blockers(settings.router, cache_dtypes))


def _worker_blockers(settings: WorkerSettings, cache_dtypes: Collection[str] | None) -> Iterator[str]:
    cache = settings.kv_cache_config
    transfer = settings.cache_transceiver_config
    yield from unsupported_fields(cache, "kv_cache_config.")
    known = cache_dtypes is not None and PARTIAL[KvCacheConfig]["dtype"].accepts(cache.dtype)
    if known and cache.dtype != "auto" and set(cache_dtypes or ()) != {cache.dtype}:
        yield f"kv_cache_config.dtype={cache.dtype!r} (this model's cache has {', '.join(sorted(cache_dtypes or ()))})"
    yield from unsupported_fields(transfer, "cache_transceiver_config.")


def _block_problems(cache: KvCacheConfig) -> Iterator[str]:
    size = cache.tokens_per_block
    if size < 2 or size & (size - 1):
        yield f"kv_cache_config.tokens_per_block must be a power of two above 1, not {size}"


def _size_problems(cache: KvCacheConfig) -> Iterator[str]:
    if cache.max_tokens is not None and cache.max_tokens <= 0:
        yield f"kv_cache_config.max_tokens must be positive, not {cache.max_tokens}"
    if cache.max_tokens is None and cache.max_gpu_total_bytes == 0 and not cache.free_gpu_memory_fraction:
        yield (
            "Quota not set: give the KV cache a size with kv_cache_config.max_tokens, max_gpu_total_bytes or "
            "a positive free_gpu_memory_fraction"
        )


def _event_problems(settings: WorkerSettings) -> Iterator[str]:
    cache = settings.kv_cache_config
    if cache.event_buffer_max_size > 0 and not cache.enable_block_reuse:
        yield "kv_cache_config.event_buffer_max_size needs enable_block_reuse: without reuse there are no events"
    events = cache.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return
    if settings.pipeline_parallel_size > 1 or settings.context_parallel_size > 1:
        yield "kv_events_config: streaming events need pipeline_parallel_size=1 and context_parallel_size=1"
    if events.publisher == "zmq":
        yield from event_port_problems(
            events.endpoint, events.replay_endpoint, ranks_per_host=settings.dp_size, world_size=settings.dp_size
        )
