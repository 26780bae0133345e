"""The page owner's side: opens sessions, answers requests for pages, and keeps leases until no reader is left.

Messages are handled on the control thread, slow work (checksums, writing) on one worker for each receiver
(:mod:`kvmesh.transceiver.serving`), the rest on the executor's thread.
"""

from __future__ import annotations

import itertools
import secrets

from kvmesh.protocol.transfer import CancelSession, Hello, Refused, RequestData, ResultAck, Ticket, TransferResult
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.early_sender import EarlySender
from kvmesh.transceiver.handshake import PairingRefusedError, StrangerError
from kvmesh.transceiver.lending import Lending
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.parts import HeldPages, choose_sources, make_parts
from kvmesh.transceiver.peers import Receivers, watch_process
from kvmesh.transceiver.planes.base import MoveJob
from kvmesh.transceiver.precancel import PreCancels
from kvmesh.transceiver.runs import MissingPageError, decode_pages, only_pages
from kvmesh.transceiver.serving import Serving
from kvmesh.transceiver.sessions import Piece, SendSession
from kvmesh.transceiver.states import InvalidTransitionError, SendEvent, next_send_status
from kvmesh.transceiver.table import SessionTable
from kvmesh.transceiver.tickets import NEVER_UNIX_MS, NONCE_BYTES, SpentNonces, TicketError, check_ticket
from kvmesh.transceiver.types import PageLease, PeerKey, TransferPoll
from kvmesh.transceiver.waiting_pages import WaitingPages

__all__ = ["SenderSide"]

_ACK_EVENTS = {
    "done": SendEvent.ACK_DONE,
    "failed": SendEvent.ACK_FAILED,
    "cancelled": SendEvent.ACK_CANCELLED,
}


