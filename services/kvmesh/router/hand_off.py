"""What a context server keeps for a generation server, and who tells it when nobody will come."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.router.cluster import Server
from kvmesh.router.dialects.base import Dialect, Outgoing

__all__ = ["Abort", "HandOff"]

Abort = Callable[[Server, Outgoing], None]
"""Sends an abort in the background: nothing waits for it, and the transfer's own deadline stands behind it."""


class HandOff:
    """Pages that a context server keeps, or is about to keep, for a generation server to fetch."""

    def __init__(self, server: Server, dialect: Dialect, transfer_id: int, abort: Abort) -> None:
        self.server = server
        self.dialect = dialect
        self.transfer_id = transfer_id
        self.settled = False
        """Whether no pages are waiting: they were fetched, or there never were any."""
        self._abort = abort

    def close(self) -> None:
        """The sequence is over; an unsettled server is told not to wait.

        Also when its answer never came: that may have been under way when the client left.
        """
        if not self.settled and (abort := self.dialect.abort(self.transfer_id)) is not None:
            self._abort(self.server, abort)
