"""The owner's end of the staged protocol: gathers the pieces that receivers ask for, and sends them.

One connection for each receiver, with two threads: one reads its requests, so that its end, or that of a session, is
noticed at once; the other gathers and sends one piece after another. Sessions are admitted in the order in which they
open, as many as the send region can hold. A room is held while a piece is gathered and sent, never for a receiver.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvmesh.net.address import listen
from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.channels.base import Channel, Region
from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError, Part, PlaneError
from kvmesh.transceiver.planes.sockets import accept, shut, tune
from kvmesh.transceiver.planes.strangers import MAX_STRANGERS, Strangers
from kvmesh.transceiver.staged.admission import REST_S, AdmissionQueue
from kvmesh.transceiver.staged.attachments import Attachments
from kvmesh.transceiver.staged.connection import ReceiverConnection, SessionKey
from kvmesh.transceiver.staged.copying import PageCopier, item_table
from kvmesh.transceiver.staged.frames import (
    KEY_BYTES,
    NONCE_BYTES,
    AnswerKind,
    Greeting,
    Request,
    RequestKind,
    encode_greeting,
    introduction_payload,
    read_introduction,
    read_request,
)
from kvmesh.transceiver.staged.pieces import ItemTable
from kvmesh.transceiver.staged.rooms import Rooms
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.types import PeerKey

__all__ = ["PieceServer"]

MAX_CONNECTIONS: Final = 256
HELLO_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 1.0
LOOK_S: Final = 5.0
"""Longest sleep of a connection's reader while no session is open."""


@dataclass(slots=True, eq=False)
class _Grant:
    key: bytes
    parts: Sequence[Part]
    items: ItemTable
    control: MoveControl = field(default_factory=MoveControl)
    connection: ReceiverConnection | None = None


