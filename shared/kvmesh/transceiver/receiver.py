"""The receiver's side: asks an owner for the pages that are missing, has them moved and checked, and acknowledges.

This is what the executor's thread does of it. Messages are handled on the control thread
(:mod:`kvmesh.transceiver.answers`, :mod:`kvmesh.transceiver.owner_lives`), slow work (attaching, copying, checksums) on
one worker for each owner (:mod:`kvmesh.transceiver.pulling`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.transfer import Aux, RequestData
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.answers import Answers
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.borrowing import Borrowing
from kvmesh.transceiver.links import LinkState
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.owner_lives import OwnerLives
from kvmesh.transceiver.owners import Decline, Owner, Owners
from kvmesh.transceiver.precancel import PreCancels
from kvmesh.transceiver.pulling import Pulling
from kvmesh.transceiver.runs import encode_pages, only_pages
from kvmesh.transceiver.sessions import ReceiveSession
from kvmesh.transceiver.states import ReceiveEvent, SessionState, next_receive_status
from kvmesh.transceiver.table import SessionTable
from kvmesh.transceiver.types import PageIds, PageLease, PeerKey, TransferPoll, TransferSize

__all__ = ["ReceiverSide"]


class ReceiverSide:
    """See the module."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._push = engine.plane.direction == "push"
        self._log = get_logger("transceiver.receiver")
        self.table: SessionTable[ReceiveSession] = SessionTable(
            engine, "generation", on_ended=self._ended, on_released=self._released
        )
        self._owners = Owners(engine, self._count_refused)
        self._pulling = Pulling(engine, self.table)
        self._precancelled = PreCancels(engine.clock)
        self.borrowing = Borrowing(engine)
        self.lives = OwnerLives(engine, self.table, self._ask)
        self.links = self.lives.links
        self.answers = Answers(engine, self.table, self.links, self._pulling, self._precancelled)
        self._numbers = itertools.count(1)
        self._auxes: dict[int, Aux] = {}

    # The executor's thread.

    def open(
        self,
        transfer_id: int,
        request_id: str,
        handoff: HandOff,
        lease: PageLease,
        first_block: Sequence[int],
        prompt_digest: bytes,
    ) -> TransferSize:
        """Ask the owner for the blocks from ``first_block[group]`` on, into the pages of ``lease``; returns how much.

        Raises:
            TicketError: 403, the hand-off was not signed in this cluster, has expired or is for something else.
            PromptMismatchError: 400, the pages on offer hold another prompt than ``prompt_digest`` names.
            DuplicateTransferError: this transfer is open already; the lease stays the caller's.
            ValueError: the lease or ``first_block`` does not fit the hand-off.
        """
        owner = self._owners.of_handoff(transfer_id, handoff, prompt_digest)
        return self._open(transfer_id, request_id, owner, lease, first_block)

    def open_claimed(
        self,
        transfer_id: int,
        request_id: str,
        address: bytes,
        lease: PageLease,
        first_block: Sequence[int],
        num_tokens: int,
        prompt_digest: bytes,
    ) -> TransferSize:
        """Generation first: :meth:`open` of a prompt that the owner at ``address`` has still to compute.

        Raises:
            TicketError: 403, no context engine of this cluster signed the address.
            DuplicateTransferError: this transfer is open already; the lease stays the caller's.
            ValueError: the lease or ``first_block`` does not fit ``num_tokens``.
        """
        owner = self._owners.of_address(transfer_id, address, num_tokens, prompt_digest)
        return self._open(transfer_id, request_id, owner, lease, first_block)

    def take_aux(self, transfer_id: int) -> Aux | None:
        """What came with a completed generation-first transfer; it is forgotten here."""
        with self.table.lock:
            return self._auxes.pop(transfer_id, None)

    def _open(
        self,
        transfer_id: int,
        request_id: str,
        owner: Owner,
        lease: PageLease,
        first_block: Sequence[int],
    ) -> TransferSize:
        engine = self._engine
        if len(first_block) != engine.num_groups:
            raise ValueError(f"first blocks of {len(first_block)} layer groups for a layout of {engine.num_groups}")
        pages = engine.leased_pages(lease, owner.num_tokens)
        wanted: list[PageIds] = []
        local: list[PageIds] = []
        num_pages = num_bytes = 0
        for ids, first, group in zip(pages, first_block, engine.layout.groups, strict=True):
            wanted.append(ids[first:] if first else ids)
            local.append(only_pages(wanted[-1]))
            num_pages += len(local[-1])
            num_bytes += len(local[-1]) * group.page_bytes
        session = ReceiveSession(
            transfer_id=transfer_id,
            request_id=request_id,
            lease=lease,
            started_s=engine.clock.monotonic_s(),
            num_tokens=owner.num_tokens,
            session=next(self._numbers),
            peer=owner.peer,
            endpoint=owner.endpoint,
            token=owner.token,
            is_claim=owner.is_claim,
            first_block=list(first_block),
            wanted=wanted,
            local=local,
            num_pages=num_pages,
            num_bytes=num_bytes,
        )
        self.table.check_new(transfer_id)
        is_borrowed = (
            owner.loan is not None
            and self._may_borrow(session)
            and self.borrowing.read(session, owner.loan, owner.expires_unix_ms)
        )
        with self.table.lock:
            self.table.add(session)
            if any(first_block):
                self.table.counters.pages_reused += sum(
                    int(np.count_nonzero(ids[:first] >= 0)) for ids, first in zip(pages, first_block, strict=True)
                )
            engine.plane.session_opened()
            if is_borrowed:
                self._apply(session, ReceiveEvent.BORROWED)
            else:
                self._begin(session, owner.peer)
        return TransferSize(session.num_pages, session.num_bytes)

    def _may_borrow(self, session: ReceiveSession) -> bool:
        """Whether pages that are lent to a session that is not open yet may be read without asking.

        Without the lock: what changes meanwhile might as well have changed afterwards.
        """
        link = self.links.get(session.endpoint)
        return (
            link is not None
            and link.peer == session.peer
            and link.state is LinkState.UP
            # Between unequal layouts pieces of pages move, of which the owner knows when it is asked.
            and link.pairing is not None
            and link.pairing.layout is self._engine.layout
            and session.transfer_id not in self._precancelled
            and not self._engine.fences.is_over(link.peer)
        )

    def _begin(self, session: ReceiveSession, peer: PeerKey) -> None:
        """Ask at once, or connect first (under the lock). Whatever goes wrong is an end of the session."""
        try:
            if self._precancelled.take(session.transfer_id):
                self._cancel(session, "cancelled before it was opened")
            elif self._engine.fences.is_over(peer):
                self._fail(session, 503, "peer_dead", f"{peer} ended before it was asked")
            elif self.links.obtain(session.endpoint, peer).state is LinkState.UP:
                self._ask(session)
        except Exception:
            # The border of error isolation.
            isolated(self._log, "a transfer could not be begun", transfer_id=session.transfer_id)
            self._fail(session, 502, "transfer_failed", "the owner of the pages could not be asked for them")

    def poll(self, at_least: int) -> TransferPoll:
        """What ended since the last poll; waits one interval at most for ``at_least`` sessions.

        A call that waits also fails sessions that are past their deadline.
        """
        poll = self.table.poll(
            at_least,
            self._engine.times.poll_s,
            lambda _poll, now_s: self._apply_deadlines(now_s, blocking=at_least > 0),
        )
        self._maintain()
        return poll

    def sweep(self) -> list[int]:
        """Sessions that have become overdue since the last sweep, each once."""
        with self.table.lock:
            self.links.expire(self._engine.clock.monotonic_s())
        overdue = self.table.sweep()
        self._maintain()
        return overdue

    def cancel(self, transfer_id: int) -> bool:
        """Cancel; True once nothing writes into the pages (also for transfers that are not open)."""
        with self.table.lock:
            session = self.table.open.get(transfer_id)
            if session is not None:
                self._cancel(session, "cancelled by the receiver")
            return self.table.safe(transfer_id)

    def decline(self, transfer_id: int, handoff: HandOff) -> None:
        """Tell the owner that these pages will not be asked for. Nothing happens when it cannot be told.

        Raises:
            TicketError: 403, as in :meth:`open`.
        """
        self._decline(self._owners.decline_handoff(transfer_id, handoff))

    def decline_claim(self, transfer_id: int, address: bytes) -> None:
        """Generation first: :meth:`decline` of a prompt that was never asked for.

        Raises:
            TicketError: 403, as in :meth:`open_claimed`.
        """
        self._decline(self._owners.decline_address(transfer_id, address))

    def _decline(self, decline: Decline) -> None:
        if self._engine.fences.is_over(decline.peer):
            return  # An old ticket must not take the link of whoever has the address by now.
        with self.table.lock:
            self.links.obtain(decline.endpoint, decline.peer)
            self._engine.send(decline.endpoint, decline.cancel)

    def _count_refused(self) -> None:
        with self.table.lock:
            self.table.counters.refused += 1

    # Under the lock.

    def _ask(self, session: ReceiveSession) -> None:
        try:
            fault_point("transceiver.before_request")
        except FaultInjectedError as error:
            self._fail(session, 502, "transfer_failed", str(error))
            return
        if self._engine.bounce is not None:
            session.run = self._engine.bounce.reserve(session.num_pages, session.num_bytes)
        self._engine.send(
            session.endpoint,
            RequestData(
                transfer_id=session.transfer_id,
                session=session.session,
                ticket=b"" if session.is_claim else session.token,
                claim=session.token if session.is_claim else b"",
                first_block=session.first_block,
                dst_pages=[encode_pages(ids) for ids in session.wanted],
                bounce=None if session.run is None else session.run.where,
            ),
        )
        session.started_s = self._engine.clock.monotonic_s()
        session.deadline_s = session.started_s + self._engine.times.timeout_s
        session.asked = True
        session.peer_may_write = self._push
        # Notifies: a poll that waits has to learn of the new deadline.
        self._apply(session, ReceiveEvent.ASKED)

    def _cancel(self, session: ReceiveSession, reason: str) -> None:
        session.control.stop()
        self._apply(session, ReceiveEvent.CANCEL, reason)

    def _ended(self, session: ReceiveSession) -> None:
        session.control.stop()
        if session.aux is not None and session.status.state is SessionState.FULLY_TRANSFERRED:
            self._auxes[session.transfer_id] = session.aux
        if not session.busy:
            self._acknowledge(session)

    def _released(self, session: ReceiveSession) -> None:
        session.give_run()
        self._engine.plane.session_closed()

    def _acknowledge(self, session: ReceiveSession) -> None:
        self._pulling.acknowledge(session)

    def _apply_deadlines(self, now_s: float, *, blocking: bool) -> float:
        due_s = self.links.expire(now_s)
        for session in list(self.table.open.values()):
            if session.terminal or not blocking:
                continue
            if now_s < session.deadline_s:
                due_s = min(due_s, session.deadline_s)
                continue
            self.table.note_overdue(session)
            timeout_ms = round(self._engine.times.timeout_s * 1000)
            late = (
                f"The KV cache did not arrive within kv_transfer_timeout_ms ({timeout_ms} ms); send the request again."
            )
            self._fail(session, 503, "kv_transfer_timeout", late)
        return due_s

    def _maintain(self) -> None:
        with self.table.lock:
            now_s = self._engine.clock.monotonic_s()
            self.lives.forget_lost(now_s)
            for session in self.table.quarantine:
                if session.peer_may_write and session.cancel_is_due(now_s):
                    self._pulling.ask_to_stop(session)

    def _apply(self, session: ReceiveSession, event: ReceiveEvent, reason: str = "") -> None:
        self.table.advance(session, next_receive_status(session.status, event), reason)

    def _fail(self, session: ReceiveSession, http_status: int, code: str, message: str) -> None:
        status = next_receive_status(session.status, ReceiveEvent.FAIL)
        self.table.fail(session, status, http_status, code, message)
