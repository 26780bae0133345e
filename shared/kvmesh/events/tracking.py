"""What a sequence number means to a reader: the next one, a repetition, a hole, or another life of the publisher."""

from __future__ import annotations

from enum import Enum

__all__ = ["Arrival", "SequenceTracker"]


class Arrival(Enum):
    """What to do with a live message."""

    NEXT = "next"
    """Apply it."""
    DUPLICATE = "duplicate"
    """A replay has brought it already."""
    GAP = "gap"
    """Something before it is missing: replay first."""
    RESTART = "restart"
    """The publisher counts anew: forget what it had."""


class SequenceTracker:
    """Two watermarks: what the index has applied, and what the live stream has shown.

    A replay runs ahead of the live stream, so a live number at or below the applied one is a repetition, as long as
    the live numbers themselves grow; when they do not, the publisher has started again.
    """

    def __init__(self) -> None:
        self.applied = -1
        self.live = -1

    def arrive(self, sequence: int) -> Arrival:
        """Judge a live message; does not apply it."""
        if sequence <= self.live:
            return Arrival.RESTART
        self.live = sequence
        if sequence <= self.applied:
            return Arrival.DUPLICATE
        return Arrival.NEXT if sequence == self.applied + 1 else Arrival.GAP

    def apply(self, sequence: int) -> None:
        """A message has been applied, live or replayed."""
        self.applied = max(self.applied, sequence)

    def restart(self) -> None:
        """Forget both watermarks."""
        self.applied = self.live = -1
