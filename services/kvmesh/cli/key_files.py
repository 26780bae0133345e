"""Whether the files of keys that a mesh's settings name can be used, before anything starts."""

from __future__ import annotations

from kvmesh.config import CoordinatorSettings, IndexerSettings, RouterSettings, WorkerSettings
from kvmesh.config.mesh_plan import MeshPlan
from kvmesh.events.keyed import KeyRing
from kvmesh.net.auth import ApiKeys
from kvmesh.net.curve import CurveSecurity

__all__ = ["check_key_files"]


def check_key_files(plan: MeshPlan) -> None:
    """Read every file of API, CURVE and event keys once, as the services will.

    Raises:
        ConfigError: one cannot be used; the message names its setting and says what to do.
    """
    services: tuple[CoordinatorSettings | IndexerSettings | RouterSettings | WorkerSettings, ...]
    services = (plan.coordinator, plan.indexer, plan.router, *plan.workers)
    for settings in services:
        ApiKeys(settings.api_keys_file)
        if not isinstance(settings, CoordinatorSettings):
            CurveSecurity.load(settings.curve)
    KeyRing.load(plan.indexer.event_key_file, "event_key_file")
    KeyRing.load(plan.router.index.event_key_file, "index.event_key_file")
    for worker in plan.workers:
        KeyRing.load(worker.events.key_file, "events.key_file")
