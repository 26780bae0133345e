"""The receiver's end of the staged protocol: asks one owner for pieces, two at a time, and scatters what has come.

Rooms are the receiver's own: a session that is stopped leaves at once, and a room into which the owner may still write
stays out of use until the owner has answered for it or is gone. Pages are written here, by the thread that moves.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.channels.base import Incoming
from kvmesh.transceiver.planes.base import MoveControl, MoveJob, MoveStoppedError, PlaneError
from kvmesh.transceiver.planes.sockets import shut, tune
from kvmesh.transceiver.staged.admission import REST_S, AdmissionGate
from kvmesh.transceiver.staged.frames import (
    Answer,
    AnswerKind,
    Introduction,
    Request,
    RequestKind,
    encode_introduction,
    introduction_payload,
    read_answer,
    read_greeting,
)
from kvmesh.transceiver.staged.pieces import ItemTable, Piece, PiecePlan, plan_pieces
from kvmesh.transceiver.staged.rooms import WAIT_S
from kvmesh.transceiver.staged.staging import Staging
from kvmesh.transceiver.types import PeerKey

__all__ = ["PieceClient"]

LANDING_S: Final = 1.0
"""How long bytes may be under way after their owner has sent them; what takes longer is given up with its owner."""
_TAGS: Final = 1 << 32


class _Patience(MoveControl):
    """Stops by itself."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end_s = time.monotonic() + seconds

    @property
    def stopped(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._end_s


@dataclass(slots=True, eq=False)
class _Session:
    admitted: bool = False
    refusal: str | None = None


@dataclass(slots=True, eq=False)
class _Asked:
    piece: Piece
    room: int
    incoming: Incoming
    answer: AnswerKind | None = None
    text: str = ""
    abandoned: bool = False


class PieceClient:
    """See the module. Several threads may pull at once.

    Args:
        staging: this engine's.
        peer: the owner.
        address: its piece server.
        descriptor: of its channel.

    Raises:
        PlaneError: it cannot be reached, or refuses.
    """

    def __init__(self, staging: Staging, peer: PeerKey, address: tuple[str, int], descriptor: bytes) -> None:
        self._staging = staging
        self._peer = peer
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        self._asked: dict[int, _Asked] = {}
        self._pulls = 0
        self._lost = ""
        self._leaving = False
        self._released = False
        where = "{}:{}".format(*address)
        try:
            self._stream = socket.create_connection(address, staging.connect_timeout_s)
        except OSError as error:
            raise PlaneError(f"cannot reach the piece server at {where}: {error}") from error
        try:
            self._owner_bytes = self._introduce()
            staging.attachments.acquire(peer, descriptor, "receiver")
        except (OSError, PlaneError) as error:
            self._stream.close()
            raise PlaneError(f"cannot use the piece server at {where}: {error}") from error
        self._stream.settimeout(None)
        self._thread = threading.Thread(target=self._listen, name="kvmesh-piece-answers", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether the connection has ended."""
        return bool(self._lost)

    def pull(self, job: MoveJob, items: ItemTable, gate: AdmissionGate) -> int:
        """Move the pages of ``job``, which has entered ``gate``; see :meth:`DataPlane.move`."""
        plan = plan_pieces(items, min(self._staging.region.nbytes, self._owner_bytes))
        session = _Session()
        with self._changed:
            if self._lost:
                raise PlaneError(self._lost)
            self._sessions[job.session] = session
            self._pulls += 1
        try:
            self._request(job, RequestKind.OPEN, num_items=items.num_items, nbytes=items.nbytes)
            self._wait(lambda: session.admitted or session.refusal is not None, job, gate)
            if session.refusal is not None:
                raise PlaneError(session.refusal)
            self._pull_pieces(job, items, plan, gate)
        finally:
            self._close_session(job)
        return items.nbytes

    def leave(self) -> None:
        """Close the connection, as soon as the owner has answered for every room that it may write into."""
        with self._changed:
            self._leaving = True
            quiet = not self._asked
        if quiet:
            shut(self._stream)

    def close(self) -> None:
        """Close the connection now."""
        shut(self._stream)
        self._thread.join(1.0)

    def _introduce(self) -> int:
        staging, stream = self._staging, self._stream
        tune(stream)
        greeting = read_greeting(stream)
        descriptor = staging.channel.describe()
        mac = staging.signer.mac(introduction_payload(greeting.nonce, staging.key, descriptor))
        stream.sendall(encode_introduction(Introduction(staging.key, descriptor, mac)))
        answer = read_answer(stream)
        if answer.kind is not AnswerKind.ATTACHED:
            raise PlaneError(f"the owner refuses: {answer.text}")
        return greeting.region_bytes

    def _pull_pieces(self, job: MoveJob, items: ItemTable, plan: PiecePlan, gate: AdmissionGate) -> None:
        staging = self._staging
        flight: deque[_Asked] = deque()
        planned = items.pieces(plan.piece_bytes)
        following = next(planned, None)
        try:
            while flight or following is not None:
                while following is not None and len(flight) < plan.in_flight:
                    # Who holds a room does not wait for another one: so every room that is waited for comes free.
                    room = (
                        staging.rooms.try_take(following.nbytes)
                        if flight
                        else staging.rooms.take(following.nbytes, job.control)
                    )
                    if room is None:
                        break
                    flight.append(self._ask(job, following, room))
                    following = next(planned, None)
                asked = flight[0]
                self._wait(lambda asked=asked: asked.answer is not None, job, gate)  # type: ignore[misc]
                if asked.answer is not AnswerKind.SENT:
                    raise PlaneError(asked.text or "the owner has ended the session")
                asked.incoming.wait(job.control)
                job.control.checkpoint()
                segments = items.segments(asked.piece.first, asked.piece.num_items)
                staging.copier.scatter(staging.region.address + asked.room, job.parts, segments, job.sums)
                flight.popleft()
                staging.rooms.give(asked.room)
            job.control.checkpoint()
        finally:
            for asked in flight:
                self._abandon(asked)

    def _ask(self, job: MoveJob, piece: Piece, room: int) -> _Asked:
        staging = self._staging
        tag = next(staging.tags) % (_TAGS - 1) + 1
        try:
            incoming = staging.channel.expect(self._peer, tag, room, piece.nbytes)
        except PlaneError:
            staging.rooms.give(room)
            # What the channel has lost is set up anew with a new connection.
            shut(self._stream)
            raise
        asked = _Asked(piece, room, incoming)
        with self._changed:
            self._asked[tag] = asked
        try:
            self._request(
                job,
                RequestKind.PIECE,
                tag=tag,
                first=piece.first,
                num_items=piece.num_items,
                nbytes=piece.nbytes,
                offset=room,
            )
        except PlaneError:
            self._abandon(asked)
            raise
        return asked

    def _abandon(self, asked: _Asked) -> None:
        """Nobody waits for a piece any more; its room is given back when nothing can write into it."""
        safe = asked.incoming.cancel()
        with self._changed:
            asked.abandoned = True
            answered = asked.answer is not None
            if safe:
                self._forget(asked)
        if safe or (answered and self._has_landed(asked)):
            self._staging.rooms.give(asked.room)

    def _has_landed(self, asked: _Asked) -> bool:
        """Whether nothing writes into the room of an abandoned piece, now that its owner has answered."""
        try:
            asked.incoming.wait(_Patience(LANDING_S))
        except PlaneError:
            return True
        except MoveStoppedError:
            if not asked.incoming.cancel():
                # Then it has to wait until the connection ends.
                with self._changed:
                    self._asked[next(self._staging.tags) % (_TAGS - 1) + 1] = asked
                return False
        return True

    def _forget(self, asked: _Asked) -> None:
        for tag in [tag for tag, one in self._asked.items() if one is asked]:
            del self._asked[tag]

    def _close_session(self, job: MoveJob) -> None:
        with self._changed:
            del self._sessions[job.session]
        try:
            self._request(job, RequestKind.CLOSE)
        except PlaneError:
            # The owner learns of it from the end of the connection.
            shut(self._stream)
        with self._changed:
            self._pulls -= 1
        self._settle()

    def _request(self, job: MoveJob, kind: RequestKind, *, tag: int = 0, **fields: int) -> None:
        request = Request(kind, tag, job.transfer_id, job.session, job.access, **fields)
        with self._writing:
            try:
                self._stream.sendall(request.encode())
            except OSError as error:
                raise PlaneError(f"the connection to {self._peer} was lost: {error}") from error

    def _wait(self, happened: Callable[[], bool], job: MoveJob, gate: AdmissionGate) -> None:
        rest_s = time.monotonic() + REST_S
        resting = False
        with self._changed:
            while not happened():
                if job.control.stopped:
                    raise MoveStoppedError
                if self._lost:
                    raise PlaneError(self._lost)
                self._changed.wait(WAIT_S)
                if not resting and time.monotonic() >= rest_s:
                    resting = True
                    gate.rest(job)
        if resting:
            gate.wake(job)

    # The thread that reads answers.

    def _listen(self) -> None:
        try:
            while True:
                self._take(read_answer(self._stream))
        except OSError as error:
            self._lose(str(error))
        except Exception as error:
            # The border of error isolation: what one owner says ends its own connection only.
            isolated(get_logger("transceiver.staged"), "an owner's answer could not be handled", peer=str(self._peer))
            shut(self._stream)
            self._lose(repr(error))
        self._settle()

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._lost = f"the connection to {self._peer} was lost: {reason}"
            self._changed.notify_all()

    def _take(self, answer: Answer) -> None:
        landing: _Asked | None = None
        with self._changed:
            if answer.tag:
                asked = self._asked.pop(answer.tag, None)
                if asked is not None:
                    asked.answer, asked.text = answer.kind, answer.text
                    landing = asked if asked.abandoned else None
            elif (session := self._sessions.get(answer.number)) is not None:
                if answer.kind is AnswerKind.ADMITTED:
                    session.admitted = True
                else:
                    session.refusal = answer.text
            self._changed.notify_all()
        if landing is not None and self._has_landed(landing):
            self._staging.rooms.give(landing.room)
        with self._changed:
            if self._leaving and not self._asked:
                shut(self._stream)

    def _settle(self) -> None:
        """After the end of the connection and of the last pull: let go of the owner, and of what it has left behind."""
        with self._changed:
            if not self._lost or self._pulls or self._released:
                return
            self._released = True
            left, self._asked = list(self._asked.values()), {}
        self._staging.attachments.release(self._peer)
        for asked in left:
            self._staging.limbo.put(asked.incoming, asked.room, asked.piece.nbytes)
        self._stream.close()
