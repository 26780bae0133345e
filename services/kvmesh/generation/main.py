"""Entry of the generation server: pulls KV pages and decodes."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.config import WorkerSettings
from kvmesh.worker.main import run_worker

__all__ = ["run"]


def run(settings: WorkerSettings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM.

    Args:
        settings: of the server.
        on_ready: called with the base URL once requests are answered.

    Raises:
        ValueError: the settings are for another role.
    """
    if settings.role == "context":
        raise ValueError("a generation server cannot have the role 'context'; use 'kvmesh context'")
    run_worker(settings, on_ready=on_ready)
