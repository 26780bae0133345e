"""Which peers a channel is attached to, and for whom: it lets go of a peer when neither side needs it any more."""

from __future__ import annotations

import threading
from collections import Counter

from kvmesh.transceiver.channels.base import Channel, Side
from kvmesh.transceiver.types import PeerKey

__all__ = ["Attachments"]


class Attachments:
    """Counts the users of a channel's attachments.

    Args:
        channel: the channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._of_peer: dict[PeerKey, threading.Lock] = {}
        self._uses: Counter[PeerKey] = Counter()

    def acquire(self, peer: PeerKey, descriptor: bytes, side: Side) -> None:
        """Attach; blocks for connection set-up, and only those who want the same peer.

        Raises:
            PlaneError: the peer cannot be reached.
        """
        with self._lock_of(peer):
            self._channel.attach(peer, descriptor, side)
            self._uses[peer] += 1

    def release(self, peer: PeerKey) -> None:
        """Matches :meth:`acquire`; the last one detaches the peer."""
        with self._lock_of(peer):
            self._uses[peer] -= 1
            if not self._uses[peer]:
                del self._uses[peer]
                self._channel.detach(peer)

    def _lock_of(self, peer: PeerKey) -> threading.Lock:
        with self._lock:
            return self._of_peer.setdefault(peer, threading.Lock())
