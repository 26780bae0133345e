"""``DisaggConfig``: TensorRT-LLM's disaggregated file (``context_servers:``, ``generation_servers:`` ...)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, field_validator, model_validator

from kvmesh.config.base import StrictModel
from kvmesh.config.endpoints import HttpUrl, Port
from kvmesh.config.router import ScheduleStyle
from kvmesh.config.routing import KvCacheAwarePolicy, RoundRobinPolicy, RoutingPolicy

__all__ = [
    "ConditionalDisaggConfig",
    "DisaggClusterConfig",
    "DisaggConfig",
    "DisaggServers",
    "MinimalInstances",
    "OtlpConfig",
]

_SECTIONS = ("context_servers", "generation_servers")
_SECTION_KEYS = ("num_instances", "urls", "router")
_INHERITED_BY_ROUTER = ("max_batch_size", "max_num_tokens")


class DisaggServers(StrictModel):
    """One of the two sections: how many servers, where, how to choose among them, and their LLM arguments."""

    num_instances: Annotated[int, Field(ge=0)] = 1
    """Number of servers."""
    urls: list[HttpUrl] = Field(default_factory=list)
    """Their addresses (``host:port``), as many as there are instances; empty where servers register themselves."""
    router: RoutingPolicy = Field(default_factory=RoundRobinPolicy)
    """How one of them is chosen; ``type`` defaults to ``round_robin``."""
    llm_args: dict[str, Any] = Field(default_factory=dict)
    """Every other key of the section: the servers' LLM arguments, as written."""

    @model_validator(mode="before")
    @classmethod
    def gather_llm_args(cls, data: Any) -> Any:
        """Split a section as written into its own keys and LLM arguments; the router inherits some of the latter."""
        if data is None:
            return {}
        if not isinstance(data, dict) or "llm_args" in data:
            return data
        own = {key: data[key] for key in _SECTION_KEYS if data.get(key) is not None}
        args = {key: value for key, value in data.items() if key not in _SECTION_KEYS}
        own["router"] = _policy(own.get("router"), args)
        return own | {"llm_args": args}

    @model_validator(mode="after")
    def match_urls_to_instances(self) -> Self:
        """There are as many addresses as instances, or none."""
        if self.urls and len(self.urls) != self.num_instances:
            raise ValueError(
                f"Number of urls ({len(self.urls)}) should be equal to the number of instances ({self.num_instances})"
            )
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("the same address is listed twice")
        return self


class ConditionalDisaggConfig(StrictModel):
    """When a generation server may prefill by itself."""

    max_local_prefill_length: Annotated[int, Field(ge=0)] = 0
    """Uncached prompt tokens up to which it does."""


class OtlpConfig(StrictModel):
    """OpenTelemetry export."""

    otlp_traces_endpoint: str | None = None
    """Where traces are sent."""


class MinimalInstances(StrictModel):
    """Servers that must be there before the cluster is ready."""

    context_servers: Annotated[int, Field(ge=0)] = 1
    """Context servers."""
    generation_servers: Annotated[int, Field(ge=0)] = 1
    """Generation servers."""


class DisaggClusterConfig(StrictModel):
    """Servers that register themselves instead of being listed."""

    cluster_uri: str
    """Address of the cluster storage, ``http(s)://`` or ``etcd://``."""
    cluster_name: str = ""
    """Namespace in that storage."""
    minimal_instances: MinimalInstances = Field(default_factory=MinimalInstances)
    """Servers that must be there before the cluster is ready."""
    heartbeat_interval_sec: int = 5
    """Seconds between two heartbeats of a server."""
    inactive_timeout_sec: Annotated[int, Field(gt=0)] = 10
    """Seconds without a heartbeat after which a server is inactive."""

    @field_validator("cluster_uri")
    @classmethod
    def check_scheme(cls, uri: str) -> str:
        """Only the two kinds of storage that exist."""
        if not uri.startswith(("http://", "https://", "etcd://")):
            raise ValueError(f"cluster_uri {uri!r} must start with http://, https:// or etcd://")
        return uri


