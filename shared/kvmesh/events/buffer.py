"""Keeps buffered events until somebody has fetched them: a bounded queue, oldest dropped."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvmesh.protocol.kv_cache_events import KvCacheEvent

__all__ = ["EventBuffer", "LatestEvents"]


class LatestEvents(NamedTuple):
    """What one fetch got."""

    position: int
    """Number of events that had ever been put in: confirms this fetch."""
    events: list[KvCacheEvent]


class EventBuffer:
    """May be used from several threads.

    Args:
        capacity: most events kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[KvCacheEvent] = deque()
        self._position = 0
        """Events put in so far."""
        self._dropped = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._events)

    @property
    def dropped_total(self) -> int:
        """Events that had to make room before anybody was known to have them."""
        return self._dropped

    def extend(self, events: Iterable[KvCacheEvent]) -> None:
        """Put events in; the oldest make room."""
        with self._changed:
            before = len(self._events)
            self._events.extend(events)
            self._position += len(self._events) - before
            while len(self._events) > self._capacity:
                self._events.popleft()
                self._dropped += 1
            self._changed.notify_all()

    def get_latest_events(self, timeout_s: float | None = 0.0, *, confirmed: int | None = None) -> LatestEvents:
        """Fetch all events; waits until there is one.

        Args:
            timeout_s: longest wait in seconds; 0: none, None: without bound.
            confirmed: None: the fetched events are forgotten. Else they are kept until a later fetch confirms the
                ``position`` that came with them, and come again with every fetch until then; so an answer that is lost
                on its way to the reader loses no event.
        """
        with self._changed:
            if confirmed is not None:
                self._forget(confirmed)
            self._changed.wait_for(lambda: bool(self._events), timeout_s)
            events = list(self._events)
            if confirmed is None:
                self._events.clear()
            return LatestEvents(self._position, events)

    def _forget(self, position: int) -> None:
        first = self._position - len(self._events)
        for _ in range(min(position, self._position) - first):
            self._events.popleft()
