"""Whether an index holds what a publisher tells: both state digests as of a sequence number, and numbers have to meet.

The publisher's answer may be ahead of what has been applied here, or behind it. So the digests of batches that are
applied while an answer is on its way are kept, and an answer that is ahead is kept until its batch has been applied.
One whose batch has not come by the next answer, nor any other, tells of a batch that was lost with nothing after it. At
other times nothing is noted: digests cost time by the number of adapters and salts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from kvmesh.events.digests import Digest, DigestAnswer, DigestKey, differences
from kvmesh.events.published import NOTHING_PUBLISHED

__all__ = ["Drift", "DriftWatch"]

KEPT_BATCHES = 16
"""Digests of so many batches wait for an answer, which takes milliseconds; with more, the next one has to do."""

LONGEST_REST_S = 600.0
"""What a publisher no longer keeps cannot be repaired by reading it anew; that is tried ever less often, up to this."""

Held = Mapping[DigestKey, Digest]


class Drift(NamedTuple):
    """The index is wrong about a publisher."""

    sequence: int
    """As of this batch."""
    differences: dict[DigestKey, int]
    """Blocks too many (or too few, negative) by what they are of; 0: as many, but others. Empty: a batch is missing."""


class DriftWatch:
    """Of one publisher. Pure; asking, reading anew and time are the caller's.

    Args:
        interval_s: first rest after a repair.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._rest_s = interval_s
        self._resting_until_s = 0.0
        self._history: deque[tuple[int, Held]] = deque(maxlen=KEPT_BATCHES)
        self._told: DigestAnswer | None = None
        self._applied_when_told = -1
        self._asking = False
        self.compared_total = 0
        self.missed_total = 0
        """Answers about a batch whose digests had not been noted: the publisher was too busy to be compared."""

    def asked(self, now: tuple[int, Held | None]) -> None:
        """The publisher is being asked, while the batch with this number was the last one applied."""
        self._history.clear()
        sequence, held = now
        if held is not None:
            self._history.append((sequence, held))
        self._asking = True

    def wants(self, sequence: int) -> bool:
        """Whether :meth:`applied` has to be told of this batch."""
        if self._told is not None and sequence >= _number(self._told):
            return True
        return self._asking and len(self._history) < KEPT_BATCHES

    def applied(self, sequence: int, held: Held | None) -> Drift | None:
        """A batch has been applied.

        Args:
            sequence: its number.
            held: digests of what is held now; None: not known, so nothing is compared.
        """
        if held is None:
            self.void()
            return None
        if self._asking and len(self._history) < KEPT_BATCHES:
            self._history.append((sequence, held))
        told = self._told
        if told is None or _number(told) > sequence:
            return None
        self._told = None
        return self._compare(told, held) if _number(told) == sequence else None

    def told(self, answer: DigestAnswer, now: tuple[int, Held | None]) -> Drift | None:
        """The publisher's answer.

        Args:
            answer: what it says.
            now: the last batch applied and digests of what is held; -1 before the first.
        """
        self._asking = False
        sequence, held = now
        wanted = _number(answer)
        if wanted > sequence:
            # As long as batches come, one that is missing will be noticed by its number.
            missing = self._told is not None and _number(self._told) > sequence == self._applied_when_told
            self._told, self._applied_when_told = answer, sequence
            return Drift(wanted, {}) if missing else None
        if wanted < sequence:
            held = next((of for number, of in self._history if number == wanted), None)
            self.missed_total += held is None
        self._history.clear()
        return None if held is None else self._compare(answer, held)

    def void(self) -> None:
        """What was held is void, or not known: nothing that was noted can be compared."""
        self._history.clear()
        self._told = None

    def repair(self, now_s: float) -> bool:
        """Whether a drift that was just found should be repaired now; a repair that did not help doubles the rest."""
        if now_s < self._resting_until_s:
            return False
        self._resting_until_s = now_s + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        return True

    def _compare(self, told: DigestAnswer, held: Held) -> Drift | None:
        self.compared_total += 1
        found = differences(told.digests, held)
        if found:
            return Drift(_number(told), found)
        self._rest_s, self._resting_until_s = self._interval_s, 0.0
        return None


def _number(answer: DigestAnswer) -> int:
    return -1 if answer.sequence == NOTHING_PUBLISHED else answer.sequence
