"""A channel is attached to a peer as long as either side needs it, and nothing is kept of a peer that has left."""

from __future__ import annotations

import pytest

from kvmesh.transceiver.planes.base import PlaneError
from kvmesh.transceiver.staged.attachments import Attachments
from kvmesh.transceiver.types import PeerKey


class FakeChannel:
    def __init__(self) -> None:
        self.calls: list[tuple[str, PeerKey]] = []
        self.reachable = True

    def attach(self, peer: PeerKey, _descriptor: bytes, _side: str) -> None:
        if not self.reachable:
            raise PlaneError("nobody is there")
        self.calls.append(("attach", peer))

    def detach(self, peer: PeerKey) -> None:
        self.calls.append(("detach", peer))


def test_the_last_user_detaches_and_no_life_of_a_peer_is_remembered() -> None:
    channel = FakeChannel()
    attachments = Attachments(channel)  # type: ignore[arg-type]
    for epoch in range(3):
        peer = PeerKey("peer", epoch)
        attachments.acquire(peer, b"", "owner")
        attachments.acquire(peer, b"", "receiver")
        attachments.release(peer)
        assert channel.calls[-1] == ("attach", peer)
        attachments.release(peer)
        assert channel.calls[-1] == ("detach", peer)
    channel.reachable = False
    with pytest.raises(PlaneError):
        attachments.acquire(PeerKey("peer", 9), b"", "owner")
    assert not attachments._of_peer
    assert not attachments._users
    assert not attachments._uses
