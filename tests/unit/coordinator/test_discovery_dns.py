"""The DNS source over a fake resolver and a clock that is moved by hand."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import anyio
import pytest
from waiting import until

from kvmesh.coordinator.discovery.dns import DnsSource, resolve
from kvmesh.coordinator.discovery.source import Expected
from kvmesh.net.clock import ManualClock


class FakeResolver:
    """Answers what it is set to."""

    def __init__(self) -> None:
        self.answer: list[str] | OSError = []
        self.asked: list[str] = []

    async def __call__(self, name: str) -> list[str]:
        self.asked.append(name)
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


async def test_every_address_is_reported_and_a_failure_changes_nothing() -> None:
    clock, resolver = ManualClock(), FakeResolver()
    source = DnsSource("context", 8100, "http", Expected(), clock=clock, interval_s=2.0, lookup=resolver)
    reports: list[Mapping[str, bool]] = []

    async def next_round() -> None:
        await until(lambda: clock.sleepers == 1)
        clock.advance(2.0)
        await until(lambda: clock.sleepers == 1)

    async with anyio.create_task_group() as tasks:
        resolver.answer = ["10.0.0.2", "10.0.0.1", "fd00::7"]
        tasks.start_soon(source.run, reports.append)
        await until(lambda: reports)
        assert reports == [{"http://10.0.0.1:8100": True, "http://10.0.0.2:8100": True, "http://[fd00::7]:8100": True}]
        resolver.answer = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        await next_round()
        await next_round()
        assert len(reports) == 1, "nobody knows is not nobody is there"
        assert source.statistics() == {"errors_total": 2}
        resolver.answer = ["10.0.0.1"]
        await next_round()
        assert reports[-1] == {"http://10.0.0.1:8100": True}
        tasks.cancel_scope.cancel()
    assert set(resolver.asked) == {"context"}


async def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.coordinator.discovery.dns.LOOK_UP_TIMEOUT_S", 0.05)

    async def hang(_name: str) -> list[str]:
        await anyio.sleep_forever()
        raise AssertionError

    clock = ManualClock()
    source = DnsSource("context", 8100, "http", Expected(), clock=clock, interval_s=2.0, lookup=hang)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.run, lambda _urls: None)
        await until(lambda: source.statistics()["errors_total"] == 1)
        tasks.cancel_scope.cancel()


async def test_the_systems_resolver_gives_plain_addresses() -> None:
    assert "127.0.0.1" in await resolve("localhost")
    with pytest.raises(OSError, match=r".+"):
        await resolve("does-not-exist.invalid")
