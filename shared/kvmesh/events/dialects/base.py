"""What a dialect is, and how it refuses an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvmesh.events.records import EventRecord

__all__ = ["Dialect", "RejectedError"]


class RejectedError(ValueError):
    """One event that cannot be used; its batch goes on without it.

    Attributes:
        reason: a fixed word to count by, never content of the event.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Dialect(NamedTuple):
    """A way of writing events."""

    name: str
    decode: Callable[[memoryview], EventRecord]
    """Raises RejectedError, or msgspec.DecodeError when the event is not in this dialect after all."""
