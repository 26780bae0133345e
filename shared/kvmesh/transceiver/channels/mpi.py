"""The MPI channel: one message for each piece, over MPICH between engines that each run under their own mpiexec.

One thread makes all calls to MPI. It polls only while a piece is on its way, less often the longer nothing happens, and
looks ten times a second for messages that nobody waits for. MPICH never tells that a peer has died: whoever waits is
ended by its :class:`MoveControl`, and what was posted for a dead peer stays posted until the process ends.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from kvmesh.telemetry import get_logger
from kvmesh.transceiver.channels.base import BackendName, Region, Side
from kvmesh.transceiver.channels.mailbox import Expected, Mailbox, Operation, bytes_of, check_span
from kvmesh.transceiver.channels.mpi_library import TAG_MASK, MpiError, connect_bounded, load_mpi
from kvmesh.transceiver.channels.mpi_meeting import Meeting, announce
from kvmesh.transceiver.channels.written import WrittenByOwner
from kvmesh.transceiver.liveness import ProcessIdentity
from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError, PlaneError
from kvmesh.transceiver.types import PeerKey

__all__ = ["MpiChannel", "create"]

START_S: Final = 60.0
ACCEPT_S: Final = 3
"""Other pieces wait while a connection is made: milliseconds, or this long when the peer dies in the middle."""
MOVING_S: Final = ((0.003, 0.0), (0.030, 50e-6), (float("inf"), 0.001))
"""While something is posted. Until so long after the last progress: the pause between two looks, each of which moves
some 100 KiB of a large message.
"""
EXPECTING_S: Final = ((0.002, 50e-6), (0.030, 200e-6), (float("inf"), 0.001))
"""The same while something is expected that has not come."""
IDLE_S: Final = 0.1
DRAIN_S: Final = 0.25
"""For receives that have begun to end, when their peer is detached."""
CLOSE_S: Final = 5.0

_Result = TypeVar("_Result")


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    token: bytes
    process: ProcessIdentity


@dataclass(slots=True, eq=False)
class _Link:
    """One direction of a peer: its intercommunicator, in which the peer is rank 0."""

    communicator: Any
    source: int
    """The peer's number in the mailbox."""


@dataclass(slots=True, eq=False)
class _Peer:
    sides: set[Side] = field(default_factory=set)
    outgoing: _Link | None = None
    incoming: _Link | None = None
    process: WrittenByOwner | None = None
    """Of a peer that is an owner."""


