"""The receiver's slow work, on one worker for each owner: copying pages (pull planes), checks, acknowledgements."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.protocol.transfer import CancelSession, ResultAck, TransferResult
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.arrivals import arrived_pages
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.bounce import run_job
from kvmesh.transceiver.handshake import Pairing
from kvmesh.transceiver.links import worker_of
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.parts import decode_sources, make_parts
from kvmesh.transceiver.planes.base import MoveJob, MoveStoppedError, Part, PlaneError
from kvmesh.transceiver.runs import MissingPageError, decode_pages
from kvmesh.transceiver.sessions import ReceiveSession, SliceCheck
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


class _Work(NamedTuple):
    """What a worker does for a session: move, scatter and sum."""

    job: MoveJob | None
    """Pull planes."""
    check: SliceCheck | None
    in_run: list[Part] | None
    """Where the pages go that come in one piece; None: they come one by one."""
    is_last: bool


def _arrives_in_run(session: ReceiveSession, answer: TransferResult) -> bool:
    """Whether the pages come in the run that was reserved for them, which is given back when they do not.

    Raises:
        MissingPageError: they come in another run.
    """
    if answer.bounce is None:
        session.give_run()
        return False
    if session.run is None or answer.bounce.nbytes != session.run.where.nbytes:
        raise MissingPageError("pages come in another run than was reserved for them")
    return True


class Pulling:
    """See the module. Shares the receiver's table and its lock."""

    def __init__(self, engine: LocalEngine, table: SessionTable[ReceiveSession]) -> None:
        self._engine = engine
        self._table = table
        self._log = get_logger("transceiver.pulling")

    def start_pull(self, session: ReceiveSession, pairing: Pairing, granted: TransferResult) -> None:
        """Copy the pages that the owner has granted (under the lock)."""
        try:
            parts = self._parts_of(session.local, pairing, [decode_pages(data) for data in granted.src_pages], granted)
            in_run = _arrives_in_run(session, granted)
        except (MissingPageError, ValueError) as error:
            self._fail(session, f"the owner's answer makes no sense: {error}")
            return
        check = self._prepare_check(session, parts, granted)
        job = MoveJob(
            transfer_id=session.transfer_id,
            session=session.session,
            parts=parts,
            access=granted.access,
            control=session.control,
            sums=None if check is None else check.ours,
        )
        if in_run and session.run is not None and granted.bounce is not None:
            job = run_job(job, session.run.where, granted.bounce)
        if check is not None and granted.checksums:
            check.theirs = granted.checksums
        session.next_slice += 1
        self._apply(session, ReceiveEvent.MOVING)
        self._submit(session, _Work(job, check, parts if in_run else None, is_last=True))

    def start_check(self, session: ReceiveSession, pairing: Pairing, written: TransferResult) -> None:
        """Check the pages that the owner has written: all, or those of one slice (under the lock)."""
        try:
            local = arrived_pages(session, self._engine.layout, written) if session.is_claim else session.local
            # Where they came from plays no part any more, only which of them came together.
            pages = [np.zeros(len(local[route.receiver_group]), dtype=np.int32) for route in pairing.routes]
            parts = self._parts_of(local, pairing, pages, written)
            in_run = _arrives_in_run(session, written)
        except (MissingPageError, ValueError) as error:
            session.peer_may_write = session.peer_may_write and not written.is_last
            self._fail(session, f"the owner's answer makes no sense: {error}")
            return
        check = self._prepare_check(session, parts, written)
        now_s = self._engine.clock.monotonic_s()
        session.note_slices(written.slices_ns, now_s)
        if not written.is_last:
            session.deadline_s = now_s + self._engine.times.timeout_s  # which is how long nothing may move at all
        session.next_slice += 1
        if not written.is_last and session.status.state is SessionState.READY:
            self._apply(session, ReceiveEvent.MOVING)
        self._submit(session, _Work(None, check, parts if in_run else None, is_last=written.is_last))

    def take_checksums(self, session: ReceiveSession, answer: TransferResult) -> None:
        """The owner's checksums have come (under the lock)."""
        check = session.checks.get(answer.slice_index)
        if check is None or check.theirs is not None:
            self._table.counters.dropped += 1
            return
        check.theirs = answer.checksums
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
            self._engine.send(session.endpoint, self._give_up(session, 0))

    def ask_to_stop(self, session: ReceiveSession) -> None:
        """Ask an owner that may be writing to stop and to say so.

        The ticket goes along: should the request have been lost, or overtaken, it can never be redeemed afterwards.
        """
        self._engine.send(session.endpoint, self._give_up(session, session.session))

    @staticmethod
    def _give_up(session: ReceiveSession, number: int) -> CancelSession:
        if session.refused:
            # Somebody else may have the right to this transfer by now: only what this session has asked for is over.
            return CancelSession(transfer_id=session.transfer_id, session=number)
        ticket, claim = (b"", session.token) if session.is_claim else (session.token, b"")
        return CancelSession(transfer_id=session.transfer_id, session=number, ticket=ticket, claim=claim)

    def _parts_of(
        self, local: list[PageIds], pairing: Pairing, pages: list[PageIds], answer: TransferResult
    ) -> list[Part]:
        if len(pages) != len(pairing.routes):
            raise MissingPageError(f"pages of {len(pages)} routes are granted, there are {len(pairing.routes)}")
        return make_parts(
            pairing.routes,
            decode_sources(pages, answer.src_tiers),
            local,
            owner=pairing.layout,
            receiver=self._engine.layout,
            side="receiver",
        )

    def _prepare_check(self, session: ReceiveSession, parts: list[Part], answer: TransferResult) -> SliceCheck | None:
        if not answer.checked or self._engine.checksums is None:
            return None
        check = session.checks[session.next_slice] = SliceCheck(self._engine.checksums.running(parts))
        return check

    def _submit(self, session: ReceiveSession, work: _Work) -> None:
        session.moving += 1
        session.busy = True
        if (
            work.job is not None
            and session.peer is not None
            and self._engine.plane.is_quick(session.peer, session.num_bytes)
        ):
            self._work(session, work)
            return
        try:
            self._engine.workers.submit(worker_of(session.endpoint, session.peer), lambda: self._work(session, work))
        except WorkerBusyError as error:
            self._leave(session)
            self._fail(session, str(error))

    @staticmethod
    def _leave(session: ReceiveSession) -> None:
        session.moving -= 1
        session.busy = session.moving > 0

    def _work(self, session: ReceiveSession, work: _Work) -> None:
        reason = ""
        try:
            if work.job is not None:
                assert session.peer is not None
                self._engine.plane.move(session.peer, work.job)
            if work.in_run is not None:
                self._scatter(session, work.in_run, work.check)
            elif work.job is None and work.check is not None:
                work.check.ours.add_all()
            if work.is_last:
                fault_point("transceiver.before_ack")
        except MoveStoppedError:
            reason = "stopped"
        except (PlaneError, FaultInjectedError) as error:
            reason = str(error)
        except Exception:
            # The border of error isolation: what one owner makes go wrong ends its own transfer only.
            isolated(self._log, "a transfer could not be received", transfer_id=session.transfer_id)
            reason = "the pages could not be received; the log of this server says why"
        with self._table.lock:
            self._leave(session)
            if work.job is not None and not reason:
                session.note_slices(session.control.take_slices(), self._engine.clock.monotonic_s())
            if work.in_run is not None:
                session.give_run()
            if session.terminal:
                if not session.busy:
                    self.acknowledge(session)
            elif reason:
                self._fail(session, reason)
            elif work.is_last:
                self._apply(session, ReceiveEvent.MOVED)
                self._complete(session)
            self._table.notify()

    def _scatter(self, session: ReceiveSession, parts: list[Part], check: SliceCheck | None) -> None:
        assert self._engine.bounce is not None
        assert session.run is not None
        session.control.checkpoint()
        self._engine.bounce.scatter(session.run, parts, None if check is None else check.ours)

    def _complete(self, session: ReceiveSession) -> None:
        if session.status.state is not SessionState.KV_TRANSFERRED:
            return
        compared = [check.difference() for check in session.checks.values() if check.theirs is not None]
        damage = next((found for found in compared if found is not None), None)
        if damage is not None:
            self._fail(session, damage, "checksum_mismatch")
        elif len(compared) == len(session.checks):
            self._apply(session, ReceiveEvent.VERIFIED)
        elif session.orphaned:
            self._fail(session, f"{session.peer} ended before it had sent its checksums", "peer_dead", 503)

    def _apply(self, session: ReceiveSession, event: ReceiveEvent) -> None:
        self._table.advance(session, next_receive_status(session.status, event))

    def _fail(
        self, session: ReceiveSession, reason: str, code: str = "transfer_failed", http_status: int = 502
    ) -> None:
        status = next_receive_status(session.status, ReceiveEvent.FAIL)
        self._table.fail(session, status, http_status, code, reason)
