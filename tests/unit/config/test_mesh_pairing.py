"""A mesh whose halves can never work together is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.config import (
    CacheTransceiverConfig,
    ConfigError,
    KvCacheConfig,
    MeshSettings,
    RouterSettings,
    WorkerSettings,
)
from kvmesh.config.mesh_pairing import refuse_unpairable
from kvmesh.config.mesh_plan import plan_mesh


def judge(context: WorkerSettings, generation: WorkerSettings, *, may_have_gpu: bool = False, **mesh: Any) -> None:
    settings = MeshSettings(context=context, generation=generation, **mesh)
    refuse_unpairable(
        plan_mesh(settings, cluster_secret="s3cret", cpu_count=1).workers,
        schedule_style=settings.router.schedule_style,
        environment={},
        may_have_gpu=may_have_gpu,
    )


def transfers(device: str = "auto", **fields: Any) -> WorkerSettings:
    config = CacheTransceiverConfig(**{"backend": "DEFAULT", **fields})
    return WorkerSettings(device=device, cache_transceiver_config=config)


def cache(**fields: Any) -> WorkerSettings:
    return WorkerSettings(kv_cache_config=KvCacheConfig(**fields))


@pytest.mark.parametrize(
    ("context", "generation", "says"),
    [
        (
            cache(tokens_per_block=64),
            WorkerSettings(),
            r"context\.kv_cache_config\.tokens_per_block is 64 and generation\.kv_cache_config\.tokens_per_block is 32",
        ),
        (cache(dtype="float32"), cache(dtype="float16"), r"kv_cache_config\.dtype is float32"),
        (WorkerSettings(dtype="float32"), WorkerSettings(dtype="bfloat16"), r"context\.dtype is float32"),
        (cache(max_attention_window=[64]), cache(max_attention_window=[64, 128]), r"max_attention_window is \[64\]"),
        (
            WorkerSettings(cache_transceiver_config=CacheTransceiverConfig(backend=None)),
            WorkerSettings(),
            r"context\.cache_transceiver_config\.backend is null",
        ),
        (
            transfers(backend="NIXL"),
            transfers(),
            r"context\S* comes to backend NIXL with runtime PYTHON and generation\S* to DEFAULT \(the built-in plane\)",
        ),
        (transfers(transceiver_runtime="CPP"), transfers(), "runtime CPP and .* with runtime PYTHON"),
        (transfers(kv_transfer_timeout_ms=None), transfers(), "runtime CPP and .* with runtime PYTHON"),
        (
            transfers(backend="NIXL", enable_pipelined_transfer=True),
            transfers(backend="NIXL"),
            r"enable_pipelined_transfer needs router\.schedule_style generation_first, not context_first; set it",
        ),
        (WorkerSettings(served_model_name="a"), WorkerSettings(served_model_name="b"), "served_model_name is a"),
    ],
)
def test_what_can_never_pair(context: WorkerSettings, generation: WorkerSettings, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        judge(context, generation)
    judge(context, generation, num_context=0, num_generation=0, num_aggregated=1)


def test_what_may_pair() -> None:
    judge(WorkerSettings(), WorkerSettings())
    judge(cache(max_attention_window=[64]), cache(max_attention_window=[64, 64]))
    judge(cache(dtype="float32"), WorkerSettings(dtype="float32"))
    judge(cache(max_attention_window=[4096]), WorkerSettings())
    judge(transfers(backend="NIXL"), transfers(backend="NIXL"))
    judge(
        transfers(backend="NIXL", enable_pipelined_transfer=True),
        transfers(backend="NIXL", enable_pipelined_transfer=True),
        router=RouterSettings(schedule_style="generation_first"),
    )


def test_a_device_that_only_the_engine_finds_may_settle_the_backend() -> None:
    nixl, default = transfers(backend="NIXL"), transfers()
    judge(nixl, default, may_have_gpu=True)  # DEFAULT is NIXL on CUDA
    with pytest.raises(ConfigError, match="comes to backend NIXL"):
        judge(nixl, transfers("cpu"), may_have_gpu=True)
