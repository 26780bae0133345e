"""Requests of receivers that came before the prompt was there, or before its owner even knew of it (generation first).

Remembered in bounded memory until their context request is found, their claim expires, or 120 s have passed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from kvmesh.net.clock import Clock
from kvmesh.protocol.transfer import Claim, RequestData
from kvmesh.transceiver.types import PeerKey

__all__ = ["EarlyRequest", "EarlyRequests"]

CAPACITY: Final = 4096
RETENTION_S: Final = 120.0


class EarlyRequest(NamedTuple):
    """A receiver that waits for a prompt."""

    peer: PeerKey
    request: RequestData
    claim: Claim
    expires_s: float
    """Monotonic."""


class EarlyRequests:
    """By transfer id. Not thread-safe: used under the sender's lock."""

    def __init__(self, clock: Clock, capacity: int = CAPACITY, retention_s: float = RETENTION_S) -> None:
        self._clock = clock
        self._capacity = capacity
        self._retention_s = retention_s
        self._waiting: OrderedDict[int, EarlyRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._waiting

    @property
    def is_full(self) -> bool:
        """Whether no more receivers are remembered."""
        return len(self._waiting) >= self._capacity

    def remember(self, peer: PeerKey, request: RequestData, claim: Claim) -> None:
        """Keep a request; there must be room, and none of its transfer."""
        assert not self.is_full
        assert request.transfer_id not in self._waiting
        keep_s = min(self._retention_s, max(0, claim.lifetime_ms) / 1e3)
        self._waiting[request.transfer_id] = EarlyRequest(peer, request, claim, self._clock.monotonic_s() + keep_s)

    def take(self, transfer_id: int) -> EarlyRequest | None:
        """The request of a transfer, which is forgotten; None when there is none."""
        return self._waiting.pop(transfer_id, None)

    def has(self, peer: PeerKey, transfer_id: int, session: int) -> bool:
        """Whether the request that a receiver made under its session number waits here."""
        found = self._waiting.get(transfer_id)
        return found is not None and found.peer == peer and found.request.session == session

    def withdraw(self, peer: PeerKey, transfer_id: int, session: int) -> bool:
        """Forget the request that a receiver made under its session number; returns whether there was one."""
        if not self.has(peer, transfer_id, session):
            return False
        del self._waiting[transfer_id]
        return True

    def take_of(self, peer: PeerKey) -> list[EarlyRequest]:
        """The requests of a peer that is gone; they are forgotten."""
        gone = [early for early in self._waiting.values() if early.peer == peer]
        for early in gone:
            del self._waiting[early.request.transfer_id]
        return gone

    def take_expired(self) -> list[EarlyRequest]:
        """The requests whose time is over; they are forgotten."""
        now_s = self._clock.monotonic_s()
        over = [early for early in self._waiting.values() if now_s >= early.expires_s]
        for early in over:
            del self._waiting[early.request.transfer_id]
        return over
