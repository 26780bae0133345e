"""A stack of free numbers (pages, slots, tree nodes) as one int32 array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import CacheIntegrityError

__all__ = ["FreeList"]


class FreeList:
    """Numbers ``0 .. capacity - 1`` that are not in use; a fresh list gives them in ascending order."""

    def __init__(self, capacity: int) -> None:
        self._stack: NDArray[np.int32] = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._count = capacity

    def __len__(self) -> int:
        return self._count

    @property
    def capacity(self) -> int:
        """How many numbers there are in all."""
        return len(self._stack)

    @property
    def free(self) -> NDArray[np.int32]:
        """The free numbers, in no useful order (a view; read it at once)."""
        return self._stack[: self._count]

    def holds_exactly(self, free: NDArray[np.bool_]) -> bool:
        """Whether the free numbers are exactly those that ``free``, bool ``[capacity]``, marks, each of them once."""
        numbers = self.free
        if len(free) != self.capacity or len(numbers) != np.count_nonzero(free):
            return False
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.capacity:
            return False
        found = np.zeros(self.capacity, dtype=np.bool_)
        found[numbers] = True
        return bool(np.array_equal(found, free))

    def take(self, count: int) -> NDArray[np.int32]:
        """Remove and return ``count`` numbers, the most recently freed first.

        Raises:
            CacheIntegrityError: fewer are free.
        """
        if count > self._count:
            raise CacheIntegrityError(f"{count} numbers wanted, {self._count} free")
        end = self._count
        self._count = end - count
        return self._stack[self._count : end][::-1].copy()

    def put(self, numbers: NDArray[np.int32]) -> None:
        """Give ``numbers`` back; the next :meth:`take` returns them in this order.

        Raises:
            CacheIntegrityError: more come back than were taken.
        """
        end = self._count + len(numbers)
        if end > len(self._stack):
            raise CacheIntegrityError(f"{end} numbers free of {len(self._stack)}: one came back twice")
        self._stack[self._count : end] = numbers[::-1]
        self._count = end

    def replace(self, taken: NDArray[np.int32], given: NDArray[np.int32]) -> None:
        """Take exactly the free numbers ``taken`` and give back as many others; linear in the free numbers."""
        free = self._stack[: self._count]
        self._stack[: self._count] = np.concatenate((given, free[~np.isin(free, taken)]))

    def grow(self, capacity: int) -> None:
        """Add the numbers from the present capacity up to ``capacity - 1``; they are given out last."""
        added = np.arange(capacity - 1, len(self._stack) - 1, -1, dtype=np.int32)
        used = self._stack[self._count :]
        self._stack = np.concatenate((added, self._stack[: self._count], used))
        self._count += len(added)

    def shrink(self, capacity: int) -> None:
        """Forget the numbers from ``capacity`` on, all of which must be free.

        Raises:
            CacheIntegrityError: one of them is in use.
        """
        free = self._stack[: self._count]
        kept = free[free < capacity]
        if self._count - len(kept) != len(self._stack) - capacity:
            raise CacheIntegrityError(f"numbers from {capacity} on are still in use")
        self._stack = np.concatenate((kept, np.zeros(capacity - len(kept), dtype=np.int32)))
        self._count = len(kept)
