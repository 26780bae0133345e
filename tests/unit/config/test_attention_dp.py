"""``enable_attention_dp``: what a server's ranks are told, and what they cannot be (§2.1, §4.3, §7 T12)."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.config import ConfigError, KvCacheConfig, MeshSettings, WorkerSettings
from kvmesh.config.attention_dp import rank_memory_bytes, rank_settings
from kvmesh.config.llm_args import translate_llm_args
from kvmesh.config.mesh_plan import plan_mesh
from kvmesh.config.startup import refuse_impossible
from kvmesh.protocol.ranks import DpSeat

RANKS: dict[str, Any] = {"enable_attention_dp": True, "tensor_parallel_size": 3}


def server(cache: dict[str, Any] | None = None, **own: Any) -> WorkerSettings:
    return WorkerSettings(
        instance_id="w", kv_cache_config=KvCacheConfig.model_validate(cache or {}), **{**RANKS, **own}
    )


def ranks_of(settings: WorkerSettings, cpu_count: int = 8) -> list[WorkerSettings]:
    size = settings.dp_size
    return [rank_settings(settings, DpSeat(rank, size), cpu_count=cpu_count) for rank in range(size)]


def test_without_it_there_is_one_engine_with_the_servers_own_settings() -> None:
    settings = WorkerSettings(tensor_parallel_size=4)
    assert settings.dp_size == 1
    assert rank_settings(settings, DpSeat(0, 1), cpu_count=8) is settings


def test_one_rank_is_the_server_itself() -> None:
    [rank] = ranks_of(server(tensor_parallel_size=1, num_threads=5))
    assert (rank.instance_id, rank.num_threads, rank.device_memory_bytes) == ("w", 5, None)


def test_ranks_share_the_machine_and_have_names_of_their_own() -> None:
    settings = server({"max_tokens": 640}, device_memory_bytes=3_000_001)
    ranks = ranks_of(settings)
    assert [rank.instance_id for rank in ranks] == ["w/0", "w/1", "w/2"]
    assert [rank.num_threads for rank in ranks] == [3, 3, 2]
    assert {rank.device_memory_bytes for rank in ranks} == {1_000_000} == {rank_memory_bytes(settings)}
    # As in TensorRT-LLM, the cache's own settings are each rank's; and each is an engine without further ranks.
    assert {rank.kv_cache_config.max_tokens for rank in ranks} == {640}
    assert {(rank.tensor_parallel_size, rank.enable_attention_dp) for rank in ranks} == {(1, False)}


def test_stated_threads_are_divided_and_nobody_has_none() -> None:
    assert [rank.num_threads for rank in ranks_of(server(num_threads=2))] == [1, 1, 1]


def test_layers_are_not_divided_as_well() -> None:
    refuse_impossible(server(), max_seq_len=100)
    with pytest.raises(ConfigError, match="enable_attention_dp needs pipeline_parallel_size=1, not 2"):
        refuse_impossible(server(pipeline_parallel_size=2), max_seq_len=100)


EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:6100"}


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (EVENTS | {"replay_endpoint": "tcp://*:6002"}, "overlap"),
        (EVENTS | {"replay_endpoint": "tcp://*:6003"}, None),
        (EVENTS | {"endpoint": "tcp://*:65534"}, "above the maximum port 65535"),
        (EVENTS | {"endpoint": "tcp://*:*"}, r"endpoint tcp://\*:\* needs a fixed port"),
        (EVENTS | {"replay_endpoint": "tcp://*:0"}, r"replay_endpoint tcp://\*:0 needs a fixed port"),
        (EVENTS | {"endpoint": "ipc:///tmp/a", "replay_endpoint": "ipc:///tmp/b"}, None),
        (EVENTS | {"endpoint": "tcp://*:*", "publisher": "null"}, None),
        (EVENTS | {"endpoint": "tcp://*:*", "enable_kv_cache_events": False}, None),
    ],
)
def test_event_ports_of_all_ranks(events: dict[str, Any], says: str | None) -> None:
    settings = server({"kv_events_config": events})
    if says is None:
        refuse_impossible(settings, max_seq_len=100)
    else:
        with pytest.raises(ConfigError, match=says):
            refuse_impossible(settings, max_seq_len=100)


def test_a_mesh_counts_ranks_when_it_shares_ports_and_cores() -> None:
    mesh = MeshSettings(num_context=2, context=WorkerSettings(**RANKS))
    workers = plan_mesh(mesh, cluster_secret="s", cpu_count=14).workers
    events = [worker.kv_cache_config.kv_events_config for worker in workers]
    assert [(each.endpoint, each.replay_endpoint) for each in events if each] == [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"),
        ("tcp://127.0.0.1:5560", "tcp://127.0.0.1:5660"),
        ("tcp://127.0.0.1:5563", "tcp://127.0.0.1:5663"),
    ]
    assert [worker.num_threads for worker in workers] == [6, 6, 2]


def test_tensorrt_llms_key_is_a_setting_here() -> None:
    args = translate_llm_args(RANKS, "extra.yaml")
    assert (args.layer, args.ignored) == (RANKS, frozenset())
