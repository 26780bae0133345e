"""An ordered queue whose members may leave at any time: the free queues and the expiry queue of the V1 cache."""

from __future__ import annotations

import heapq

from kvmesh.cache.v1.block import Block

__all__ = ["BlockQueue"]

_COMPACT_AT = 64
"""Stale entries that are never worth removing."""


class BlockQueue:
    """Blocks in the order of a (rank, number) pair, smallest first. Every call is amortised O(log n).

    A block that leaves early is not searched for: its entry stays behind, stale, and is skipped when its turn comes or
    dropped when stale entries are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Block]] = []
        self._current: dict[Block, tuple[float, int, Block]] = {}

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, block: Block) -> bool:
        return block in self._current

    def push(self, block: Block, rank: float, number: int) -> None:
        """Queue ``block``, or give it another place. No two blocks have the same ``number``."""
        entry = (rank, number, block)
        self._current[block] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._current) + _COMPACT_AT:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def discard(self, block: Block) -> None:
        """Take ``block`` out if it is queued."""
        self._current.pop(block, None)

    def first(self) -> tuple[float, Block] | None:
        """The smallest rank and its block, which stays; None: the queue is empty."""
        while self._heap:
            entry = self._heap[0]
            rank, _, block = entry
            if self._current.get(block) is entry:
                return rank, block
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Block | None:
        """Remove and return the first block; None: the queue is empty."""
        head = self.first()
        if head is None:
            return None
        _, block = head
        heapq.heappop(self._heap)
        del self._current[block]
        return block
