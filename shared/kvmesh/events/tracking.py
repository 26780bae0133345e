"""What a sequence number means to a reader: the next one, a repetition, a hole, or another life of the publisher."""

from __future__ import annotations

from enum import Enum

__all__ = ["Arrival", "SequenceTracker"]


class Arrival(Enum):
    """How a message stands to those before it."""

    NEXT = "next"
    """It follows what was applied."""
    DUPLICATE = "duplicate"
    """It has been applied already."""
    GAP = "gap"
    """Something before it is missing."""
    RESTART = "restart"
    """The publisher counts anew: what it had said is void."""


class SequenceTracker:
    """Two watermarks: what has been applied, and what the live stream has shown.

    A replay runs ahead of the live stream, so a live number at or below the applied one is a repetition, as long as
    the live numbers themselves grow; when they do not, the publisher has started again. Pure; applying is the caller's.
    """

    def __init__(self) -> None:
        self.applied = -1
        """Number of the last batch that was applied, -1 before the first."""
        self.live = -1
        """Highest number of the live stream, -1 before the first of a connection."""

    @property
    def knows_nothing(self) -> bool:
        """Whether nothing has been applied, so that nothing can be lost."""
        return self.applied < 0

    def arrive(self, sequence: int) -> Arrival:
        """Judge a live message and note that it was seen."""
        if sequence <= self.live:
            return Arrival.RESTART
        self.live = sequence
        return self.judge(sequence)

    def see(self, sequence: int) -> None:
        """Note a live message that was judged before the stream began anew."""
        self.live = max(self.live, sequence)

    def judge(self, sequence: int) -> Arrival:
        """Judge a message of a replay, or a live one that a replay may have overtaken."""
        if sequence <= self.applied:
            return Arrival.DUPLICATE
        return Arrival.NEXT if sequence == self.applied + 1 else Arrival.GAP

    def apply(self, sequence: int) -> None:
        """The batch has been applied."""
        self.applied = sequence

    def forget(self) -> None:
        """What was applied is void; the live stream goes on."""
        self.applied = -1

    def connect(self) -> None:
        """The live stream begins anew, on another connection or with another life; what was applied stays."""
        self.live = -1
