"""TensorRT-LLM's ``--config`` / ``--extra_llm_api_options`` keys, as the settings of one worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvmesh.config.errors import ConfigError, NotSupportedYetError
from kvmesh.config.nearest import unknown_key_message
from kvmesh.config.worker import WorkerSettings

__all__ = ["FOREIGN_KEYS", "NEUTRAL_ONLY", "TRANSLATED", "WITHOUT_EFFECT", "LlmArgs", "translate_llm_args"]

TRANSLATED = frozenset({"free_gpu_memory_fraction", "otlp_traces_endpoint", "scheduler_config"})
"""Keys that are implemented here under another name; every field of ``WorkerSettings`` is implemented under its own."""

WITHOUT_EFFECT = frozenset(
    {
        # Which engine computes, and on how many devices: answers are the same.
        "_autotuner_config", "allreduce_strategy", "attn_backend", "backend", "checkpoint_format", "cp_config",
        "attention_dp_config", "enable_lm_head_tp_in_adp", "gpus_per_node", "mpi_session",
        "moe_backend", "moe_cluster_parallel_size", "moe_config", "moe_expert_parallel_size",
        "moe_tensor_parallel_size", "nvfp4_gemm_config", "orchestrator_type", "pp_partition",
        "ray_worker_extension_cls", "env_overrides",
        # Speed.
        "autotuner_enabled", "batch_wait_max_tokens_ratio", "batch_wait_timeout_iters", "batch_wait_timeout_ms",
        "cuda_graph_batch_sizes", "cuda_graph_config", "cuda_graph_max_batch_size", "cuda_graph_padding_enabled",
        "disable_flashinfer_sampling", "disable_overlap_scheduler", "enable_autotuner", "enable_min_latency",
        "garbage_collection_gen0_threshold", "max_input_len", "num_postprocess_workers", "peft_cache_config",
        "postprocess_tokenizer_dir", "speculative_config", "stream_interval", "torch_compile_config",
        "trust_remote_code", "use_cuda_graph",
        # Which sampler implements the same distribution.
        "enable_mixed_sampler", "sampler_force_async_worker", "sampler_type", "use_torch_sampler",
        # Diagnostics: logs, traces and /metrics are always there.
        "enable_iter_perf_stats", "enable_iter_req_stats", "enable_layerwise_nvtx_marker", "iter_stats_max_iterations",
        "max_stats_len", "perf_metrics_max_requests", "print_iter_log", "request_stats_max_iterations",
        "return_perf_metrics", "telemetry_config",
    }
)  # fmt: skip
"""Keys that real files carry, known and without effect here; a file that has any gets one warning naming them."""

NEUTRAL_ONLY: Mapping[str, Any] = {
    "custom_tokenizer": None,
    "enable_lora": False,
    "fail_fast_on_attention_window_too_large": False,
    "gather_generation_logits": False,
    "guided_decoding_backend": None,
    "kv_connector_config": None,
    "load_format": "auto",
    "lora_config": None,
    "max_beam_width": 1,
    "mm_encoder_only": False,
    "quant_config": None,
    "reasoning_parser": None,
    "revision": None,
    "skip_tokenizer_init": False,
    "sparse_attention_config": None,
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "tokenizer_revision": None,
    "tool_parser": None,
}
"""Keys that would change answers, with the one value that asks for nothing; any other is not supported yet."""

FOREIGN_KEYS = TRANSLATED | WITHOUT_EFFECT | NEUTRAL_ONLY.keys()
"""Every key that is not a field of ``WorkerSettings`` and may yet stand in a worker's file."""

_SCHEDULER_POLICIES = {"GUARANTEED_NO_EVICT": "guaranteed_no_evict", "MAX_UTILIZATION": "max_utilization"}
_SCHEDULER_WITHOUT_EFFECT = frozenset(
    {"context_chunking_policy", "dynamic_batch_config", "use_python_scheduler", "waiting_queue_policy"}
)


