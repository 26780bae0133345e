"""The record of state changes that goes to the coordinator: bounded, and never waited for."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, Literal

from kvmesh.net.clock import Clock
from kvmesh.protocol.transfer import LedgerEvent, TransferState
from kvmesh.transceiver.types import PeerKey

__all__ = ["Ledger"]

MAX_PENDING_EVENTS: Final = 10_000
"""About ten seconds of a very busy engine; the oldest are dropped (and counted) when nobody drains."""


class Ledger:
    """Collects events from any thread until they are drained."""

    def __init__(self, key: PeerKey, clock: Clock, capacity: int = MAX_PENDING_EVENTS) -> None:
        self._key = key
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[LedgerEvent] = deque(maxlen=capacity)
        self.dropped_total = 0

    def record(
        self,
        side: Literal["context", "generation"],
        transfer_id: int,
        state: TransferState,
        *,
        peer: PeerKey | None = None,
        request_id: str = "",
        num_tokens: int = 0,
        num_pages: int = 0,
        num_bytes: int = 0,
        deadline_unix_ms: int | None = None,
        reason: str = "",
    ) -> None:
        """Add one state change of one transfer."""
        event = LedgerEvent(
            transfer_id=transfer_id,
            side=side,
            instance_id=self._key.instance_id,
            epoch=self._key.epoch,
            state=state,
            unix_ms=self._clock.unix_ns() // 1_000_000,
            peer_instance_id=peer.instance_id if peer else None,
            request_id=request_id,
            num_tokens=num_tokens,
            num_pages=num_pages,
            num_bytes=num_bytes,
            deadline_unix_ms=deadline_unix_ms,
            reason=reason,
        )
        with self._lock:
            self.dropped_total += len(self._events) == self._events.maxlen
            self._events.append(event)

    def drain(self) -> list[LedgerEvent]:
        """All events since the last call, oldest first."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events
