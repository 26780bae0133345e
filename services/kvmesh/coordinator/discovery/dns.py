"""The source of all addresses of a DNS name, looked up every few seconds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import anyio

from kvmesh.coordinator.discovery.source import Expected, Report
from kvmesh.net.clock import Clock
from kvmesh.telemetry import get_logger

__all__ = ["DnsSource", "resolve"]

LOOK_UP_TIMEOUT_S = 5.0

Resolve = Callable[[str], Awaitable[list[str]]]
"""All addresses of a name. Raises ``OSError`` where there are none, or nobody knows."""

_log = get_logger("coordinator.discovery")


class DnsSource:
    """The A and AAAA records of a name.

    A name that cannot be looked up, or does not exist, says nothing: the addresses that were known stay, and whether
    anybody is there is for the prober to find out. That is also what a service without a single replica looks like.

    Args:
        name: looked up.
        port: of the servers.
        scheme: ``http`` or ``https``.
        expected: of these servers.
        clock: of the interval.
        interval_s: seconds between two look-ups.
        lookup: the resolver.
    """

    def __init__(
        self,
        name: str,
        port: int,
        scheme: str,
        expected: Expected,
        *,
        clock: Clock,
        interval_s: float,
        lookup: Resolve | None = None,
    ) -> None:
        self.name = f"dns:{name}"
        self.expected = expected
        self._host = name
        self._port = port
        self._scheme = scheme
        self._clock = clock
        self._interval_s = interval_s
        self._lookup = lookup or resolve
        self._errors = 0
        self._failing = False

    async def run(self, report: Report) -> None:
        """See :meth:`kvmesh.coordinator.discovery.source.Source.run`."""
        while True:
            try:
                with anyio.fail_after(LOOK_UP_TIMEOUT_S):
                    addresses = await self._lookup(self._host)
            except (OSError, UnicodeError) as error:
                self._failed(error)
            else:
                if self._failing:
                    _log.info("name is found again", name=self._host)
                    self._failing = False
                report({self._url(address): True for address in sorted(addresses)})
            await self._clock.sleep(self._interval_s)

    def statistics(self) -> dict[str, float]:
        """See :meth:`kvmesh.coordinator.discovery.source.Source.statistics`."""
        return {"errors_total": self._errors}

    def _failed(self, error: Exception) -> None:
        self._errors += 1
        if not self._failing:
            reason = str(error) or type(error).__name__
            _log.warning("name cannot be looked up; what was found stays", name=self._host, error=reason)
        self._failing = True

    def _url(self, address: str) -> str:
        return f"{self._scheme}://{f'[{address}]' if ':' in address else address}:{self._port}"


async def resolve(name: str) -> list[str]:
    """All addresses of a name, by the system's resolver; link-local ones are left out.

    Raises:
        OSError: none, or nobody knows.
    """
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = {str(sockaddr[0]) for family, _, _, _, sockaddr in found if family in (socket.AF_INET, socket.AF_INET6)}
    return [address for address in addresses if "%" not in address]
