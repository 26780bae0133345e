"""Staging rooms into which a lost owner may still write: out of use until it is certain, or likely, not to."""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvmesh.telemetry import get_logger
from kvmesh.transceiver.channels.base import Incoming, Lingering
from kvmesh.transceiver.staged.rooms import Rooms

__all__ = ["Limbo"]


class _Held(NamedTuple):
    incoming: Lingering
    room: int
    nbytes: int


class Limbo:
    """Rooms that not even the end of a connection makes safe: out of use until their owner is gone.

    Of owners elsewhere that is a guess, for which half of the region is kept out of use at most: the oldest go first.
    """

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._lock = threading.Lock()
        self._held: list[_Held] = []
        self._log = get_logger("transceiver.staged")

    def put(self, incoming: Incoming, room: int, nbytes: int) -> None:
        """Take over a room of ``nbytes`` bytes whose owner has been detached."""
        if not isinstance(incoming, Lingering):
            self._rooms.give(room)
            return
        with self._lock:
            self._held.append(_Held(incoming, room, nbytes))
            guessed = [held for held in self._held if held.incoming.owner_is_elsewhere]
            while sum(held.nbytes for held in guessed) > self._rooms.nbytes // 2:
                self._log.warning("a staging room is used again early: too many owners elsewhere were lost")
                self._give(guessed.pop(0))
        self.release()

    def release(self) -> None:
        """Give back those that nothing writes into any more."""
        if not self._held:
            return
        with self._lock:
            for held in [held for held in self._held if held.incoming.owner_is_gone()]:
                self._give(held)

    def _give(self, held: _Held) -> None:
        self._held.remove(held)
        self._rooms.give(held.room)
