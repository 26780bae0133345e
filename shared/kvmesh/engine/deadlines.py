"""The deadlines of live requests: which is next, and which have passed. Knows ids only, so that it keeps no request."""

from __future__ import annotations

import heapq

__all__ = ["Deadlines"]


class Deadlines:
    """A heap whose removed entries are dropped when they reach its top, or when they outnumber the others."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries in memory: at most twice the deadlines that are set, and one."""
        return len(self._heap)

    def set(self, request_id: str, deadline_s: float) -> None:
        """Note the deadline, in monotonic seconds, of a request that has none yet."""
        self._of[request_id] = deadline_s
        heapq.heappush(self._heap, (deadline_s, request_id))

    def drop(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        if self._of.pop(request_id, None) is not None and len(self._heap) > 2 * len(self._of):
            # At least half of what is built anew was removed since the last time: constant work for each removal.
            self._heap = [(deadline_s, one) for one, deadline_s in self._of.items()]
            heapq.heapify(self._heap)

    def next_s(self) -> float | None:
        """The next deadline, None when there is none."""
        # An id may have come back with another deadline, so the number is compared and not the id looked for.
        while self._heap and self._of.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_passed(self, now_s: float) -> list[str]:
        """Remove and return the requests whose deadline has come, in order."""
        passed: list[str] = []
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            passed.append(self._heap[0][1])
            self.drop(passed[-1])
        return passed
