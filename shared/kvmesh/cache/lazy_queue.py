"""An ordered queue whose members may leave at any time: V1's free queues, and what expires at a time of its own."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["LazyQueue"]

_COMPACT_AT = 64
"""Stale entries that are never worth removing."""

Member = TypeVar("Member", bound=Hashable)


class LazyQueue(Generic[Member]):
    """Members in the order of a (rank, number) pair, smallest first. Every call is amortised O(log n).

    A member that leaves early is not searched for: its entry stays behind, stale, and is skipped when its turn comes or
    dropped when stale entries are the majority. So entries are never more than twice the members, and a few.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Member]] = []
        self._current: dict[Member, tuple[float, int, Member]] = {}

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, member: Member) -> bool:
        return member in self._current

    def push(self, member: Member, rank: float, number: int) -> None:
        """Queue ``member``, or give it another place. No two members have the same ``number``."""
        entry = (rank, number, member)
        self._current[member] = entry
        heapq.heappush(self._heap, entry)
        self._compact()

    def discard(self, member: Member) -> None:
        """Take ``member`` out if it is queued."""
        if self._current.pop(member, None) is not None:
            self._compact()

    def first(self) -> tuple[float, Member] | None:
        """The smallest rank and its member, which stays; None: the queue is empty."""
        while self._heap:
            entry = self._heap[0]
            rank, _, member = entry
            if self._current.get(member) is entry:
                return rank, member
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Member | None:
        """Remove and return the first member; None: the queue is empty."""
        head = self.first()
        if head is None:
            return None
        _, member = head
        heapq.heappop(self._heap)
        del self._current[member]
        return member

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._current) + _COMPACT_AT:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)
