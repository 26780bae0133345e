"""Pages of ended sessions that someone may still touch: kept pinned until that is over, on the executor's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvmesh.transceiver.types import PageLease

__all__ = ["Quarantine"]


class _Held(NamedTuple):
    lease: PageLease
    num_pages: int
    quiet: Callable[[], bool]


class Quarantine:
    """Leases by session, each with the question that says when its pages are safe.

    Used under the lock of its side; leases are released by :meth:`release_quiet` only.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    @property
    def pages(self) -> int:
        """Pages that cannot be reused yet although their transfer has ended."""
        return sum(held.num_pages for held in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, session: int) -> bool:
        return session in self._held

    def put(self, session: int, lease: PageLease, num_pages: int, quiet: Callable[[], bool]) -> None:
        """Keep ``lease`` until ``quiet`` answers True.

        Raises:
            ValueError: the session is here already.
        """
        if session in self._held:
            raise ValueError(f"session {session} is in quarantine already")
        self._held[session] = _Held(lease, num_pages, quiet)

    def release_quiet(self) -> list[int]:
        """Release what is safe by now; returns the sessions."""
        safe = [session for session, held in self._held.items() if held.quiet()]
        for session in safe:
            self._held.pop(session).lease.release()
        return safe

    def release_all(self) -> None:
        """Release everything, because this process is about to end."""
        while self._held:
            self._held.popitem()[1].lease.release()
