"""Stop strings in streamed text: nothing is emitted that could still become part of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["StopMatch", "StopMatcher"]


class StopMatch(NamedTuple):
    """What may be emitted now, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Holds back the longest suffix that is a prefix of a stop string.

    Args:
        stops: stop strings, none empty.
        include: emit the stop string itself too.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Take the next piece of text. After a match every further piece is the caller's mistake."""
        if not self._stops:
            return StopMatch(text)
        self._held += text
        # The stop that is complete first wins, so that where the text was cut does not matter.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, at, stop = min(found)
            return StopMatch(self._held[: end if self._include else at], stop)
        keep = max(self._overlap(stop) for stop in self._stops)
        emitted, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return StopMatch(emitted)

    def flush(self) -> str:
        """The text held back, once no more can follow."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest suffix of the held text that begins ``stop``."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
