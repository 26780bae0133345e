"""The lives of page owners, as a receiver sees them: connections that come and go, and owners that are over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from kvmesh.protocol.transfer import HelloReply
from kvmesh.transceiver.links import Link, Links, LinkState
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.sessions import ReceiveSession
from kvmesh.transceiver.states import ReceiveEvent, SessionState, next_receive_status
from kvmesh.transceiver.table import SessionTable

__all__ = ["OwnerLives"]


class OwnerLives:
    """See the module. Shares the receiver's table and its lock; has the links to the owners.

    Args:
        engine: this engine.
        table: the sessions.
        ask: asks the owner of a session for its pages (under the lock): there is a link to it now.
    """

    def __init__(
        self,
        engine: LocalEngine,
        table: SessionTable[ReceiveSession],
        ask: Callable[[ReceiveSession], None],
    ) -> None:
        self._engine = engine
        self._table = table
        self._ask = ask
        self.links = Links(engine, on_up=self._link_up, on_down=self._link_down, run_locked=self._run_locked)

    def peer_dead(self, instance_id: str, epoch: int, *, certain: bool = True) -> bool:
        """An owner is gone: ``epoch`` and older lives of it answer nothing any more.

        Args:
            instance_id: of the owner.
            epoch: of its latest life that is over.
            certain: its process has ended, so that it writes no more either. Otherwise it may only stand still, or be
                cut off, and write again: the links to lives that were asked to write are kept, to hear of their end.

        Returns:
            Whether no such link is left.
        """
        self._engine.fences.end(instance_id, epoch)
        with self._table.lock:
            if certain:
                self._write_no_more(instance_id, epoch)
            for link in self.links.take_lives(instance_id, epoch):
                reason = f"{link.peer} ended during the transfer"
                link.is_fenced = any(one.peer_may_write for one in self._sessions_with(link))
                if link.is_fenced:
                    self._link_down(link, "peer_dead", reason)
                else:
                    self.links.drop(link, "peer_dead", reason)
            self._table.notify()
            return not self.links.take_lives(instance_id, epoch)

    def forget_lost(self, now_s: float) -> None:
        """Let go of connections that have been lost for long, unless a session needs them (under the lock)."""
        if self.links.any_lost:
            in_use = {session.endpoint for session in [*self._table.open.values(), *self._table.quarantine]}
            self.links.forget_lost(now_s, in_use)

    # The control thread.

    def on_reply(self, endpoint: str, reply: HelloReply) -> None:
        """An owner answers our introduction."""
        with self._table.lock:
            self.links.on_reply(endpoint, reply)

    def on_connected(self, endpoint: str) -> None:
        """The connection to an owner is there."""
        with self._table.lock:
            if (link := self.links.get(endpoint)) is not None:
                link.lost_since_s = None

    def on_disconnected(self, endpoint: str) -> None:
        """The connection to an owner was lost: answers that it owes us will not come."""
        with self._table.lock:
            link = self.links.get(endpoint)
            if link is None:
                return
            if link.is_fenced:
                # The owner was taken for dead and has closed the connection: now its process has ended, too.
                self.peer_dead(*link.peer)
                return
            if link.state is not LinkState.UP:
                self.links.drop(link, "peer_unreachable", f"{link.peer} at {endpoint} cannot be reached")
                return
            link.lost_since_s = link.lost_since_s or self._engine.clock.monotonic_s()
            for session in self._sessions_of(endpoint):
                if session.asked and not session.busy:
                    self._fail(session, 503, "peer_lost", f"the connection to {link.peer} was lost")

    # Under the lock.

    def _link_up(self, link: Link) -> None:
        for session in self._sessions_of(link.endpoint):
            if session.status.state is SessionState.INIT:
                self._ask(session)

    def _write_no_more(self, instance_id: str, epoch: int) -> None:
        for session in [*self._table.open.values(), *self._table.quarantine]:
            peer = session.peer
            if peer is not None and peer.instance_id == instance_id and peer.epoch <= epoch:
                session.peer_may_write = False

    def _sessions_with(self, link: Link) -> Iterator[ReceiveSession]:
        sessions = itertools.chain(self._table.open.values(), self._table.quarantine)
        return (one for one in sessions if (one.endpoint, one.peer) == (link.endpoint, link.peer))

    def _link_down(self, link: Link, code: str, reason: str) -> None:
        if link.is_fenced and code == "peer_lost":
            self._write_no_more(*link.peer)  # Another process has its address.
        for session in self._sessions_of(link.endpoint):
            # A copy from shared memory outlives its owner; one over a socket notices by itself.
            if session.peer != link.peer:
                continue
            if session.busy:
                session.orphaned = True
            else:
                self._fail(session, 503, code, reason)

    def _sessions_of(self, endpoint: str) -> list[ReceiveSession]:
        return [s for s in self._table.open.values() if s.endpoint == endpoint and not s.terminal]

    def _fail(self, session: ReceiveSession, http_status: int, code: str, message: str) -> None:
        status = next_receive_status(session.status, ReceiveEvent.FAIL)
        self._table.fail(session, status, http_status, code, message)

    def _run_locked(self, action: Callable[[], None]) -> None:
        with self._table.lock:
            action()
