"""Entry of the KV event indexer."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.config import IndexerSettings
from kvmesh.indexer.app import IndexerService
from kvmesh.net.service import run_service
from kvmesh.telemetry import configure_logging

__all__ = ["run"]


def run(settings: IndexerSettings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; ``on_ready`` is called with the base URL once requests are taken."""
    configure_logging("indexer", settings.log_level, settings.log_format)
    run_service(IndexerService(settings), settings.host, settings.port, on_ready=on_ready)
