"""The MPI channel: one message for each piece, over MPICH between engines that each run under their own mpiexec.

MPICH never tells that a peer has died: whoever waits is ended by its :class:`MoveControl`, and what was posted for a
dead peer stays posted until the process ends.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field

import msgspec

from kvmesh.transceiver.channels.base import BackendName, Region, Side
from kvmesh.transceiver.channels.mailbox import Expected, Mailbox, bytes_of, check_span
from kvmesh.transceiver.channels.mpi_library import TAG_MASK
from kvmesh.transceiver.channels.mpi_meeting import Meeting, announce
from kvmesh.transceiver.channels.mpi_thread import Link, MpiThread
from kvmesh.transceiver.channels.written import WrittenByOwner
from kvmesh.transceiver.liveness import ProcessIdentity
from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError, PlaneError
from kvmesh.transceiver.types import PeerKey

__all__ = ["MpiChannel"]


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    token: bytes
    process: ProcessIdentity


@dataclass(slots=True, eq=False)
class _Peer:
    sides: set[Side] = field(default_factory=set)
    outgoing: Link | None = None
    incoming: Link | None = None
    process: WrittenByOwner | None = None
    """Of a peer that is an owner."""


class MpiChannel:
    """See the module.

    Args:
        send: pieces leave from here.
        receive: pieces land here.
        name: of this engine: ``str`` of its :class:`PeerKey`.
        bind_host: where receivers announce themselves; a loopback address keeps MPICH on loopback.
        connect_timeout_s: bound of each step of :meth:`attach`.

    Raises:
        PlaneError: MPI is not installed, does not work here, or this process was not started by mpiexec.
    """

    name: BackendName = "MPI"

    def __init__(self, send: Region, receive: Region, *, name: str, bind_host: str, connect_timeout_s: float) -> None:
        self._name = name
        self._send_region, self._receive_region = send, receive
        self._source_bytes = bytes_of(send)
        self._connect_timeout_s = connect_timeout_s
        self._mailbox = Mailbox()
        self._lock = threading.Lock()
        self._peers: dict[PeerKey, _Peer] = {}
        self._mpi = MpiThread(bind_host, self._mailbox, bytes_of(receive))
        token = secrets.token_bytes(16)
        self._meeting = Meeting(bind_host, token, connect_timeout_s, self._open_port, self._accept)
        self._descriptor = _Descriptor(*self._meeting.address, token, ProcessIdentity.current())

    def describe(self) -> bytes:
        """See :meth:`Channel.describe`."""
        return msgspec.msgpack.encode(self._descriptor)

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> None:
        """See :meth:`Channel.attach`. The owner only lets the receiver in, which makes the connection."""
        with self._lock:
            known = self._peers.setdefault(peer, _Peer())
            known.sides.add(side)
            if side == "owner" or known.incoming is not None:
                return
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=_Descriptor)
            known.process = WrittenByOwner(theirs.process)
            announce(
                (theirs.host, theirs.port),
                theirs.token,
                self._name,
                self._connect_timeout_s,
                lambda port: self._connect(peer, port),
            )
        except (msgspec.MsgspecError, PlaneError) as error:
            with self._lock:
                known.sides.discard(side)
            raise PlaneError(f"MPI cannot reach {peer}: {error}") from error

    def detach(self, peer: PeerKey) -> None:
        """See :meth:`Channel.detach`."""
        with self._lock:
            known = self._peers.pop(peer, None)
        for link in (known.incoming, known.outgoing) if known is not None else ():
            if link is not None:
                self._mpi.part(link, f"{peer} was detached")

    def expect(self, peer: PeerKey, tag: int, offset: int, nbytes: int) -> Expected:
        """See :meth:`Channel.expect`."""
        check_span(self._receive_region, offset, nbytes)
        known = self._attached(peer)
        if known.incoming is None:
            raise PlaneError(f"{peer} is not attached")
        expected = self._mailbox.expect(known.incoming.source, tag & TAG_MASK, offset, nbytes, owner=known.process)
        self._mpi.wake()
        return expected

    def send(
        self,
        peer: PeerKey,
        tag: int,
        src_offset: int,
        dst_offset: int,  # noqa: ARG002 - the receiver has its room by the tag
        nbytes: int,
        control: MoveControl,
    ) -> None:
        """See :meth:`Channel.send`. What was posted is waited for even when it is to stop."""
        check_span(self._send_region, src_offset, nbytes)
        if control.stopped:
            raise MoveStoppedError
        known = self._attached(peer)
        if known.outgoing is None:
            raise PlaneError(f"{peer} is not attached")
        source = self._source_bytes[src_offset : src_offset + nbytes]
        self._mpi.send(known.outgoing, source, tag & TAG_MASK).wait_ended(control)

    def session_opened(self) -> None:
        """Nothing to do: what is expected or sent makes the thread look for progress."""

    def session_closed(self) -> None:
        """See :meth:`session_opened`."""

    def close(self) -> None:
        """See :meth:`Channel.close`."""
        self._meeting.close()
        self._mpi.close()

    def _attached(self, peer: PeerKey) -> _Peer:
        self._mpi.check()
        with self._lock:
            known = self._peers.get(peer)
        if known is None:
            raise PlaneError(f"{peer} is not attached")
        return known

    def _receiver(self, name: str) -> _Peer:
        with self._lock:
            for key, peer in self._peers.items():
                if str(key) == name and "owner" in peer.sides:
                    return peer
        raise PlaneError(f"{name} is not expected here")

    def _open_port(self, name: str) -> str:
        self._receiver(name)
        return self._mpi.open_port()

    def _accept(self, name: str, port: str) -> None:
        peer = self._receiver(name)
        former, peer.outgoing = peer.outgoing, self._mpi.accept(port)
        if former is not None:
            self._mpi.part(former, f"{name} has connected again")

    def _connect(self, peer: PeerKey, port: str) -> None:
        link = self._mpi.connect(port)
        with self._lock:
            known = self._peers.get(peer)
            if known is not None:
                known.incoming = link
        if known is None:
            self._mpi.part(link, f"{peer} was detached")
