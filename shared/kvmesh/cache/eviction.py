"""Which page goes first: the lowest priority, and within a priority the one that became droppable longest ago.

A queue entry is a (page, stamp) pair in a ring per priority. A page that is picked up again is not searched for in the
ring: its stamp is cleared, and the stale entry is skipped when its turn comes or dropped when the ring is compacted.
Every operation is therefore amortised O(1) per page, however many pages there are, and works on whole arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["EvictionQueue"]

_MIN_RING = 256
_MIN_SCAN = 64


class EvictionQueue:
    """The droppable pages of one pool, in the order in which they will be evicted.

    Args:
        num_pages: pages are numbered ``0 .. num_pages - 1``.
    """

    def __init__(self, num_pages: int) -> None:
        self._stamps: NDArray[np.int64] = np.zeros(num_pages, dtype=np.int64)
        self._last_stamp = 0
        self._count = 0
        self._rings: dict[int, _Ring] = {}

    def __len__(self) -> int:
        return self._count

    def contains(self, pages: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of ``pages`` are queued."""
        queued: NDArray[np.bool_] = self._stamps[pages] != 0
        return queued

    def push(self, pages: NDArray[np.int32], priorities: NDArray[np.uint8]) -> None:
        """Queue ``pages`` (none of them queued now); the first one will be evicted before the second, and so on."""
        if not len(pages):
            return
        stamps = np.arange(self._last_stamp + 1, self._last_stamp + 1 + len(pages), dtype=np.int64)
        self._last_stamp += len(pages)
        self._stamps[pages] = stamps
        self._count += len(pages)
        first = int(priorities[0])
        if (priorities == first).all():
            self._ring(first).append(pages, stamps, self._stamps)
            return
        for priority in np.unique(priorities).tolist():
            mask = priorities == priority
            self._ring(priority).append(pages[mask], stamps[mask], self._stamps)

    def discard(self, pages: NDArray[np.int32]) -> None:
        """Take ``pages`` out of the queue; those that are not in it are ignored."""
        self._count -= int(np.count_nonzero(self._stamps[pages]))
        self._stamps[pages] = 0

    def pop(self, count: int) -> NDArray[np.int32]:
        """Remove and return up to ``count`` pages, the first to go first."""
        parts: list[NDArray[np.int32]] = []
        wanted = min(count, self._count)
        self._count -= wanted
        for priority in sorted(self._rings):
            if not wanted:
                break
            taken = self._rings[priority].pop(wanted, self._stamps)
            wanted -= len(taken)
            parts.append(taken)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def _ring(self, priority: int) -> _Ring:
        ring = self._rings.get(priority)
        if ring is None:
            ring = self._rings[priority] = _Ring()
        return ring


class _Ring:
    """Entries of one priority, oldest first, some of them stale."""

    def __init__(self) -> None:
        self._pages: NDArray[np.int32] = np.empty(_MIN_RING, dtype=np.int32)
        self._stamps: NDArray[np.int64] = np.empty(_MIN_RING, dtype=np.int64)
        self._head = 0
        self._tail = 0

    def append(self, pages: NDArray[np.int32], stamps: NDArray[np.int64], current: NDArray[np.int64]) -> None:
        end = self._tail + len(pages)
        if end > len(self._pages):
            self._compact(len(pages), current)
            end = self._tail + len(pages)
        self._pages[self._tail : end] = pages
        self._stamps[self._tail : end] = stamps
        self._tail = end

    def pop(self, count: int, current: NDArray[np.int64]) -> NDArray[np.int32]:
        """Up to ``count`` live entries from the head; their stamps are cleared."""
        parts: list[NDArray[np.int32]] = []
        while count and self._head < self._tail:
            end = min(self._tail, self._head + max(count, _MIN_SCAN))
            pages = self._pages[self._head : end]
            live = np.flatnonzero(current[pages] == self._stamps[self._head : end])
            if len(live) > count:
                live = live[:count]
                end = self._head + int(live[-1]) + 1
            taken = pages[live]
            current[taken] = 0
            parts.append(taken)
            count -= len(taken)
            self._head = end
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def _compact(self, room: int, current: NDArray[np.int64]) -> None:
        """Drop stale entries and leave space for as many new ones as are live, so that this stays amortised."""
        pages = self._pages[self._head : self._tail]
        stamps = self._stamps[self._head : self._tail]
        live = current[pages] == stamps
        pages, stamps = pages[live], stamps[live]
        capacity = max(_MIN_RING, 2 * (len(pages) + room))
        self._pages = np.empty(capacity, dtype=np.int32)
        self._stamps = np.empty(capacity, dtype=np.int64)
        self._pages[: len(pages)] = pages
        self._stamps[: len(pages)] = stamps
        self._head, self._tail = 0, len(pages)
