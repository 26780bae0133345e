"""Which peers a channel is attached to, and for whom: it lets go of a peer when neither side needs it any more."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

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
        self._users: Counter[PeerKey] = Counter()
        """Of each lock: those that have it or wait for it."""
        self._uses: Counter[PeerKey] = Counter()

    def acquire(self, peer: PeerKey, descriptor: bytes, side: Side) -> None:
        """Attach; blocks for connection set-up, and only those who want the same peer.

        Raises:
            PlaneError: the peer cannot be reached.
        """
        with self._alone_with(peer):
            self._channel.attach(peer, descriptor, side)
            self._uses[peer] += 1

    def release(self, peer: PeerKey) -> None:
        """Matches :meth:`acquire`; the last one detaches the peer."""
        with self._alone_with(peer):
            self._uses[peer] -= 1
            if not self._uses[peer]:
                del self._uses[peer]
                self._channel.detach(peer)

    @contextmanager
    def _alone_with(self, peer: PeerKey) -> Iterator[None]:
        with self._lock:
            lock = self._of_peer.setdefault(peer, threading.Lock())
            self._users[peer] += 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                self._users[peer] -= 1
                if not self._users[peer]:
                    del self._users[peer], self._of_peer[peer]
