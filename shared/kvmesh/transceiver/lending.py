"""The page owner's side of loans: few pages that a receiver reads with nothing but the hand-off, and tells afterwards.

The grant of a loan is put up with the session and travels in the signed ticket. Who reads looks at it again after the
last byte, so that the owner may take it back at any time without asking anybody; it does so before the pages are
released, may move, or are granted to a receiver that has asked.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvmesh.cache.layout import PageLayout
from kvmesh.protocol.transfer import Loan, Refused, ResultAck, Ticket
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.integrity import PageChecksums
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.peers import Receivers
from kvmesh.transceiver.planes.base import LOAN, Part, PlaneError
from kvmesh.transceiver.runs import encode_pages, only_pages
from kvmesh.transceiver.sessions import SendSession
from kvmesh.transceiver.states import SendEvent, next_send_status
from kvmesh.transceiver.table import SessionTable
from kvmesh.transceiver.tickets import SpentNonces, TicketError, check_ticket
from kvmesh.transceiver.types import PageIds

__all__ = ["MAX_LENT_PAGES", "Lending", "page_sums"]

MAX_LENT_PAGES: Final = 64
"""They are named in the ticket, whose length is bounded."""

MAX_REFUSED: Final = 1024
"""Refused acknowledgements that are remembered."""


def page_sums(checksums: PageChecksums, layout: PageLayout, held: Sequence[PageIds]) -> list[bytes]:
    """Per layer group the uint64 checksums of whole pages, one for each block; 0 where none is held.

    Args:
        checksums: computes them.
        layout: of the pages.
        held: per layer group the page of each block; negative where none is.
    """
    encoded: list[bytes] = []
    for group, ids in zip(layout.groups, held, strict=True):
        pages = only_pages(ids)
        part = Part(group.pool, pages, group.pool, pages, group.page_bytes)
        sums = checksums.of([part])[0] if len(pages) else b""
        if len(pages) != len(ids):
            by_block = np.zeros(len(ids), dtype="<u8")
            by_block[ids >= 0] = np.frombuffer(sums, dtype="<u8")
            sums = by_block.tobytes()
        encoded.append(sums)
    return encoded


class Lending:
    """See the module. Shares the sender's table, its lock, and the tickets that are spent.

    Args:
        engine: this engine.
        table: the sessions.
        receivers: who has introduced himself.
        spent: tickets that were redeemed.
    """

    def __init__(
        self, engine: LocalEngine, table: SessionTable[SendSession], receivers: Receivers, spent: SpentNonces
    ) -> None:
        self._engine = engine
        self._table = table
        self._receivers = receivers
        self._spent = spent
        self._refused: dict[tuple[bytes, int, int], None] = {}
        """Route, transfer and session of acknowledgements, the oldest first."""
        self._log = get_logger("transceiver.lending")

    def lend(self, transfer_id: int, held: Sequence[PageIds]) -> Loan | None:
        """Put up the grant of a prompt's pages for whoever gets the ticket, where that is worth it.

        Args:
            transfer_id: of a session that is about to be opened.
            held: per layer group the page of each block; negative where none is.
        """
        engine = self._engine
        if engine.plane.direction != "pull" or engine.bounce is not None or sum(map(len, held)) > MAX_LENT_PAGES:
            return None
        nbytes = sum(len(only_pages(ids)) * engine.page_bytes(group) for group, ids in enumerate(held))
        try:
            if not (access := engine.plane.lend(transfer_id, nbytes)):
                return None
        except PlaneError as error:
            self._log.warning("nothing can be lent", transfer_id=transfer_id, reason=str(error))
            return None
        try:
            sums = [] if engine.checksums is None else page_sums(engine.checksums, engine.layout, held)
        except BaseException:
            engine.plane.revoke(transfer_id, LOAN)
            raise
        return Loan(access, [encode_pages(ids) for ids in held], sums)

    def recall(self, session: SendSession) -> None:
        """Whoever reads now will find out that it must not; nothing happens where nothing is lent (under the lock)."""
        if session.lent:
            session.lent = False
            self._engine.plane.revoke(session.transfer_id, LOAN)

    def on_taken(self, route: bytes, ack: ResultAck) -> None:
        """A receiver has read a loan (under the lock, on the control thread).

        The ticket is the right to say so: who says it need not have introduced himself, or may be taken for dead.
        """
        session = self._table.open.get(ack.transfer_id)
        try:
            ticket = self._redeem(session, route, ack)
        except TicketError as error:
            self._refuse(route, ack, error)
            return
        if ticket is None or session is None or session.terminal or session.peer is not None:
            # A repeated one, of what was not lent, or the pages were given up before it came.
            self._table.counters.dropped += 1
            return
        session.peer, session.session = self._receivers.peer(route), ack.session
        # Not more than was lent, whatever it says.
        pages = [len(only_pages(held.ids)) for held in session.held]
        nbytes = sum(count * self._engine.page_bytes(group) for group, count in enumerate(pages))
        session.num_pages = max(0, min(ack.num_pages, sum(pages)))
        session.num_bytes = max(0, min(ack.num_bytes, nbytes))
        self._table.advance(session, next_send_status(session.status, SendEvent.TAKEN))

    def _redeem(self, session: SendSession | None, route: bytes, ack: ResultAck) -> Ticket | None:
        """Spend the ticket of an acknowledgement, unless that is a repeated one.

        Returns:
            None where it is none of this session's loan, and has spent nothing.
        """
        mine = None if session is None else session.ticket
        if session is not None and mine is not None and hmac.compare_digest(session.token, ack.ticket):
            ticket = mine  # Which this engine has just signed itself.
        else:
            ticket = self._engine.tickets.open_ticket(ack.ticket)
        # The identity of a connection stays the same when it is made again.
        purpose = (route, ack.session)
        if not self._spent.was_spent_on(ticket, purpose):
            now_ms = self._engine.now_unix_ms()
            check_ticket(ticket, transfer_id=ack.transfer_id, owner=self._engine.key, now_unix_ms=now_ms)
            if ticket.loan is None or ack.status != "done":
                return None
            self._spent.spend(ticket, now_ms, purpose)
        return ticket if mine is not None and mine.nonce == ticket.nonce else None

    def _refuse(self, route: bytes, ack: ResultAck, error: TicketError) -> None:
        """Say so; it counts once, however often a receiver that has not heard repeats itself."""
        said = (route, ack.transfer_id, ack.session)
        if said in self._refused:
            self._table.counters.dropped += 1
        else:
            self._refused[said] = None
            if len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
            self._table.counters.refused += 1
            self._log.warning("an acknowledgement was refused", transfer_id=ack.transfer_id, code=error.code)
        refused = Refused(
            transfer_id=ack.transfer_id,
            session=ack.session,
            status=error.status,
            code=error.code or "ticket_refused",
            message=error.message,
        )
        self._engine.send(route, refused)
