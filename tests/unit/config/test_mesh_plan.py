"""From one mesh settings object to the settings of each process (decisions 1, 6, 7)."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvmesh.config import (
    CacheTransceiverConfig,
    CoordinatorSettings,
    KvCacheConfig,
    KVEventsConfig,
    MeshSettings,
    RouterSettings,
    WorkerSettings,
)
from kvmesh.config.mesh import spread_over_workers
from kvmesh.config.mesh_plan import MeshPlan, plan_mesh


def plan(mesh: MeshSettings) -> MeshPlan:
    return plan_mesh(mesh, cluster_secret="s3cret", cpu_count=8)


def test_workers_get_roles_names_ports_and_threads() -> None:
    workers = plan(MeshSettings(num_context=2, num_generation=1, num_aggregated=1)).workers
    assert [(w.role, w.instance_id, w.port) for w in workers] == [
        ("context", "context-0", 8101),
        ("context", "context-1", 8102),
        ("generation", "generation-0", 8201),
        ("both", "aggregated-0", 8501),
    ]
    assert {w.num_threads for w in workers} == {2}
    assert {w.cluster_secret for w in workers} == {"s3cret"}


def test_every_worker_publishes_at_its_own_local_ports() -> None:
    """decisions 7."""
    events = [w.kv_cache_config.kv_events_config for w in plan(MeshSettings(num_context=2)).workers]
    assert [(e.endpoint, e.replay_endpoint, e.publisher) for e in events if e] == [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", "zmq"),
        ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658", "zmq"),
        ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:5659", "zmq"),
    ]


def test_stated_events_keep_everything_but_the_port() -> None:
    events = KVEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://*:6000", replay_endpoint="tcp://*:7000", topic="t"
    )
    template = WorkerSettings(kv_cache_config=KvCacheConfig(kv_events_config=events))
    first, second = plan(MeshSettings(context=template, generation=template)).workers
    assert first.kv_cache_config.kv_events_config == events
    moved = {"endpoint": "tcp://*:6001", "replay_endpoint": "tcp://*:7001"}
    assert second.kv_cache_config.kv_events_config == events.model_copy(update=moved)


def test_stated_events_get_the_endpoints_that_they_leave_out() -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, topic="t")
    template = WorkerSettings(kv_cache_config=KvCacheConfig(kv_events_config=events))
    _, second = plan(MeshSettings(context=template, generation=template)).workers
    planned = second.kv_cache_config.kv_events_config
    assert planned is not None
    assert (planned.endpoint, planned.replay_endpoint) == ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658")


@pytest.mark.parametrize("events", [None, KVEventsConfig(enable_kv_cache_events=False)])
def test_events_can_be_turned_off(events: KVEventsConfig | None) -> None:
    template = WorkerSettings(kv_cache_config=KvCacheConfig(kv_events_config=events))
    assert plan(MeshSettings(context=template)).workers[0].kv_cache_config.kv_events_config == events


def test_pipeline_stages_publish_no_events() -> None:
    """decisions 15; a section that asks for them is left as it is, for the server to refuse."""
    stages = WorkerSettings(pipeline_parallel_size=2)
    context, generation = plan(MeshSettings(context=stages)).workers
    assert context.kv_cache_config.kv_events_config is None
    assert generation.kv_cache_config.kv_events_config is not None
    asked = stages.model_copy(
        update={"kv_cache_config": KvCacheConfig(kv_events_config=KVEventsConfig(enable_kv_cache_events=True))}
    )
    (context, _) = plan(MeshSettings(context=asked)).workers
    assert context.kv_cache_config.kv_events_config is not None


def test_every_rank_gets_its_share_of_the_cores() -> None:
    template = WorkerSettings(tensor_parallel_size=3)
    assert [worker.num_threads for worker in plan(MeshSettings(context=template)).workers] == [6, 2]


def test_transfers_and_topics_are_on_unless_stated() -> None:
    """decisions 1 and 6."""
    stated = WorkerSettings(cache_transceiver_config=CacheTransceiverConfig(backend="NIXL"))
    context, generation = plan(MeshSettings(context=stated)).workers
    assert (context.cache_transceiver_config.backend, generation.cache_transceiver_config.backend) == (
        "NIXL",
        "DEFAULT",
    )
    assert generation.events.topic_style == "kv"


def test_processes_find_each_other() -> None:
    mesh = MeshSettings(coordinator=CoordinatorSettings(host="0.0.0.0", port=9400))
    planned = plan(mesh)
    assert planned.router.coordinator_url == planned.indexer.coordinator_url == "http://127.0.0.1:9400"
    assert {w.coordinator_url for w in planned.workers} == {"http://127.0.0.1:9400"}
    assert planned.router.indexer_url == "http://127.0.0.1:8300"
    assert planned.router.indexer_match_endpoint == planned.indexer.match_endpoint


def test_keys_of_sockets_are_those_of_the_mesh_unless_a_section_has_others() -> None:
    mesh = MeshSettings.model_validate(
        {"curve": {"key_file": "all.key_secret"}, "router": {"curve": {"key_file": "router.key_secret"}}}
    )
    plan = plan_mesh(mesh, cluster_secret="s", cpu_count=2)
    assert {worker.curve.key_file for worker in plan.workers} == {"all.key_secret"}
    assert plan.indexer.curve.key_file == "all.key_secret"
    assert plan.router.curve.key_file == "router.key_secret"


def test_a_section_beats_the_mesh() -> None:
    mesh = MeshSettings(
        model="m", lease_s=2, log_format="json", api_keys_file="/k", router=RouterSettings(model="r", log_level="debug")
    )
    planned = plan(mesh)
    assert (planned.router.model, planned.router.log_level, planned.router.log_format) == ("r", "debug", "json")
    assert (planned.workers[0].model, planned.coordinator.lease_s) == ("m", 2)
    assert planned.router.api_keys_file == "/k"
    assert planned.workers[0].api_keys_file is None, "clients never speak to workers"


@pytest.mark.parametrize(("context", "generation"), [(0, 1), (1, 0), (0, 0)])
def test_a_mesh_needs_both_halves_or_a_whole(context: int, generation: int) -> None:
    with pytest.raises(ValidationError, match="num_aggregated"):
        MeshSettings(num_context=context, num_generation=generation)
    MeshSettings(num_context=context, num_generation=generation, num_aggregated=1)


def test_a_workers_key_without_a_section_is_for_all_workers() -> None:
    layer = {
        "kv_cache_config": {"max_tokens": 1024, "tokens_per_block": 16},
        "generation": {"kv_cache_config": {"max_tokens": 2048}},
        "log_level": "debug",
        "port": 1,
    }
    shared = {"kv_cache_config": {"max_tokens": 1024, "tokens_per_block": 16}}
    assert spread_over_workers(layer) == {
        "log_level": "debug",
        "port": 1,
        "context": shared,
        "aggregated": shared,
        "generation": {"kv_cache_config": {"max_tokens": 2048, "tokens_per_block": 16}},
    }
    assert spread_over_workers({"lease_s": 1}) == {"lease_s": 1}


def test_an_ipv6_address_is_in_brackets_in_urls() -> None:
    planned = plan(MeshSettings(host="::1"))
    assert planned.router.coordinator_url == "http://[::1]:8400"
    assert planned.router.indexer_url == "http://[::1]:8300"
