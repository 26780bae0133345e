"""Which page goes first: the lowest priority, and within a priority the one that became evictable longest ago.

A queue entry is a (page, stamp) pair in a ring per priority. A page that is picked up again is not searched for in the
ring: its stamp is cleared, and the stale entry is skipped when its turn comes or dropped when the ring is compacted.
Every operation is therefore amortised O(1) per page, however many pages there are, and works on whole arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["EvictionQueue", "Stamps"]

_MIN_RING = 256
_MIN_SCAN = 64


class Stamps:
    """The one live queue entry of each page, shared by the queues of all levels: a page waits in one of them at most.

    Args:
        num_pages: pages are numbered ``0 .. num_pages - 1``.
    """

    def __init__(self, num_pages: int) -> None:
        self.live: NDArray[np.int64] = np.zeros(num_pages, dtype=np.int64)
        """0 for a page that is in no queue."""
        self._last = 0

    def give(self, pages: NDArray[np.int32]) -> NDArray[np.int64]:
        """New stamps for ``pages``, which makes their older entries stale."""
        stamps = np.arange(self._last + 1, self._last + 1 + len(pages), dtype=np.int64)
        self._last += len(pages)
        self.live[pages] = stamps
        return stamps


class EvictionQueue:
    """The evictable pages of one pool on one level, in the order in which they will be evicted.

    Args:
        stamps: of the pool's pages.
    """

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        self._count = 0
        self._rings: dict[int, _Ring] = {}

    def __len__(self) -> int:
        return self._count

    def push(self, pages: NDArray[np.int32], priorities: NDArray[np.uint8]) -> None:
        """Queue ``pages`` (none of them queued now); the first one will be evicted before the second, and so on."""
        self._insert(pages, priorities, front=False)

    def push_front(self, pages: NDArray[np.int32], priorities: NDArray[np.uint8]) -> None:
        """Put back what was just popped, in the same order, ahead of everything of the same priority."""
        self._insert(pages, priorities, front=True)

    def discard(self, pages: NDArray[np.int32]) -> None:
        """Take ``pages`` out of the queue; those that are in no queue are ignored, none may be in another."""
        live = self._stamps.live
        self._count -= int(np.count_nonzero(live[pages]))
        live[pages] = 0

    def pop(self, count: int) -> NDArray[np.int32]:
        """Remove and return up to ``count`` pages, the first to go first."""
        parts: list[NDArray[np.int32]] = []
        wanted = min(count, self._count)
        self._count -= wanted
        for priority in sorted(self._rings):
            if not wanted:
                break
            taken = self._rings[priority].pop(wanted, self._stamps.live)
            wanted -= len(taken)
            parts.append(taken)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def _insert(self, pages: NDArray[np.int32], priorities: NDArray[np.uint8], *, front: bool) -> None:
        if not len(pages):
            return
        stamps = self._stamps.give(pages)
        self._count += len(pages)
        first = int(priorities[0])
        if (priorities == first).all():
            self._ring(first).insert(pages, stamps, self._stamps.live, front=front)
            return
        for priority in np.unique(priorities).tolist():
            mask = priorities == priority
            self._ring(priority).insert(pages[mask], stamps[mask], self._stamps.live, front=front)

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

    def insert(
        self, pages: NDArray[np.int32], stamps: NDArray[np.int64], live: NDArray[np.int64], *, front: bool
    ) -> None:
        count = len(pages)
        if (self._head < count) if front else (self._tail + count > len(self._pages)):
            self._compact(count, live, front=front)
        if front:
            self._head -= count
            begin = self._head
        else:
            begin = self._tail
            self._tail += count
        self._pages[begin : begin + count] = pages
        self._stamps[begin : begin + count] = stamps

    def pop(self, count: int, live: NDArray[np.int64]) -> NDArray[np.int32]:
        """Up to ``count`` live entries from the head; their stamps are cleared."""
        parts: list[NDArray[np.int32]] = []
        while count and self._head < self._tail:
            end = min(self._tail, self._head + max(count, _MIN_SCAN))
            pages = self._pages[self._head : end]
            valid = np.flatnonzero(live[pages] == self._stamps[self._head : end])
            if len(valid) > count:
                valid = valid[:count]
                end = self._head + int(valid[-1]) + 1
            taken = pages[valid]
            live[taken] = 0
            parts.append(taken)
            count -= len(taken)
            self._head = end
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def _compact(self, room: int, live: NDArray[np.int64], *, front: bool) -> None:
        """Drop stale entries and leave space for as many new ones as are live, so that this stays amortised."""
        pages = self._pages[self._head : self._tail]
        stamps = self._stamps[self._head : self._tail]
        # The newcomers have their stamps already, but an older entry of theirs has another one.
        valid = live[pages] == stamps
        pages, stamps = pages[valid], stamps[valid]
        begin = room if front else 0
        capacity = max(_MIN_RING, begin + 2 * (len(pages) + room))
        self._pages = np.empty(capacity, dtype=np.int32)
        self._stamps = np.empty(capacity, dtype=np.int64)
        self._head, self._tail = begin, begin + len(pages)
        self._pages[self._head : self._tail] = pages
        self._stamps[self._head : self._tail] = stamps
