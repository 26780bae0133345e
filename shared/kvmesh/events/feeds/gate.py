"""Keeps an index as it is while a snapshot of it is written in pieces: changes wait, and so does its clock.

Questions are answered all the while, with what was known when the gate closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio.lowlevel

from kvmesh.net.clock import Clock
from kvmesh.telemetry import get_logger

__all__ = ["Gate"]

_log = get_logger("events.feeds")

BURST_S = 0.001
"""How long waiting changes are made up for before other tasks get a turn."""


class Gate:
    """A clock for the index, whose predictions do not end while the gate is closed, and a queue of its changes.

    Args:
        clock: the true one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stopped_at_s: float | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        self.closed = False
        """Whether changes have to :meth:`wait`."""

    def monotonic_s(self) -> float:
        """See :class:`Clock`; stands still while a snapshot is written."""
        return self._clock.monotonic_s() if self._stopped_at_s is None else self._stopped_at_s

    def unix_ns(self) -> int:
        """See :class:`Clock`."""
        return self._clock.unix_ns()

    async def sleep(self, seconds: float) -> None:
        """See :class:`Clock`."""
        await self._clock.sleep(seconds)

    def wait(self, change: Callable[[], None]) -> None:
        """Make a change once the gate is open, after those that came before it."""
        self._waiting.append(change)

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        """Closed for the block, and until what has waited is made up for."""
        self.closed, self._stopped_at_s = True, self._clock.monotonic_s()
        try:
            yield
        finally:
            self._stopped_at_s = None
            try:
                with anyio.CancelScope(shield=True):
                    await self._catch_up()
            finally:
                self.closed = False

    async def _catch_up(self) -> None:
        turn_ends_s = self._clock.monotonic_s() + BURST_S
        while self._waiting:
            try:
                self._waiting.popleft()()
            except Exception:
                # Whoever asked for it has gone on long since; the changes behind it are other people's.
                _log.exception("a change that waited for a snapshot could not be made")
            if self._clock.monotonic_s() >= turn_ends_s:
                await anyio.lowlevel.checkpoint()
                turn_ends_s = self._clock.monotonic_s() + BURST_S
