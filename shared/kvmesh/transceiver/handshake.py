"""Hello and its answer: built, signed, checked, what they agree on, and the sentence that says why they cannot."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec

from kvmesh.cache.layout import LayoutError, PageLayout
from kvmesh.protocol.transfer import Hello, HelloReply
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.transceiver.liveness import ProcessIdentity
from kvmesh.transceiver.peer_layouts import read_layout
from kvmesh.transceiver.planes.base import Side
from kvmesh.transceiver.routes import Route, RouteError, plan_routes
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.types import PeerKey

__all__ = ["Handshake", "Introduction", "Pairing", "PairingRefusedError", "StrangerError", "pairing_obstacle"]

_Signed = TypeVar("_Signed", Hello, HelloReply)


class Introduction(NamedTuple):
    """Who an engine is, and what must agree between two of them before pages move."""

    key: PeerKey
    backend: str
    layout_digest: str
    layout_summary: str
    layout: PageLayout


class Pairing(NamedTuple):
    """How pages go between this engine and a peer."""

    layout: PageLayout
    """The peer's."""
    routes: tuple[Route, ...]
    """From the owner's pages to the receiver's."""


class PairingRefusedError(Exception):
    """Two engines cannot exchange pages; the message names both values of what differs."""


class StrangerError(PairingRefusedError):
    """The peer has not shown that it knows the cluster secret: it learns nothing."""


def pairing_obstacle(mine: Introduction, peer: Hello | HelloReply) -> str | None:
    """Why ``peer`` and this engine cannot exchange pages, naming both values; None when they can."""
    me = mine.key.instance_id
    if peer.protocol != PROTOCOL_VERSION:
        return f"transfer protocol differs: {peer.instance_id} speaks {peer.protocol}, {me} speaks {PROTOCOL_VERSION}"
    if peer.backend != mine.backend:
        return (
            f"transfer backend differs: {peer.instance_id} uses {peer.backend}, {me} uses {mine.backend}; "
            "set the same cache_transceiver_config.backend and transceiver_runtime on both"
        )
    if peer.layout_digest != mine.layout_digest:
        return (
            f"model or cache layout differs: {peer.instance_id} has {peer.layout_digest[:16]} ({peer.layout_summary}), "
            f"{me} has {mine.layout_digest[:16]} ({mine.layout_summary}); "
            "serve the same checkpoint with the same dtype and tokens_per_block on both"
        )
    return None


class Handshake:
    """Builds and checks this engine's introductions.

    The signature keeps strangers from handing us descriptors of memory and processes to open.
    """

    def __init__(self, mine: Introduction, signer: Signer, agent: bytes) -> None:
        self.mine = mine
        self._signer = signer
        self._agent = agent
        self._layout = msgspec.msgpack.encode(mine.layout)
        self._same = Pairing(mine.layout, plan_routes(mine.layout, mine.layout))
        self._process = msgspec.msgpack.encode(ProcessIdentity.current())

    def hello(self, owner: str, identity: bytes) -> Hello:
        """A signed introduction, which serves nobody but who sends it.

        Args:
            owner: the instance that it is for.
            identity: this engine's on the connection that it goes over.
        """
        return self._sign(
            Hello(
                instance_id=self.mine.key.instance_id,
                epoch=self.mine.key.epoch,
                layout_digest=self.mine.layout_digest,
                layout_summary=self.mine.layout_summary,
                layout=self._layout,
                backend=self.mine.backend,
                agent=self._agent,
                process=self._process,
            ),
            _bond(owner, identity),
        )

    def reply(self, identity: bytes, refused: str | None = None) -> HelloReply:
        """A signed answer, which says nothing to anybody but who has asked; a refusal carries no descriptor.

        Args:
            identity: the receiver's on the connection that it goes over.
            refused: why the two cannot pair, if so.
        """
        return self._sign(
            HelloReply(
                instance_id=self.mine.key.instance_id,
                epoch=self.mine.key.epoch,
                layout_digest=self.mine.layout_digest,
                layout_summary=self.mine.layout_summary,
                layout=self._layout,
                backend=self.mine.backend,
                agent=b"" if refused else self._agent,
                process=self._process,
                refused=refused,
            ),
            _bond(self.mine.key.instance_id, identity),
        )

    def refuse_stranger(self) -> HelloReply:
        """The answer to who does not share the secret: that, and nothing of this engine."""
        return HelloReply(
            instance_id="",
            epoch=0,
            layout_digest="",
            layout_summary="",
            layout=b"",
            backend="",
            refused="the introduction is not signed with the cluster secret, or was made for another connection",
        )

    def pair(self, peer: Hello | HelloReply, side: Side, identity: bytes) -> Pairing:
        """What an introduction, or the answer to ours, comes to.

        Args:
            peer: what has come.
            side: which of the two this engine is.
            identity: the receiver's on the connection that it has come over.

        Raises:
            StrangerError: it is not signed with this cluster's secret for this engine and this connection.
            PairingRefusedError: the two do not fit together.
        """
        owner = self.mine.key.instance_id if isinstance(peer, Hello) else peer.instance_id
        if not self._signer.verifies(_payload(peer) + _bond(owner, identity), peer.auth):
            raise StrangerError(f"{self.mine.key.instance_id} does not share a cluster secret with this peer")
        if (obstacle := pairing_obstacle(self.mine, peer)) is not None:
            raise PairingRefusedError(obstacle)
        if peer.layout == self._layout:
            return self._same
        try:
            mine = self.mine.layout
            theirs = read_layout(peer.layout, mine)
            return Pairing(theirs, plan_routes(mine, theirs) if side == "owner" else plan_routes(theirs, mine))
        except (LayoutError, RouteError) as error:
            raise PairingRefusedError(f"the page layout of {peer.instance_id} does not fit: {error}") from error

    def _sign(self, message: _Signed, bond: bytes) -> _Signed:
        message.auth = self._signer.mac(_payload(message) + bond)
        return message


def _bond(owner: str, identity: bytes) -> bytes:
    """What an introduction is bound to beside what it says: recorded, it opens no other engine, and no other route."""
    return msgspec.msgpack.encode((owner, identity))


def _payload(message: Hello | HelloReply) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(message, auth=b""))