class PieceServer:
    """See the module.

    Args:
        copier: reads this engine's pages.
        region: the send region.
        rooms: of the send region.
        channel: moves the bytes.
        attachments: to the receivers.
        signer: checks introductions.
        bind_host: address to listen on, at an ephemeral port.
        stall_s: a receiver that does not take a piece for so long is given up.
    """

    def __init__(
        self,
        copier: PageCopier,
        region: Region,
        rooms: Rooms,
        channel: Channel,
        attachments: Attachments,
        *,
        signer: Signer,
        bind_host: str,
        stall_s: float,
    ) -> None:
        self._copier = copier
        self._region = region
        self._rooms = rooms
        self._channel = channel
        self._attachments = attachments
        self._signer = signer
        self._stall_s = stall_s
        self._log = get_logger("transceiver.staged")
        self._lock = threading.Lock()
        self._grants: dict[SessionKey, _Grant] = {}
        self._admission = AdmissionQueue(region.nbytes)
        self._connections: dict[ReceiverConnection, threading.Thread] = {}
        self._closed = False
        self._strangers = Strangers("kvmesh-piece-requests")
        self._listener = listen(bind_host, backlog=MAX_CONNECTIONS)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="kvmesh-piece-server", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Sessions that wait for their turn."""
        return self._admission.waiting

    def grant(self, transfer_id: int, session: int, parts: Sequence[Part]) -> bytes:
        """Let one session read ``parts``; returns the key that its receiver must present."""
        key = secrets.token_bytes(KEY_BYTES)
        with self._lock:
            self._grants[transfer_id, session] = _Grant(key, parts, item_table(parts))
        return key

    def revoke(self, transfer_id: int, session: int) -> None:
        """Serve a session no more; unknown ones are ignored."""
        self._end((transfer_id, session), forget=True)

    def drop(self, peer: PeerKey) -> None:
        """Close the connections of a receiver that is gone."""
        with self._lock:
            gone = [connection for connection in self._connections if connection.peer == peer]
        for connection in gone:
            self._give_up(connection)

    def close(self) -> None:
        """Close the listener and every connection; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = dict(self._connections)
        # Only a shutdown wakes a thread that is blocked in accept.
        shut(self._listener)
        self._listener.close()
        for connection in connections:
            self._give_up(connection)
        # What still sends ends before the channel does, unless it is stuck in a library.
        end_s = time.monotonic() + CLOSE_S
        for thread in (self._thread, *connections.values()):
            thread.join(max(0.0, end_s - time.monotonic()))

    # Threads.

    def _accept(self) -> None:
        while (stream := accept(self._listener)) is not None:
            connection = ReceiverConnection(stream)
            with self._lock:
                refused = self._closed or len(self._connections) >= MAX_CONNECTIONS + MAX_STRANGERS
                if not refused and (thread := self._strangers.meet(stream, partial(self._serve, connection))):
                    self._connections[connection] = thread
            if refused:
                stream.close()

    def _serve(self, connection: ReceiverConnection, _stream: socket.socket) -> None:
        sending = threading.Thread(target=self._send_all, args=(connection,), name="kvmesh-piece-send", daemon=True)
        peer: PeerKey | None = None
        try:
            peer = self._introduce(connection)
            if peer is not None:
                sending.start()
                while True:
                    self._handle(connection, self._next_request(connection))
        except OSError as error:
            self._log.debug("a receiver has left", peer=str(peer or "nobody"), reason=str(error))
        except Exception:
            # The border of error isolation: what one receiver makes go wrong ends its own connection only.
            isolated(self._log, "a receiver's connection failed", peer=str(peer or "nobody"))
        finally:
            self._give_up(connection)
            connection.requests.put(None)
            if sending.ident is not None:
                sending.join()
            with self._lock:
                self._connections.pop(connection, None)
            connection.stream.close()
            if peer is not None:
                self._attachments.release(peer)

    def _introduce(self, connection: ReceiverConnection) -> PeerKey | None:
        stream = connection.stream
        by_s = time.monotonic() + HELLO_TIMEOUT_S
        stream.settimeout(HELLO_TIMEOUT_S)
        tune(stream)
        nonce = secrets.token_bytes(NONCE_BYTES)
        stream.sendall(encode_greeting(Greeting(nonce, self._region.nbytes)))
        peer, descriptor, mac = read_introduction(stream, by_s)
        if not self._signer.verifies(introduction_payload(nonce, peer, descriptor), mac):
            self._log.warning("a receiver's introduction is not signed with this cluster's secret", peer=str(peer))
            connection.answer(AnswerKind.REFUSED, text="the introduction is not signed with the cluster secret")
            return None
        self._strangers.know(stream)
        stream.settimeout(HELLO_TIMEOUT_S)
        try:
            self._attachments.acquire(peer, descriptor, "owner")
        except PlaneError as error:
            self._log.warning("cannot reach a receiver's staging buffer", peer=str(peer), reason=str(error))
            connection.answer(AnswerKind.REFUSED, text=str(error))
            return None
        with self._lock:
            connection.peer = peer
        connection.answer(AnswerKind.ATTACHED)
        return peer

    def _next_request(self, connection: ReceiverConnection) -> Request:
        """Wait for a request. Sessions of a receiver that is silent rest; one that does not take a piece is given up.

        Raises:
            OSError: the connection has ended, or was given up.
        """
        while True:
            connection.stream.settimeout(REST_S if connection.sessions else LOOK_S)
            try:
                # A peek: a frame that comes in two parts must not be torn by the timeout.
                if not connection.stream.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError("the receiver closed the connection")
                break
            except TimeoutError:
                self._look(connection)
        connection.stream.settimeout(HELLO_TIMEOUT_S)
        return read_request(connection.stream)

    def _look(self, connection: ReceiverConnection) -> None:
        """Nothing was heard for a while."""
        sending_s = connection.sending_s
        taken_s = 0.0 if sending_s is None else time.monotonic() - sending_s
        if taken_s > self._stall_s:
            raise ConnectionAbortedError(f"it does not take a piece within {self._stall_s:g} s")
        if taken_s < REST_S and (connection.working or not connection.requests.empty()):
            return
        with self._lock:
            for session in connection.sessions:
                self._admission.rest(session)
            self._admit()

    def _handle(self, connection: ReceiverConnection, request: Request) -> None:
        if request.kind is RequestKind.OPEN:
            self._open(connection, request)
        elif request.kind is RequestKind.PIECE:
            connection.requests.put(request)
        else:
            self._end((request.transfer_id, request.session), connection=connection)

    def _open(self, connection: ReceiverConnection, request: Request) -> None:
        session = request.transfer_id, request.session
        with self._lock:
            grant = self._grants.get(session)
            if grant is None or grant.connection is not None or not secrets.compare_digest(grant.key, request.key):
                refusal = "the owner refused the session"
            elif (grant.items.num_items, grant.items.nbytes) != (request.num_items, request.nbytes):
                refusal = (
                    f"the owner granted {grant.items.num_items} items of {grant.items.nbytes} bytes, "
                    f"{request.num_items} of {request.nbytes} bytes are wanted"
                )
            else:
                refusal = ""
                grant.connection = connection
                connection.sessions.add(session)
                self._channel.session_opened()
                self._admission.ask(session, grant.items.nbytes)
                self._admit()
        if refusal:
            connection.answer(AnswerKind.REFUSED, number=request.session, text=refusal)

    def _end(self, session: SessionKey, *, connection: ReceiverConnection | None = None, forget: bool = False) -> None:
        """A session asks for nothing more; ``forget``: and never will again."""
        with self._lock:
            grant = self._grants.get(session)
            if grant is None or (connection is not None and grant.connection is not connection):
                return
            grant.control.stop()
            if forget:
                del self._grants[session]
            if grant.connection is not None and session in grant.connection.sessions:
                grant.connection.sessions.discard(session)
                self._channel.session_closed()
            self._admission.leave(session)
            self._admit()

    def _admit(self) -> None:
        for session in self._admission.admit():
            grant = self._grants[session]  # type: ignore[index]
            assert grant.connection is not None
            grant.connection.answer(AnswerKind.ADMITTED, number=session[1])  # type: ignore[index]

    def _give_up(self, connection: ReceiverConnection) -> None:
        """A receiver is gone: nothing is sent to it any more, and its places go to others."""
        shut(connection.stream)
        with self._lock:
            sessions = list(connection.sessions)
            for session in sessions:
                if (grant := self._grants.get(session)) is not None:
                    grant.control.abandon()
        for session in sessions:
            self._end(session)

    def _send_all(self, connection: ReceiverConnection) -> None:
        while (request := connection.requests.get()) is not None:
            kind, text = AnswerKind.SENT, ""
            connection.working = True
            try:
                self._send_piece(connection, request)
            except MoveStoppedError:
                kind = AnswerKind.ENDED
            except (PlaneError, FaultInjectedError, ValueError) as error:
                kind, text = AnswerKind.REFUSED, str(error)
            except Exception:
                # The border of error isolation: a piece has failed, and the transfer that it belongs to.
                isolated(self._log, "a piece could not be sent", peer=str(connection.peer))
                kind, text = AnswerKind.REFUSED, "the owner could not send a piece; its log says why"
            connection.working = False
            connection.answer(kind, tag=request.tag, number=request.session, text=text)

    def _send_piece(self, connection: ReceiverConnection, request: Request) -> None:
        session = request.transfer_id, request.session
        with self._lock:
            grant = self._grants.get(session)
            if grant is None or grant.connection is not connection or grant.control.stopped:
                raise MoveStoppedError
            if not self._admission.is_admitted(session):
                raise PlaneError("a piece was asked for before the session was admitted")
            self._admission.wake(session)
        assert connection.peer is not None
        segments = grant.items.segments(request.first, request.num_items)
        if grant.items.bytes_of(segments) != request.nbytes:
            raise PlaneError(f"the piece has {grant.items.bytes_of(segments)} bytes, {request.nbytes} are wanted")
        room = self._rooms.take(request.nbytes, grant.control)
        try:
            fault_point("transceiver.during_send")
            self._copier.gather(self._region.address + room, grant.parts, segments)
            if grant.control.stopped:
                raise MoveStoppedError  # What was gathered since may be another request's.
            connection.sending_s = time.monotonic()
            self._channel.send(connection.peer, request.tag, room, request.offset, request.nbytes, grant.control)
        finally:
            connection.sending_s = None
            self._rooms.give(room)
