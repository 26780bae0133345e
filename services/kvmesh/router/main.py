"""The router's process."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.config import RouterSettings
from kvmesh.config.startup import refuse_unsupported
from kvmesh.net.service import run_service
from kvmesh.router.app import RouterService
from kvmesh.telemetry import configure_logging

__all__ = ["run"]


def run(settings: RouterSettings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: of the router.
        on_ready: called with the base URL once requests are taken.

    Raises:
        ConfigError: a setting asks for what this version cannot do.
    """
    configure_logging("router", settings.log_level, settings.log_format)
    refuse_unsupported(settings)
    run_service(RouterService(settings), settings.host, settings.port, on_ready=on_ready)
