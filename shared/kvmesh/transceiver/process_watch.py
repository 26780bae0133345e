"""The processes of peers that are watched for their end: pidfds by peer, each reported once."""

from __future__ import annotations

import os

from kvmesh.transceiver.types import PeerKey

__all__ = ["ProcessWatch"]


class ProcessWatch:
    """Owns the descriptors; used by one thread."""

    def __init__(self) -> None:
        self._watched: dict[int, PeerKey] = {}

    def take(self, pidfd: int, peer: PeerKey) -> bool:
        """Watch a process; returns False, and closes the descriptor, where the peer is watched already."""
        if peer in self._watched.values():
            os.close(pidfd)
            return False
        self._watched[pidfd] = peer
        return True

    def lives(self, instance_id: str, epoch: int) -> list[int]:
        """The descriptors of this life of an instance and of earlier ones."""
        return [
            pidfd for pidfd, peer in self._watched.items() if peer.instance_id == instance_id and peer.epoch <= epoch
        ]

    def let_go(self, pidfd: int) -> PeerKey:
        """Close a descriptor; returns whose it was."""
        os.close(pidfd)
        return self._watched.pop(pidfd)

    def close(self) -> None:
        """Let go of all."""
        for pidfd in list(self._watched):
            self.let_go(pidfd)
