"""The page owner's slow work, on one worker for each receiver: attaching, checksums, writing (push planes)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.protocol.transfer import Aux, TransferResult
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.bounce import run_job
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.parts import encode_tiers
from kvmesh.transceiver.peers import Receivers
from kvmesh.transceiver.planes.base import MoveJob, MoveStoppedError, PlaneError
from kvmesh.transceiver.runs import encode_pages
from kvmesh.transceiver.sessions import LastWords, Piece, SendSession
from kvmesh.transceiver.states import SendEvent, SessionState, next_send_status
from kvmesh.transceiver.table import SessionTable
from kvmesh.transceiver.types import PeerKey
from kvmesh.transceiver.workers import WorkerBusyError

__all__ = ["Serving"]


class Serving:
    """See the module. Shares the sender's table and its lock."""

    def __init__(self, engine: LocalEngine, table: SessionTable[SendSession], receivers: Receivers) -> None:
        self._engine = engine
        self._table = table
        self._receivers = receivers
        self._log = get_logger("transceiver.serving")

    def pair(self, route: bytes, peer: PeerKey, descriptor: bytes) -> None:
        """Answer a receiver's introduction, after its memory has become reachable where this side must reach it."""
        if self._engine.plane.attaches == "receiver":
            self._engine.send(route, self._engine.handshake.reply(route))
        else:
            self._submit(peer, lambda: self._attach(route, peer, descriptor))

    def start(self, session: SendSession, peer: PeerKey, job: MoveJob, piece: Piece) -> None:
        """Serve a session that was asked for; pieces of one session go out in order."""
        self._enter(session)
        plane = self._engine.plane
        if plane.direction == "pull" and plane.is_quick(peer, session.num_bytes):
            self._serve(session, peer, job, piece, quick=True)
        elif not self._submit(peer, lambda: self._serve(session, peer, job, piece)):
            self._fail(session, "the page owner has too many transfers to this receiver waiting")

    def say_finished(self, session: SendSession, aux: Aux) -> None:
        """The answer ended with its first token: tell the receiver, who gets no pages (under the lock)."""
        self._apply(session, SendEvent.STARTED)
        self._apply(session, SendEvent.WRITTEN)
        self.answer(session, "done", aux=aux)

    def give_up(self, session: SendSession) -> None:
        """End a promised session that was cancelled while nothing of it was being sent (under the lock)."""
        self._tell_end(session, "cancelled", "the transfer was cancelled")
        self._apply(session, SendEvent.CANCEL)
        self._apply(session, SendEvent.FAIL, "cancelled")

    def forget(self, peer: PeerKey) -> None:
        """A receiver is gone: let go of its memory when its worker has stopped."""
        self._engine.workers.retire(_worker(peer), lambda: self._engine.plane.detach(peer, "owner"))

    def answer(
        self, session: SendSession, status: Literal["ready", "done", "checksums", "failed", "cancelled"], **fields: Any
    ) -> None:
        """Tell the receiver of a session how it stands; fields are those of ``TransferResult``."""
        route = self._receivers.route(session.peer)
        if route is not None:
            self._engine.send(
                route,
                TransferResult(transfer_id=session.transfer_id, session=session.session, status=status, **fields),
            )

    def _attach(self, route: bytes, peer: PeerKey, descriptor: bytes) -> None:
        try:
            way = self._engine.plane.attach(peer, descriptor, "owner")
        except PlaneError as error:
            self._log.warning("cannot reach a receiver's memory", peer=str(peer), reason=str(error))
            self._engine.send(route, self._engine.handshake.reply(route, refused=str(error)))
            return
        except Exception:
            # The border of error isolation, as below.
            isolated(self._log, "cannot reach a receiver's memory", peer=str(peer))
            refusal = f"{self._engine.key} cannot reach the memory of {peer}; its log says why"
            self._engine.send(route, self._engine.handshake.reply(route, refused=refusal))
            return
        self._log.info("paired", peer=str(peer), plane=way)
        self._engine.send(route, self._engine.handshake.reply(route))

    def fail(self, session: SendSession, reason: str) -> None:
        """End a promised session of which a piece cannot be sent (under the lock)."""
        session.control.stop()
        self._tell_end(session, "failed", reason)
        status = next_send_status(session.status, SendEvent.FAIL)
        self._table.fail(session, status, 409, "pages_mismatch", reason)

    def _serve(self, session: SendSession, peer: PeerKey, job: MoveJob, piece: Piece, *, quick: bool = False) -> None:
        plane, checksums = self._engine.plane, self._engine.checksums
        checked = checksums is not None
        try:
            fault_point("transceiver.before_send")
            bounced = self._gather(session, job)
            with self._table.lock:
                if session.terminal or session.control.stopped:
                    raise MoveStoppedError
                if session.status.state is SessionState.READY:
                    self._apply(session, SendEvent.STARTED)
                if plane.direction == "pull":
                    session.granted = True
                    access = plane.grant(session.transfer_id, session.session, (bounced or job).parts)
                    # Of a few pages the checksums go along at once.
                    early = checksums.of(job.parts) if quick and checksums is not None else []
                    self.answer(
                        session,
                        "ready",
                        src_pages=[encode_pages(source.ids) for source in piece.sources],
                        src_tiers=encode_tiers(piece.sources),
                        access=access,
                        checked=checked,
                        checksums=early,
                        bounce=session.run.where if bounced is not None and session.run is not None else None,
                        aux=piece.aux,
                    )
                    checksums = None if early else checksums
            if plane.direction == "push":
                plane.move(peer, bounced or job)
                fault_point("transceiver.after_write")
                with self._table.lock:
                    session.give_run()
                    if session.terminal or session.control.stopped:
                        raise MoveStoppedError
                    if piece.is_last:
                        self._apply(session, SendEvent.WRITTEN)
                    self.answer(
                        session,
                        "done",
                        bytes_moved=job.num_bytes,
                        slices_ns=session.control.take_slices(),
                        src_tiers=encode_tiers(piece.sources),
                        checked=checked,
                        slice_index=piece.number,
                        slice_blocks=piece.blocks,
                        is_last=piece.is_last,
                        aux=piece.aux,
                        bounce=None if bounced is None else session.offered,
                    )
            # While the receiver copies, or sums what it has got.
            sums = checksums.of(job.parts) if checksums is not None else []
        except MoveStoppedError:
            self._cancelled(session)
        except (PlaneError, FaultInjectedError) as error:
            self._fail(session, str(error))
        except Exception:
            # The border of error isolation: what one receiver makes go wrong ends its own transfer only.
            isolated(self._log, "a transfer could not be served", transfer_id=session.transfer_id, peer=str(peer))
            self._fail(session, "the page owner could not serve the transfer; its log says why")
        else:
            self._served(session, sums, piece)

    def _gather(self, session: SendSession, job: MoveJob) -> MoveJob | None:
        """What moves the pages of ``job`` in one piece, gathered; None when they go one by one.

        A job is then all of a session: a server that bounces sends no slices.
        """
        bounce = self._engine.bounce
        if bounce is None or session.control.stopped:
            return None
        session.run = bounce.gather(job, session.offered)
        if session.run is None:
            return None
        assert session.offered is not None
        return run_job(job, session.run.where, session.offered)

    def _served(self, session: SendSession, sums: list[bytes], piece: Piece) -> None:
        with self._table.lock:
            self._leave(session)
            # Even if it was cancelled meanwhile: the receiver, told that the pages are there, waits for them.
            if sums:
                self.answer(session, "checksums", checksums=sums, slice_index=piece.number, is_last=piece.is_last)
            if session.promise is not None and not session.promise.complete:
                # Between two chunks a transfer has no deadline: that its receiver waits is no fault of this side's.
                due_s = self._engine.clock.monotonic_s() + self._engine.times.timeout_s
                session.deadline_s = due_s if session.moving else math.inf
            self._table.notify()

    def _cancelled(self, session: SendSession) -> None:
        with self._table.lock:
            self._leave(session)
            self._tell_end(session, "cancelled", "the transfer was cancelled")
            self._apply(session, SendEvent.CANCEL)
            self._apply(session, SendEvent.FAIL, "cancelled")
            self._table.notify()

    def _fail(self, session: SendSession, reason: str) -> None:
        with self._table.lock:
            session.control.stop()  # of pieces before this one, that are on their way
            self._leave(session)
            self._tell_end(session, "failed", reason)
            status = next_send_status(session.status, SendEvent.FAIL)
            self._table.fail(session, status, 502, "transfer_failed", reason)
            self._table.notify()

    def _tell_end(self, session: SendSession, status: Literal["failed", "cancelled"], message: str) -> None:
        """Once, for further pieces of a promised prompt may be waiting behind the one that has ended it.

        The receiver takes it as a word that nobody writes into its pages: while a piece is on its way, it has to wait.
        """
        if session.told_end:
            return
        session.told_end = session.promise is not None
        if session.moving:
            session.last_words = LastWords(status, message)
        else:
            self.answer(session, status, message=message)

    @staticmethod
    def _enter(session: SendSession) -> None:
        session.moving += 1
        session.busy = True

    def _leave(self, session: SendSession) -> None:
        session.moving -= 1
        session.busy = session.moving > 0
        if session.last_words is not None and not session.moving:
            self.answer(session, session.last_words.status, message=session.last_words.message)
            session.last_words = None

    def _apply(self, session: SendSession, event: SendEvent, reason: str = "") -> None:
        self._table.advance(session, next_send_status(session.status, event), reason)

    def _submit(self, peer: PeerKey, job: Callable[[], None]) -> bool:
        try:
            self._engine.workers.submit(_worker(peer), job)
        except WorkerBusyError as error:
            self._log.warning("a receiver is overloaded", peer=str(peer), reason=str(error))
            return False
        return True


def _worker(peer: PeerKey) -> str:
    return f"to-{peer}"
