"""Sends transfer states to the coordinator's ledger: queued, in batches, in order, and never in anyone's way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import anyio
import msgspec

from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.clock import Clock
from kvmesh.net.discovery_link import Backoff, CoordinatorLink
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.transfer import LedgerEvent

__all__ = ["LedgerReporter"]

MAX_QUEUED = 10_000
"""Events kept while the coordinator does not answer; the oldest are dropped first."""

BATCH = 500

PAUSE_S = 0.1
"""Between two batches: events of one moment travel together."""


class LedgerReporter:
    """A bounded queue of ledger events, and the loop that empties it.

    Not guaranteed: that each event arrives exactly once. The queue drops the oldest when it is full, and a batch whose
    answer was lost is sent again; the ledger ignores repetitions.
    """

    def __init__(self, http: HttpClient, link: CoordinatorLink, clock: Clock) -> None:
        self._http = http
        self._link = link
        self._clock = clock
        self._queue: deque[LedgerEvent] = deque(maxlen=MAX_QUEUED)
        self._filled = anyio.Event()
        self._emptied = anyio.Event()
        self._emptied.set()
        self._dropped = 0

    def report(self, events: Iterable[LedgerEvent]) -> None:
        """Queue events; never waits."""
        for event in events:
            self._dropped += len(self._queue) == MAX_QUEUED
            self._queue.append(event)
        if self._queue:
            self._filled.set()
            if self._emptied.is_set():
                self._emptied = anyio.Event()

    async def run(self) -> None:
        """Send what is queued, until cancelled."""
        backoff = Backoff()
        while True:
            await self._filled.wait()
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            url = self._link.url
            try:
                await self._http.call("POST", f"{url}/transfers", dict, body=batch)
            except (PeerUnreachableError, ApiError, msgspec.DecodeError) as error:
                self._link.failed(error, url)
                self._put_back(batch)
                await self._clock.sleep(backoff.next_s())
                continue
            self._link.succeeded()
            backoff.reset()
            if not self._queue:
                self._filled = anyio.Event()
                self._emptied.set()
            await self._clock.sleep(PAUSE_S)

    async def emptied(self) -> None:
        """Wait until everything that was reported has arrived."""
        await self._emptied.wait()

    def statistics(self) -> dict[str, float]:
        """Events queued now, and dropped since the start."""
        return {"ledger_queued": len(self._queue), "ledger_dropped_total": self._dropped}

    def _put_back(self, batch: list[LedgerEvent]) -> None:
        """At the front again, as many of the newest as there is room for."""
        lost = max(0, len(batch) - (MAX_QUEUED - len(self._queue)))
        self._dropped += lost
        self._queue.extendleft(reversed(batch[lost:]))
