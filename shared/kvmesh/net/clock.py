"""Time as a dependency: code with deadlines takes a clock, so that tests can move it by hand."""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Protocol

import anyio

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """What deadlines are measured with."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back. For durations and deadlines."""

    def unix_ns(self) -> int:
        """Nanoseconds since the Unix epoch. For time stamps that other machines read."""

    async def sleep(self, seconds: float) -> None:
        """Wait; a checkpoint even for zero."""


class SystemClock:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        """See :meth:`Clock.monotonic_s`."""
        return time.monotonic()

    def unix_ns(self) -> int:
        """See :meth:`Clock.unix_ns`."""
        return time.time_ns()

    async def sleep(self, seconds: float) -> None:
        """See :meth:`Clock.sleep`."""
        await anyio.sleep(seconds)


class ManualClock:
    """A clock that stands still until :meth:`advance` is called; sleepers wake in order of their time."""

    def __init__(self, start_s: float = 0.0, start_unix_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_s = start_s
        self._unix_offset_ns = start_unix_ns - round(start_s * 1e9)
        self._sleepers: list[tuple[float, int, anyio.Event]] = []
        self._order = itertools.count()

    def monotonic_s(self) -> float:
        """See :meth:`Clock.monotonic_s`."""
        return self._now_s

    def unix_ns(self) -> int:
        """See :meth:`Clock.unix_ns`."""
        return self._unix_offset_ns + round(self._now_s * 1e9)

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has been advanced by ``seconds``."""
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        event = anyio.Event()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._order), event))
        await event.wait()

    def advance(self, seconds: float) -> None:
        """Move time forward and wake whoever slept until then.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError("a clock does not go back")
        self._now_s += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now_s:
            heapq.heappop(self._sleepers)[2].set()

    @property
    def sleepers(self) -> int:
        """How many tasks wait for time to pass; lets a test know that a waiter has arrived."""
        return len(self._sleepers)
