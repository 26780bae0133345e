"""Entry of the context server: prefills prompts and hands their KV pages on."""

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
    if settings.role == "generation":
        raise ValueError("a context server cannot have the role 'generation'; use 'kvmesh generation'")
    run_worker(settings, on_ready=on_ready)
