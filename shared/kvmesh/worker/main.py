"""A worker process: checks its settings, then serves."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.config import WorkerSettings
from kvmesh.config.startup import refuse_unsupported
from kvmesh.net.service import run_service
from kvmesh.telemetry import configure_logging
from kvmesh.worker.server import WorkerService

__all__ = ["run_worker"]


def run_worker(settings: WorkerSettings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: the worker's settings.
        on_ready: called with the base URL once requests are answered.

    Raises:
        ConfigError: a setting asks for what this version or this machine cannot do.
    """
    configure_logging("worker" if settings.role == "both" else settings.role, settings.log_level, settings.log_format)
    refuse_unsupported(settings)
    run_service(WorkerService(settings), settings.host, settings.port, on_ready=on_ready)
