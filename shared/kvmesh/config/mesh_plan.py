"""From the settings of a mesh to those of each of its processes: ports, addresses and what they share."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from kvmesh.config.base import StrictModel
from kvmesh.config.coordinator import CoordinatorSettings
from kvmesh.config.endpoints import tcp_port, with_tcp_port
from kvmesh.config.indexer import IndexerSettings
from kvmesh.config.kv_cache import KvCacheConfig
from kvmesh.config.kv_events import KVEventsConfig
from kvmesh.config.mesh import MeshSettings
from kvmesh.config.router import RouterSettings
from kvmesh.config.worker import WorkerRole, WorkerSettings

__all__ = ["MeshPlan", "plan_mesh"]

M = TypeVar("M", bound=StrictModel)

_SHARED = (
    "host", "model", "log_level", "log_format", "otlp_endpoint", "drain_s", "request_timeout_s", "tls", "curve",
)  # fmt: skip
"""What a process takes from the mesh unless its own section says otherwise."""

_WILDCARD_HOSTS = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, never bound


class MeshPlan(NamedTuple):
    """The settings of every process of one mesh."""

    coordinator: CoordinatorSettings
    indexer: IndexerSettings
    router: RouterSettings
    workers: tuple[WorkerSettings, ...]
    """Context servers, then generation servers, then unrestricted ones."""


class _Seat(NamedTuple):
    """The place of one worker in the mesh."""

    role: WorkerRole
    name: str
    template: WorkerSettings
    port: int


def plan_mesh(mesh: MeshSettings, *, cluster_secret: str, cpu_count: int) -> MeshPlan:
    """Settle what each process of a mesh is told; whatever a section states is kept.

    Events are on, every worker publishing at its own ports of 127.0.0.1: they carry prompt tokens.

    Args:
        mesh: the settings.
        cluster_secret: signs transfer tickets.
        cpu_count: cores of the machine, shared evenly among the ranks of all workers.
    """
    coordinator = _filled(_with_shared(mesh, mesh.coordinator), lease_s=mesh.lease_s)
    coordinator_url = _url(coordinator)
    # A coordinator that asks for keys asks every member.
    common = {"coordinator_url": coordinator_url}
    if coordinator.api_keys_file is not None:
        common["api_keys_file"] = coordinator.api_keys_file
    indexer = _filled(_with_shared(mesh, mesh.indexer), **common)
    router = _filled(
        # Clients are no services of the mesh: only the router's own section asks them for certificates.
        _filled(mesh.router, tls=mesh.tls.model_copy(update={"client_auth": "none"})),
        **_shared(mesh, RouterSettings),
        api_keys_file=mesh.api_keys_file or coordinator.api_keys_file,
        coordinator_url=coordinator_url,
        indexer_url=_url(indexer),
        indexer_match_endpoint=indexer.match_endpoint,
    )
    seats = _seats(mesh)
    told = {**common, "cluster_secret": cluster_secret}
    before = [0, *accumulate(seat.template.dp_size for seat in seats)]  # engines of the workers before each one
    ranks = [seat.template.world_size for seat in seats]
    workers = tuple(
        _worker(mesh, seat, before[index], {**told, "num_threads": max(1, cpu_count * ranks[index] // sum(ranks))})
        for index, seat in enumerate(seats)
    )
    return MeshPlan(coordinator, indexer, router, workers)


def _seats(mesh: MeshSettings) -> list[_Seat]:
    kinds: list[tuple[WorkerRole, str, WorkerSettings, int, int]] = [
        ("context", "context", mesh.context, mesh.context_port, mesh.num_context),
        ("generation", "generation", mesh.generation, mesh.generation_port, mesh.num_generation),
        ("both", "aggregated", mesh.aggregated, mesh.aggregated_port, mesh.num_aggregated),
    ]
    return [
        _Seat(role, f"{name}-{index}", template, first_port + index)
        for role, name, template, first_port, count in kinds
        for index in range(count)
    ]


def _worker(mesh: MeshSettings, seat: _Seat, first_rank: int, told: dict[str, Any]) -> WorkerSettings:
    template = _filled(_with_shared(mesh, seat.template), **told)
    return template.model_copy(
        update={
            "role": seat.role,
            "instance_id": seat.name,
            "port": seat.port,
            "kv_cache_config": _with_events(mesh, template, first_rank),
            "cache_transceiver_config": _filled(template.cache_transceiver_config, backend="DEFAULT"),
            "events": _filled(template.events, topic_style="kv"),
        }
    )


def _with_events(mesh: MeshSettings, template: WorkerSettings, first_rank: int) -> KvCacheConfig:
    """The cache of a worker, publishing at ports that no other worker has.

    Endpoints that a section leaves out are those of the mesh. A worker's attention data-parallel ranks count up from
    its ports, so a worker begins behind all ``first_rank`` engines of the workers before it. Pipeline stages publish
    none; where a section asks for them all the same, the server refuses to start.
    """
    cache = template.kv_cache_config
    events = cache.kv_events_config
    if events is None:
        if "kv_events_config" in cache.model_fields_set or template.pipeline_parallel_size > 1:
            return cache  # a stated null means no events
        events = KVEventsConfig(enable_kv_cache_events=True)
    if events.enable_kv_cache_events:
        events = _filled(
            events,
            endpoint=f"tcp://127.0.0.1:{mesh.events_port}",
            replay_endpoint=f"tcp://127.0.0.1:{mesh.replay_port}",
        )
    ports = {
        "endpoint": _shifted(events.endpoint, first_rank),
        "replay_endpoint": _shifted(events.replay_endpoint, first_rank),
    }
    return cache.model_copy(update={"kv_events_config": events.model_copy(update=ports)})


def _shifted(endpoint: str | None, places: int) -> str | None:
    port = tcp_port(endpoint) if endpoint is not None else None
    return endpoint if endpoint is None or port is None else with_tcp_port(endpoint, port + places)


def _with_shared(mesh: MeshSettings, section: M) -> M:
    return _filled(section, **_shared(mesh, type(section)))


def _shared(mesh: MeshSettings, section: type[StrictModel]) -> dict[str, Any]:
    return {name: getattr(mesh, name) for name in _SHARED if name in section.model_fields}


def _filled(section: M, **values: Any) -> M:
    """The section with these values where it states none."""
    return section.model_copy(update={key: v for key, v in values.items() if key not in section.model_fields_set})


def _url(service: CoordinatorSettings | IndexerSettings) -> str:
    """Where the other processes of this machine reach a service."""
    host = "127.0.0.1" if service.host in _WILDCARD_HOSTS else service.host
    return f"{service.tls.scheme}://{f'[{host}]' if ':' in host else host}:{service.port}"
