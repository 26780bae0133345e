"""Entry of the context server: prefills prompts and hands their KV pages on."""

from __future__ import annotations

from kvmesh.config import WorkerSettings
from kvmesh.worker.main import run_worker

__all__ = ["run"]


def run(settings: WorkerSettings) -> None:
    """Serve until SIGTERM.

    Raises:
        ValueError: the settings are for another role.
    """
    if settings.role == "generation":
        raise ValueError("a context server cannot have the role 'generation'; use 'kvmesh generation'")
    run_worker(settings)
