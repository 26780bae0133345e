"""Who has introduced himself on the control connections: strangers are few, and have little time."""

from __future__ import annotations

import math
from typing import Final, Generic, TypeVar

__all__ = ["Introductions"]

MAX_STRANGERS: Final = 256
"""Connections whose introduction was not accepted yet; the oldest goes when there are more."""
STRANGER_TIMEOUT_S: Final = 10.0
"""For an introduction to come."""
MAX_ADMITTED: Final = 4096
"""Identities that are remembered."""

C = TypeVar("C")


class Introductions(Generic[C]):
    """Strangers, by their connections, and the identities that were admitted; used by one thread."""

    def __init__(self) -> None:
        self._since_s: dict[C, float] = {}
        """Oldest first."""
        self._admitted: dict[bytes, None] = {}
        """Identities, which are secrets of their peers; the oldest are forgotten."""

    def is_stranger(self, connection: C) -> bool:
        """Whether nobody has introduced himself there."""
        return connection in self._since_s

    def crowded_out(self) -> C | None:
        """The stranger that has to leave before there may be another one, if any."""
        return next(iter(self._since_s)) if len(self._since_s) >= MAX_STRANGERS else None

    def add(self, connection: C, now_s: float) -> None:
        """A new connection."""
        self._since_s[connection] = now_s

    def discard(self, connection: C) -> None:
        """It is closed, or a stranger no more."""
        self._since_s.pop(connection, None)

    def admit(self, identity: bytes) -> None:
        """Whoever has this identity is no stranger, also when it connects again."""
        self._admitted[identity] = None
        if len(self._admitted) > MAX_ADMITTED:
            del self._admitted[next(iter(self._admitted))]

    def is_admitted(self, identity: bytes) -> bool:
        """Whether it was admitted before."""
        return identity in self._admitted

    def overdue(self, now_s: float) -> list[C]:
        """Those that have said nothing for too long, which are to be closed."""
        return [one for one, since_s in self._since_s.items() if now_s >= since_s + STRANGER_TIMEOUT_S]

    @property
    def due_s(self) -> float:
        """When the next of them is overdue."""
        return next(iter(self._since_s.values())) + STRANGER_TIMEOUT_S if self._since_s else math.inf
