"""What ``kvmesh up`` starts: free ports and a fair cache for what :mod:`kvmesh.config.mesh_plan` has settled.

A port that the user named is used or refused; a default one moves aside when it is taken. Workers' HTTP ports are the
system's choice unless named, since everyone learns them from the coordinator.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from kvmesh.cli.errors import UserError
from kvmesh.cli.ports import PortPicker
from kvmesh.config import CoordinatorSettings, IndexerSettings, MeshSettings, RouterSettings, WorkerSettings
from kvmesh.config.endpoints import tcp_port, with_tcp_port
from kvmesh.config.mesh_plan import plan_mesh as plan_settings
from kvmesh.config.service import ServiceSettings

__all__ = [
    "ChildPlan",
    "Machine",
    "MeshPlan",
    "event_ports",
    "event_ports_are_free",
    "plan_mesh",
    "with_free_event_ports",
]

CACHE_SHARE = 0.25
"""Part of the free memory that all KV caches together may take on a machine that people also work on."""

LEAST_CACHE_BYTES = 128 << 20
MOST_CACHE_BYTES = 1 << 30

LOOPBACK = "127.0.0.1"
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared with, never bound

_COMMANDS = {"context": "context", "generation": "generation", "both": "worker"}
_PORT_FIELDS = {"context": "context_port", "generation": "generation_port", "both": "aggregated_port"}

_EVENT_PORTS = {"endpoint": "events_port", "replay_endpoint": "replay_port"}
"""Setting of the mesh by field of a worker's event configuration."""

S = TypeVar("S", CoordinatorSettings, IndexerSettings, RouterSettings)


class Machine(NamedTuple):
    """What there is to divide."""

    cores: int
    free_memory_bytes: int


class ChildPlan(NamedTuple):
    """One process."""

    name: str
    command: str
    settings: ServiceSettings
    stop_rank: int
    """Lower ranks stop first: the router, so that nothing new arrives, then workers, then what they report to."""


class MeshPlan(NamedTuple):
    """All processes, in the order in which they start, and where they meet."""

    children: tuple[ChildPlan, ...]
    url: str
    coordinator_url: str
    indexer_url: str
    worker_names: tuple[str, ...]


def plan_mesh(mesh: MeshSettings, machine: Machine, ports: PortPicker, cluster_secret: str) -> MeshPlan:
    """Settle every process of ``mesh``.

    Args:
        mesh: the settings.
        machine: its cores and memory are shared among the workers.
        ports: gives out free ports.
        cluster_secret: signs transfer tickets.

    Raises:
        UserError: a port that the user named is taken.
    """
    settled = plan_settings(_with_free_ports(mesh, ports), cluster_secret=cluster_secret, cpu_count=machine.cores)
    cache_bytes = int(machine.free_memory_bytes * CACHE_SHARE) // len(settled.workers)
    cache_bytes = max(LEAST_CACHE_BYTES, min(cache_bytes, MOST_CACHE_BYTES))
    workers = [_worker(mesh, worker, ports, cache_bytes) for worker in settled.workers]
    children = (
        ChildPlan("coordinator", "coordinator", settled.coordinator, 3),
        ChildPlan("indexer", "indexer", settled.indexer, 2),
        *workers,
        ChildPlan("router", "router", settled.router, 0),
    )
    return MeshPlan(
        children=tuple(child._replace(settings=_as_json_logs(child.settings)) for child in children),
        url=_url(settled.router),
        coordinator_url=_url(settled.coordinator),
        indexer_url=_url(settled.indexer),
        worker_names=tuple(worker.name for worker in workers),
    )


def event_ports(child: ChildPlan) -> dict[str, int]:
    """First port of each event endpoint of a worker, by field; without those that are no TCP ports."""
    worker = child.settings
    if not isinstance(worker, WorkerSettings) or (events := worker.kv_cache_config.kv_events_config) is None:
        return {}
    endpoints: dict[str, str | None] = {field: getattr(events, field) for field in _EVENT_PORTS}
    ports = {field: tcp_port(endpoint) for field, endpoint in endpoints.items() if endpoint is not None}
    return {field: port for field, port in ports.items() if port is not None}


def event_ports_are_free(child: ChildPlan, ports: PortPicker) -> bool:
    """Whether a worker that does not run could bind its event ports, those of all its ranks."""
    count = child.settings.dp_size if isinstance(child.settings, WorkerSettings) else 0
    return all(ports.are_free(LOOPBACK, first, count) for first in event_ports(child).values())


