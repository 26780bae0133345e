"""The page owner's side of loans: few pages that a receiver reads with nothing but the hand-off.

A loan is put up with the session and travels in the signed ticket. Who has read it takes it in one step with the
certainty that it still stood, so that the owner may take it back at any time without asking anybody; it does so before
the pages are released, may move, or are granted to a receiver that has asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvmesh.cache.layout import PageLayout
from kvmesh.protocol.transfer import Loan
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.integrity import PageChecksums
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.peers import Receivers
from kvmesh.transceiver.planes.base import Part, PlaneError
from kvmesh.transceiver.planes.loans import Receipt
from kvmesh.transceiver.runs import encode_pages, only_pages
from kvmesh.transceiver.sessions import SendSession
from kvmesh.transceiver.states import SendEvent, next_send_status
from kvmesh.transceiver.table import SessionTable
from kvmesh.transceiver.tickets import SpentNonces
from kvmesh.transceiver.types import PageIds

__all__ = ["MAX_LENT_PAGES", "Lending", "page_sums"]

MAX_LENT_PAGES: Final = 64
"""They are named in the ticket, whose length is bounded."""


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
        self._loans = engine.plane.loans
        self._log = get_logger("transceiver.lending")

    def lend(self, transfer_id: int, held: Sequence[PageIds]) -> Loan | None:
        """Lend a prompt's pages to whoever gets the ticket, where that is worth it.

        Args:
            transfer_id: of a session that is about to be opened.
            held: per layer group the page of each block; negative where none is.
        """
        engine, loans = self._engine, self._loans
        if loans is None or engine.bounce is not None or sum(map(len, held)) > MAX_LENT_PAGES:
            return None
        nbytes = sum(len(only_pages(ids)) * engine.page_bytes(group) for group, ids in enumerate(held))
        try:
            if not (access := loans.lend(transfer_id, nbytes)):
                return None
        except PlaneError as error:
            self._log.warning("nothing can be lent", transfer_id=transfer_id, reason=str(error))
            return None
        try:
            sums = [] if engine.checksums is None else page_sums(engine.checksums, engine.layout, held)
        except BaseException:
            loans.recall(transfer_id)
            raise
        return Loan(access, [encode_pages(ids) for ids in held], sums)

    def look(self) -> None:
        """End the sessions whose pages were read (under the lock)."""
        if self._loans is not None:
            for transfer_id, receipt in self._loans.taken():
                session = self._table.open.get(transfer_id)
                if session is not None and session.lent:
                    self._taken(session, receipt)

    def recall(self, session: SendSession) -> None:
        """Whoever reads now will find out that it must not; a session that was read before ends (under the lock).

        Nothing happens where nothing is lent.
        """
        if session.lent and self._loans is not None:
            receipt = self._loans.recall(session.transfer_id)
            if receipt is not None and not session.terminal:
                self._taken(session, receipt)
            session.lent = False

    def _taken(self, session: SendSession, receipt: Receipt) -> None:
        assert session.ticket is not None
        session.lent = False
        # Nobody may redeem it by asking any more.
        self._spent.spend(session.ticket, self._engine.now_unix_ms())
        # Of two who read at once it may name the one who was too late.
        session.peer = self._receivers.numbered(receipt.reader)
        # Not more than was lent, whatever it says.
        pages = [len(only_pages(held.ids)) for held in session.held]
        nbytes = sum(count * self._engine.page_bytes(group) for group, count in enumerate(pages))
        session.num_pages, session.num_bytes = min(receipt.num_pages, sum(pages)), min(receipt.num_bytes, nbytes)
        self._table.advance(session, next_send_status(session.status, SendEvent.TAKEN))
