"""Entry of the KV event indexer."""

from __future__ import annotations

from kvmesh.config import IndexerSettings
from kvmesh.indexer.app import IndexerService
from kvmesh.net.service import run_service
from kvmesh.telemetry import configure_logging

__all__ = ["run"]


def run(settings: IndexerSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    configure_logging("indexer", settings.log_level, settings.log_format)
    run_service(IndexerService(settings), settings.host, settings.port)
