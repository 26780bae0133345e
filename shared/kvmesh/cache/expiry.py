"""When the retention priorities of a pool's pages fall back to the default: after a duration from the first release."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.lazy_queue import LazyQueue

__all__ = ["PageExpiry"]


class PageExpiry:
    """Pages with a duration that waits for their release, and pages whose duration runs.

    Its memory is that of pages in use: a page that is freed leaves no trace for long, however far its time is away.
    """

    def __init__(self) -> None:
        self._durations_s: dict[int, float] = {}
        self._running: LazyQueue[int] = LazyQueue()
        self._now_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._durations_s) or len(self._running) > 0

    @property
    def waiting(self) -> bool:
        """Whether any duration has not begun."""
        return bool(self._durations_s)

    def add(self, pages: NDArray[np.int32], durations_s: NDArray[np.float64]) -> None:
        """Give ``pages`` durations that begin when :meth:`start` names them; infinite ones are none."""
        for page, duration_s in zip(pages.tolist(), durations_s.tolist(), strict=True):
            if duration_s < np.inf:
                self._durations_s[page] = duration_s

    def start(self, pages: NDArray[np.int32]) -> None:
        """``pages`` were released, not always for the first time."""
        for page in self._durations_s.keys() & set(pages.tolist()):
            self._running.push(page, self._now_s + self._durations_s.pop(page), page)

    def forget(self, page: int) -> None:
        """``page`` was freed."""
        self._durations_s.pop(page, None)
        self._running.discard(page)

    def take(self, now_s: float) -> list[int]:
        """Pages whose time has come by ``now_s`` (monotonic), each once, the earliest first."""
        self._now_s = now_s
        due: list[int] = []
        while (head := self._running.first()) is not None and head[0] <= now_s:
            due.append(head[1])
            self._running.discard(head[1])
        return due