class LlmArgs(NamedTuple):
    """What a worker's file comes to."""

    layer: dict[str, Any]
    """Fields of ``WorkerSettings``, not yet validated."""
    ignored: frozenset[str]
    """Keys of the file that are known and without effect here."""


def translate_llm_args(args: Mapping[str, Any], source: str, also_known: frozenset[str] = frozenset()) -> LlmArgs:
    """Translate TensorRT-LLM's keys; those that are fields of ``WorkerSettings`` pass as they are.

    Args:
        args: the file, or the part of one that concerns a worker.
        source: the file's name, for messages.
        also_known: further keys that a suggestion for a wrong one may name.

    Raises:
        ConfigError: unknown keys, all named with the nearest right one, or contradicting ones.
        NotSupportedYetError: known keys that ask for behaviour which this version does not have.
    """
    fields = WorkerSettings.model_fields.keys()
    known = fields | FOREIGN_KEYS
    unknown = [unknown_key_message(key, known | also_known) for key in args if key not in known]
    if unknown:
        raise ConfigError(f"{source}: {'; '.join(unknown)}")
    missing = [f"{key}={args[key]!r}" for key in NEUTRAL_ONLY if key in args and args[key] != NEUTRAL_ONLY[key]]
    if missing:
        raise NotSupportedYetError(f"not supported yet: {'; '.join(missing)} ({source})")

    layer = {key: value for key, value in args.items() if key in fields}
    ignored = set(WITHOUT_EFFECT & args.keys())
    if args.get("free_gpu_memory_fraction") is not None:
        _take_fraction(layer, args["free_gpu_memory_fraction"], source)
    if args.get("otlp_traces_endpoint") is not None:
        layer.setdefault("otlp_endpoint", args["otlp_traces_endpoint"])
    if args.get("scheduler_config") is not None:
        ignored |= _take_scheduler(layer, args["scheduler_config"], source)
    return LlmArgs(layer, frozenset(ignored))


def _take_fraction(layer: dict[str, Any], fraction: Any, source: str) -> None:
    """Older files have the fraction beside ``kv_cache_config`` instead of in it."""
    cache = dict(layer.get("kv_cache_config") or {})
    if cache.setdefault("free_gpu_memory_fraction", fraction) != fraction:
        raise ConfigError(
            f"{source}: free_gpu_memory_fraction and kv_cache_config.free_gpu_memory_fraction differ; keep the latter"
        )
    layer["kv_cache_config"] = cache


def _take_scheduler(layer: dict[str, Any], scheduler: Any, source: str) -> set[str]:
    """Translate ``scheduler_config``; returns the keys in it that have no effect here."""
    if not isinstance(scheduler, Mapping):
        raise ConfigError(f"{source}: scheduler_config must be a mapping")
    known = {"capacity_scheduler_policy", "enable_prefix_aware_scheduling", *_SCHEDULER_WITHOUT_EFFECT}
    unknown = [unknown_key_message(str(key), known) for key in scheduler if key not in known]
    if unknown:
        raise ConfigError(f"{source}: scheduler_config: {'; '.join(unknown)}")
    policy = scheduler.get("capacity_scheduler_policy")
    if policy is not None:
        if policy not in _SCHEDULER_POLICIES:
            raise NotSupportedYetError(
                f"not supported yet: scheduler_config.capacity_scheduler_policy={policy!r} ({source}); "
                f"use {' or '.join(_SCHEDULER_POLICIES)}"
            )
        layer.setdefault("scheduler_policy", _SCHEDULER_POLICIES[policy])
    if scheduler.get("enable_prefix_aware_scheduling") is not None:
        layer.setdefault("enable_prefix_aware_scheduling", scheduler["enable_prefix_aware_scheduling"])
    return {f"scheduler_config.{key}" for key in scheduler if key in _SCHEDULER_WITHOUT_EFFECT}
