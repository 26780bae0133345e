"""``MeshSettings``: what ``kvmesh up`` starts on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from kvmesh.config.coordinator import CoordinatorSettings
from kvmesh.config.curve import CurveSettings
from kvmesh.config.describe import WORKER_SECTIONS
from kvmesh.config.endpoints import Port
from kvmesh.config.indexer import IndexerSettings
from kvmesh.config.router import RouterSettings
from kvmesh.config.service import DEFAULT_MODEL, Seconds, TracedSettings
from kvmesh.config.sources import merged
from kvmesh.config.worker import WorkerSettings

__all__ = ["MeshSettings", "spread_over_workers"]

_GIVEN_BY_THE_MESH = frozenset({"role", "port", "instance_id", "coordinator_url"})


class MeshSettings(TracedSettings):
    """A whole mesh on one machine: how many of what, and a template for each kind of process.

    ``model``, ``host``, ``request_timeout_s``, ``drain_s``, ``tls``, ``curve``, logging and tracing given here apply to
    every process whose own section leaves them unset; ``kvmesh.config.mesh_plan`` settles the rest.
    ``tls.client_auth`` is for services among themselves: the router asks its clients for certificates only where its
    own section says so.
    """

    model: str = DEFAULT_MODEL
    """Model of all servers."""
    lease_s: Seconds = 10.0
    """Seconds after which a silent process counts as dead."""
    request_timeout_s: Seconds = 180.0
    """Deadline of one request in seconds."""
    curve: CurveSettings = Field(default_factory=CurveSettings)
    """Encryption of the ZeroMQ sockets of all processes."""
    num_context: Annotated[int, Field(ge=0)] = 1
    """Context servers."""
    num_generation: Annotated[int, Field(ge=0)] = 1
    """Generation servers."""
    num_aggregated: Annotated[int, Field(ge=0)] = 0
    """Servers with no role restriction, which serve whole requests alone."""
    context_port: Port = 8101
    """HTTP port of the first context server; the others follow. Only where set, else ``up`` takes free ones."""
    generation_port: Port = 8201
    """HTTP port of the first generation server; the others follow. Only where set, else ``up`` takes free ones."""
    aggregated_port: Port = 8501
    """HTTP port of the first unrestricted server; the others follow. Only where set, else ``up`` takes free ones."""
    events_port: Port = 5557
    """KV event port of the first worker; the others follow."""
    replay_port: Port = 5657
    """KV event replay port of the first worker; the others follow."""
    ready_timeout_s: Seconds = 300.0
    """Longest wait in seconds until every process is ready, a model download included."""
    restart_backoff_s: Seconds = 0.5
    """Seconds before a dead process is started again; doubled each time it dies early."""
    restart_backoff_max_s: Seconds = 15.0
    """Upper bound of that wait in seconds."""
    router: RouterSettings = Field(default_factory=RouterSettings)
    """The router."""
    indexer: IndexerSettings = Field(default_factory=IndexerSettings)
    """The KV event indexer."""
    coordinator: CoordinatorSettings = Field(default_factory=CoordinatorSettings)
    """The coordinator."""
    context: WorkerSettings = Field(default_factory=WorkerSettings)
    """Template of the context servers; its role and port are given by the mesh."""
    generation: WorkerSettings = Field(default_factory=WorkerSettings)
    """Template of the generation servers; its role and port are given by the mesh."""
    aggregated: WorkerSettings = Field(default_factory=WorkerSettings)
    """Template of the unrestricted servers; its role and port are given by the mesh."""

    @model_validator(mode="after")
    def require_both_halves(self) -> Self:
        """A mesh answers only with a whole server, or with one of each half."""
        if self.num_aggregated == 0 and (self.num_context == 0 or self.num_generation == 0):
            raise ValueError("a mesh needs num_context and num_generation of at least 1, or num_aggregated")
        return self


def spread_over_workers(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer of a mesh's settings in which keys that only a worker knows go to the workers of every role.

    What a section of the same layer states for itself wins.
    """
    known = WorkerSettings.model_fields.keys() - MeshSettings.model_fields.keys() - _GIVEN_BY_THE_MESH
    shared = {key: value for key, value in layer.items() if key in known}
    own = {key: value for key, value in layer.items() if key not in known}
    if not shared:
        return own
    return own | {section: merged(shared, own.get(section) or {}) for section in WORKER_SECTIONS}