def with_free_event_ports(mesh: MeshSettings, child: ChildPlan, ports: PortPicker) -> ChildPlan:
    """A worker that does not run, with other event ports for those that somebody has taken since they were planned.

    Everyone learns a worker's ports from the coordinator; those of other services are written into all settings, and
    those that the user named stay. The same object when nothing changes.

    Raises:
        RuntimeError: no port is free.
    """
    worker = child.settings
    if not isinstance(worker, WorkerSettings) or (events := worker.kv_cache_config.kv_events_config) is None:
        return child
    own = _section(mesh, worker).kv_cache_config.kv_events_config
    stated = frozenset[str]() if own is None else own.model_fields_set
    moved: dict[str, str] = {}
    for field, port in event_ports(child).items():
        if field in stated or _EVENT_PORTS[field] in mesh.model_fields_set:
            continue
        if (other := ports.repick(LOOPBACK, port, worker.dp_size)) != port:
            moved[field] = with_tcp_port(getattr(events, field), other)
    if not moved:
        return child
    cache = worker.kv_cache_config.model_copy(update={"kv_events_config": events.model_copy(update=moved)})
    return child._replace(settings=worker.model_copy(update={"kv_cache_config": cache}))


def _section(mesh: MeshSettings, worker: WorkerSettings) -> WorkerSettings:
    return {"context": mesh.context, "generation": mesh.generation, "both": mesh.aggregated}[worker.role]


def _with_free_ports(mesh: MeshSettings, ports: PortPicker) -> MeshSettings:
    router = _placed(mesh, "router", mesh.router, ports, "--port")
    coordinator = _placed(mesh, "coordinator", mesh.coordinator, ports, "--set coordinator.port=PORT")
    indexer = _placed(mesh, "indexer", mesh.indexer, ports, "--set indexer.port=PORT")
    if "match_endpoint" not in indexer.model_fields_set:
        port = ports.pick(LOOPBACK, tcp_port(indexer.match_endpoint) or 0)
        indexer = indexer.model_copy(update={"match_endpoint": f"tcp://{LOOPBACK}:{port}"})
    sections: dict[str, Any] = {"router": router, "coordinator": coordinator, "indexer": indexer}
    engines = (
        mesh.num_context * mesh.context.dp_size
        + mesh.num_generation * mesh.generation.dp_size
        + mesh.num_aggregated * mesh.aggregated.dp_size
    )
    for field in ("events_port", "replay_port"):
        if field not in mesh.model_fields_set:
            sections[field] = ports.pick_run(LOOPBACK, engines, getattr(mesh, field))
    return mesh.model_copy(update=sections)


def _placed(mesh: MeshSettings, name: str, settings: S, ports: PortPicker, remedy: str) -> S:
    """A service at a port that is free."""
    host = settings.host if "host" in settings.model_fields_set else mesh.host
    # The router's port is what people type: it never moves silently.
    named = "port" in settings.model_fields_set or name == "router"
    if settings.port == 0 or not named:
        return settings.model_copy(update={"port": ports.pick(host, settings.port)})
    if not ports.claim(host, settings.port):
        raise UserError(f"port {settings.port} of the {name} is taken; choose another with {remedy}")
    return settings


def _worker(mesh: MeshSettings, settings: WorkerSettings, ports: PortPicker, cache_bytes: int) -> ChildPlan:
    name = settings.instance_id or settings.role
    field = _PORT_FIELDS[settings.role]
    port = settings.port if field in mesh.model_fields_set else 0
    if port and not ports.claim(settings.host, port):
        raise UserError(f"port {port} of {name} is taken; choose another with --set {field}=PORT")
    update: dict[str, Any] = {"port": port}
    if settings.device_memory_bytes is None:
        update["device_memory_bytes"] = max(cache_bytes, LEAST_CACHE_BYTES * settings.dp_size)
    return ChildPlan(name, _COMMANDS[settings.role], settings.model_copy(update=update), 1)


def _as_json_logs(settings: ServiceSettings) -> ServiceSettings:
    """The supervisor reads its children's logs."""
    return settings.model_copy(update={"log_format": "json"})


def _url(settings: CoordinatorSettings | IndexerSettings | RouterSettings) -> str:
    host = LOOPBACK if settings.host in _WILDCARDS else settings.host
    return f"{settings.tls.scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"
