"""The NIXL channel: one one-sided write of one contiguous run for each piece.

The two regions are pools of one page each to the NIXL plane, which knows how to treat the library; a piece is a part
of that page.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvmesh.transceiver.channels.base import BackendName, Incoming, Region, Side
from kvmesh.transceiver.channels.mailbox import check_span
from kvmesh.transceiver.channels.written import WrittenByOwner
from kvmesh.transceiver.liveness import ProcessIdentity
from kvmesh.transceiver.planes.base import MoveControl, MoveJob, Part, PlaneError
from kvmesh.transceiver.planes.nixl import NixlPlane
from kvmesh.transceiver.types import PeerKey, PoolMemory

__all__ = ["NixlChannel", "create"]

_SEND, _RECEIVE = 0, 1
_PAGE = np.zeros(1, dtype=np.int32)


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    process: ProcessIdentity
    memory: bytes
    """As the NIXL plane describes it."""


class NixlChannel:
    """See the module.

    Args:
        send: this engine's send region.
        receive: its receive region.
        name: of this engine, unique in the mesh.
        bind_host: where it listens; a loopback address keeps UCX on loopback.
        connect_timeout_s: bound of connection set-up.

    Raises:
        PlaneError: NIXL is not installed, or cannot use this memory.
    """

    name: BackendName = "NIXL"

    def __init__(self, send: Region, receive: Region, *, name: str, bind_host: str, connect_timeout_s: float) -> None:
        self._send, self._receive = send, receive
        self._plane = NixlPlane(
            [_pool(send), _pool(receive)], name=name, bind_host=bind_host, connect_timeout_s=connect_timeout_s
        )
        self._owners: dict[PeerKey, ProcessIdentity] = {}

    def describe(self) -> bytes:
        """See :meth:`Channel.describe`."""
        return msgspec.msgpack.encode(_Descriptor(ProcessIdentity.current(), self._plane.describe()))

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> None:
        """See :meth:`Channel.attach`. The owner's ends with a real write; a receiver waits to be written to."""
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise PlaneError(f"the peer's description of its memory cannot be read: {error}") from error
        if side == "owner":
            self._plane.attach(peer, theirs.memory, "owner")
        else:
            self._owners[peer] = theirs.process

    def detach(self, peer: PeerKey) -> None:
        """See :meth:`Channel.detach`."""
        self._owners.pop(peer, None)
        self._plane.detach(peer, "owner")

    def expect(self, peer: PeerKey, tag: int, offset: int, nbytes: int) -> Incoming:  # noqa: ARG002
        """See :meth:`Channel.expect`. The owner finds the room by its place."""
        check_span(self._receive, offset, nbytes)
        if (owner := self._owners.get(peer)) is None:
            raise PlaneError(f"{peer} is not attached")
        return WrittenByOwner(owner)

    def send(
        self,
        peer: PeerKey,
        tag: int,  # noqa: ARG002 - a one-sided write is known by its place
        src_offset: int,
        dst_offset: int,
        nbytes: int,
        control: MoveControl,
    ) -> None:
        """See :meth:`Channel.send`. A write that was posted is waited for unless the receiver is gone."""
        check_span(self._send, src_offset, nbytes)
        run = Part(_SEND, _PAGE, _RECEIVE, _PAGE, nbytes, src_offset, dst_offset)
        self._plane.move(peer, MoveJob(transfer_id=0, session=0, parts=[run], control=control))

    def session_opened(self) -> None:
        """See :meth:`Channel.session_opened`."""
        self._plane.session_opened()

    def session_closed(self) -> None:
        """See :meth:`Channel.session_closed`."""
        self._plane.session_closed()

    def close(self) -> None:
        """See :meth:`Channel.close`."""
        self._plane.close()


def create(send: Region, receive: Region, *, name: str, bind_host: str, connect_timeout_s: float) -> NixlChannel:
    """The channel of this backend; see :class:`NixlChannel`."""
    return NixlChannel(send, receive, name=name, bind_host=bind_host, connect_timeout_s=connect_timeout_s)


def _pool(region: Region) -> PoolMemory:
    return PoolMemory(address=region.address, nbytes=region.nbytes, num_pages=1, page_bytes=region.nbytes, fd=region.fd)
