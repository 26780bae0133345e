"""Entry of the generation server: pulls KV pages and decodes."""

from __future__ import annotations

from kvmesh.config import WorkerSettings
from kvmesh.worker.main import run_worker

__all__ = ["run"]


def run(settings: WorkerSettings) -> None:
    """Serve until SIGTERM.

    Raises:
        ValueError: the settings are for another role.
    """
    if settings.role == "context":
        raise ValueError("a generation server cannot have the role 'context'; use 'kvmesh context'")
    run_worker(settings)
