"""Which file says what to which service: our own keys, TensorRT-LLM's LLM arguments, or its disaggregated file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from kvmesh.config.coordinator import CoordinatorSettings
from kvmesh.config.describe import describe
from kvmesh.config.disagg import DisaggConfig, DisaggServers
from kvmesh.config.errors import ConfigError, NotSupportedYetError, warn_config
from kvmesh.config.llm_args import LlmArgs, translate_llm_args
from kvmesh.config.mesh import MeshSettings
from kvmesh.config.router import RouterSettings
from kvmesh.config.sources import merged
from kvmesh.config.worker import WorkerSettings

__all__ = ["coordinator_layer", "file_layer", "parse_disagg", "router_layer", "worker_layer"]

_ETCD = "etcd://"
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})  # noqa: S104 - compared with, never bound
_ROUTER_WITHOUT_EFFECT = (
    "disagg_coordinator_url", "gen_strip_message_history", "gen_tokids_ctxbytes", "num_workers",
    "perf_metrics_max_requests", "perf_metrics_output_dir", "return_perf_metrics",
)  # fmt: skip
_WORKER_SECTIONS = ("context", "generation", "aggregated")
_DISAGG_MARKS = frozenset({"context_servers", "generation_servers", "conditional_disagg_config", "disagg_cluster"})


def file_layer(cls: type[BaseModel], data: dict[str, Any], above: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What a file says to a service, as fields of its settings class, not yet validated.

    Args:
        cls: the settings class.
        data: the file.
        above: what flags and environment say; a worker's ``role`` there picks its section of a disaggregated file.
        source: the file's name, for messages.

    Raises:
        ConfigError: the file has unknown or contradicting keys.
        NotSupportedYetError: it asks for behaviour which this version does not have.
    """
    if issubclass(cls, WorkerSettings):
        if _is_disagg(data):
            return worker_layer(parse_disagg(data, source), _role(above, source), source, above)
        return _announced([translate_llm_args(data, source)], source)[0]
    if issubclass(cls, RouterSettings) and _is_disagg(data):
        return router_layer(parse_disagg(data, source), source, above)
    if issubclass(cls, CoordinatorSettings) and _is_disagg(data):
        return coordinator_layer(parse_disagg(data, source))
    if issubclass(cls, MeshSettings):
        return _disagg_mesh_layer(parse_disagg(data, source), source) if _is_disagg(data) else _mesh_layer(data, source)
    return data


def parse_disagg(data: Mapping[str, Any], source: str) -> DisaggConfig:
    """The disaggregated file, checked; its LLM arguments are checked when they are translated.

    Raises:
        ConfigError: naming every problem.
    """
    try:
        return DisaggConfig.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe(error)}") from error


