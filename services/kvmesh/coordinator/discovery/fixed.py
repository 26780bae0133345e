"""The source of servers that are named beforehand."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from kvmesh.coordinator.discovery.source import Expected, Report

__all__ = ["FixedSource"]


class FixedSource:
    """Addresses that never change.

    Args:
        urls: base URLs.
        expected: of these servers.
    """

    name = "static"

    def __init__(self, urls: Iterable[str], expected: Expected) -> None:
        self.expected = expected
        self._urls = dict.fromkeys(urls, True)

    async def run(self, report: Report) -> None:
        """See :meth:`kvmesh.coordinator.discovery.source.Source.run`."""
        report(self._urls)
        await anyio.sleep_forever()

    def statistics(self) -> dict[str, float]:
        """See :meth:`kvmesh.coordinator.discovery.source.Source.statistics`."""
        return {"errors_total": 0}
