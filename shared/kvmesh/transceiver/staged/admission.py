"""Which transfers may use a staging region: in the order in which they come, as many as fit into it at once.

One whose peer has gone silent rests: its place goes to others until it is heard of again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError
from kvmesh.transceiver.staged.rooms import WAIT_S

__all__ = ["REST_S", "AdmissionGate", "AdmissionQueue"]

REST_S: Final = 0.25
"""Whose peer is silent for so long gives its place to others."""


class AdmissionQueue:
    """The decisions: first come, first served; what is larger than the region goes alone.

    Args:
        capacity_bytes: how much may be under way.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._waiting: OrderedDict[Hashable, int] = OrderedDict()
        self._admitted: dict[Hashable, int] = {}
        self._resting: set[Hashable] = set()
        self.admitted_bytes = 0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def ask(self, key: Hashable, nbytes: int) -> None:
        """Queue up.

        Raises:
            ValueError: ``key`` waits or is admitted already.
        """
        if key in self._waiting or key in self._admitted:
            raise ValueError(f"{key} has asked already")
        self._waiting[key] = min(nbytes, self._capacity_bytes)

    def admit(self) -> list[Hashable]:
        """Admit those whose turn it is, in order."""
        admitted: list[Hashable] = []
        while self._waiting:
            key, nbytes = next(iter(self._waiting.items()))
            if self.admitted_bytes + nbytes > self._capacity_bytes:
                break
            del self._waiting[key]
            self._admitted[key] = nbytes
            self.admitted_bytes += nbytes
            admitted.append(key)
        return admitted

    def is_admitted(self, key: Hashable) -> bool:
        """Whether ``key`` is under way."""
        return key in self._admitted

    def rest(self, key: Hashable) -> None:
        """An admitted one does nothing at present: others may have its place. Ignored for any other."""
        if key in self._admitted and key not in self._resting:
            self._resting.add(key)
            self.admitted_bytes -= self._admitted[key]

    def wake(self, key: Hashable) -> None:
        """One that rested goes on, even if that makes more than fit: nobody new comes in until there is room again."""
        if key in self._resting:
            self._resting.discard(key)
            self.admitted_bytes += self._admitted[key]

    def leave(self, key: Hashable) -> None:
        """Done, or not wanted any more; unknown keys are ignored."""
        self.rest(key)
        self._waiting.pop(key, None)
        self._admitted.pop(key, None)
        self._resting.discard(key)


class AdmissionGate:
    """An :class:`AdmissionQueue` at which threads wait.

    Args:
        capacity_bytes: how much may be under way.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._queue = AdmissionQueue(capacity_bytes)
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return self._queue.waiting

    def enter(self, key: Hashable, nbytes: int, control: MoveControl) -> None:
        """Wait for one's turn.

        Raises:
            MoveStoppedError: ``control`` was stopped meanwhile.
        """
        with self._changed:
            self._queue.ask(key, nbytes)
            self._admit()
            while not self._queue.is_admitted(key):
                if control.stopped:
                    self._queue.leave(key)
                    self._admit()
                    raise MoveStoppedError
                self._changed.wait(WAIT_S)

    def rest(self, key: Hashable) -> None:
        """See :meth:`AdmissionQueue.rest`."""
        with self._changed:
            self._queue.rest(key)
            self._admit()

    def wake(self, key: Hashable) -> None:
        """See :meth:`AdmissionQueue.wake`."""
        with self._changed:
            self._queue.wake(key)

    def leave(self, key: Hashable) -> None:
        """Let the next ones in."""
        with self._changed:
            self._queue.leave(key)
            self._admit()

    def _admit(self) -> None:
        if self._queue.admit():
            self._changed.notify_all()
