"""A worker process: checks its settings, then serves."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.config import WorkerSettings
from kvmesh.engine.client import EngineRefusedError, EngineStartError
from kvmesh.net.groups import leaves
from kvmesh.net.service import run_service
from kvmesh.telemetry import configure_logging, get_logger
from kvmesh.worker.preflight import check_settings
from kvmesh.worker.server import WorkerFailedError, WorkerService

__all__ = ["run_worker"]

FAILED = 1
REFUSED = 2
"""Exit status for what only other settings, or more memory, can mend; the command line's for mistakes."""

_log = get_logger("worker")


def run_worker(settings: WorkerSettings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: the worker's settings.
        on_ready: called with the base URL once requests are answered.

    Raises:
        ConfigError: a setting asks for what this version or this machine cannot do.
        SystemExit: status 2, the engine refused to start as it is set up; status 1, it did not start for another
            reason or the worker could not go on.
    """
    configure_logging("worker" if settings.role == "both" else settings.role, settings.log_level, settings.log_format)
    check_settings(settings)
    status = 0
    try:
        run_service(WorkerService(settings), settings.host, settings.port, on_ready=on_ready)
    except* EngineStartError as group:
        errors = leaves(group)
        for error in errors:
            _log.error("the engine did not start", reason=str(error))
        # Supervisors do not try again what the engine itself has refused.
        status = REFUSED if any(isinstance(error, EngineRefusedError) for error in errors) else FAILED
    except* WorkerFailedError:
        status = status or FAILED  # said in the log already
    if status:
        raise SystemExit(status)
