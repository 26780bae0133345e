"""The receiver's slow work, on one worker for each owner: copying pages (pull planes), checks, acknowledgements."""

from __future__ import annotations

import numpy as np

from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.protocol.transfer import CancelSession, ResultAck, TransferResult
from kvmesh.transceiver.handshake import Pairing
from kvmesh.transceiver.integrity import checksum_difference
from kvmesh.transceiver.links import worker_of
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.parts import decode_sources, make_parts
from kvmesh.transceiver.planes.base import MoveJob, MoveStoppedError, Part, PlaneError
from kvmesh.transceiver.runs import MissingPageError, decode_pages
from kvmesh.transceiver.sessions import ReceiveSession
from kvmesh.transceiver.states import ReceiveEvent, SessionState, next_receive_status
from kvmesh.transceiver.table import SessionTable
from kvmesh.transceiver.types import PageIds
from kvmesh.transceiver.workers import WorkerBusyError

__all__ = ["Pulling"]

_ACK_STATUS = {
    SessionState.FULLY_TRANSFERRED: "done",
    SessionState.ERROR: "failed",
    SessionState.CANCELLED: "cancelled",
}


class Pulling:
    """See the module. Shares the receiver's table and its lock."""

    def __init__(self, engine: LocalEngine, table: SessionTable[ReceiveSession]) -> None:
        self._engine = engine
        self._table = table

    def start_pull(self, session: ReceiveSession, pairing: Pairing, granted: TransferResult) -> None:
        """Copy the pages that the owner has granted (under the lock)."""
        try:
            parts = self._parts_of(session, pairing, [decode_pages(data) for data in granted.src_pages], granted)
        except (MissingPageError, ValueError) as error:
            self._fail(session, f"the owner's answer makes no sense: {error}")
            return
        self._prepare_check(session, parts, granted)
        job = MoveJob(
            transfer_id=session.transfer_id,
            session=session.session,
            parts=parts,
            access=granted.access,
            control=session.control,
            sums=session.sums,
        )
        if session.sums is not None and granted.checksums:
            session.owner_sums = granted.checksums
        self._apply(session, ReceiveEvent.MOVING)
        self._submit(session, job)

    def start_check(self, session: ReceiveSession, pairing: Pairing, written: TransferResult) -> None:
        """Check the pages that the owner has written (under the lock)."""
        # Where they came from plays no part any more, only which of them came together.
        pages = [np.zeros(len(session.local[route.receiver_group]), dtype=np.int32) for route in pairing.routes]
        try:
            parts = self._parts_of(session, pairing, pages, written)
        except MissingPageError as error:
            self._fail(session, f"the owner's answer makes no sense: {error}")
            return
        self._prepare_check(session, parts, written)
        self._submit(session, None)

    def take_checksums(self, session: ReceiveSession, sums: list[bytes]) -> None:
        """The owner's checksums have come (under the lock)."""
        session.owner_sums = sums
        self._complete(session)

    def acknowledge(self, session: ReceiveSession) -> None:
        """Tell the owner, once, how an ended session stands: it may release its pages, or has to stop writing."""
        if session.acknowledged or session.peer is None:
            return
        if session.peer_may_write:
            if session.cancel_is_due(self._engine.clock.monotonic_s()):
                self.ask_to_stop(session)
            return
        session.acknowledged = True
        if session.asked:
            self._engine.send(
                session.endpoint,
                ResultAck(
                    transfer_id=session.transfer_id,
                    session=session.session,
                    status=_ACK_STATUS[session.status.state],  # type: ignore[arg-type]
                ),
            )
        else:
            give_up = CancelSession(transfer_id=session.transfer_id, ticket=session.token)
            self._engine.send(session.endpoint, give_up)

    def ask_to_stop(self, session: ReceiveSession) -> None:
        """Ask an owner that may be writing to stop and to say so.

        The ticket goes along: should the request have been lost, or overtaken, it can never be redeemed afterwards.
        """
        message = CancelSession(transfer_id=session.transfer_id, session=session.session, ticket=session.token)
        self._engine.send(session.endpoint, message)

    def _parts_of(
        self, session: ReceiveSession, pairing: Pairing, pages: list[PageIds], answer: TransferResult
    ) -> list[Part]:
        if len(pages) != len(pairing.routes):
            raise MissingPageError(f"pages of {len(pages)} routes are granted, there are {len(pairing.routes)}")
        return make_parts(
            pairing.routes,
            decode_sources(pages, answer.src_tiers),
            session.local,
            owner=pairing.layout,
            receiver=self._engine.layout,
            side="receiver",
        )

    def _prepare_check(self, session: ReceiveSession, parts: list[Part], answer: TransferResult) -> None:
        if answer.checked and self._engine.checksums is not None:
            session.sums = self._engine.checksums.running(parts)

    def _submit(self, session: ReceiveSession, job: MoveJob | None) -> None:
        session.busy = True
        if (
            job is not None
            and session.peer is not None
            and self._engine.plane.is_quick(session.peer, session.num_bytes)
        ):
            self._work(session, job)
            return
        try:
            self._engine.workers.submit(worker_of(session.endpoint), lambda: self._work(session, job))
        except WorkerBusyError as error:
            session.busy = False
            self._fail(session, str(error))

    def _work(self, session: ReceiveSession, job: MoveJob | None) -> None:
        reason = ""
        try:
            if job is not None:
                assert session.peer is not None
                self._engine.plane.move(session.peer, job)
            elif session.sums is not None:
                session.sums.add_all()
            fault_point("transceiver.before_ack")
        except MoveStoppedError:
            reason = "stopped"
        except (PlaneError, FaultInjectedError) as error:
            reason = str(error)
        with self._table.lock:
            session.busy = False
            if session.terminal:
                self.acknowledge(session)
            elif reason:
                self._fail(session, reason)
            else:
                self._apply(session, ReceiveEvent.MOVED)
                self._complete(session)
            self._table.notify()

    def _complete(self, session: ReceiveSession) -> None:
        if session.status.state is not SessionState.KV_TRANSFERRED:
            return
        if session.sums is None:
            self._apply(session, ReceiveEvent.VERIFIED)
        elif session.owner_sums is not None:
            damage = checksum_difference(session.sums.encoded(), session.owner_sums)
            if damage is None:
                self._apply(session, ReceiveEvent.VERIFIED)
            else:
                self._fail(session, damage, "checksum_mismatch")
        elif session.orphaned:
            self._fail(session, f"{session.peer} ended before it had sent its checksums", "peer_dead", 503)

    def _apply(self, session: ReceiveSession, event: ReceiveEvent) -> None:
        self._table.advance(session, next_receive_status(session.status, event))

    def _fail(
        self, session: ReceiveSession, reason: str, code: str = "transfer_failed", http_status: int = 502
    ) -> None:
        status = next_receive_status(session.status, ReceiveEvent.FAIL)
        self._table.fail(session, status, http_status, code, reason)
