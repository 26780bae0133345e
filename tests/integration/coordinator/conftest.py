from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from kvmesh.coordinator.app import CoordinatorService
from kvmesh.coordinator.ledger import TransferLedger
from kvmesh.coordinator.registry import MemberRegistry
from kvmesh.coordinator.storage import MemoryStore
from kvmesh.net.clock import SystemClock
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.service import serving

LEASE_S = 0.6


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def coordinator() -> Callable[..., object]:
    """``async with coordinator("incarnation", port) as url``: a coordinator with an empty memory."""
    clock = SystemClock()

    @asynccontextmanager
    async def start(incarnation: str = "one", port: int = 0, lease_s: float = LEASE_S) -> AsyncIterator[str]:
        service = CoordinatorService(
            clock,
            MemberRegistry(clock, lease_s=lease_s, incarnation=incarnation),
            TransferLedger(clock),
            MemoryStore(clock),
        )
        async with serving(service, port=port) as url:
            yield url

    return start


@pytest.fixture
def client() -> Callable[..., object]:
    """``async with client(url) as client``: a running client that says goodbye at the end."""

    @asynccontextmanager
    async def start(url: str, **arguments: object) -> AsyncIterator[CoordinatorClient]:
        client = CoordinatorClient(url, **arguments)
        async with anyio.create_task_group() as tasks:
            await client.start(tasks)
            try:
                yield client
            finally:
                with anyio.CancelScope(shield=True):
                    await client.stop()

    return start
