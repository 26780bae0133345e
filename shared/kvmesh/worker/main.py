"""A worker process: checks its settings, then serves."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.config import WorkerSettings
from kvmesh.engine.client import EngineStartError
from kvmesh.net.groups import leaves
from kvmesh.net.service import run_service
from kvmesh.telemetry import configure_logging, get_logger
from kvmesh.worker.preflight import check_settings
from kvmesh.worker.server import WorkerFailedError, WorkerService

__all__ = ["run_worker"]

_log = get_logger("worker")


def run_worker(settings: WorkerSettings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: the worker's settings.
        on_ready: called with the base URL once requests are answered.

    Raises:
        ConfigError: a setting asks for what this version or this machine cannot do.
        SystemExit: status 1, the engine did not start or the worker could not go on.
    """
    configure_logging("worker" if settings.role == "both" else settings.role, settings.log_level, settings.log_format)
    check_settings(settings)
    failed = False
    try:
        run_service(WorkerService(settings), settings.host, settings.port, on_ready=on_ready)
    except* EngineStartError as group:
        failed = True
        for error in leaves(group):
            _log.error("the engine did not start", reason=str(error))
    except* WorkerFailedError:
        failed = True  # said in the log already
    if failed:
        raise SystemExit(1)
