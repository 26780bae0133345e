"""The sessions of one side under one lock: their changes, what the executor hears of them, and when leases go.

A session is *open* until the executor has heard how it ended. Then its lease is released if nothing touches the pages,
else it moves to quarantine. Leases are released only in :meth:`SessionTable.poll` and :meth:`SessionTable.sweep`, which
the executor calls on its own thread; everything else may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, ParamSpec, TypeVar

from kvmesh.protocol.transfer import TransferState
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.quarantine import Quarantine
from kvmesh.transceiver.sessions import Session
from kvmesh.transceiver.states import TERMINAL_STATES, SessionState, Status
from kvmesh.transceiver.types import TransferFailure, TransferPoll

__all__ = ["Counters", "DuplicateTransferError", "SessionTable"]

S = TypeVar("S", bound=Session)
P = ParamSpec("P")
R = TypeVar("R")

_OUTCOMES: dict[SessionState, TransferState] = {
    SessionState.FULLY_TRANSFERRED: "completed",
    SessionState.ERROR: "failed",
    SessionState.CANCELLED: "cancelled",
}


class DuplicateTransferError(ValueError):
    """A session for this transfer is open already."""


@dataclass(slots=True)
class Counters:
    """Counters of one side since start."""

    started: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    timed_out: int = 0
    refused: int = 0
    dropped: int = 0
    pages: int = 0
    nbytes: int = 0
    pages_reused: int = 0


class SessionTable(Generic[S]):
    """See the module.

    Args:
        engine: this engine.
        side: which side's sessions these are.
        on_ended: called under the lock when a session has ended, whichever way.
        on_released: called under the lock when a session's lease has been released.
    """

    def __init__(
        self,
        engine: LocalEngine,
        side: Literal["context", "generation"],
        *,
        on_ended: Callable[[S], None],
        on_released: Callable[[S], None] | None = None,
    ) -> None:
        self._engine = engine
        self._side = side
        self._on_ended = on_ended
        self._on_released = on_released
        self._log = get_logger(f"transceiver.{side}")
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.open: dict[int, S] = {}
        self.quarantine: Quarantine[S] = Quarantine()
        self.counters = Counters()
        self._looking = False

    def check_new(self, transfer_id: int) -> None:
        """Check that a session may be opened.

        Raises:
            DuplicateTransferError: one of this transfer is open.
        """
        if transfer_id in self.open:
            raise DuplicateTransferError(f"transfer {transfer_id} is open already")

    def add(self, session: S, *, deadline_unix_ms: int | None = None) -> None:
        """Open a session.

        Raises:
            DuplicateTransferError: one of this transfer is open.
        """
        with self.lock:
            self.check_new(session.transfer_id)
            self.open[session.transfer_id] = session
            self.counters.started += 1
            self._record(session, "registered", deadline_unix_ms=deadline_unix_ms)

    def advance(self, session: S, status: Status, reason: str = "") -> None:
        """Set a session's status, as a transition function of ``states`` gave it."""
        with self.lock:
            before, session.status = session.status, status
            if before.state is SessionState.INIT and status.state is SessionState.READY:
                self._record(session, "transferring")
                self.notify()
            if status.terminal and not before.terminal:
                self._ended(session, reason)

    def notify(self) -> None:
        """Wake the executor: a session has changed (under the lock)."""
        if not self._looking:
            self._engine.waiter.notify(self.changed)

    def sweep_after(self, look: Callable[[], None]) -> list[int]:
        """:meth:`sweep`, after the executor's own look at what has become of its sessions."""
        with self.lock:
            self._look(look)
            return self.sweep()

    def fail(self, session: S, status: Status, http_status: int, code: str, message: str) -> None:
        """Set a session's status because of an error; a session that has ended keeps its end."""
        with self.lock:
            if not session.terminal:
                session.failure = TransferFailure(session.transfer_id, http_status, code, message)
                self.advance(session, status, message)

    def poll(
        self,
        at_least: int,
        wait_s: float,
        on_pass: Callable[[TransferPoll, float], float],
    ) -> TransferPoll:
        """What ended since the last poll. A wait ends early when the waiter says that its thread is needed elsewhere.

        Args:
            at_least: how many sessions to wait for, clamped to those open; 0 does not wait.
            wait_s: bound of the whole wait.
            on_pass: called on each look with the poll so far and the time; applies deadlines and returns the time at
                which the next one is due.
        """
        poll = TransferPoll([], [], [], [], {})
        with self.changed:
            end_s = self._engine.clock.monotonic_s() + wait_s
            target = min(at_least, len(self.open))
            undisturbed = True
            while True:
                now_s = self._engine.clock.monotonic_s()
                # Ended sessions are collected first: at the exact deadline an end that was seen wins.
                self._collect(poll)
                due_s = self._look(on_pass, poll, now_s)
                if self.open:
                    self._collect(poll)
                if poll.settled >= target or now_s >= end_s or not undisturbed:
                    self._release()
                    return poll
                undisturbed = self._engine.waiter.wait(self.changed, min(end_s, due_s) - now_s)

    def sweep(self) -> list[int]:
        """Sessions that are overdue and were not swept before."""
        with self.lock:
            now_s = self._engine.clock.monotonic_s()
            overdue = [s for s in self.open.values() if not s.terminal and not s.swept and now_s >= s.deadline_s]
            for session in overdue:
                session.swept = True
                self.note_overdue(session)
            self._release()
        return [session.transfer_id for session in overdue]

    def note_overdue(self, session: S) -> bool:
        """Warn and record, once, that a session is past its deadline; returns whether this was the first time."""
        if session.overdue_noted:
            return False
        session.overdue_noted = True
        self.counters.timed_out += 1
        self._log.warning("a transfer is overdue", transfer_id=session.transfer_id, peer=str(session.peer or "nobody"))
        reason = f"not finished after {self._engine.times.timeout_s:g} s; its pages stay pinned"
        self._record(session, "timed_out", reason=reason)
        return True

    def safe(self, transfer_id: int) -> bool:
        """Whether nothing touches pages of this transfer here."""
        session = self.open.get(transfer_id)
        return (session is None or session.quiet) and not self.quarantine.holds(transfer_id)

    def stop_movers(self) -> None:
        """Ask everything of this process that touches pages to end."""
        with self.lock:
            for session in [*self.open.values(), *self.quarantine]:
                session.control.abandon()

    def close(self) -> None:
        """Release every lease, because this process is about to end."""
        with self.lock:
            while self.open:
                self.open.popitem()[1].lease.release()
            self.quarantine.release_all()

    def _look(self, look: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Have the executor change sessions, which collects what has ended next: nobody has to wake it."""
        self._looking = True
        try:
            return look(*args, **kwargs)
        finally:
            self._looking = False

    def _release(self) -> None:
        if self.quarantine:
            for session in self.quarantine.release_quiet():
                self._released(session)

    def _released(self, session: S) -> None:
        if self._on_released is not None:
            self._on_released(session)

    def _collect(self, poll: TransferPoll) -> None:
        for session in [session for session in self.open.values() if session.status.state in TERMINAL_STATES]:
            if session.status.state is SessionState.FULLY_TRANSFERRED:
                poll.completed.append(session.transfer_id)
                if session.notes is not None:
                    poll.notes[session.transfer_id] = session.notes
            elif session.status.state is SessionState.CANCELLED:
                poll.cancelled.append(session.transfer_id)
            else:
                poll.failed.append(
                    session.failure or TransferFailure(session.transfer_id, 502, "transfer_failed", "transfer failed")
                )
            del self.open[session.transfer_id]
            if session.quiet:
                session.lease.release()
                self._released(session)
            else:
                self.quarantine.put(session)

    def _ended(self, session: S, reason: str) -> None:
        outcome = _OUTCOMES[session.status.state]
        counters = self.counters
        if outcome == "completed":
            counters.completed += 1
            counters.pages += session.num_pages
            counters.nbytes += session.num_bytes
        elif outcome == "failed":
            counters.failed += 1
        else:
            counters.cancelled += 1
        self._record(session, outcome, reason=reason)
        # First, so that the executor wakes while the rest is said to the peer.
        self.notify()
        self._on_ended(session)

    def _record(
        self, session: S, state: TransferState, *, reason: str = "", deadline_unix_ms: int | None = None
    ) -> None:
        self._engine.ledger.record(
            self._side,
            session.transfer_id,
            state,
            peer=session.peer,
            request_id=session.request_id,
            num_tokens=session.num_tokens,
            num_pages=session.num_pages,
            num_bytes=session.num_bytes,
            deadline_unix_ms=deadline_unix_ms,
            reason=reason,
        )
