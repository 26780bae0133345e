"""Brings what the iterations of a rank told into its buffer, with every one of them or in a rhythm.

With attention data parallelism each rank has a buffer, and the server's front fetches all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvmesh.events.buffer import EventBuffer
from kvmesh.net.clock import Clock
from kvmesh.protocol.kv_cache_events import KvCacheEvent

__all__ = ["EventGatherer"]


class EventGatherer:
    """What a rank does with the events of an iteration.

    Args:
        buffer: where they are fetched from.
        capacity: events that may wait for the next gathering; the oldest are dropped.
        period_s: seconds between two gatherings; 0: one with every iteration.
        clock: paces them.
    """

    def __init__(self, buffer: EventBuffer, capacity: int, *, period_s: float = 0.0, clock: Clock) -> None:
        self._buffer = buffer
        self._waiting: deque[KvCacheEvent] = deque()
        self._capacity = capacity
        self._period_s = period_s
        self._clock = clock
        self._next_s = clock.monotonic_s()
        self.dropped_total = 0
        """Events that were dropped before they were gathered."""

    def flush(self, events: Iterable[KvCacheEvent]) -> None:
        """An iteration is over; gather when it is time."""
        self._waiting.extend(events)
        while len(self._waiting) > self._capacity:
            self._waiting.popleft()
            self.dropped_total += 1
        now_s = self._clock.monotonic_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._period_s
        self._buffer.extend(self._waiting)
        self._waiting.clear()

    def due_in_s(self) -> float | None:
        """Seconds until waiting events are to be gathered, None when none wait."""
        return max(0.0, self._next_s - self._clock.monotonic_s()) if self._waiting else None
