"""The interface of a channel: how contiguous bytes get from an owner's send region into a receiver's receive region."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

from kvmesh.transceiver.planes.base import MoveControl, Side
from kvmesh.transceiver.types import PeerKey

__all__ = ["BackendName", "Channel", "Incoming", "Lingering", "Region", "Side"]

BackendName = Literal["BUILTIN", "NIXL", "UCX", "MOONCAKE", "MPI"]


class Region(NamedTuple):
    """Staging memory of this engine, which a channel registers once."""

    address: int
    nbytes: int
    fd: int | None
    """The memfd behind it, mapped from its start; None: memory that no other process can map."""


class Incoming(Protocol):
    """Bytes that a receiver expects. Ends with one of :meth:`wait` and :meth:`cancel`."""

    def wait(self, control: MoveControl) -> None:
        """Return when the bytes are in the region; called after the owner has said that it sent them.

        Raises:
            PlaneError: they cannot arrive any more.
            MoveStoppedError: ``control`` was stopped; :meth:`cancel` must follow.
        """

    def cancel(self) -> bool:
        """Give up.

        Returns:
            True when nothing writes into the room any more; else the room stays out of use until the peer is
            detached, or until the owner says that it has ended.
        """


@runtime_checkable
class Lingering(Protocol):
    """What else an :class:`Incoming` has where not even detaching the owner keeps it from writing."""

    @property
    def owner_is_elsewhere(self) -> bool:
        """Whether its end cannot be seen from here: then only time tells."""

    def owner_is_gone(self) -> bool:
        """Whether the owner has ended, so that it writes no more."""


class Channel(Protocol):
    """Moves contiguous bytes from an owner's send region into a receiver's receive region.

    An engine may be owner and receiver of the same peer at once. Methods may be called from different threads.
    """

    @property
    def name(self) -> BackendName:
        """The backend's name."""

    def describe(self) -> bytes:
        """What a peer needs to attach, sent in the handshake."""

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> None:
        """Make the peer reachable; called at both ends, at the owner's first. Idempotent for each side.

        Args:
            peer: the other engine.
            descriptor: what its channel described.
            side: which side this engine is for the peer.

        Raises:
            PlaneError: it cannot be reached. Connection set-up is all that this blocks for.
        """

    def detach(self, peer: PeerKey) -> None:
        """Forget the peer, on both sides; unknown peers are ignored. No send to it may be running."""

    def expect(self, peer: PeerKey, tag: int, offset: int, nbytes: int) -> Incoming:
        """Receiver, before it asks the owner: bytes with this tag will land at ``offset`` of the receive region.

        Args:
            peer: the owner.
            tag: 32 bits, unique for the (owner, receiver) pair while in use.
            offset: where in the receive region, in bytes.
            nbytes: how many.

        Raises:
            PlaneError: the peer is not attached or cannot send.
        """

    def send(
        self, peer: PeerKey, tag: int, src_offset: int, dst_offset: int, nbytes: int, control: MoveControl
    ) -> None:
        """Owner: bytes of the send region go to the peer's receive region; blocks until the source may be overwritten.

        Args:
            peer: the receiver.
            tag: the receiver's, see :meth:`expect`.
            src_offset: where in this engine's send region, in bytes.
            dst_offset: where in the peer's receive region, in bytes.
            nbytes: how many.
            control: stops the send.

        Raises:
            PlaneError: the bytes did not leave; nothing reads the source any more.
            MoveStoppedError: the send was stopped; nothing reads the source any more.
        """

    def session_opened(self) -> None:
        """A session with a peer is open: the channel may have to make progress."""

    def session_closed(self) -> None:
        """Matches :meth:`session_opened`; without open sessions a channel takes less than 2 % of a core."""

    def close(self) -> None:
        """Release everything; idempotent. Blocks for a bounded time."""
