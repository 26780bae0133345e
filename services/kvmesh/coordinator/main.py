"""The coordinator's process."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from kvmesh.config import CoordinatorSettings
from kvmesh.coordinator.app import CoordinatorService
from kvmesh.coordinator.discovery import make_sources
from kvmesh.coordinator.etcd import EtcdClient, EtcdUser
from kvmesh.coordinator.ledger import TransferLedger
from kvmesh.coordinator.registry import MemberRegistry
from kvmesh.coordinator.storage import MemoryStore
from kvmesh.net.auth import ApiKeys
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.service import run_service
from kvmesh.net.tls import Tls, TlsError
from kvmesh.telemetry import configure_logging

__all__ = ["build", "run"]


def build(settings: CoordinatorSettings, clock: Clock | None = None) -> CoordinatorService:
    """A coordinator that has not started: its memory is empty.

    Raises:
        ConfigError: certificates, API keys or etcd's password cannot be used, or a source of servers cannot work here.
    """
    clock = clock or SystemClock()
    tls = Tls(settings.tls)
    registry = MemberRegistry(
        clock, lease_s=settings.lease_s, incarnation=secrets.token_hex(8), history=settings.history_max
    )
    ledger = TransferLedger(clock, max_transfers=settings.ledger_max)
    return CoordinatorService(
        clock,
        registry,
        ledger,
        MemoryStore(clock),
        drain_s=settings.drain_s,
        etcd=_etcd_client(settings),
        cluster=settings.cluster_name,
        etcd_lease_s=settings.etcd_lease_s,
        advertise_url=settings.advertise_url,
        tls=tls,
        keys=ApiKeys(settings.api_keys_file),
        sources=make_sources(settings.discovery, scheme=settings.tls.scheme, clock=clock),
    )


def _etcd_client(settings: CoordinatorSettings) -> EtcdClient | None:
    if not settings.etcd_endpoints:
        return None
    user = None
    if settings.etcd_user is not None and settings.etcd_password_file is not None:
        user = EtcdUser(settings.etcd_user, Path(settings.etcd_password_file))
        user.password()  # a file that cannot be read is told at the start
    return EtcdClient(settings.etcd_endpoints, tls=_for_etcd(settings), user=user)


def _for_etcd(settings: CoordinatorSettings) -> Tls:
    """The client's TLS towards etcd, which is no service of the mesh: its certificate bears its own name."""
    if settings.etcd_tls.stated:
        try:
            return Tls(settings.etcd_tls.as_client(), serves=False)
        except TlsError as error:
            raise TlsError(str(error).replace("tls.", "etcd_tls.", 1)) from error
    return Tls(settings.tls.model_copy(update={"server_name": None}))


def run(settings: CoordinatorSettings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; ``on_ready`` is called with the base URL once requests are taken."""
    configure_logging("coordinator", settings.log_level, settings.log_format)
    run_service(build(settings), settings.host, settings.port, on_ready=on_ready)
