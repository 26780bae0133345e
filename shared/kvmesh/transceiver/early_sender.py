"""The page owner's side of generation first: prompts that receivers claim before they are computed.

A context request opens a send session at once, without pages; the claim of its receiver may come before or after that.
When both are here the executor is told, and computes. What it then lets go out is sent in order: what was let go before
the receiver came goes out when it comes, once. Every method takes the sender's lock, or is called under it.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Sequence

from kvmesh.protocol.transfer import Aux, CancelSession, Claim, Refused, RequestData, TransferResult
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.claims import check_claim, open_claim
from kvmesh.transceiver.early import EarlyRequest, EarlyRequests
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.parts import HeldPages, make_parts
from kvmesh.transceiver.peers import Receivers
from kvmesh.transceiver.planes.base import MoveJob
from kvmesh.transceiver.precancel import PreCancels
from kvmesh.transceiver.promises import OutgoingSlice, Promise, Wanted, slice_pages
from kvmesh.transceiver.runs import MissingPageError, decode_pages
from kvmesh.transceiver.serving import Serving
from kvmesh.transceiver.sessions import Piece, SendSession
from kvmesh.transceiver.slices import BlockSpan
from kvmesh.transceiver.states import SendEvent, next_send_status
from kvmesh.transceiver.table import SessionTable
from kvmesh.transceiver.tickets import SpentNonces, TicketError
from kvmesh.transceiver.types import PageLease, PeerKey

__all__ = ["EarlySender"]


class EarlySender:
    """See the module. Shares the sender's table and its lock."""

    def __init__(
        self,
        engine: LocalEngine,
        table: SessionTable[SendSession],
        receivers: Receivers,
        serving: Serving,
        precancelled: PreCancels,
    ) -> None:
        self._engine = engine
        self._table = table
        self._receivers = receivers
        self._serving = serving
        self._precancelled = precancelled
        self._spent = SpentNonces()
        self._claimed: list[int] = []
        self.early = EarlyRequests(engine.clock)
        self._log = get_logger("transceiver.early")

    # The executor's thread.

    def expect(self, transfer_id: int, request_id: str, num_tokens: int, prompt_digest: bytes) -> None:
        """Open a session for a prompt that is to be computed when its receiver has come.

        Raises:
            DuplicateTransferError: a session of this transfer is open already.
        """
        now_s = self._engine.clock.monotonic_s()
        promise = Promise(prompt_digest)
        timeout_s = self._engine.times.timeout_s
        session = SendSession(
            transfer_id=transfer_id,
            request_id=request_id,
            lease=promise.leases,
            started_s=now_s,
            deadline_s=now_s + timeout_s,
            num_tokens=num_tokens,
            promise=promise,
        )
        with self._table.lock:
            due_ms = self._engine.times.deadline_unix_ms(self._engine.now_unix_ms())
            self._table.add(session, deadline_unix_ms=due_ms)
            if self._precancelled.take(transfer_id):
                self._apply(session, SendEvent.CANCEL, "cancelled before it was opened")
            elif (early := self.early.take(transfer_id)) is not None:
                self._meet(session, promise, early)

    def take_claimed(self) -> list[int]:
        """Transfers whose receiver has come since the last call."""
        with self._table.lock:
            claimed, self._claimed = self._claimed, []
        return claimed

    def send(self, transfer_id: int, lease: PageLease, spans: Sequence[BlockSpan], aux: Aux | None) -> bool:
        """Let a slice go out.

        Args:
            transfer_id: of a promised prompt.
            lease: its pages up to the end of the slice, in the layer groups that send any; kept until they are quiet.
            spans: by layer group, the blocks that go out.
            aux: with the last slice.

        Returns:
            False when the transfer is over or about to be: nothing is sent, and the lease is released.
        """
        with self._table.lock:
            session = self._table.open.get(transfer_id)
            promise = None if session is None else session.promise
            if session is None or promise is None or session.terminal or session.status.cancelling:
                lease.release()
                return False
            promise.leases.add(lease)
            piece = OutgoingSlice(
                number=promise.num_slices,
                span=max(spans, key=lambda span: (span.first, span.end)),  # that of groups without a window
                spans=list(spans),
                held=[HeldPages(lease.page_ids(group)) for group in range(len(spans))],
                aux=aux,
            )
            session.held = piece.held
            promise.num_slices += 1
            promise.waiting.append(piece)
            if piece.is_last:
                self._complete(session, promise)
            self._dispatch(session, promise)
            return True

    def send_nothing(self, transfer_id: int, aux: Aux) -> bool:
        """The first token ended the answer; False when the transfer is over."""
        with self._table.lock:
            session = self._table.open.get(transfer_id)
            promise = None if session is None else session.promise
            if session is None or promise is None or session.terminal or session.status.cancelling:
                return False
            if promise.wanted is None or promise.num_slices:
                raise ValueError(f"transfer {transfer_id} cannot end without pages: its prompt goes out already")
            self._complete(session, promise)
            self._serving.say_finished(session, aux)
            return True

    def maintain(self) -> None:
        """Refuse the receivers whose context request has not come in time."""
        with self._table.lock:
            for early in self.early.take_expired():
                self._refuse(
                    self._receivers.route(early.peer),
                    early.request,
                    503,
                    "kv_context_timeout",
                    "no context request came for this transfer before its claim expired",
                )

    # The control thread.

    def on_claim(self, route: bytes, peer: PeerKey | None, request: RequestData) -> None:
        """A receiver asks for a prompt that may not be there yet (under the lock)."""
        try:
            if peer is None:
                raise TicketError("hello_required", "introduce yourself before asking for pages")
            claim = self._checked(request.transfer_id, request.claim, peer)
            self._spent.spend(claim, self._engine.now_unix_ms())
        except TicketError as error:
            self._refuse(route, request, error.status, error.code or "claim_refused", error.message)
            return
        session = self._table.open.get(request.transfer_id)
        taken = request.transfer_id in self.early or (session is not None and session.peer is not None)
        if taken or (session is not None and session.promise is None):
            self._refuse(route, request, 409, "claim_taken", "another receiver has asked for this transfer")
        elif session is not None and session.promise is not None and not session.terminal:
            early = EarlyRequest(peer, request, claim, 0.0)
            self._meet(session, session.promise, early)
        elif session is not None or self._precancelled.take(request.transfer_id):
            self._answer_cancelled(route, request.transfer_id, request.session)
        elif self.early.is_full:
            self._refuse(route, request, 503, "too_many_claims", "too many receivers wait here; try again in a moment")
        else:
            self.early.remember(peer, request, claim)

    def on_cancel(self, peer: PeerKey | None, cancel: CancelSession) -> None:
        """A receiver will not ask, or asks no more, for a prompt that it was promised (under the lock)."""
        if (peer is not None and self.withdraw(peer, cancel.transfer_id, cancel.session)) or not cancel.claim:
            return
        try:
            # Even an expired claim is proof enough to give its prompt up.
            claim = open_claim(self._engine.claims, cancel.claim)
            receiver = PeerKey(claim.receiver_instance_id, claim.receiver_epoch)
            check_claim(
                claim,
                transfer_id=cancel.transfer_id,
                owner=self._engine.key,
                receiver=peer or receiver,
                now_unix_ms=None,
            )
        except TicketError as error:
            self._table.counters.refused += 1
            self._log.warning("a cancel without the right to it", transfer_id=cancel.transfer_id, code=error.code)
            return
        session = self._table.open.get(cancel.transfer_id)
        if session is None:
            self._precancelled.remember(cancel.transfer_id)
        elif session.promise is not None and session.peer is None:
            self._apply(session, SendEvent.CANCEL, "given up by the receiver")

    def withdraw(self, peer: PeerKey, transfer_id: int, number: int) -> bool:
        """A receiver waits no more for a context request that has not come (under the lock); False: it did not."""
        if not self.early.withdraw(peer, transfer_id, number):
            return False
        self._precancelled.remember(transfer_id)  # so that the request, should it come, does not wait either
        return True

    def forget(self, peer: PeerKey) -> None:
        """A receiver is gone (under the lock)."""
        for early in self.early.take_of(peer):
            self._precancelled.remember(early.request.transfer_id)

    def ended(self, session: SendSession) -> None:
        """A session has ended (under the lock): a receiver that comes later must not wait for it."""
        if session.promise is not None and session.peer is None:
            self._precancelled.remember(session.transfer_id)

    # Under the lock.

    def _checked(self, transfer_id: int, token: bytes, peer: PeerKey) -> Claim:
        engine = self._engine
        claim = open_claim(engine.claims, token)
        now_ms = engine.now_unix_ms()
        check_claim(claim, transfer_id=transfer_id, owner=engine.key, receiver=peer, now_unix_ms=now_ms)
        return claim

    def _meet(self, session: SendSession, promise: Promise, early: EarlyRequest) -> None:
        """The context request and its receiver are both here."""
        request, claim = early.request, early.claim
        same_prompt = hmac.compare_digest(claim.prompt_digest, promise.prompt_digest)
        if not same_prompt or claim.num_tokens != session.num_tokens:
            # The context request goes on waiting: this receiver wants something else.
            what = f"the claim to transfer {session.transfer_id} is for another prompt or cache_salt than is computed"
            self._refuse(self._receivers.route(early.peer), request, 400, "claim_mismatch", what)
            return
        session.peer, session.session, session.offered = early.peer, request.session, request.bounce
        try:
            wanted = Wanted(list(request.first_block), [decode_pages(data) for data in request.dst_pages])
            self._check_wanted(session, early.peer, wanted)
        except (MissingPageError, ValueError) as error:
            session.told_end = True
            self._serving.answer(session, "failed", message=str(error))
            status = next_send_status(session.status, SendEvent.FAIL)
            self._table.fail(session, status, 409, "pages_mismatch", str(error))
            return
        promise.wanted = wanted
        session.deadline_s = math.inf
        self._claimed.append(session.transfer_id)
        self._apply(session, SendEvent.ASKED)
        if promise.complete:
            session.deadline_s = self._due_s()
        self._dispatch(session, promise)

    def _check_wanted(self, session: SendSession, peer: PeerKey, wanted: Wanted) -> None:
        theirs = self._receivers.pairing(peer).layout
        blocks = -(-session.num_tokens // theirs.tokens_per_block)
        lengths = [first + len(ids) for first, ids in zip(wanted.first_block, wanted.pages, strict=True)]
        if lengths != [blocks] * len(theirs.groups) or min(wanted.first_block) < 0:
            raise MissingPageError(
                f"pages up to blocks {lengths} are wanted, but the prompt has {blocks} blocks in each of "
                f"{len(theirs.groups)} layer groups"
            )

    def _complete(self, session: SendSession, promise: Promise) -> None:
        """The last slice may go: from here on the transfer has its time, and no more."""
        promise.complete = True
        if promise.wanted is not None:
            session.deadline_s = self._due_s()

    def _dispatch(self, session: SendSession, promise: Promise) -> None:
        """Send what may go out, in order, once the receiver is known."""
        if promise.wanted is None or session.peer is None:
            return
        theirs, routes = self._receivers.pairing(session.peer)
        while promise.waiting and not session.terminal:
            piece = promise.waiting.popleft()
            try:
                pages = slice_pages(piece, routes, promise.wanted)
                parts = make_parts(
                    routes, pages.sources, pages.targets, owner=self._engine.layout, receiver=theirs, side="owner"
                )
            except MissingPageError as error:
                self._serving.fail(session, str(error))
                return
            job = MoveJob(
                transfer_id=session.transfer_id, session=session.session, parts=parts, control=session.control
            )
            session.num_pages += sum(map(len, pages.targets))
            session.num_bytes += job.num_bytes
            if not promise.complete:
                session.deadline_s = self._due_s()  # a chunk that is on its way has its time, too
            blocks = (piece.span.first, piece.span.end)
            self._serving.start(
                session, session.peer, job, Piece(pages.sources, piece.number, blocks, piece.is_last, piece.aux)
            )

    def _due_s(self) -> float:
        return self._engine.clock.monotonic_s() + self._engine.times.timeout_s

    def _answer_cancelled(self, route: bytes, transfer_id: int, number: int) -> None:
        message = TransferResult(
            transfer_id=transfer_id, session=number, status="cancelled", message="the transfer was cancelled"
        )
        self._engine.send(route, message)

    def _refuse(self, route: bytes | None, request: RequestData, status: int, code: str, message: str) -> None:
        self._table.counters.refused += 1
        self._log.warning("a claim was refused", transfer_id=request.transfer_id, code=code, reason=message)
        if route is not None:
            refused = Refused(
                transfer_id=request.transfer_id, session=request.session, status=status, code=code, message=message
            )
            self._engine.send(route, refused)

    def _apply(self, session: SendSession, event: SendEvent, reason: str = "") -> None:
        self._table.advance(session, next_send_status(session.status, event), reason)
