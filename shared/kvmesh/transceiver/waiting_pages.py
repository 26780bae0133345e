"""Pages of finished prompts that nobody has asked for yet: where they are, and whether they may make room for others.

As long as nobody has asked, the cache may move them to its host tier. A receiver that asks then waits for the
executor's next look: only its thread may say where the pages are, and keep them there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvmesh.protocol.transfer import RequestData
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.parts import HeldPages
from kvmesh.transceiver.sessions import SendSession
from kvmesh.transceiver.states import SessionState
from kvmesh.transceiver.table import SessionTable

__all__ = ["WaitingPages"]


class WaitingPages:
    """See the module. Shares the sender's table and its lock.

    Args:
        engine: this engine.
        table: the sessions.
        begin: serves a request whose pages are where the session says (under the lock).
        fail: ends a session that was asked for, with the reason (under the lock).
        recall: takes back what a session has lent, which may end it (under the lock).
    """

    def __init__(
        self,
        engine: LocalEngine,
        table: SessionTable[SendSession],
        *,
        begin: Callable[[SendSession, RequestData], None],
        fail: Callable[[SendSession, str], None],
        recall: Callable[[SendSession], None],
    ) -> None:
        self._engine = engine
        self._table = table
        self._begin = begin
        self._fail = fail
        self._recall = recall

    def let_move(self) -> int:
        """Let the pages of sessions that nobody has asked for move; returns of how many that is new."""
        count = 0
        if not self._engine.shares_host_tier:
            return count
        with self._table.lock:
            for session in self._table.open.values():
                unasked = session.status.state is SessionState.INIT and session.promise is None
                if not unasked or session.movable:
                    continue
                # Before the cache touches them, so that nobody takes for the prompt's what it puts there.
                self._recall(session)
                if not session.terminal and session.lease.let_move():
                    session.movable = True
                    count += 1
        return count

    def put_off(self, session: SendSession, request: RequestData) -> bool:
        """Keep a request for the executor's next look, if the session's pages may have moved (under the lock)."""
        if session.movable:
            session.put_off = request
            self._table.notify()
        return session.movable

    @property
    def any_put_off(self) -> bool:
        """Whether a receiver waits for the next look."""
        return any(session.put_off is not None for session in self._table.open.values())

    def look(self) -> None:
        """Serve what was put off, on the executor's thread: where there is no room to bring pages up, next time."""
        with self._table.lock:
            for session in [one for one in self._table.open.values() if one.put_off is not None]:
                if session.terminal:
                    session.put_off = None
                    continue
                if not (session.control.stopped or session.lease.keep_place()):
                    if session.lease.lost:
                        session.put_off = None
                        self._fail(session, "a tier of the owner's cache has lost pages that waited to be fetched")
                    continue
                request, session.put_off = session.put_off, None
                assert request is not None
                if not session.control.stopped:
                    session.movable = False
                    session.held = self._places(session)
                self._begin(session, request)

    def _places(self, session: SendSession) -> list[HeldPages]:
        held: list[HeldPages] = []
        for group, ids in enumerate(self._engine.leased_pages(session.lease, session.num_tokens)):
            in_host = (session.lease.levels(group)[: len(ids)] != 0).astype(np.uint8)
            held.append(HeldPages(ids, in_host if in_host.any() else None))
        return held