def worker_layer(
    config: DisaggConfig, role: Literal["context", "generation"], source: str, above: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Settings of the servers of one section, with one warning about the keys that have no effect."""
    layer = _announced([_section_args(config.servers(role), source)], source)[0]
    return _cluster_layer(config, source, above or {}) | layer | {"role": role}


def coordinator_layer(config: DisaggConfig) -> dict[str, Any]:
    """Settings of the coordinator of the file's cluster."""
    cluster = config.disagg_cluster
    if cluster is None:
        return {}
    layer: dict[str, Any] = {"cluster_name": cluster.cluster_name} if cluster.cluster_name else {}
    if "inactive_timeout_sec" in cluster.model_fields_set:
        layer["lease_s"] = cluster.inactive_timeout_sec
    if cluster.cluster_uri.startswith(_ETCD):
        layer["etcd_endpoints"] = [cluster.cluster_uri]
    return layer


def router_layer(config: DisaggConfig, source: str, above: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings of the router in front of the servers of the file; only what the file states.

    Args:
        config: the file.
        source: its name, for messages.
        above: what flags and environment say.

    Raises:
        ConfigError: the file's cluster is an etcd, and no coordinator is named.
        NotSupportedYetError: the file asks for behaviour which this version does not have.
    """
    if config.allow_request_chat_template:
        raise NotSupportedYetError(f"not supported yet: allow_request_chat_template=True ({source})")
    ignored = [key for key in _ROUTER_WITHOUT_EFFECT if key in config.model_fields_set]
    if ignored:
        warn_config(f"{source}: known to TensorRT-LLM and without effect here: {', '.join(ignored)}")
    renamed = {"hostname": "host", "port": "port", "max_retries": "max_retries", "node_id": "node_id"}
    renamed |= {"schedule_style": "schedule_style"}
    layer = {ours: getattr(config, theirs) for theirs, ours in renamed.items() if theirs in config.model_fields_set}
    for role, section in (("context", config.context_servers), ("generation", config.generation_servers)):
        layer[f"{role}_router"] = section.router.model_dump()
        if section.urls:
            layer[f"{role}_servers"] = section.urls
        if "model" in section.llm_args:
            layer.setdefault("model", section.llm_args["model"])
    if config.conditional_disagg_config is not None:
        layer["max_local_prefill_length"] = config.conditional_disagg_config.max_local_prefill_length
    if config.otlp_config is not None and config.otlp_config.otlp_traces_endpoint is not None:
        layer["otlp_endpoint"] = config.otlp_config.otlp_traces_endpoint
    if config.disagg_cluster is not None:
        minimal = config.disagg_cluster.minimal_instances
        layer["min_context_servers"] = minimal.context_servers
        layer["min_generation_servers"] = minimal.generation_servers
    return layer | _cluster_layer(config, source, above or {})


def _mesh_layer(data: dict[str, Any], source: str) -> dict[str, Any]:
    """A mesh's own file; keys that only a worker knows go to the workers of every role."""
    ours = MeshSettings.model_fields.keys()
    args = {key: value for key, value in data.items() if key not in ours}
    layer = {key: value for key, value in data.items() if key in ours}
    if args:
        translated = translate_llm_args(args, source, also_known=frozenset(ours | DisaggConfig.model_fields.keys()))
        shared = _announced([translated], source)[0]
        for role in _WORKER_SECTIONS:
            layer[role] = merged(shared, layer.get(role) or {})
    return layer


def _disagg_mesh_layer(config: DisaggConfig, source: str) -> dict[str, Any]:
    """A whole mesh on this machine: as many servers as the file has instances, at its ports if it names any."""
    translated = [_section_args(config.servers(role), source) for role in ("context", "generation")]
    context, generation = _announced(translated, source)
    router = router_layer(config, source, {"coordinator_url": "of the mesh"})
    router.pop("coordinator_url", None)
    layer: dict[str, Any] = {
        "num_context": config.context_servers.num_instances,
        "num_generation": config.generation_servers.num_instances,
        "context": context,
        "generation": generation,
    }
    if coordinator := coordinator_layer(config):
        layer["coordinator"] = coordinator
    if "model" in router:
        layer["model"] = router.pop("model")
    for role, section in (("context", config.context_servers), ("generation", config.generation_servers)):
        if router.pop(f"{role}_servers", None):
            layer[f"{role}_port"] = _first_port(section, source)
    return layer | {"router": router}


def _section_args(section: DisaggServers, source: str) -> LlmArgs:
    return translate_llm_args(section.llm_args, source, also_known=frozenset(DisaggConfig.model_fields))


def _announced(translated: list[LlmArgs], source: str) -> list[dict[str, Any]]:
    """The layers, after one warning that names every key without effect."""
    ignored = sorted(frozenset().union(*(args.ignored for args in translated)))
    if ignored:
        warn_config(f"{source}: known to TensorRT-LLM and without effect here: {', '.join(ignored)}")
    return [args.layer for args in translated]


def _cluster_layer(config: DisaggConfig, source: str, above: Mapping[str, Any]) -> dict[str, Any]:
    """``disagg_cluster`` as the coordinator that keeps the same storage interface."""
    cluster = config.disagg_cluster
    if cluster is None:
        return {}
    if cluster.cluster_uri.startswith(_ETCD):
        if not above.get("coordinator_url"):
            raise ConfigError(
                f"{source}: servers register with a coordinator, which keeps its state at {cluster.cluster_uri}: run "
                f"'kvmesh coordinator --config {source}' and give its address as coordinator_url"
            )
        return {}
    ignored = sorted({"heartbeat_interval_sec", "inactive_timeout_sec", "cluster_name"} & cluster.model_fields_set)
    if ignored:
        warn_config(f"{source}: without effect here, the coordinator's settings count: {', '.join(ignored)}")
    return {"coordinator_url": cluster.cluster_uri}


def _first_port(section: DisaggServers, source: str) -> int:
    """The port of the first server, if the section's addresses are consecutive ports of this machine."""
    parts = [urlsplit(url) for url in section.urls]
    ports = [part.port for part in parts]
    first = parts[0].port or 0
    if {part.hostname for part in parts} - _LOCAL_HOSTS or ports != list(range(first, first + len(ports))):
        raise ConfigError(
            f"{source}: a mesh on one machine needs urls with consecutive ports of localhost, or no urls; "
            "for servers that run already, start a router with this file instead"
        )
    return first


def _role(above: Mapping[str, Any], source: str) -> Literal["context", "generation"]:
    role = above.get("role")
    if role == "context":
        return "context"
    if role == "generation":
        return "generation"
    raise ConfigError(f"{source} describes context and generation servers: say which this is with role")


def _is_disagg(data: Mapping[str, Any]) -> bool:
    """A router's own file has plain lists where the disaggregated file has sections."""
    return any(key in _DISAGG_MARKS and not isinstance(value, list) for key, value in data.items())
