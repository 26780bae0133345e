"""The page owner's slow work, on one worker for each receiver: attaching, checksums, writing (push planes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.protocol.transfer import TransferResult
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.parts import encode_tiers
from kvmesh.transceiver.peers import Receivers
from kvmesh.transceiver.planes.base import MoveJob, MoveStoppedError, PlaneError
from kvmesh.transceiver.runs import encode_pages
from kvmesh.transceiver.sessions import SendSession
from kvmesh.transceiver.states import SendEvent, next_send_status
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
            self._engine.send(route, self._engine.handshake.reply())
        else:
            self._submit(peer, lambda: self._attach(route, peer, descriptor))

    def start(self, session: SendSession, peer: PeerKey, job: MoveJob) -> None:
        """Serve a session that was asked for."""
        session.busy = True
        plane = self._engine.plane
        if plane.direction == "pull" and plane.is_quick(peer, session.num_bytes):
            self._serve(session, peer, job, quick=True)
        elif not self._submit(peer, lambda: self._serve(session, peer, job)):
            self._fail(session, "the page owner has too many transfers to this receiver waiting")

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
            self._engine.send(route, self._engine.handshake.reply(refused=str(error)))
            return
        self._log.info("paired", peer=str(peer), plane=way)
        self._engine.send(route, self._engine.handshake.reply())

    def _serve(self, session: SendSession, peer: PeerKey, job: MoveJob, *, quick: bool = False) -> None:
        plane, checksums = self._engine.plane, self._engine.checksums
        checked = checksums is not None
        try:
            fault_point("transceiver.before_send")
            with self._table.lock:
                if session.terminal or session.control.stopped:
                    raise MoveStoppedError
                self._apply(session, SendEvent.STARTED)
                if plane.direction == "pull":
                    access = plane.grant(session.transfer_id, session.session, job.parts)
                    # Of a few pages the checksums go along at once.
                    early = checksums.of(job.parts) if quick and checksums is not None else []
                    self.answer(
                        session,
                        "ready",
                        src_pages=[encode_pages(source.ids) for source in session.sources],
                        src_tiers=encode_tiers(session.sources),
                        access=access,
                        checked=checked,
                        checksums=early,
                    )
                    checksums = None if early else checksums
            if plane.direction == "push":
                plane.move(peer, job)
                fault_point("transceiver.after_write")
                with self._table.lock:
                    if session.terminal or session.control.stopped:
                        raise MoveStoppedError
                    self._apply(session, SendEvent.WRITTEN)
                    self.answer(
                        session,
                        "done",
                        bytes_moved=session.num_bytes,
                        src_tiers=encode_tiers(session.sources),
                        checked=checked,
                    )
        except MoveStoppedError:
            self._cancelled(session)
        except (PlaneError, FaultInjectedError) as error:
            self._fail(session, str(error))
        else:
            # While the receiver copies, or sums what it has got.
            sums = checksums.of(job.parts) if checksums is not None else []
            self._served(session, sums)

    def _served(self, session: SendSession, sums: list[bytes]) -> None:
        with self._table.lock:
            session.busy = False
            # Even if it was cancelled meanwhile: the receiver, told that the pages are there, waits for them.
            if sums:
                self.answer(session, "checksums", checksums=sums)
            self._table.notify()

    def _cancelled(self, session: SendSession) -> None:
        with self._table.lock:
            session.busy = False
            self.answer(session, "cancelled", message="the transfer was cancelled")
            self._apply(session, SendEvent.CANCEL)
            self._apply(session, SendEvent.FAIL, "cancelled")
            self._table.notify()

    def _fail(self, session: SendSession, reason: str) -> None:
        with self._table.lock:
            session.busy = False
            self.answer(session, "failed", message=reason)
            status = next_send_status(session.status, SendEvent.FAIL)
            self._table.fail(session, status, 502, "transfer_failed", reason)
            self._table.notify()

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
