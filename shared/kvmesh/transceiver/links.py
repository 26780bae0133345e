"""A receiver's connections to page owners: introduced once for each pair, kept while the owner lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from kvmesh.protocol.transfer import HelloReply
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.handshake import Pairing, PairingRefusedError
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.peers import watch_process
from kvmesh.transceiver.planes.base import PlaneError
from kvmesh.transceiver.types import PeerKey
from kvmesh.transceiver.workers import WorkerBusyError

__all__ = ["Link", "LinkState", "Links"]

LOST_RETENTION_S: Final = 3600.0
"""How long a lost connection is retried, unless its peer is known to be dead: a last acknowledgement may still have to
reach an owner that lives, and keeps its pages pinned until then. Retrying costs one attempt every few seconds."""


class LinkState(Enum):
    """Where a connection is."""

    INTRODUCING = auto()
    ATTACHING = auto()
    UP = auto()


@dataclass(slots=True, eq=False)
class Link:
    """One page owner, as this receiver reaches it."""

    endpoint: str
    peer: PeerKey
    deadline_s: float
    """Connection set-up fails then."""
    identity: bytes = b""
    """This engine's on the connection."""
    state: LinkState = LinkState.INTRODUCING
    lost_since_s: float | None = None
    is_fenced: bool = False
    """The peer was taken for dead, but may still write: kept until it is known not to, for nothing else."""
    pairing: Pairing | None = None
    """Known once the owner has answered."""


class Links:
    """The links by endpoint; used under the receiver's lock.

    Args:
        engine: this engine.
        on_up: a link can carry requests now.
        on_down: a link cannot be set up, with the reason; it is gone from here.
        run_locked: runs a callable under the receiver's lock.
    """

    def __init__(
        self,
        engine: LocalEngine,
        *,
        on_up: Callable[[Link], None],
        on_down: Callable[[Link, str, str], None],
        run_locked: Callable[[Callable[[], None]], None],
    ) -> None:
        self._engine = engine
        self._on_up = on_up
        self._on_down = on_down
        self._run_locked = run_locked
        self._links: dict[str, Link] = {}
        self._log = get_logger("transceiver.links")

    def __len__(self) -> int:
        return len(self._links)

    def get(self, endpoint: str) -> Link | None:
        """The link to ``endpoint``, if there is one."""
        return self._links.get(endpoint)

    def obtain(self, endpoint: str, peer: PeerKey) -> Link:
        """The link to ``peer`` at ``endpoint``; a new one introduces itself at once."""
        link = self._links.get(endpoint)
        if link is not None and link.peer == peer:
            return link
        if link is not None:
            # Another life of an engine answers at an address that was used before.
            self.drop(link, "peer_lost", f"{peer} has taken the place of {link.peer}")
        deadline_s = self._engine.clock.monotonic_s() + self._engine.times.connect_s
        link = self._links[endpoint] = Link(endpoint, peer, deadline_s)
        link.identity = self._engine.dial(endpoint)
        self._engine.send(endpoint, self._engine.handshake.hello(peer.instance_id, link.identity))
        return link

    def on_reply(self, endpoint: str, reply: HelloReply) -> None:
        """An owner answers our introduction."""
        link = self._links.get(endpoint)
        if link is None or link.state is not LinkState.INTRODUCING:
            return
        answered = PeerKey(reply.instance_id, reply.epoch)
        try:
            link.pairing = self._engine.handshake.pair(reply, "receiver", link.identity)
            if reply.refused is not None:
                raise PairingRefusedError(reply.refused)
            if answered != link.peer:
                raise PairingRefusedError(f"{answered} answers at {endpoint}, where {link.peer} is expected")
        except PairingRefusedError as refusal:
            self.drop(link, "pairing_refused", str(refusal))
            return
        link.state = LinkState.ATTACHING
        watch_process(self._engine, link.peer, reply.process)
        try:
            self._engine.workers.submit(worker_of(endpoint, link.peer), lambda: self._attach(link, reply.agent))
        except WorkerBusyError as error:
            self.drop(link, "peer_unreachable", str(error))

    def expire(self, now_s: float) -> float:
        """Give up links that did not come up in time; returns when the next one is due."""
        due_s = float("inf")
        for link in list(self._links.values()):
            if link.state is LinkState.UP:
                continue
            if now_s >= link.deadline_s:
                waited_s = self._engine.times.connect_s
                self.drop(link, "peer_unreachable", f"{link.peer} at {link.endpoint} did not answer in {waited_s:g} s")
            else:
                due_s = min(due_s, link.deadline_s)
        return due_s

    @property
    def any_lost(self) -> bool:
        """Whether there is something for :meth:`forget_lost`."""
        return any(link.is_fenced or link.lost_since_s is not None for link in self._links.values())

    def forget_lost(self, now_s: float, in_use: set[str]) -> None:
        """Drop idle links that have been lost for long, and those to peers that are over and quiet."""
        for link in list(self._links.values()):
            if link.is_fenced and link.endpoint not in in_use:
                self.drop(link, "peer_dead", f"{link.peer} ended")
                continue
            lost_s = link.lost_since_s
            if lost_s is not None and now_s - lost_s >= LOST_RETENTION_S and link.endpoint not in in_use:
                self.drop(link, "peer_lost", f"the connection to {link.peer} was lost")

    def drop(self, link: Link, code: str, reason: str) -> None:
        """Close a link; its peer's memory is let go of when its worker has stopped."""
        if self._links.get(link.endpoint) is not link:
            return
        del self._links[link.endpoint]
        # What its sessions still have to say goes out before the connection closes.
        self._on_down(link, code, reason)
        self._engine.hang_up(link.endpoint)
        worker = worker_of(link.endpoint, link.peer)
        self._engine.workers.retire(worker, lambda: self._engine.plane.detach(link.peer, "receiver"))

    def take_lives(self, instance_id: str, epoch: int) -> list[Link]:
        """The links to lives of an instance up to ``epoch``."""
        return [
            link for link in self._links.values() if link.peer.instance_id == instance_id and link.peer.epoch <= epoch
        ]

    def _attach(self, link: Link, descriptor: bytes) -> None:
        plane = self._engine.plane
        try:
            way = plane.name.lower() if plane.attaches == "owner" else plane.attach(link.peer, descriptor, "receiver")
        except PlaneError as error:
            reason = f"cannot reach the memory of {link.peer}: {error}"
            self._run_locked(lambda: self.drop(link, "peer_unreachable", reason))
            return
        except Exception:
            # The border of error isolation: what one owner makes go wrong ends the link to it only.
            isolated(self._log, "cannot reach an owner's memory", peer=str(link.peer))
            unknown = f"cannot reach the memory of {link.peer}; the log of this server says why"
            self._run_locked(lambda: self.drop(link, "peer_unreachable", unknown))
            return
        self._log.info("paired", peer=str(link.peer), plane=way)
        self._run_locked(lambda: self._up(link))

    def _up(self, link: Link) -> None:
        if self._links.get(link.endpoint) is link:
            link.state = LinkState.UP
            self._on_up(link)


def worker_of(endpoint: str, peer: PeerKey | None) -> str:
    """Name of the worker that serves a link: another life at the same address has another one."""
    return f"from-{endpoint}-{peer}"
