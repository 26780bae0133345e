"""What owners say of a receiver's sessions: results, refusals and cancels, as they come in on the control thread."""

from __future__ import annotations

import itertools

from kvmesh.protocol.transfer import CancelSession, Refused, ResultAck, TransferResult
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.arrivals import answer_obstacle
from kvmesh.transceiver.handshake import Pairing
from kvmesh.transceiver.links import Links
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.precancel import PreCancels
from kvmesh.transceiver.pulling import Pulling
from kvmesh.transceiver.sessions import ReceiveSession
from kvmesh.transceiver.states import ReceiveEvent, SessionState, next_receive_status
from kvmesh.transceiver.table import SessionTable

__all__ = ["Answers"]


class Answers:
    """See the module. Shares the receiver's table and its lock.

    Args:
        engine: this engine.
        table: the sessions.
        links: the connections to owners.
        pulling: has pages moved and checked.
        precancelled: transfers that were cancelled before they were opened.
    """

    def __init__(
        self,
        engine: LocalEngine,
        table: SessionTable[ReceiveSession],
        links: Links,
        pulling: Pulling,
        precancelled: PreCancels,
    ) -> None:
        self._engine = engine
        self._push = engine.plane.direction == "push"
        self._table = table
        self._links = links
        self._pulling = pulling
        self._precancelled = precancelled
        self._log = get_logger("transceiver.answers")

    def on_result(self, endpoint: str, result: TransferResult) -> None:
        """An owner says how a session stands."""
        with self._table.lock:
            session = self._find(endpoint, result.transfer_id, result.session)
            if session is None:
                self._table.counters.dropped += 1
                return
            if result.is_last:
                session.peer_may_write = False
            if session.terminal:
                self._table.notify()  # Its pages may be quiet now.
            granted = result.status in {"ready", "done"}
            if session.terminal:
                if granted:
                    self._pulling.acknowledge(session)
            elif granted and (obstacle := self._obstacle(session, result)) is not None:
                self._table.counters.dropped += 1
                self._log.warning("an answer makes no sense", transfer_id=result.transfer_id, reason=obstacle)
            elif granted and (obstacle := answer_obstacle(session, result)) is not None:
                self._fail(session, 502, "bad_aux", f"the owner's answer makes no sense: {obstacle}")
            elif granted:
                self._take_granted(session, result)
            elif result.status == "checksums":
                self._pulling.take_checksums(session, result)
            elif result.status == "cancelled":
                self._apply(session, ReceiveEvent.CANCEL, "cancelled by the page owner")
            else:
                self._fail(session, 502, "transfer_failed", result.message or "the page owner reports a failure")

    def on_refused(self, endpoint: str, refused: Refused) -> None:
        """An owner refuses a request for pages. Whether it serves an earlier copy of it, its word does not say."""
        with self._table.lock:
            session = self._find(endpoint, refused.transfer_id, refused.session)
            if session is None:
                self._table.counters.dropped += 1
                return
            session.refused = True
            self._fail(session, refused.status, refused.code, refused.message)

    def on_cancel(self, endpoint: str, cancel: CancelSession) -> None:
        """An owner wants its pages back."""
        with self._table.lock:
            session = self._find(endpoint, cancel.transfer_id, cancel.session)
            if cancel.session == 0:
                self._precancelled.remember(cancel.transfer_id)
            elif session is None:
                # It is over, and the acknowledgement was lost with a connection.
                ack = ResultAck(transfer_id=cancel.transfer_id, session=cancel.session, status="cancelled")
                self._engine.send(endpoint, ack)
            elif session.terminal and not session.busy:
                session.acknowledged = False
                self._pulling.acknowledge(session)
            else:
                session.control.stop()
                self._apply(session, ReceiveEvent.CANCEL, "cancelled by the page owner")

    # Under the lock.

    def _obstacle(self, session: ReceiveSession, result: TransferResult) -> str | None:
        """Why a session cannot take this answer now; such an answer is dropped."""
        state = session.status.state
        expected = {SessionState.READY, SessionState.TRANSFERRING} if session.next_slice else {SessionState.READY}
        if state not in expected:
            return f"{result.status} to a session that is {state.value}"
        if result.aux is not None and result.aux.finished:
            return None
        if self._push != (result.status == "done"):
            return f"{result.status} on a plane of the other kind"
        if result.slice_index != session.next_slice:
            return f"slice {result.slice_index} where {session.next_slice} is expected"
        return None

    def _take_granted(self, session: ReceiveSession, result: TransferResult) -> None:
        session.aux = result.aux
        if result.aux is not None and result.aux.finished:
            session.num_pages = session.num_bytes = 0
            self._apply(session, ReceiveEvent.MOVED)
            self._apply(session, ReceiveEvent.VERIFIED)
        elif result.status == "ready":
            self._pulling.start_pull(session, self._pairing_of(session), result)
        else:
            self._pulling.start_check(session, self._pairing_of(session), result)

    def _pairing_of(self, session: ReceiveSession) -> Pairing:
        link = self._links.get(session.endpoint)
        assert link is not None
        assert link.pairing is not None
        return link.pairing

    def _find(self, endpoint: str, transfer_id: int, number: int) -> ReceiveSession | None:
        wanted = (endpoint, transfer_id, number)
        candidates = itertools.chain(self._table.open.values(), self._table.quarantine)
        return next((s for s in candidates if (s.endpoint, s.transfer_id, s.session) == wanted), None)

    def _apply(self, session: ReceiveSession, event: ReceiveEvent, reason: str = "") -> None:
        self._table.advance(session, next_receive_status(session.status, event), reason)

    def _fail(self, session: ReceiveSession, http_status: int, code: str, message: str) -> None:
        status = next_receive_status(session.status, ReceiveEvent.FAIL)
        self._table.fail(session, status, http_status, code, message)
