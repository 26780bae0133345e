"""The receiver's side of loans: a few pages are read at once, on the executor's thread.

Nothing is asked and nobody waited for. That the loan still stands when it is taken, after the last byte, says that the
pages were what the ticket promises; whatever is not as it should be sends the session on the usual way, with a request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvmesh.cache.layout import PageLayout
from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.protocol.transfer import Loan
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.integrity import checksum_difference
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.planes.base import Part, PlaneError
from kvmesh.transceiver.planes.loans import Receipt
from kvmesh.transceiver.runs import MissingPageError, all_are_pages, decode_pages
from kvmesh.transceiver.sessions import ReceiveSession
from kvmesh.transceiver.types import PageIds

__all__ = ["Borrowing", "lent_parts", "lent_sums"]

_SUM: Final = np.dtype("<u8")


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
    """See the module.

    Args:
        engine: this engine.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._loans = engine.plane.loans
        self._number = engine.key.number
        self._log = get_logger("transceiver.borrowing")
        self.borrowed_total = 0

    def read(self, session: ReceiveSession, loan: Loan, expires_unix_ms: int) -> bool:
        """Read the pages of a session that is not open yet, and take the loan; on the executor's thread.

        Nobody else knows of the session meanwhile: either all of it happens, or its pages hold anything.

        Args:
            session: whose pages they are to be.
            loan: the owner's.
            expires_unix_ms: when the ticket expires, exactly: a loan stays on one host, which has one clock.

        Returns:
            Whether the pages are there; otherwise their owner has to be asked for them.
        """
        engine, loans, peer = self._engine, self._loans, session.peer
        assert peer is not None
        if (
            loans is None
            or engine.bounce is not None
            or not loans.stands(peer, loan.access)  # It is out of reach, was read, or was taken back already.
            or engine.now_unix_ms() >= expires_unix_ms  # Its owner says so.
        ):
            return False
        try:
            fault_point("transceiver.before_request")
            parts = lent_parts(loan, engine.layout, session.first_block, session.wanted, session.local)
            checks = engine.checksums is not None and bool(loan.checksums)
            theirs = lent_sums(loan, session.first_block, session.wanted) if checks else []
            begin_ns = time.time_ns()
            ours = loans.read(peer, parts, summed=checks)
            end_ns = time.time_ns()
            if checks and (damage := checksum_difference([sums.tobytes() for sums in ours], theirs)) is not None:
                raise PlaneError(damage)
            fault_point("transceiver.before_ack")
            if engine.now_unix_ms() >= expires_unix_ms:
                raise PlaneError("their ticket has expired meanwhile")
            receipt = Receipt(self._number, session.num_pages, session.num_bytes)
            if not loans.take(peer, loan.access, receipt):
                raise PlaneError("they were read by somebody else, or taken back, meanwhile")
        except (PlaneError, MissingPageError, ValueError, FaultInjectedError) as error:
            self._log.info("lent pages are asked for", transfer_id=session.transfer_id, reason=str(error))
            return False
        except Exception:
            # The border of error isolation: what one owner makes go wrong costs its own loan only.
            isolated(self._log, "lent pages could not be read", transfer_id=session.transfer_id)
            return False
        self.borrowed_total += 1
        session.acknowledged = True
        session.note_slices([begin_ns, end_ns], engine.clock.monotonic_s())
        return True
