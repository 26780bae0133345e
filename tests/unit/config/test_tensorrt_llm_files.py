"""TensorRT-LLM's YAML files, unchanged: worker options, the disaggregated file (decisions 10, semantics §5.5-§5.7)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvmesh.config import (
    ConfigError,
    ConfigWarning,
    ConversationPolicy,
    CoordinatorSettings,
    DisaggConfig,
    KvCacheAwarePolicy,
    LoadBalancingPolicy,
    MeshSettings,
    NotSupportedYetError,
    RoundRobinPolicy,
    RouterSettings,
    WorkerSettings,
    load_settings,
)

Write = Callable[[str], Path]

WORKER_FILE = """
backend: pytorch
tensor_parallel_size: 1
moe_expert_parallel_size: 1
disable_overlap_scheduler: true
cuda_graph_config: {enable_padding: true, batch_sizes: [1, 2, 4]}
print_iter_log: true
max_batch_size: 16
max_num_tokens: 1024
max_seq_len: 2048
enable_chunked_prefill: true
scheduler_config:
  capacity_scheduler_policy: GUARANTEED_NO_EVICT
  context_chunking_policy: FIRST_COME_FIRST_SERVED
  enable_prefix_aware_scheduling: false
kv_cache_config: {enable_block_reuse: true, free_gpu_memory_fraction: 0.3, tokens_per_block: 64}
cache_transceiver_config: {backend: DEFAULT, max_tokens_in_buffer: 2048}
"""

DISAGG_FILE = """
hostname: localhost
port: 8000
model: SmolLM2-135M-Instruct
free_gpu_memory_fraction: 0.25
backend: pytorch
disable_overlap_scheduler: True
conditional_disagg_config: {max_local_prefill_length: 100}
otlp_config: {otlp_traces_endpoint: "http://127.0.0.1:4318/v1/traces"}
node_id: 7
context_servers:
  num_instances: 2
  max_batch_size: 8
  tensor_parallel_size: 1
  kv_cache_config: {enable_partial_reuse: false}
  cache_transceiver_config: {backend: DEFAULT}
  urls: ["localhost:8001", "localhost:8002"]
generation_servers:
  num_instances: 1
  max_batch_size: 16
  max_num_tokens: 256
  router: {type: kv_cache_aware, load_weight: 0.5}
  kv_cache_config: {tokens_per_block: 64}
  cache_transceiver_config: {backend: DEFAULT}
  urls: ["localhost:8011"]
