"""The receiver's side of loans: a few pages are read at once, on the executor's thread; their owner is told afterwards.

Nothing is asked and nobody waited for. That the owner's grant still stands after the last byte says that the pages were
what the ticket promises; whatever is not as it should be sends the session on the usual way, with a request. What tells
the owner is kept until its grant is gone, which is how it says that it has heard; until then it is told again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvmesh.cache.layout import PageLayout
from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.protocol.transfer import Loan, Refused, ResultAck
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.integrity import checksum_difference
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.planes.base import Part, PlaneError
from kvmesh.transceiver.runs import MissingPageError, all_are_pages, decode_pages
from kvmesh.transceiver.sessions import CANCEL_REPEAT_S, ReceiveSession
from kvmesh.transceiver.table import SessionTable
from kvmesh.transceiver.types import PageIds, PeerKey

__all__ = ["Borrowing", "lent_parts", "lent_sums"]

MAX_OWED: Final = 4096
"""Acknowledgements that are kept; with so many of which owners have not heard, pages are asked for."""

LOOK_S: Final = 0.01
"""Long enough for an owner to have heard, unless something is wrong."""

_SUM: Final = np.dtype("<u8")


@dataclass(slots=True)
class _Owed:
    endpoint: str
    peer: PeerKey
    access: bytes
    ack: ResultAck
    until_s: float
    """When the ticket expires: nobody takes it any more."""
    send_s: float
    """When to send it again."""


def lent_parts(
    loan: Loan, layout: PageLayout, first_block: Sequence[int], wanted: Sequence[PageIds], local: Sequence[PageIds]
) -> list[Part]:
    """What to read of a loan, between two engines of the same layout: whole pages, a part for each layer group.

    Args:
        loan: as the owner has signed it.
        layout: of both.
        first_block: by layer group, the block that ``wanted[group][0]`` is.
        wanted: by layer group, pages of the receiver, negative where it keeps none.
        local: ``wanted`` without its negative entries; the very same arrays where it has none.

    Raises:
        MissingPageError: other blocks are lent than are wanted.
        ValueError: a list of pages cannot be read.
    """
    if len(loan.pages) != len(layout.groups):
        raise MissingPageError(f"pages of {len(loan.pages)} layer groups are lent, there are {len(layout.groups)}")
    parts: list[Part] = []
    for group, data, first, ours, pages in zip(layout.groups, loan.pages, first_block, wanted, local, strict=True):
        theirs = decode_pages(data)[first:]
        if len(theirs) != len(ours):
            raise MissingPageError(f"{len(theirs)} blocks are lent where {len(ours)} are wanted")
        # A page that the owner does not hold is none of its pool: the plane refuses it.
        parts.append(
            Part(group.pool, pages, group.pool, theirs if pages is ours else theirs[ours >= 0], group.page_bytes)
        )
    return parts


def lent_sums(loan: Loan, first_block: Sequence[int], wanted: Sequence[PageIds]) -> list[bytes]:
    """By part of :func:`lent_parts`, the owner's checksums of its pages.

    Raises:
        MissingPageError: there is not one for each block.
    """
    if len(loan.checksums) != len(wanted):
        raise MissingPageError(f"checksums of {len(loan.checksums)} layer groups are lent, there are {len(wanted)}")
    sums: list[bytes] = []
    for data, first, ours in zip(loan.checksums, first_block, wanted, strict=True):
        theirs = data[first * _SUM.itemsize :]
        if len(theirs) != len(ours) * _SUM.itemsize:
            raise MissingPageError("the lent pages and their checksums differ in number")
        sums.append(theirs if all_are_pages(ours) else np.frombuffer(theirs, dtype=_SUM)[ours >= 0].tobytes())
    return sums


class Borrowing:
    """See the module. Shares the receiver's table and its lock.

    Args:
        engine: this engine.
        table: the sessions.
    """

    def __init__(self, engine: LocalEngine, table: SessionTable[ReceiveSession]) -> None:
        self._engine = engine
        self._table = table
        self._owed: dict[int, _Owed] = {}
        self._look_s = math.inf
        """When the next of them is to be looked at."""
        self._log = get_logger("transceiver.borrowing")
        self.borrowed_total = 0

    @property
    def owes(self) -> bool:
        """Whether owners may not have heard yet that their pages were read."""
        return bool(self._owed)

    def read(self, session: ReceiveSession, loan: Loan, expires_unix_ms: int) -> bool:
        """Read the pages of a session that is not open yet, and tell their owner; on the executor's thread.

        Nobody else knows of the session meanwhile: either all of it happens, or its pages hold anything.

        Args:
            session: whose pages they are to be.
            loan: the owner's.
            expires_unix_ms: when the ticket expires, exactly: a loan stays on one host, which has one clock.

        Returns:
            Whether the pages are there; otherwise their owner has to be asked for them.
        """
        engine = self._engine
        assert session.peer is not None
        if (
            engine.bounce is not None
            or not engine.plane.stands(session.peer, loan.access)  # It is out of reach, or was taken back already.
            or session.transfer_id in self._owed  # A ticket is good for one transfer.
            or len(self._owed) >= MAX_OWED
            or engine.now_unix_ms() >= expires_unix_ms  # Its owner says so.
        ):
            return False
        try:
            fault_point("transceiver.before_request")
            parts = lent_parts(loan, engine.layout, session.first_block, session.wanted, session.local)
            checks = engine.checksums is not None and bool(loan.checksums)
            theirs = lent_sums(loan, session.first_block, session.wanted) if checks else []
            begin_ns = time.time_ns()
            ours = engine.plane.read_lent(session.peer, loan.access, parts, summed=checks)
            end_ns = time.time_ns()
            if checks and (damage := checksum_difference([sums.tobytes() for sums in ours], theirs)) is not None:
                raise PlaneError(damage)
            fault_point("transceiver.before_ack")
            if engine.now_unix_ms() >= expires_unix_ms:
                raise PlaneError("their ticket has expired meanwhile")
        except (PlaneError, MissingPageError, ValueError, FaultInjectedError) as error:
            self._log.info("lent pages are asked for", transfer_id=session.transfer_id, reason=str(error))
            return False
        except Exception:
            # The border of error isolation: what one owner makes go wrong costs its own loan only.
            isolated(self._log, "lent pages could not be read", transfer_id=session.transfer_id)
            return False
        # Before anything else: it is handled while this side goes on.
        self._tell(session, loan.access, expires_unix_ms)
        session.note_slices([begin_ns, end_ns], engine.clock.monotonic_s())
        return True

    def tell_again(self, now_s: float, endpoint: str | None = None) -> None:
        """Forget what owners have heard, and repeat what they may not have (under the lock).

        Args:
            now_s: the monotonic time.
            endpoint: of an owner to which the connection is there again, so that everything is repeated at once.
        """
        if endpoint is None and now_s < self._look_s:
            return
        for key, owed in list(self._owed.items()):
            if now_s >= owed.until_s or not self._engine.plane.stands(owed.peer, owed.access):
                del self._owed[key]
            elif owed.endpoint == endpoint or now_s >= owed.send_s:
                owed.send_s = now_s + CANCEL_REPEAT_S
                self._engine.send(owed.endpoint, owed.ack)
        self._look_s = min((owed.send_s for owed in self._owed.values()), default=math.inf)

    def tell_all(self) -> None:
        """Repeat, for the last time, what owners may not have heard: this engine ends."""
        with self._table.lock:
            for owed in self._owed.values():
                self._engine.send(owed.endpoint, owed.ack)
            self._owed.clear()

    def take_refusal(self, endpoint: str, refused: Refused) -> bool:
        """An owner does not take an acknowledgement: it need not hear it again (under the lock).

        Returns:
            Whether it was one that the owner was told.
        """
        owed = self._owed.get(refused.transfer_id)
        if owed is None or (owed.endpoint, owed.ack.session) != (endpoint, refused.session):
            return False
        del self._owed[refused.transfer_id]
        self._log.warning(
            "pages were read on loan, and their owner does not take the acknowledgement",
            transfer_id=refused.transfer_id,
            owner=str(owed.peer),
            code=refused.code,
        )
        return True

    def forget(self, endpoint: str, peer: PeerKey) -> None:
        """An owner is gone, or out of reach for good (under the lock)."""
        gone = [key for key, owed in self._owed.items() if (owed.endpoint, owed.peer) == (endpoint, peer)]
        for key in gone:
            del self._owed[key]

    def _tell(self, session: ReceiveSession, access: bytes, expires_unix_ms: int) -> None:
        assert session.peer is not None
        ack = ResultAck(
            transfer_id=session.transfer_id,
            session=session.session,
            status="done",
            ticket=session.token,
            num_pages=session.num_pages,
            num_bytes=session.num_bytes,
        )
        self._engine.send(session.endpoint, ack)
        session.acknowledged = True
        now_s = self._engine.clock.monotonic_s()
        until_s = now_s + (expires_unix_ms - self._engine.now_unix_ms()) / 1e3
        with self._table.lock:
            self.borrowed_total += 1
            self._owed[session.transfer_id] = _Owed(
                session.endpoint, session.peer, access, ack, until_s, now_s + CANCEL_REPEAT_S
            )
            self._look_s = min(self._look_s, now_s + LOOK_S)
