"""Rooms in a staging region: first fit, whoever waits longest comes first, and every wait can be stopped."""

from __future__ import annotations

import bisect
import threading
from collections import deque
from typing import Final

from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError

__all__ = ["ALIGNMENT_BYTES", "WAIT_S", "FirstFit", "Rooms"]

ALIGNMENT_BYTES: Final = 64
WAIT_S: Final = 0.05
"""Who waits looks this often whether it was stopped."""


class FirstFit:
    """Which bytes of a region are taken: the lowest hole that is large enough is used, neighbouring holes are one.

    Args:
        nbytes: of the region, a multiple of :data:`ALIGNMENT_BYTES`.
    """

    def __init__(self, nbytes: int) -> None:
        self._starts = [0]
        self._holes = {0: nbytes}
        self._taken: dict[int, int] = {}
        self.nbytes = nbytes
        self.used_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """Take room for ``nbytes``; returns its offset, or None while no hole is large enough."""
        size = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for index, start in enumerate(self._starts):
            hole = self._holes[start]
            if hole < size:
                continue
            del self._holes[start]
            if hole == size:
                del self._starts[index]
            else:
                self._starts[index] = start + size
                self._holes[start + size] = hole - size
            self._taken[start] = size
            self.used_bytes += size
            return start
        return None

    def give(self, offset: int) -> None:
        """Give room back.

        Raises:
            ValueError: none is taken at ``offset``.
        """
        if (size := self._taken.pop(offset, None)) is None:
            raise ValueError(f"no room is taken at {offset}")
        self.used_bytes -= size
        index = bisect.bisect(self._starts, offset)
        if index < len(self._starts) and self._starts[index] == offset + size:
            size += self._holes.pop(self._starts.pop(index))
        if index and (before := self._starts[index - 1]) + self._holes[before] == offset:
            self._holes[before] += size
        else:
            self._starts.insert(index, offset)
            self._holes[offset] = size


class Rooms:
    """:class:`FirstFit` between threads.

    Args:
        nbytes: of the region, a multiple of :data:`ALIGNMENT_BYTES`.
    """

    def __init__(self, nbytes: int) -> None:
        self._rooms = FirstFit(nbytes)
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @property
    def nbytes(self) -> int:
        """Size of the region."""
        return self._rooms.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken."""
        return self._rooms.used_bytes

    def take(self, nbytes: int, control: MoveControl) -> int:
        """Take room for ``nbytes``, waiting for it behind those who wait already; returns its offset.

        Who waits must hold no room of the same region: then those that are taken are given back whatever happens here.

        Raises:
            MoveStoppedError: ``control`` was stopped.
            ValueError: the region is smaller.
        """
        if nbytes > self.nbytes:
            raise ValueError(f"a room of {nbytes} bytes in a region of {self.nbytes} bytes")
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while True:
                    if control.stopped:
                        raise MoveStoppedError
                    if self._waiting[0] is me and (offset := self._rooms.take(nbytes)) is not None:
                        return offset
                    self._changed.wait(WAIT_S)
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()

    def try_take(self, nbytes: int) -> int | None:
        """Take room for ``nbytes`` if it is there now and nobody waits; returns its offset or None."""
        with self._changed:
            return None if self._waiting else self._rooms.take(nbytes)

    def give(self, offset: int) -> None:
        """Give room back."""
        with self._changed:
            self._rooms.give(offset)
            self._changed.notify_all()
