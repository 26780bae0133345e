"""Cancels that arrive before their session: remembered for a while, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvmesh.net.clock import Clock

__all__ = ["PreCancels"]

CAPACITY: Final = 4096
RETENTION_S: Final = 120.0
"""As long as the peers of this protocol keep an orphaned receiver's data."""


class PreCancels:
    """Transfer ids that were cancelled before anyone opened them."""

    def __init__(self, clock: Clock, capacity: int = CAPACITY, retention_s: float = RETENTION_S) -> None:
        self._clock = clock
        self._capacity = capacity
        self._retention_s = retention_s
        self._expiry_s: OrderedDict[int, float] = OrderedDict()

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._expiry_s

    def __len__(self) -> int:
        return len(self._expiry_s)

    def remember(self, transfer_id: int) -> None:
        """Note a cancel; the oldest is forgotten when there are too many."""
        self._expire()
        self._expiry_s.pop(transfer_id, None)
        self._expiry_s[transfer_id] = self._clock.monotonic_s() + self._retention_s
        if len(self._expiry_s) > self._capacity:
            self._expiry_s.popitem(last=False)

    def take(self, transfer_id: int) -> bool:
        """Whether ``transfer_id`` was cancelled; it is forgotten."""
        self._expire()
        return self._expiry_s.pop(transfer_id, None) is not None

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        while self._expiry_s and next(iter(self._expiry_s.values())) <= now_s:
            self._expiry_s.popitem(last=False)
