"""Two coordinators at one etcd that both look for servers: the death of the one that leads loses nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from etcd_server import EtcdServer, etcd_binary, why_no_etcd
from fake_worker import FakeWorker
from waiting import until

from kvmesh.cli.certificates import make_certificate
from kvmesh.config import CoordinatorSettings
from kvmesh.coordinator.app import CoordinatorService
from kvmesh.coordinator.main import build
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.service import serving
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.protocol.transfer import LedgerEvent

pytestmark = pytest.mark.skipif(etcd_binary() is None, reason=why_no_etcd())

LEASE_S = 2.0
OPEN = LedgerEvent(transfer_id=3, side="context", instance_id="found-0", epoch=5, state="registered", unix_ms=1)


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    server = EtcdServer()
    try:
        yield server.start()
    finally:
        server.stop()


@asynccontextmanager
async def coordinator(etcd: EtcdServer, urls: list[str]) -> AsyncIterator[tuple[str, CoordinatorService]]:
    settings = CoordinatorSettings.model_validate(
        {
            "lease_s": LEASE_S,
            "drain_s": 0.1,
            "etcd_endpoints": etcd.url,
            "etcd_lease_s": 1.0,
            "discovery": [{"type": "static", "urls": urls}],
        }
    )
    service = build(settings)
    async with serving(service) as url:
        yield url, service


async def crash(service: CoordinatorService) -> None:
    """End as by ``kill -9``: nothing more is written, nobody is asked any more, and the lead is not given up."""
    assert service._succession is not None
    service._succession._lease = 0
    assert service._succession._scope is not None
    service._succession._scope.cancel()
    await service._succession._ended.wait()
    assert service._finder is not None
    service._finder._admits = service._finder._buries = lambda: False


async def test_the_death_of_the_leader_loses_nobody(etcd: EtcdServer) -> None:
    """Found and registered members keep their lives, open transfers stay open, and who is gone is noticed after all."""
    heard: list[MemberEvent] = []
    found, mortal = FakeWorker("found-0", epoch=5), FakeWorker("found-1", epoch=7)
    async with serving(found) as found_url, anyio.create_task_group() as tasks:
        async with serving(mortal) as mortal_url:
            urls = [found_url, mortal_url]
            async with coordinator(etcd, urls) as (first_url, first), coordinator(etcd, urls) as (second_url, second):
                watcher = CoordinatorClient(f"{first_url},{second_url}")
                watcher.subscribe(heard.append)
                await watcher.start(tasks)
                own = CoordinatorClient(f"{first_url},{second_url}", watch=False)
                await own.start(tasks)
                own.announce(Member(instance_id="own-0", role="generation", url="http://127.0.0.1:1", epoch=9))
                own.report(
                    [
                        LedgerEvent(
                            transfer_id=3, side="context", instance_id="found-0", epoch=5, state="registered", unix_ms=1
                        )
                    ]
                )
                await until(lambda: {one.instance_id for one in watcher.members()} == {"found-0", "found-1", "own-0"})
                lead, follow = (first, second) if first._is_active() else (second, first)
                assert not follow._is_active()
                await until(lambda: lead._ledger.open_transfer(3) is not None)
                assert follow._finder is not None
                assert follow._finder.statistics()["asked_total"] == 0, "who follows asks nobody"
                await crash(lead)
                await until(follow._is_active)
                # Longer than a lease: whoever is a member now has been heard by the new leader itself.
                await anyio.sleep(1.5 * LEASE_S)
                assert [event for event in heard if event.kind in ("dead", "left")] == []
                assert {one.instance_id: (one.epoch, one.source) for one in follow._registry.members().members} == {
                    "found-0": (5, "static"),
                    "found-1": (7, "static"),
                    "own-0": (9, ""),
                }
                assert follow._ledger.open_transfer(3) is not None
                mortal.info["protocol"] = 0
                await until(lambda: ("dead", "found-1") in [(event.kind, event.member.instance_id) for event in heard])
                await own.stop()
                await watcher.stop()
        tasks.cancel_scope.cancel()


async def test_etcd_that_speaks_tls_and_asks_for_a_certificate(tmp_path: Path) -> None:
    """Its certificate bears its own name: ``server_name`` is for services of the mesh."""
    files = make_certificate(tmp_path)
    server = EtcdServer(files)
    tls = {"cert_file": files.certificate, "key_file": files.key, "ca_file": files.ca}
    try:
        server.start()
        settings = {
            "drain_s": 0.1,
            "etcd_endpoints": server.url,
            "tls": {**{name: str(file) for name, file in tls.items()}, "server_name": "only.in.the.mesh"},
        }
        service = build(CoordinatorSettings.model_validate(settings))
        async with serving(service) as url:
            assert url.startswith("https://")
            await until(lambda: service.statistics()["etcd_connected"] == 1 and service.statistics()["leading"] == 1)
        settings["tls"] = {"ca_file": str(files.ca)}
        bare = build(CoordinatorSettings.model_validate(settings))
        async with serving(bare):
            await until(lambda: "etcd" in bare.health().detail)
            assert bare.statistics()["etcd_connected"] == 0
    finally:
        server.stop()
