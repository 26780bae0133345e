"""What a dialect gives, and how it refuses an event."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.events.records import EventRecord

__all__ = ["DecodedEvent", "RejectedError"]


class RejectedError(ValueError):
    """One event that cannot be used; its batch goes on without it.

    Attributes:
        reason: a fixed word to count by, never content of the event.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DecodedEvent(NamedTuple):
    """One event of a batch."""

    dialect: str
    """Name of the way it was written in."""
    record: EventRecord | None
    """None: it says nothing, on purpose."""
