"""How many requests may be under way, how many may wait for a place, and what the others are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from kvmesh.net.clock import Clock
from kvmesh.protocol.errors import ApiError

__all__ = ["Admission"]

QUEUE_PER_PLACE = 1.0
"""Waiting requests per place: more than that and the wait is longer than a request itself."""
MAX_RETRY_AFTER_S = 30
_SMOOTHING = 0.1
"""Weight of the newest request in the average duration."""


class Admission:
    """Places for requests, first come first served.

    Args:
        max_inflight: places.
        clock: measures how long places are held, for ``Retry-After``.
        max_queued: how many may wait; default as many as there are places.
    """

    def __init__(self, max_inflight: int, clock: Clock, *, max_queued: int | None = None) -> None:
        self._places = anyio.Semaphore(max_inflight, fast_acquire=True)
        self._max_inflight = max_inflight
        self._max_queued = round(max_inflight * QUEUE_PER_PLACE) if max_queued is None else max_queued
        self._clock = clock
        self._mean_s = 0.0
        self._rejected = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place for the length of the block, waiting for one if there is none. The caller bounds the wait.

        Raises:
            ApiError: 429 with ``Retry-After`` when the queue is full.
        """
        if self._places.value == 0 and self.queued >= self._max_queued:
            self._rejected += 1
            raise ApiError(
                429,
                f"The router is at its limit of {self._max_inflight} requests and {self._max_queued} waiting; "
                "send the request again later.",
                type="rate_limit_error",
                code="over_capacity",
                retry_after_s=self.retry_after_s(),
            )
        await self._places.acquire()
        started_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            self._places.release()
            self._mean_s += _SMOOTHING * (self._clock.monotonic_s() - started_s - self._mean_s)

    @property
    def queued(self) -> int:
        """Requests waiting for a place."""
        return self._places.statistics().tasks_waiting

    def retry_after_s(self) -> int:
        """Seconds until the queue has probably moved through: 1 to :data:`MAX_RETRY_AFTER_S`."""
        rounds = 1 + self.queued / self._max_inflight
        return max(1, min(MAX_RETRY_AFTER_S, round(rounds * self._mean_s)))

    def statistics(self) -> dict[str, float]:
        """Places, waiters and refusals."""
        return {
            "inflight_requests": self._max_inflight - self._places.value,
            "queued_requests": self.queued,
            "rejected_requests_total": self._rejected,
        }