@dataclass(slots=True, eq=False)
class _Posted:
    request: Any
    operation: Operation
    link: _Link
    memory: Any
    """Kept alive while MPI may touch it."""
    receives: bool


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
        self._log = get_logger("transceiver.mpi")
        self._name = name
        self._send_region, self._receive_region = send, receive
        self._source_bytes, self._room_bytes = bytes_of(send), bytes_of(receive)
        self._connect_timeout_s = connect_timeout_s
        self._mailbox = Mailbox()
        self._peers: dict[PeerKey, _Peer] = {}
        self._posted: list[_Posted] = []
        self._left: list[_Posted] = []
        """Posted for peers that were detached; of those that have died, MPI never says that it has ended."""
        self._sources = 0
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._wanted = threading.Condition()
        self._closed = False
        self._broken: str | None = None
        self._mpi: Any = None
        started: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(bind_host, started), name="kvmesh-mpi", daemon=True)
        self._thread.start()
        try:
            self._mpi = started.result(START_S)
        except TimeoutError:
            raise PlaneError(f"MPI did not start within {START_S:g} s") from None
        token = secrets.token_bytes(16)
        self._meeting = Meeting(bind_host, token, connect_timeout_s, self._open_port, self._accept)
        self._descriptor = _Descriptor(*self._meeting.address, token, ProcessIdentity.current())

    def describe(self) -> bytes:
        """See :meth:`Channel.describe`."""
        return msgspec.msgpack.encode(self._descriptor)

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> None:
        """See :meth:`Channel.attach`. The owner only lets the receiver in, which makes the connection."""
        with self._wanted:
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
            with self._wanted:
                known.sides.discard(side)
            raise PlaneError(f"MPI cannot reach {peer}: {error}") from error

    def detach(self, peer: PeerKey) -> None:
        """See :meth:`Channel.detach`."""
        with self._wanted:
            known = self._peers.pop(peer, None)
        if known is None:
            return
        for link in (known.incoming, known.outgoing):
            if link is not None and not self._closed:
                self._do(lambda link=link: self._part(link, f"{peer} was detached"))  # type: ignore[misc]

    def expect(self, peer: PeerKey, tag: int, offset: int, nbytes: int) -> Expected:
        """See :meth:`Channel.expect`."""
        check_span(self._receive_region, offset, nbytes)
        link = self._link(peer, "incoming")
        known = self._peers.get(peer)
        owner = known.process if known is not None else None
        expected = self._mailbox.expect(link.source, tag & TAG_MASK, offset, nbytes, owner=owner)
        with self._wanted:
            self._wanted.notify()
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
        """See :meth:`Channel.send`."""
        check_span(self._send_region, src_offset, nbytes)
        if control.stopped:
            raise MoveStoppedError
        link = self._link(peer, "outgoing")
        operation = Operation()
        memory = self._source_bytes[src_offset : src_offset + nbytes]

        def post() -> None:
            try:
                request = link.communicator.Isend([memory, self._mpi.BYTE], 0, tag & TAG_MASK)
            except self._mpi.Exception as error:
                operation.settle(f"sending to {peer} failed: {error}")
            else:
                self._posted.append(_Posted(request, operation, link, memory, receives=False))

        self._ask(post)
        operation.wait_ended(control)

    def session_opened(self) -> None:
        """Nothing to do: what is expected or sent makes the thread look for progress."""

    def session_closed(self) -> None:
        """See :meth:`session_opened`."""

    def close(self) -> None:
        """See :meth:`Channel.close`. MPI itself ends with the process."""
        with self._wanted:
            if self._closed:
                return
            self._closed = True
            self._wanted.notify()
        self._meeting.close()
        self._thread.join(CLOSE_S)

    # What follows up to the next comment runs on the threads of callers and of the meeting.

    def _link(self, peer: PeerKey, which: str) -> _Link:
        if self._closed or self._broken is not None:
            raise PlaneError(self._broken or "the MPI channel is closed")
        known = self._peers.get(peer)
        link: _Link | None = getattr(known, which, None)
        if link is None:
            raise PlaneError(f"{peer} is not attached")
        return link

    def _ask(self, call: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        with self._wanted:
            if self._closed or self._broken is not None:
                raise PlaneError(self._broken or "the MPI channel is closed")
            self._calls.append((call, future))
            self._wanted.notify()
        return future

    def _do(self, call: Callable[[], _Result]) -> _Result:
        try:
            return self._ask(call).result(self._connect_timeout_s + 2 * ACCEPT_S + CLOSE_S)
        except MpiError as error:
            raise PlaneError(str(error)) from error
        except TimeoutError:
            raise PlaneError("MPI does not answer") from None

    def _peer_named(self, name: str) -> _Peer:
        with self._wanted:
            for key, peer in self._peers.items():
                if str(key) == name and "owner" in peer.sides:
                    return peer
        raise PlaneError(f"{name} is not expected here")

    def _open_port(self, name: str) -> str:
        self._peer_named(name)
        port: str = self._do(lambda: self._mpi.Open_port())
        return port

    def _accept(self, name: str, port: str) -> None:
        peer = self._peer_named(name)

        def accept() -> None:
            former = peer.outgoing
            peer.outgoing = self._meet(lambda info: self._mpi.COMM_SELF.Accept(port, info))
            # Not after a failure: its tag would be given to another port, and a late peer would write into its call.
            self._mpi.Close_port(port)
            if former is not None:
                self._part(former, f"{name} has connected again")

        self._do(accept)

    def _connect(self, peer: PeerKey, port: str) -> None:
        def connect() -> None:
            link = self._meet(lambda info: self._mpi.COMM_SELF.Connect(port, info))
            if (known := self._peers.get(peer)) is not None:
                known.incoming = link

        self._do(connect)

    # From here on everything runs on the MPI thread.

    def _run(self, bind_host: str, started: Future[Any]) -> None:
        try:
            self._mpi = load_mpi(bind_host)
        except PlaneError as error:
            started.set_exception(error)
            return
        started.set_result(self._mpi)
        last_progress_s = time.monotonic()
        while True:
            with self._wanted:
                pause_s = self._pause(time.monotonic() - last_progress_s)
                if pause_s != 0 and not self._calls and not self._closed:
                    self._wanted.wait(pause_s)
                calls, self._calls = self._calls, []
                if self._closed:
                    break
            for call, future in calls:
                self._answer(call, future)
            if self._broken is not None:
                break
            if self._turn() or calls:
                last_progress_s = time.monotonic()
        self._end(calls, self._broken or "the MPI channel is closed")

    def _pause(self, quiet_s: float) -> float | None:
        if self._posted or self._mailbox.expecting:
            steps = MOVING_S if self._posted else EXPECTING_S
            return next(pause_s for until_s, pause_s in steps if quiet_s < until_s)
        return IDLE_S if self._peers else None

    def _answer(self, call: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(call())
        except TimeoutError:
            self._broken = "MPICH hangs; transfers over MPI need this server to be restarted"
            self._log.error(self._broken)
            future.set_exception(PlaneError(self._broken))
        except (self._mpi.Exception, MpiError, PlaneError) as error:
            future.set_exception(PlaneError(str(error)))

    def _turn(self) -> bool:
        """Take what has arrived and settle what has ended; returns whether there was any."""
        arrived = False
        with self._wanted:
            links = [peer.incoming for peer in self._peers.values() if peer.incoming is not None]
        for link in links:
            while self._take(link):
                arrived = True
        self._left = [one for one in self._left if not self._ended(one)]
        if not self._posted:
            return arrived
        before = len(self._posted)
        self._posted = [one for one in self._posted if not self._ended(one)]
        return arrived or len(self._posted) < before

    def _take(self, link: _Link) -> bool:
        status = self._mpi.Status()
        message = link.communicator.Improbe(0, self._mpi.ANY_TAG, status)
        if message is None:
            return False
        nbytes = status.Get_count(self._mpi.BYTE)
        expected = self._mailbox.claim(link.source, status.tag, nbytes)
        if expected is None:
            memory = np.empty(nbytes, dtype=np.uint8)
        else:
            memory = self._room_bytes[expected.offset : expected.offset + nbytes]
        request = message.Irecv([memory, self._mpi.BYTE])
        self._posted.append(_Posted(request, expected or Operation(), link, memory, receives=True))
        return True

    def _ended(self, one: _Posted) -> bool:
        try:
            if not one.request.Test():
                return False
        except self._mpi.Exception as error:
            one.operation.settle(f"MPI: {error}")
        else:
            one.operation.settle()
        return True

    def _meet(self, call: Callable[[Any], Any]) -> _Link:
        communicator = connect_bounded(self._mpi, call, ACCEPT_S)
        self._sources += 1
        return _Link(communicator, self._sources)

    def _part(self, link: _Link, reason: str) -> None:
        self._mailbox.fail(link.source, reason)
        deadline_s = time.monotonic() + DRAIN_S
        while any(one.receives and one.link is link for one in self._posted) and time.monotonic() < deadline_s:
            self._posted = [one for one in self._posted if not self._ended(one)]
            time.sleep(MOVING_S[-1][1])
        for one in self._posted:
            if one.link is link:
                self._left.append(one)
                if not one.receives:  # Into the room of a receive that has begun, its sender may yet write.
                    one.operation.settle(reason)
        self._posted = [one for one in self._posted if one.link is not link]
        # Local in MPICH, also with requests under way; Disconnect would wait for the peer.
        link.communicator.Free()

    def _end(self, calls: list[tuple[Callable[[], Any], Future[Any]]], reason: str) -> None:
        with self._wanted:
            calls, self._calls = [*calls, *self._calls], []
            peers = list(self._peers.values())
        for _, future in calls:
            if not future.done():
                future.set_exception(PlaneError(reason))
        for peer in peers:
            if peer.incoming is not None:
                self._mailbox.fail(peer.incoming.source, reason)
        for one in self._posted:
            one.operation.settle(reason)


def create(send: Region, receive: Region, *, name: str, bind_host: str, connect_timeout_s: float) -> MpiChannel:
    """The channel of this backend; see :class:`MpiChannel`."""
    return MpiChannel(send, receive, name=name, bind_host=bind_host, connect_timeout_s=connect_timeout_s)
