"""What a source of servers is: it says at which addresses they are, whenever that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from kvmesh.protocol.members import Role

__all__ = ["Expected", "Report", "Source"]

Report = Callable[[Mapping[str, bool]], None]
"""Told all addresses of a source: base URL -> whether new work may go there (a pod that terminates takes none)."""


class Expected(NamedTuple):
    """What is known of a source's servers beforehand."""

    role: Role | None = None
    dialect: str = "kvmesh"


class Source(Protocol):
    """Where servers are found."""

    name: str
    """Of the source, for people: ``dns:context``."""
    expected: Expected

    async def run(self, report: Report) -> None:
        """Follow the source until cancelled; what cannot be learned leaves the last report as it is."""

    def statistics(self) -> dict[str, float]:
        """``errors_total``: look-ups, lists and watches that failed."""
