"""The coordinator's process."""

from __future__ import annotations

import secrets

from kvmesh.config import CoordinatorSettings, NotSupportedYetError
from kvmesh.coordinator.app import CoordinatorService
from kvmesh.coordinator.ledger import TransferLedger
from kvmesh.coordinator.registry import MemberRegistry
from kvmesh.coordinator.storage import MemoryStore
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.service import run_service
from kvmesh.telemetry import configure_logging

__all__ = ["build", "run"]


def build(settings: CoordinatorSettings, clock: Clock | None = None) -> CoordinatorService:
    """A coordinator with an empty memory.

    Raises:
        NotSupportedYetError: the settings ask for API keys, which members could not present.
    """
    if settings.api_keys_file is not None:
        raise NotSupportedYetError(
            "not supported yet: api_keys_file of the coordinator; bind it to loopback or a trusted network"
        )
    clock = clock or SystemClock()
    registry = MemberRegistry(
        clock, lease_s=settings.lease_s, incarnation=secrets.token_hex(8), history=settings.history_max
    )
    ledger = TransferLedger(clock, max_transfers=settings.ledger_max)
    return CoordinatorService(clock, registry, ledger, MemoryStore(clock), drain_s=settings.drain_s)


def run(settings: CoordinatorSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    configure_logging("coordinator", settings.log_level, settings.log_format)
    run_service(build(settings), settings.host, settings.port)
