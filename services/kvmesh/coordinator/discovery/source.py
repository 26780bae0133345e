"""What a source of servers is: it says at which addresses they are, whenever that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from kvmesh.net.server_info import MESH_DIALECT
from kvmesh.protocol.members import Role

__all__ = ["Expected", "Report", "Source", "may_have_key"]

Report = Callable[[Mapping[str, bool]], None]
"""Told all addresses of a source: base URL -> whether new work may go there (a pod that terminates takes none)."""


class Expected(NamedTuple):
    """What is known of a source's servers beforehand."""

    role: Role | None = None
    dialect: str = MESH_DIALECT
    trusted: bool = False
    """Whether whoever answers at its addresses may be shown the mesh's API key."""


def may_have_key(url: str, expected: Expected, verifies: bool) -> bool:
    """Whether who is at ``url`` is asked with the mesh's API key: an address proves nothing of who answers there.

    Args:
        url: base URL that a source has named.
        expected: of the source's servers. Other engines do not know the key.
        verifies: whether certificates are verified by the mesh's own authority.
    """
    if expected.dialect != MESH_DIALECT:
        return False
    return expected.trusted or (verifies and url.startswith("https://"))


class Source(Protocol):
    """Where servers are found."""

    name: str
    """Of the source, for people: ``dns:context``."""
    expected: Expected

    async def run(self, report: Report) -> None:
        """Follow the source until cancelled; what cannot be learned leaves the last report as it is."""

    def statistics(self) -> dict[str, float]:
        """``errors_total``: look-ups, lists and watches that failed."""
