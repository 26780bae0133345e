"""The receiver's side of loans: a few pages are read at once, on the executor's thread; their owner is told afterwards.

Nothing is asked and nobody waited for. That the owner's grant still stands after the last byte says that the pages were
what the ticket promises; whatever is not as it should be sends the session on the usual way, with a request. What tells
the owner is kept until its grant is gone, which is how it says that it has heard; until then it is told again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.protocol.transfer import Loan, ResultAck
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.handshake import Pairing
from kvmesh.transceiver.integrity import RunningChecksums, checksum_difference
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.parts import HeldPages, Source, choose_sources, make_parts
from kvmesh.transceiver.planes.base import MoveJob, MoveStoppedError, PlaneError
from kvmesh.transceiver.runs import MissingPageError, decode_pages
from kvmesh.transceiver.sessions import CANCEL_REPEAT_S, ReceiveSession
from kvmesh.transceiver.states import ReceiveEvent, next_receive_status
from kvmesh.transceiver.table import SessionTable
from kvmesh.transceiver.types import PageIds, PeerKey

__all__ = ["Borrowing", "Reading", "lent_sources", "lent_sums"]

MAX_OWED: Final = 4096
"""Acknowledgements that are kept; an owner that never hears of one keeps its pages until its deadline."""

LOOK_S: Final = 0.01
"""Long enough for an owner to have heard, unless something is wrong."""

_SUM: Final = np.dtype("<u8")


class Reading(NamedTuple):
    """What is about to be read."""

    job: MoveJob
    ours: RunningChecksums | None
    """None: the two do not check."""
    theirs: list[bytes]


@dataclass(slots=True)
class _Owed:
    endpoint: str
    peer: PeerKey
    access: bytes
    ack: ResultAck
    until_s: float
    """When the ticket has expired, nobody takes it any more."""
    send_s: float
    """When to send it again."""


def lent_sources(loan: Loan, pairing: Pairing, first_block: Sequence[int], wanted: Sequence[PageIds]) -> list[Source]:
    """By route, the lent pages of the blocks that are wanted.

    Args:
        loan: as the owner has signed it.
        pairing: with the owner.
        first_block: by layer group, the block that ``wanted[group][0]`` is.
        wanted: by layer group, pages of the receiver, negative where it keeps none.

    Raises:
        MissingPageError: a wanted block is not lent.
        ValueError: the list of pages cannot be read.
    """
    held = [HeldPages(decode_pages(data)) for data in loan.pages]
    _check_groups(len(held), pairing)
    return choose_sources(pairing.routes, held, first_block, wanted)


def lent_sums(loan: Loan, pairing: Pairing, first_block: Sequence[int], wanted: Sequence[PageIds]) -> list[bytes]:
    """By route, the owner's checksums of the same pages; between equal layouts only, where whole pages move.

    Raises:
        MissingPageError: there is not one for each block.
    """
    _check_groups(len(loan.checksums), pairing)
    sums: list[bytes] = []
    for route in pairing.routes:
        first, ours = first_block[route.receiver_group], wanted[route.receiver_group]
        theirs = loan.checksums[route.owner_group][first * _SUM.itemsize :]
        if len(theirs) != len(ours) * _SUM.itemsize:
            raise MissingPageError("the lent pages and their checksums differ in number")
        sums.append(np.frombuffer(theirs, dtype=_SUM)[ours >= 0].tobytes())
    return sums


def _check_groups(number: int, pairing: Pairing) -> None:
    if number != len(pairing.layout.groups):
        raise MissingPageError(f"{number} layer groups are lent, the owner has {len(pairing.layout.groups)}")


class Borrowing:
    """See the module. Shares the receiver's table and its lock.

    Args:
        engine: this engine.
        table: the sessions.
        acknowledge: tells an owner how a session has ended that was not read to its end (under the lock).
    """

    def __init__(
        self,
        engine: LocalEngine,
        table: SessionTable[ReceiveSession],
        acknowledge: Callable[[ReceiveSession], None],
    ) -> None:
        self._engine = engine
        self._table = table
        self._acknowledge_end = acknowledge
        self._owed: dict[tuple[int, int], _Owed] = {}
        self._look_s = math.inf
        """When the next of them is to be looked at."""
        self._log = get_logger("transceiver.borrowing")
        self.borrowed_total = 0

    @property
    def owes(self) -> bool:
        """Whether owners may not have heard yet that their pages were read."""
        return bool(self._owed)

    def plan(self, session: ReceiveSession, loan: Loan, pairing: Pairing) -> Reading | None:
        """What to read for a session that has just been opened; None where its owner has to be asked (under the lock).

        A session that gets something to read is busy until :meth:`read` has returned.
        """
        engine = self._engine
        assert session.peer is not None
        checks = engine.checksums is not None and bool(loan.checksums)
        if (
            # Their pieces have checksums of their own, which an owner knows when it is asked.
            (checks and pairing.layout is not engine.layout)
            or engine.bounce is not None
            or not engine.plane.is_quick(session.peer, session.num_bytes)
            or not engine.plane.stands(session.peer, loan.access)
            # A ticket is good for one transfer.
            or any(transfer_id == session.transfer_id for transfer_id, _ in self._owed)
        ):
            return None
        try:
            parts = make_parts(
                pairing.routes,
                lent_sources(loan, pairing, session.first_block, session.wanted),
                session.local,
                owner=pairing.layout,
                receiver=engine.layout,
                side="receiver",
            )
            theirs = lent_sums(loan, pairing, session.first_block, session.wanted) if checks else []
        except (MissingPageError, ValueError) as error:
            self._log.warning("what is lent does not fit", transfer_id=session.transfer_id, reason=str(error))
            return None
        ours = engine.checksums.running(parts) if checks and engine.checksums is not None else None
        job = MoveJob(
            transfer_id=session.transfer_id,
            session=session.session,
            parts=parts,
            access=loan.access,
            control=session.control,
            sums=ours,
        )
        session.busy = True
        return Reading(job, ours, theirs)

    def read(self, session: ReceiveSession, reading: Reading) -> bool:
        """Read what was planned, on the executor's thread, without the lock; False where the owner has to be asked."""
        failure = obstacle = ""
        try:
            obstacle = self._copy(session, reading)
            if not obstacle:
                fault_point("transceiver.before_ack")
        except MoveStoppedError:
            failure = "stopped"
        except FaultInjectedError as error:
            failure = str(error)
        except Exception:
            # The border of error isolation: what one owner makes go wrong ends its own transfer only.
            isolated(self._log, "a transfer could not be received", transfer_id=session.transfer_id)
            failure = "the pages could not be received; the log of this server says why"
        with self._table.lock:
            session.busy = False
            if session.terminal:
                self._acknowledge_end(session)
                return True
            if failure:
                status = next_receive_status(session.status, ReceiveEvent.FAIL)
                self._table.fail(session, status, 502, "transfer_failed", failure)
                return True
            if obstacle:
                self._log.info("lent pages are asked for", transfer_id=session.transfer_id, reason=obstacle)
                return False
            now_s = self._engine.clock.monotonic_s()
            # Before anything else: it is handled while this side goes on.
            self._acknowledge(session, reading.job.access, now_s)
            self.borrowed_total += 1
            session.note_slices(session.control.take_slices(), now_s)
            self._table.advance(session, next_receive_status(session.status, ReceiveEvent.BORROWED))
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

    def refused(self, transfer_id: int, session: int) -> None:
        """An owner does not take an acknowledgement: it need not hear it again (under the lock)."""
        self._owed.pop((transfer_id, session), None)

    def forget(self, endpoint: str, peer: PeerKey) -> None:
        """An owner is gone, or out of reach for good (under the lock)."""
        gone = [key for key, owed in self._owed.items() if (owed.endpoint, owed.peer) == (endpoint, peer)]
        for key in gone:
            del self._owed[key]

    def _copy(self, session: ReceiveSession, reading: Reading) -> str:
        """Read; why what came must not be used, if so."""
        assert session.peer is not None
        fault_point("transceiver.before_request")
        try:
            self._engine.plane.move(session.peer, reading.job)
        except PlaneError as error:
            return str(error)
        if reading.ours is None:
            return ""
        return checksum_difference(reading.ours.encoded(), reading.theirs) or ""

    def _acknowledge(self, session: ReceiveSession, access: bytes, now_s: float) -> None:
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
        if len(self._owed) >= MAX_OWED:
            del self._owed[next(iter(self._owed))]
        self._owed[session.transfer_id, session.session] = _Owed(
            endpoint=session.endpoint,
            peer=session.peer,
            access=access,
            ack=ack,
            until_s=now_s + self._engine.times.timeout_s,
            send_s=now_s + CANCEL_REPEAT_S,
        )
        self._look_s = min(self._look_s, now_s + LOOK_S)