class DisaggConfig(StrictModel):
    """The disaggregated file; top-level keys that are not its own are inherited by both sections."""

    hostname: str = "localhost"
    """Address of the router."""
    port: Port = 8000
    """Port of the router."""
    max_retries: Annotated[int, Field(ge=0)] = 1
    """Further servers tried when one cannot be reached."""
    perf_metrics_max_requests: Annotated[int, Field(ge=0)] = 0
    """Finished requests whose timings are kept."""
    return_perf_metrics: bool = False
    """Ask servers for timings."""
    perf_metrics_output_dir: str | None = None
    """Directory to which timings are written; implies ``return_perf_metrics`` on the servers."""
    context_servers: DisaggServers = Field(default_factory=DisaggServers)
    """The servers that prefill."""
    generation_servers: DisaggServers = Field(default_factory=DisaggServers)
    """The servers that decode."""
    conditional_disagg_config: ConditionalDisaggConfig | None = None
    """When a generation server may prefill by itself."""
    otlp_config: OtlpConfig | None = None
    """OpenTelemetry export."""
    disagg_cluster: DisaggClusterConfig | None = None
    """Servers that register themselves."""
    node_id: Annotated[int, Field(ge=0, le=255)] | None = None
    """Part of transfer ids that tells routers apart."""
    schedule_style: ScheduleStyle = "context_first"
    """Whether the generation leg starts after the context leg or together with it."""
    allow_request_chat_template: StrictBool = False
    """Whether a request may bring its own chat template."""
    gen_strip_message_history: bool = False
    """Leave the history out of the request to the generation server."""
    gen_tokids_ctxbytes: bool = False
    """Relay prompt token ids as bytes."""
    num_workers: Annotated[int, Field(gt=0)] = 1
    """Router processes."""
    disagg_coordinator_url: str | None = None
    """Coordinator of several router processes."""

    @model_validator(mode="before")
    @classmethod
    def inherit_top_level(cls, data: Any) -> Any:
        """Hand keys that are not this file's own down to both sections, which must not contradict them."""
        if not isinstance(data, dict):
            return data
        own = {key: value for key, value in data.items() if key in cls.model_fields and value is not None}
        inherited = {key: value for key, value in data.items() if key not in cls.model_fields}
        forced = bool(own.get("return_perf_metrics")) or own.get("perf_metrics_output_dir") is not None
        for name in _SECTIONS:
            section = own.get(name, {})
            if isinstance(section, dict):
                section = _inherit(name, section, inherited)
                own[name] = section | {"return_perf_metrics": True} if forced else section
        return own

    @model_validator(mode="after")
    def require_matches_for_local_prefill(self) -> Self:
        """Serving a prompt by a generation server alone needs to know what that server holds."""
        if self.conditional_disagg_config is not None and not isinstance(
            self.generation_servers.router, KvCacheAwarePolicy
        ):
            raise ValueError("conditional_disagg_config requires generation_servers.router.type kv_cache_aware")
        return self

    def servers(self, role: Literal["context", "generation"]) -> DisaggServers:
        """The section of a role."""
        return self.context_servers if role == "context" else self.generation_servers


def _inherit(name: str, section: dict[str, Any], inherited: dict[str, Any]) -> dict[str, Any]:
    for key, value in inherited.items():
        if key in section and section[key] != value:
            raise ValueError(
                f"Parameter {key} is specified both in the top-level and in the {name} section, "
                "but with different values"
            )
    return inherited | section


def _policy(written: Any, llm_args: dict[str, Any]) -> Any:
    """A ``router:`` entry (arguments beside ``type`` or under ``args``) plus what it inherits from its section."""
    if written is not None and not isinstance(written, dict):
        return written
    policy = dict(written or {})
    nested = policy.pop("args", None)
    if isinstance(nested, dict):
        policy |= nested
    policy.setdefault("type", "round_robin")
    for key in _INHERITED_BY_ROUTER:
        if llm_args.get(key) is not None:
            policy[key] = llm_args[key]
    cache = llm_args.get("kv_cache_config")
    if policy["type"] in ("kv_cache_aware", "conversation") and isinstance(cache, dict) and "tokens_per_block" in cache:
        policy.setdefault("tokens_per_block", cache["tokens_per_block"])
    return policy