class SenderSide:
    """See the module."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._log = get_logger("transceiver.sender")
        self.table: SessionTable[SendSession] = SessionTable(
            engine, "context", on_ended=self._ended, on_released=SendSession.give_run
        )
        self.receivers = Receivers()
        self._serving = Serving(engine, self.table, self.receivers)
        self._spent = SpentNonces()
        self._precancelled = PreCancels(engine.clock)
        self._lending = Lending(engine, self.table, self.receivers, self._spent)
        self.waiting = WaitingPages(
            engine, self.table, begin=self._begin, fail=self._fail_asked, recall=self._lending.recall
        )
        self.early = EarlySender(engine, self.table, self.receivers, self._serving, self._precancelled)

    # The executor's thread.

    def open(
        self,
        transfer_id: int,
        request_id: str,
        lease: PageLease,
        num_tokens: int,
        control_endpoint: str,
        prompt_digest: bytes,
    ) -> bytes:
        """Open a session and mint its ticket; the lease is kept until every reader is terminal.

        Raises:
            DuplicateTransferError: a session of this transfer is open already; the lease stays the caller's.
            ValueError: the lease holds another number of blocks than ``num_tokens`` tokens take.
        """
        engine = self._engine
        now_s = engine.clock.monotonic_s()
        deadline_unix_ms = engine.times.deadline_unix_ms(engine.now_unix_ms())
        held = engine.leased_pages(lease, num_tokens)
        with self.table.lock:
            self.table.check_new(transfer_id)
            loan = self._lending.lend(transfer_id, held)
            ticket = Ticket(
                transfer_id=transfer_id,
                owner_instance_id=engine.key.instance_id,
                owner_epoch=engine.key.epoch,
                num_tokens=num_tokens,
                prompt_digest=prompt_digest,
                layout_digest=engine.handshake.mine.layout_digest,
                expires_unix_ms=NEVER_UNIX_MS if deadline_unix_ms is None else deadline_unix_ms,
                nonce=secrets.token_bytes(NONCE_BYTES),
                control_endpoint=control_endpoint,
                loan=loan,
            )
            session = SendSession(
                transfer_id=transfer_id,
                request_id=request_id,
                lease=lease,
                started_s=now_s,
                deadline_s=now_s + engine.times.timeout_s,
                num_tokens=num_tokens,
                ticket=ticket,
                token=engine.tickets.sign_ticket(ticket),
                lent=loan is not None,
                held=[HeldPages(ids) for ids in held],
            )
            self.table.add(session, deadline_unix_ms=deadline_unix_ms)
            if self._precancelled.take(transfer_id):
                self._apply(session, SendEvent.CANCEL, "cancelled before it was opened")
        return session.token

    def poll(self, at_least: int) -> TransferPoll:
        """What ended since the last poll; waits one slice at most for ``at_least`` sessions.

        A session that passes its deadline counts as settled, once, as timed out; it stays open with its pages pinned.
        """
        self.early.maintain()
        self.waiting.look()
        return self.table.poll(at_least, self._engine.times.slice_s, self._look)

    def sweep(self) -> list[int]:
        """Sessions that have become overdue since the last sweep, each once."""
        return self.table.sweep_after(self._lending.look)

    def cancel(self, transfer_id: int) -> bool:
        """Cancel; True once nothing reads the pages (also for transfers that are not open)."""
        with self.table.lock:
            session = self.table.open.get(transfer_id)
            if session is not None:
                self._lending.recall(session)  # What was read before is completed.
            if session is not None and not session.quiet:
                self._apply(session, SendEvent.CANCEL, "cancelled by the page owner")
                session.control.stop()
                route = self.receivers.route(session.peer)
                now_s = self._engine.clock.monotonic_s()
                if session.is_idle and session.peer is not None:
                    self._serving.give_up(session)
                elif route is not None and not session.terminal and session.cancel_is_due(now_s):
                    self._engine.send(route, CancelSession(transfer_id=transfer_id, session=session.session))
            return self.table.safe(transfer_id)

    def peer_dead(self, instance_id: str, epoch: int) -> None:
        """End the sessions of a peer that is gone: ``epoch`` and older lives of it are not served any more.

        What is lent is no session of anybody's: who has its ticket may read it, also when taken for dead.
        """
        self._engine.fences.end(instance_id, epoch)
        with self.table.lock:
            self._lending.look()
            for peer in self.receivers.take_lives(instance_id, epoch):
                for session in self.table.open.values():
                    if session.peer == peer and not session.terminal:
                        session.control.abandon()
                        status = next_send_status(session.status, SendEvent.PEER_DEAD)
                        self.table.fail(session, status, 503, "peer_dead", f"{peer} ended during the transfer")
                self.early.forget(peer)
                self._serving.forget(peer)

    # The control thread.

    def on_hello(self, route: bytes, hello: Hello) -> None:
        """A receiver introduces itself: pair with it or say why not."""
        engine = self._engine
        peer = PeerKey(hello.instance_id, hello.epoch)
        try:
            pairing = engine.handshake.pair(hello, "owner", route)
        except StrangerError as refusal:
            self._log.warning("refused to pair with a stranger", reason=str(refusal))
            engine.send(route, engine.handshake.refuse_stranger())
            return
        except PairingRefusedError as refusal:
            self._log.warning("refused to pair", peer=str(peer), reason=str(refusal))
            engine.send(route, engine.handshake.reply(route, refused=str(refusal)))
            return
        if engine.fences.is_over(peer):
            self._log.warning("refused to pair with a life that is over", peer=str(peer))
            over = f"{peer} is over: its death, or a later life, is known"
            engine.send(route, engine.handshake.reply(route, refused=over))
            return
        # A newer life of an engine fences the older ones.
        self.peer_dead(peer.instance_id, peer.epoch - 1)
        with self.table.lock:
            unknown = self.receivers.add(route, peer, pairing)
        engine.admit(route)
        if unknown:
            watch_process(engine, peer, hello.process)
        self._serving.pair(route, peer, hello.agent)

    def on_request(self, route: bytes, request: RequestData) -> None:
        """A receiver presents a ticket, or a claim, and asks for pages."""
        with self.table.lock:
            peer = self.receivers.peer(route)
            if peer is not None and self._is_repeated(peer, request):
                self.table.counters.dropped += 1  # The first one is answered.
                return
            if request.claim:
                self.early.on_claim(route, peer, request)
                return
            try:
                if peer is None:
                    raise TicketError("hello_required", "introduce yourself before asking for pages")
                ticket = self._engine.tickets.open_ticket(request.ticket)
                now_ms = self._engine.now_unix_ms()
                check_ticket(ticket, transfer_id=request.transfer_id, owner=self._engine.key, now_unix_ms=now_ms)
                session = self.table.open.get(request.transfer_id)
                if session is not None and session.ticket is not None and session.ticket.nonce == ticket.nonce:
                    self._lending.recall(session)
                self._spent.spend(ticket, now_ms)
            except TicketError as error:
                self._refuse(route, request, error.status, error.code or "ticket_refused", error.message)
                return
            if session is None or session.ticket is None or session.ticket.nonce != ticket.nonce:
                self._refuse(route, request, 404, "transfer_unknown", "the pages of this transfer are no longer held")
                return
            session.peer, session.session, session.offered = peer, request.session, request.bounce
            if session.terminal:
                self._serving.answer(session, "cancelled", message="the transfer was cancelled")
                return
            self._apply(session, SendEvent.ASKED)
            if not self.waiting.put_off(session, request):
                self._begin(session, request)

    def on_ack(self, route: bytes, ack: ResultAck) -> None:
        """A receiver reads no more."""
        with self.table.lock:
            session = self.table.open.get(ack.transfer_id)
            if session is None or not session.asked_by(self.receivers.peer(route), ack.session):
                # The usual answer to a repeated cancel of a session that has ended meanwhile.
                if (peer := self.receivers.peer(route)) is not None:
                    self.early.withdraw(peer, ack.transfer_id, ack.session)
                return
            try:
                if ack.status == "done" and session.promise is not None and not session.promise.is_sent:
                    raise InvalidTransitionError(session.status, SendEvent.ACK_DONE)
                status = next_send_status(session.status, _ACK_EVENTS[ack.status])
            except InvalidTransitionError as error:
                self.table.counters.dropped += 1
                self._log.warning("an acknowledgement makes no sense", transfer_id=ack.transfer_id, error=str(error))
                return
            session.control.stop()
            if ack.status == "failed":
                self.table.fail(session, status, 502, "receiver_failed", "the receiver reports a failure")
            else:
                self.table.advance(session, status, "" if ack.status == "done" else "cancelled by the receiver")

    def on_cancel(self, route: bytes, cancel: CancelSession) -> None:
        """A receiver gives up: with its session number what it asked for, with a ticket what it never will."""
        with self.table.lock:
            peer = self.receivers.peer(route)
            session = self.table.open.get(cancel.transfer_id)
            if session is not None and session.asked_by(peer, cancel.session):
                self._apply(session, SendEvent.CANCEL, "cancelled by the receiver")
                session.control.stop()
                if session.is_idle:
                    session.told_end = True  # below
                    self._serving.give_up(session)
            elif cancel.ticket:
                self._give_up(cancel)
            else:
                self.early.on_cancel(peer, cancel)
            moves = self._moves(peer, cancel.session) if peer is not None else not self.table.safe(cancel.transfer_id)
            if cancel.session and not moves:
                # The receiver may reuse its pages. Where something moves, the worker says so when it has stopped.
                message = TransferResult(transfer_id=cancel.transfer_id, session=cancel.session, status="cancelled")
                self._engine.send(route, message)

    # Under the lock.

    def _begin(self, session: SendSession, request: RequestData) -> None:
        assert session.peer is not None
        try:
            job, piece = self._job_of(session, session.peer, request)
        except (MissingPageError, ValueError) as error:
            self._fail_asked(session, str(error))
            return
        self._serving.start(session, session.peer, job, piece)

    def _fail_asked(self, session: SendSession, reason: str) -> None:
        self._serving.answer(session, "failed", message=reason)
        status = next_send_status(session.status, SendEvent.FAIL)
        self.table.fail(session, status, 409, "pages_mismatch", reason)

    def _job_of(self, session: SendSession, peer: PeerKey, request: RequestData) -> tuple[MoveJob, Piece]:
        theirs, routes = self.receivers.pairing(peer)
        wanted = [decode_pages(data) for data in request.dst_pages]
        sources = choose_sources(routes, session.held, request.first_block, wanted)
        targets = [only_pages(ids) for ids in wanted]
        parts = make_parts(routes, sources, targets, owner=self._engine.layout, receiver=theirs, side="owner")
        session.num_pages = sum(map(len, targets))
        session.num_bytes = sum(part.total_bytes for part in parts)
        job = MoveJob(transfer_id=session.transfer_id, session=session.session, parts=parts, control=session.control)
        return job, Piece(sources)

    def _moves(self, peer: PeerKey, number: int) -> bool:
        sessions = itertools.chain(self.table.open.values(), self.table.quarantine)
        return any(session.asked_by(peer, number) and not session.quiet for session in sessions)

    def _is_repeated(self, peer: PeerKey, request: RequestData) -> bool:
        if self.early.early.has(peer, request.transfer_id, request.session):
            return True
        sessions = itertools.chain(self.table.open.values(), self.table.quarantine)
        return any(one.transfer_id == request.transfer_id and one.asked_by(peer, request.session) for one in sessions)

    def _give_up(self, cancel: CancelSession) -> None:
        try:
            ticket = self._engine.tickets.open_ticket(cancel.ticket)
            # Even an expired ticket is proof enough to give its pages up.
            check_ticket(ticket, transfer_id=cancel.transfer_id, owner=self._engine.key)
        except TicketError as error:
            self.table.counters.refused += 1
            self._log.warning("a cancel without the right to it", transfer_id=cancel.transfer_id, code=error.code)
            return
        session = self.table.open.get(cancel.transfer_id)
        if session is None:
            self._precancelled.remember(cancel.transfer_id)
        elif session.ticket is not None and session.ticket.nonce == ticket.nonce and session.peer is None:
            self._lending.recall(session)
            if not session.terminal:
                self._apply(session, SendEvent.CANCEL, "given up by the receiver")

    def _refuse(self, route: bytes, request: RequestData, status: int, code: str, message: str) -> None:
        self.table.counters.refused += 1
        self._log.warning("a request for pages was refused", transfer_id=request.transfer_id, code=code, reason=message)
        self._engine.send(
            route,
            Refused(
                transfer_id=request.transfer_id, session=request.session, status=status, code=code, message=message
            ),
        )

    def _apply(self, session: SendSession, event: SendEvent, reason: str = "") -> None:
        self.table.advance(session, next_send_status(session.status, event), reason)

    def _look(self, poll: TransferPoll, now_s: float) -> float:
        self._lending.look()
        due_s = float("inf")
        for session in self.table.open.values():
            if session.terminal:
                continue  # It has just ended, perhaps because it was read before.
            if now_s < session.deadline_s:
                due_s = min(due_s, session.deadline_s)
            elif self.table.note_overdue(session):
                poll.timed_out.append(session.transfer_id)
        return due_s

    def _ended(self, session: SendSession) -> None:
        self._lending.recall(session)
        if session.granted:
            self._engine.plane.revoke(session.transfer_id, session.session)
        self.early.ended(session)
