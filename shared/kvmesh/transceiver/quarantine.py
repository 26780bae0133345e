"""Ended sessions whose pages someone may still touch: they keep their leases until that is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from kvmesh.transceiver.sessions import Session

__all__ = ["Quarantine"]

S = TypeVar("S", bound=Session)


class Quarantine(Generic[S]):
    """Used under the lock of its side, and its leases on the executor's thread."""

    def __init__(self) -> None:
        self._held: list[S] = []

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[S]:
        return iter(self._held)

    @property
    def pages(self) -> int:
        """Pages that cannot be reused yet although their transfer has ended, whether read or written."""
        return sum(session.num_pages for session in self._held)

    def put(self, session: S) -> None:
        """Keep an ended session until it is quiet.

        Raises:
            ValueError: it has not ended.
        """
        if not session.terminal:
            raise ValueError(f"transfer {session.transfer_id} has not ended")
        self._held.append(session)
        if session.may_be_written:
            session.lease.quarantine()

    def holds(self, transfer_id: int) -> bool:
        """Whether pages of this transfer are here and not safe yet."""
        return any(session.transfer_id == transfer_id and not session.quiet for session in self._held)

    def release_quiet(self) -> list[S]:
        """Release the leases of those that are safe by now, and return them."""
        quiet = [session for session in self._held if session.quiet]
        self._held = [session for session in self._held if not session.quiet]
        for session in quiet:
            session.lease.release()
        return quiet

    def release_all(self) -> None:
        """Release everything, because this process is about to end."""
        while self._held:
            self._held.pop().lease.release()
