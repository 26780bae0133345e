"""The memory of the ``conversation`` policy: which server had which conversation, and how its prompt began."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["SessionMatch", "SessionTable", "prefix_hashes"]


class SessionMatch(NamedTuple):
    """The conversation whose prompt shares the longest prefix with a new one."""

    session: str
    instance_id: str
    depth: int
    """Leading blocks in common."""


class _Session(NamedTuple):
    instance_id: str
    hashes: tuple[int, ...]


def prefix_hashes(units: Sequence[int] | str, *, units_per_block: int, skip: int = 0) -> tuple[int, ...]:
    """One hash for each full block and everything before it; the first ``skip`` units do not count.

    Args:
        units: token ids or a text (its code points).
        units_per_block: units in a block; a last, partial block has no hash.
        skip: leading units left out, a system prompt common to all.
    """
    hashes = []
    parent = 0
    for start in range(skip, len(units) - units_per_block + 1, units_per_block):
        block = units[start : start + units_per_block]
        parent = hash((parent, block if isinstance(block, str) else tuple(block)))
        hashes.append(parent)
    return tuple(hashes)


class SessionTable:
    """Conversations, the least recently used forgotten first.

    Args:
        max_sessions: how many are kept.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._by_hash: dict[int, str] = {}
        """The session that used a prefix last."""

    def __len__(self) -> int:
        return len(self._sessions)

    def server_of(self, session: str) -> str | None:
        """The server that had ``session``, None when it is not known."""
        found = self._sessions.get(session)
        return None if found is None else found.instance_id

    def longest_match(self, hashes: Sequence[int]) -> SessionMatch | None:
        """The session with the longest common prefix; None when not even the first block is known."""
        best: SessionMatch | None = None
        for depth, value in enumerate(hashes, start=1):
            session = self._by_hash.get(value)
            if session is None:
                break
            best = SessionMatch(session, self._sessions[session].instance_id, depth)
        return best

    def remember(self, session: str, instance_id: str, hashes: tuple[int, ...]) -> None:
        """``session`` is now at ``instance_id`` with a prompt of these blocks."""
        self._drop(session)
        self._sessions[session] = _Session(instance_id, hashes)
        for value in hashes:
            self._by_hash[value] = session
        while len(self._sessions) > self._max_sessions:
            self._drop(next(iter(self._sessions)))

    def forget_server(self, instance_id: str) -> None:
        """Drop the sessions of a server that left."""
        for session in [key for key, value in self._sessions.items() if value.instance_id == instance_id]:
            self._drop(session)

    def _drop(self, session: str) -> None:
        found = self._sessions.pop(session, None)
        for value in found.hashes if found is not None else ():
            if self._by_hash.get(value) == session:
                del self._by_hash[value]
