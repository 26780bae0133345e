"""What is wrong with a worker's settings is said before anything starts, with the field and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.config import CacheTransceiverConfig, ConfigError, KvCacheConfig, WorkerSettings, transfer_facts
from kvmesh.engine.client import EngineRefusedError, EngineStartError
from kvmesh.models.errors import ModelError
from kvmesh.models.store import resolve_model
from kvmesh.worker import main
from kvmesh.worker.preflight import check_model, check_settings

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}


def settings(**fields: Any) -> WorkerSettings:
    return WorkerSettings(**{"cluster_secret": "secret", **fields})


def transfers(**fields: Any) -> CacheTransceiverConfig:
    return CacheTransceiverConfig(backend="DEFAULT", **fields)


def model(directory: Path, **changes: Any) -> Any:
    """A checkpoint of which only the head is there."""
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    (directory / "model.safetensors").touch()
    return resolve_model(str(directory))


def test_the_defaults_pass(tmp_path: Path) -> None:
    for backend in (None, "DEFAULT"):
        worker = settings(cache_transceiver_config=CacheTransceiverConfig(backend=backend))
        check_settings(worker)
        check_model(worker, model(tmp_path))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_cache_config": KvCacheConfig(dtype="fp8")}, r"not supported yet: kv_cache_config\.dtype='fp8'"),
        (
            {"cache_transceiver_config": CacheTransceiverConfig(backend="UCX", transceiver_runtime="PYTHON")},
            r"only supports NIXL and the built-in plane, not UCX",
        ),
        (
            {"cache_transceiver_config": CacheTransceiverConfig(backend="DEFAULT"), "cluster_secret": None},
            r"backend DEFAULT needs a cluster secret: set KVMESH_CLUSTER_SECRET",
        ),
        (
            {"kv_cache_config": KvCacheConfig(use_kv_cache_manager_v2=False, enable_swa_scratch_reuse=True)},
            r"only KV cache manager V2 has: enable_swa_scratch_reuse",
        ),
        (
            {"cache_transceiver_config": transfers(transceiver_runtime="CPP", max_tokens_in_buffer=8)},
            r"max_tokens_in_buffer is 8, less than the 32 tokens of one page; set at least 32",
        ),
        (
            {"cache_transceiver_config": transfers(kv_cache_bounce_size_mb=1 << 40)},
            r"kv_cache_bounce_size_mb \d+ takes \d+ bytes for bounce regions, but \d+ bytes of memory are available",
        ),
        (
            # TEST-NET-1: no machine has it.
            {"cache_transceiver_config": transfers(), "transfer_bind_host": "192.0.2.1"},
            r"transfer_bind_host 192\.0\.2\.1 cannot be bound \([^()]+\); set an address of this machine",
        ),
    ],
)
def test_what_no_model_makes_possible(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_settings(settings(**fields))


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_facts, "installed_backends", lambda: frozenset({"BUILTIN"}))
    with pytest.raises(ConfigError, match=r"needs NIXL; run `make venv EXTRAS=engine`"):
        check_settings(settings(cache_transceiver_config=CacheTransceiverConfig(backend="NIXL")))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_seq_len": 513}, r"max_seq_len 513 exceeds the 512 tokens .* lower it"),
        ({"kv_cache_config": KvCacheConfig(tokens_per_block=48)}, "tokens_per_block must be a power of two"),
        ({"kv_cache_config": KvCacheConfig(avg_seq_len=513)}, "avg_seq_len 513 is above max_seq_len 512"),
        (
            {"kv_cache_config": KvCacheConfig(use_kv_cache_manager_v2="auto", enable_swa_scratch_reuse=True)},
            r"only KV cache manager V2 has: enable_swa_scratch_reuse",
        ),
        # A page is 2 layers x (K, V) x 2 heads x 8 x 4 bytes x 32 tokens.
        ({"device": "cpu", "device_memory_bytes": 4096}, r"no room for one block of 32 tokens \(8192 bytes\)"),
        ({"device": "cpu", "kv_cache_config": KvCacheConfig(host_cache_size=8191)}, "raise host_cache_size"),
        (
            {
                "device": "cpu",
                "cache_transceiver_config": transfers(transceiver_runtime="CPP", max_tokens_in_buffer=1 << 45),
            },
            r"max_tokens_in_buffer \d+ takes \d+ bytes for staging buffers, but \d+ bytes .* available; lower it",
        ),
    ],
)
def test_what_this_model_makes_impossible(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        check_model(settings(**fields), model(tmp_path))


def test_ranks_that_this_model_cannot_have(tmp_path: Path) -> None:
    source = model(tmp_path)
    for sizes in ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}):
        check_model(settings(**sizes), source)
    check_model(settings(tensor_parallel_size=3, enable_attention_dp=True), source)
    with pytest.raises(ModelError, match="its 4 query heads cannot be divided by 3"):
        check_model(settings(tensor_parallel_size=3), source)
    with pytest.raises(ModelError, match="pipeline_parallel_size 3 is more than the 2 layers"):
        check_model(settings(pipeline_parallel_size=3), source)
    stated = KvCacheConfig(pool_ratio=[0.5, 0.5])
    with pytest.raises(ConfigError, match="pool_ratio has 2 entries, but the model has 1 layer groups"):
        check_model(settings(tensor_parallel_size=2, kv_cache_config=stated), source)


def test_a_model_that_is_not_supported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not supported yet"):
        check_model(settings(), model(tmp_path, architectures=["Mamba2ForCausalLM"]))


def test_a_worker_is_not_started_with_what_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(main, "run_service", started)
    with pytest.raises(ConfigError, match="not supported yet"):
        main.run_worker(settings(kv_cache_config=KvCacheConfig(dtype="fp8")))


@pytest.mark.parametrize(
    ("error", "status"), [(EngineRefusedError("no room for a page"), 2), (EngineStartError("killed by signal 9"), 1)]
)
def test_only_what_the_engine_refuses_is_not_tried_again(
    error: EngineStartError, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: Any, **_kwargs: Any) -> None:
        raise ExceptionGroup("start", [error])

    monkeypatch.setattr(main, "run_service", refused)
    monkeypatch.setattr(main, "configure_logging", lambda *_args: None)
    with pytest.raises(SystemExit) as exit_:
        main.run_worker(settings())
    assert exit_.value.code == status
