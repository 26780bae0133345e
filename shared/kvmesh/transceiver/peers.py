"""The receivers that have introduced themselves to a page owner, and how to reach them."""

from __future__ import annotations

import msgspec

from kvmesh.telemetry import get_logger
from kvmesh.transceiver.handshake import Pairing
from kvmesh.transceiver.liveness import ProcessGoneError, ProcessIdentity, open_process
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.types import PeerKey

__all__ = ["Receivers", "watch_process"]


class Receivers:
    """Routes by peer and peers by route; used under the sender's lock."""

    def __init__(self) -> None:
        self._peers: dict[bytes, PeerKey] = {}
        self._routes: dict[PeerKey, bytes] = {}
        self._pairings: dict[PeerKey, Pairing] = {}
        self._numbers: dict[int, PeerKey] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def add(self, route: bytes, peer: PeerKey, pairing: Pairing) -> bool:
        """Note where ``peer`` is reached, and how pages go to it; returns whether it was unknown."""
        former = self._routes.get(peer)
        if former is not None:
            self._peers.pop(former, None)
        self._peers[route] = peer
        self._routes[peer] = route
        self._pairings[peer] = pairing
        self._numbers[peer.number] = peer
        return former is None

    def peer(self, route: bytes) -> PeerKey | None:
        """Who speaks through ``route``."""
        return self._peers.get(route)

    def numbered(self, number: int) -> PeerKey | None:
        """Whose :attr:`PeerKey.number` this is."""
        return self._numbers.get(number)

    def route(self, peer: PeerKey | None) -> bytes | None:
        """Where ``peer`` is reached."""
        return self._routes.get(peer) if peer is not None else None

    def pairing(self, peer: PeerKey) -> Pairing:
        """How pages go to a receiver that has introduced itself."""
        return self._pairings[peer]

    def take_lives(self, instance_id: str, epoch: int) -> list[PeerKey]:
        """Forget the lives of an instance up to ``epoch``; returns them."""
        gone = [peer for peer in self._routes if peer.instance_id == instance_id and peer.epoch <= epoch]
        for peer in gone:
            self._peers.pop(self._routes.pop(peer), None)
            del self._pairings[peer]
            del self._numbers[peer.number]
        return gone


def watch_process(engine: LocalEngine, peer: PeerKey, process: bytes) -> None:
    """Have the death of ``peer`` reported where this host can see it; elsewhere the coordinator tells."""
    try:
        pidfd = open_process(msgspec.msgpack.decode(process, type=ProcessIdentity))
    except ProcessGoneError:
        engine.peer_gone(peer)
    except (msgspec.MsgspecError, OSError) as error:
        get_logger("transceiver").info("cannot watch a peer's process", peer=str(peer), reason=str(error))
    else:
        if pidfd is not None:
            engine.watch(pidfd, peer)
