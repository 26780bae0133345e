"""Brings the buffered events of all attention data-parallel ranks together on rank 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvmesh.events.buffer import EventBuffer
from kvmesh.net.clock import Clock
from kvmesh.protocol.kv_cache_events import KvCacheEvent

__all__ = ["AllGather", "EventGatherer", "alone"]

AllGather = Callable[[list[KvCacheEvent]], list[list[KvCacheEvent]]]
"""Gives every rank the lists of all ranks, in their order. A collective: all ranks enter it in the same iteration."""


def alone(events: list[KvCacheEvent]) -> list[list[KvCacheEvent]]:
    """The :data:`AllGather` of a single rank."""
    return [events]


class EventGatherer:
    """What one rank does with the events of an iteration.

    Args:
        buffer: where they are fetched from; filled on rank 0 only. Its capacity is that of one rank, times the ranks.
        capacity: events of this rank that may wait for the next gathering; the oldest are dropped.
        rank: this one.
        all_gather: the collective.
        period_s: seconds between two gatherings; 0: one with every iteration. The clock must be the same for all ranks.
        clock: paces them.
    """

    def __init__(
        self,
        buffer: EventBuffer,
        capacity: int,
        *,
        rank: int = 0,
        all_gather: AllGather = alone,
        period_s: float = 0.0,
        clock: Clock,
    ) -> None:
        self._buffer = buffer
        self._waiting: deque[KvCacheEvent] = deque()
        self._capacity = capacity
        self._rank = rank
        self._all_gather = all_gather
        self._period_s = period_s
        self._clock = clock
        self._next_s = clock.monotonic_s()
        self.dropped_total = 0
        """Events of this rank that were dropped before they were gathered."""

    def flush(self, events: Iterable[KvCacheEvent]) -> None:
        """An iteration of this rank is over; gather when it is time."""
        self._waiting.extend(events)
        while len(self._waiting) > self._capacity:
            self._waiting.popleft()
            self.dropped_total += 1
        now_s = self._clock.monotonic_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._period_s
        ranks = self._all_gather(list(self._waiting))
        self._waiting.clear()
        if self._rank == 0:
            self._buffer.extend(event for of_rank in ranks for event in of_rank)

    def due_in_s(self) -> float | None:
        """Seconds until waiting events are to be gathered, None when none wait."""
        return max(0.0, self._next_s - self._clock.monotonic_s()) if self._waiting else None