"""


class TestWorkerFile:
    def test_loads_with_one_warning(self, write_yaml: Write) -> None:
        with pytest.warns(ConfigWarning, match="without effect here: backend, cuda_graph_config, ") as caught:
            settings = load_settings(WorkerSettings, write_yaml(WORKER_FILE), {})
        assert len(caught) == 1
        assert "scheduler_config.context_chunking_policy" in str(caught[0].message)
        assert (settings.max_batch_size, settings.max_num_tokens, settings.max_seq_len) == (16, 1024, 2048)
        assert settings.scheduler_policy == "guaranteed_no_evict"
        assert not settings.enable_prefix_aware_scheduling
        assert settings.kv_cache_config.tokens_per_block == 64
        assert settings.cache_transceiver_config.backend == "DEFAULT"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("max_batch_sise: 1", "unknown key 'max_batch_sise'; did you mean 'max_batch_size'"),
            ("cuda_graph_confg: {}", "did you mean 'cuda_graph_config'"),
            ("kv_cache_config: {max_tokns: 1}", "kv_cache_config: unknown key 'max_tokns'; did you mean 'max_tokens'"),
            ("scheduler_config: {capacity_policy: x}", "did you mean 'capacity_scheduler_policy'"),
            ("scheduler_config: 5", "scheduler_config must be a mapping"),
            (
                "free_gpu_memory_fraction: 0.2\nkv_cache_config: {free_gpu_memory_fraction: 0.3}",
                "differ; keep the latter",
            ),
        ],
    )
    def test_errors(self, write_yaml: Write, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            load_settings(WorkerSettings, write_yaml(text), {})

    @pytest.mark.parametrize(
        "text",
        ["max_beam_width: 4", "enable_lora: true", "guided_decoding_backend: xgrammar", "tokenizer: other",
         "scheduler_config: {capacity_scheduler_policy: STATIC_BATCH}"],
    )  # fmt: skip
    def test_what_would_change_answers_is_refused(self, write_yaml: Write, text: str) -> None:
        with pytest.raises(NotSupportedYetError, match="not supported yet: "):
            load_settings(WorkerSettings, write_yaml(text), {})

    def test_neutral_values_pass_in_silence(self, write_yaml: Write) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_settings(WorkerSettings, write_yaml("max_beam_width: 1\nenable_lora: false\ntokenizer: null"), {})

    def test_older_names(self, write_yaml: Write) -> None:
        file = write_yaml("free_gpu_memory_fraction: 0.2\notlp_traces_endpoint: http://o:4318")
        settings = load_settings(WorkerSettings, file, {})
        assert settings.kv_cache_config.free_gpu_memory_fraction == 0.2
        assert settings.otlp_endpoint == "http://o:4318"


class TestDisaggConfig:
    """§5.7."""

    def test_defaults(self) -> None:
        config = DisaggConfig.model_validate({})
        assert (config.hostname, config.port, config.max_retries, config.perf_metrics_max_requests) == (
            "localhost", 8000, 1, 0,
        )  # fmt: skip
        assert config.schedule_style == "context_first"
        assert config.context_servers.num_instances == config.generation_servers.num_instances == 1
        assert isinstance(config.context_servers.router, RoundRobinPolicy)
        assert config.disagg_cluster is None

    def test_other_keys_are_inherited_by_both_sections(self) -> None:
        config = DisaggConfig.model_validate({"max_batch_size": 4, "context_servers": {"max_seq_len": 9}})
        assert config.context_servers.llm_args == {"max_batch_size": 4, "max_seq_len": 9}
        assert config.generation_servers.llm_args == {"max_batch_size": 4}

    def test_the_same_value_twice_is_no_contradiction(self) -> None:
        DisaggConfig.model_validate({"max_batch_size": 4, "context_servers": {"max_batch_size": 4}})

    def test_contradiction(self) -> None:
        with pytest.raises(
            ValidationError,
            match="Parameter max_batch_size is specified both in the top-level and in the context_servers",
        ):
            DisaggConfig.model_validate({"max_batch_size": 4, "context_servers": {"max_batch_size": 5}})

    @pytest.mark.parametrize(("instances", "urls"), [(2, ["a:1"]), (1, ["a:1", "b:1"])])
    def test_urls_must_match_instances(self, instances: int, urls: list[str]) -> None:
        with pytest.raises(ValidationError, match="should be equal to the number of instances"):
            DisaggConfig.model_validate({"generation_servers": {"num_instances": instances, "urls": urls}})

    def test_urls_must_differ(self) -> None:
        with pytest.raises(ValidationError, match="listed twice"):
            DisaggConfig.model_validate({"context_servers": {"num_instances": 2, "urls": ["a:1", "a:1"]}})

    @pytest.mark.parametrize(
        ("router", "policy"),
        [
            (None, RoundRobinPolicy()),
            ({}, RoundRobinPolicy()),
            ({"type": "load_balancing", "use_tokens": True}, LoadBalancingPolicy(use_tokens=True)),
            ({"type": "load_balancing", "args": {"use_tokens": True}}, LoadBalancingPolicy(use_tokens=True)),
            ({"type": "conversation", "match_threshold": 0.5}, ConversationPolicy(match_threshold=0.5)),
        ],
    )
    def test_router_types(self, router: Any, policy: Any) -> None:
        """§5.6."""
        assert DisaggConfig.model_validate({"context_servers": {"router": router}}).context_servers.router == policy

    def test_router_inherits_from_its_section(self) -> None:
        """§5.6: batch size, token budget and block size; the block size only where the router has none of its own."""
        section = {
            "max_batch_size": 8,
            "max_num_tokens": 99,
            "kv_cache_config": {"tokens_per_block": 64},
            "router": {"type": "kv_cache_aware"},
        }
        policy = DisaggConfig.model_validate({"context_servers": section}).context_servers.router
        assert policy == KvCacheAwarePolicy(max_batch_size=8, max_num_tokens=99, tokens_per_block=64)
        section["router"] = {"type": "kv_cache_aware", "tokens_per_block": 16}
        policy = DisaggConfig.model_validate({"context_servers": section}).context_servers.router
        assert isinstance(policy, KvCacheAwarePolicy)
        assert policy.tokens_per_block == 16

    @pytest.mark.parametrize(
        "wrong",
        [
            {"node_id": 256},
            {"schedule_style": "both_first"},
            {"allow_request_chat_template": "yes"},
            {"allow_request_chat_template": 1},
            {"conditional_disagg_config": {"max_prefill": 1}},
            {"disagg_cluster": {"cluster_uri": "http://c:1", "ttl": 3}},
            {"disagg_cluster": {"cluster_uri": "zk://c:1"}},
            {"disagg_cluster": {}},
            {"disagg_cluster": {"cluster_uri": "http://c:1", "minimal_instances": {"router": 1}}},
            {"context_servers": {"router": {"type": "random"}}},
            {"context_servers": {"router": "round_robin"}},
            {"context_servers": ["a:1"]},
        ],
    )
    def test_rejects(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            DisaggConfig.model_validate(wrong)

    def test_cluster_defaults(self) -> None:
        cluster = DisaggConfig.model_validate({"disagg_cluster": {"cluster_uri": "http://c:1"}}).disagg_cluster
        assert cluster is not None
        assert (cluster.heartbeat_interval_sec, cluster.inactive_timeout_sec, cluster.cluster_name) == (5, 10, "")
        assert (cluster.minimal_instances.context_servers, cluster.minimal_instances.generation_servers) == (1, 1)

    def test_conditional_needs_a_cache_aware_generation_router(self) -> None:
        """§5.5."""
        conditional = {"conditional_disagg_config": {"max_local_prefill_length": 8}}
        with pytest.raises(ValidationError, match=r"requires generation_servers\.router\.type kv_cache_aware"):
            DisaggConfig.model_validate(conditional)
        DisaggConfig.model_validate(conditional | {"generation_servers": {"router": {"type": "kv_cache_aware"}}})

    @pytest.mark.parametrize("forcing", [{"return_perf_metrics": True}, {"perf_metrics_output_dir": "/tmp/x"}])
    def test_perf_metrics_are_forced_on_servers(self, forcing: dict[str, Any]) -> None:
        config = DisaggConfig.model_validate(forcing | {"context_servers": {"return_perf_metrics": False}})
        assert config.context_servers.llm_args["return_perf_metrics"] is True
        assert config.generation_servers.llm_args["return_perf_metrics"] is True


class TestDisaggFile:
    def test_for_the_router(self, write_yaml: Write) -> None:
        settings = load_settings(RouterSettings, write_yaml(DISAGG_FILE), {})
        assert (settings.host, settings.port, settings.model, settings.node_id) == (
            "localhost", 8000, "SmolLM2-135M-Instruct", 7,
        )  # fmt: skip
        assert settings.context_servers == ["http://localhost:8001", "http://localhost:8002"]
        assert settings.generation_servers == ["http://localhost:8011"]
        assert settings.context_router == RoundRobinPolicy(max_batch_size=8)
        assert settings.generation_router == KvCacheAwarePolicy(
            max_batch_size=16, max_num_tokens=256, tokens_per_block=64, load_weight=0.5
        )
        assert settings.max_local_prefill_length == 100
        assert settings.otlp_endpoint == "http://127.0.0.1:4318/v1/traces"

    @pytest.mark.filterwarnings("ignore::kvmesh.config.ConfigWarning")
    def test_for_a_worker(self, write_yaml: Write) -> None:
        file = write_yaml(DISAGG_FILE)
        context = load_settings(WorkerSettings, file, {}, {"role": "context"})
        assert (context.role, context.max_batch_size) == ("context", 8)
        assert not context.kv_cache_config.enable_partial_reuse
        assert context.kv_cache_config.free_gpu_memory_fraction == 0.25
        generation = load_settings(WorkerSettings, file, {"KVMESH_ROLE": "generation"}, {})
        assert (generation.role, generation.max_batch_size, generation.max_num_tokens) == ("generation", 16, 256)
        with pytest.raises(ConfigError, match="say which this is with role"):
            load_settings(WorkerSettings, file, {})

    def test_for_a_mesh(self, write_yaml: Write) -> None:
        with pytest.warns(ConfigWarning, match="without effect here: backend, disable_overlap_scheduler$") as caught:
            mesh = load_settings(MeshSettings, write_yaml(DISAGG_FILE), {})
        assert len(caught) == 1
        assert (mesh.num_context, mesh.num_generation) == (2, 1)
        assert (mesh.context_port, mesh.generation_port, mesh.router.port) == (8001, 8011, 8000)
        assert (mesh.context.max_batch_size, mesh.generation.max_batch_size) == (8, 16)
        assert mesh.router.context_servers == []

    def test_a_mesh_cannot_start_remote_servers(self, write_yaml: Write) -> None:
        with pytest.raises(ConfigError, match="start a router with this file instead"):
            load_settings(MeshSettings, write_yaml("context_servers: {urls: ['other:8001']}"), {})

    def test_unknown_key_names_the_nearest_of_either_kind(self, write_yaml: Write) -> None:
        with pytest.raises(ConfigError, match="unknown key 'schedule_stile'; did you mean 'schedule_style'"):
            load_settings(MeshSettings, write_yaml("schedule_stile: x\ncontext_servers: {}"), {})

    @pytest.mark.parametrize(
        "text",
        [
            "context_servers: {}\nallow_request_chat_template: true",
        ],
    )
    def test_not_supported_yet(self, write_yaml: Write, text: str) -> None:
        with pytest.raises(NotSupportedYetError, match="not supported yet: "):
            load_settings(RouterSettings, write_yaml(text), {})

    def test_cluster_is_the_coordinator(self, write_yaml: Write) -> None:
        file = write_yaml("disagg_cluster: {cluster_uri: 'http://c:1', minimal_instances: {context_servers: 2}}")
        router = load_settings(RouterSettings, file, {})
        assert (router.coordinator_url, router.min_context_servers) == ("http://c:1", 2)
        assert load_settings(WorkerSettings, file, {}, {"role": "context"}).coordinator_url == "http://c:1"
        assert load_settings(MeshSettings, file, {}).router.coordinator_url is None, "a mesh starts its own"

    def test_an_etcd_cluster_is_what_the_coordinator_keeps_its_state_in(self, write_yaml: Write) -> None:
        """§5.7: ``disagg_cluster.cluster_uri`` may be ``etcd://``."""
        file = write_yaml("disagg_cluster: {cluster_uri: 'etcd://e:2379', cluster_name: blue, inactive_timeout_sec: 4}")
        coordinator = load_settings(CoordinatorSettings, file, {})
        assert (coordinator.etcd_endpoints, coordinator.cluster_name) == (("http://e:2379",), "blue")
        assert coordinator.lease_s == 4
        assert load_settings(MeshSettings, file, {}).coordinator == coordinator
        for cls, above in ((RouterSettings, {}), (WorkerSettings, {"role": "context"})):
            with pytest.raises(ConfigError, match=r"run 'kvmesh coordinator --config .*' and give its address"):
                load_settings(cls, file, {}, above)
            settled = load_settings(cls, file, {}, {**above, "coordinator_url": "a:1, b:1"})
            assert settled.coordinator_url == "http://a:1,http://b:1"

    def test_etcd_endpoints_in_any_of_their_spellings(self, write_yaml: Write) -> None:
        for text in ("etcd://a:1,http://b:2", "[a:1, 'http://b:2']"):
            loaded = load_settings(CoordinatorSettings, write_yaml(f"etcd_endpoints: {text}"), {})
            assert loaded.etcd_endpoints == ("http://a:1", "http://b:2")
        with pytest.raises(ConfigError, match="not an HTTP address"):
            load_settings(CoordinatorSettings, write_yaml("etcd_endpoints: tcp://a:1"), {})

    def test_the_coordinator_decides_on_leases(self, write_yaml: Write) -> None:
        file = write_yaml("disagg_cluster: {cluster_uri: 'http://c:1', inactive_timeout_sec: 3}")
        with pytest.warns(ConfigWarning, match="coordinator's settings count: inactive_timeout_sec"):
            load_settings(RouterSettings, file, {})

    def test_keys_of_other_router_processes_warn(self, write_yaml: Write) -> None:
        with pytest.warns(ConfigWarning, match="without effect here: num_workers"):
            load_settings(RouterSettings, write_yaml("context_servers: {}\nnum_workers: 4"), {})


class TestMeshFile:
    def test_worker_keys_go_to_every_worker(self, write_yaml: Write) -> None:
        """A worker's file is a mesh's file too; a section may differ."""
        mesh = load_settings(
            MeshSettings, write_yaml("num_context: 2\nmax_batch_size: 3\ngeneration: {max_batch_size: 5}"), {}
        )
        sizes = (mesh.context.max_batch_size, mesh.generation.max_batch_size, mesh.aggregated.max_batch_size)
        assert (mesh.num_context, *sizes) == (2, 3, 5, 3)
        assert isinstance(mesh.router.context_router, KvCacheAwarePolicy)

    def test_unknown_key(self, write_yaml: Write) -> None:
        with pytest.raises(ConfigError, match="unknown key 'num_contexts'; did you mean 'num_context'"):
            load_settings(MeshSettings, write_yaml("num_contexts: 2"), {})
