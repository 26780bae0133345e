"""What channels over libraries with tagged messages share: expected pieces, and operations that are waited for.

A receive is posted only when its message has announced itself and somebody still wants it, into a room of its size.
So an expectation can be given up as long as nothing has arrived, with libraries that cannot cancel, and nobody can
write past a room. What nobody wants is taken and dropped, so that its sender ends.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmesh.transceiver.channels.base import Lingering, Region
from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError, PlaneError

__all__ = ["Expected", "Mailbox", "Operation", "bytes_of", "check_span"]

LOOK_S: Final = 0.02
"""How late a waiter notices that it was told to stop."""


class Operation:
    """A send or a receive; settled once, by the thread that makes the library's progress."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: str | None = None

    def settle(self, error: str | None = None) -> None:
        """It has ended and the library does not touch its memory any more; with an error, or well. The first counts."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self._ended.is_set()

    def wait_ended(self, control: MoveControl) -> None:
        """Return when it has ended well. One that was posted is waited for even when it is to stop.

        Raises:
            MoveStoppedError: ``control`` was abandoned, or it was stopped and this has ended.
            PlaneError: it has ended with an error.
        """
        while not self._ended.wait(LOOK_S):
            if control.abandoned:
                raise MoveStoppedError
        self._judge(control)

    def wait_at_most(self, seconds: float) -> None:
        """Return when it has ended well.

        Raises:
            PlaneError: it has ended with an error, or not in time.
        """
        if not self._ended.wait(seconds):
            raise PlaneError(f"the peer did not answer within {seconds:g} s")
        if self._error is not None:
            raise PlaneError(self._error)

    def _judge(self, control: MoveControl) -> None:
        if control.stopped:
            raise MoveStoppedError
        if self._error is not None:
            raise PlaneError(self._error)


class Expected(Operation):
    """Bytes that a receiver expects, an ``Incoming`` and a ``Lingering`` of :mod:`kvmesh.transceiver.channels.base`.

    Attributes:
        offset: of the room, in the receive region.
        nbytes: its size, and that of the message.
    """

    def __init__(self, withdraw: Callable[[Expected], bool], offset: int, nbytes: int, owner: Lingering | None) -> None:
        super().__init__()
        self._withdraw = withdraw
        self._owner = owner
        self.offset = offset
        self.nbytes = nbytes

    def wait(self, control: MoveControl) -> None:
        """See :meth:`Incoming.wait`."""
        while not self._ended.wait(LOOK_S):
            if control.stopped:
                raise MoveStoppedError
        self._judge(control)

    def cancel(self) -> bool:
        """See :meth:`Incoming.cancel`."""
        return self._withdraw(self) or self.ended

    @property
    def owner_is_elsewhere(self) -> bool:
        """See :class:`Lingering`."""
        return self._owner is not None and self._owner.owner_is_elsewhere

    def owner_is_gone(self) -> bool:
        """See :class:`Lingering`: the message that had begun to arrive has ended, or its sender has."""
        return self.ended or (self._owner is not None and self._owner.owner_is_gone())


class Mailbox:
    """Expected pieces by the number of their sender and their tag. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[tuple[int, int], Expected] = {}

    @property
    def expecting(self) -> bool:
        """Whether any message is expected."""
        return bool(self._expected)

    def expect(self, source: int, tag: int, offset: int, nbytes: int, *, owner: Lingering | None = None) -> Expected:
        """A message of ``source`` will come for this room.

        Args:
            source: number of the sender.
            tag: of the message.
            offset: of the room, in the receive region.
            nbytes: of both.
            owner: knows whether the sender lives, where the library does not end what it has left behind.

        Raises:
            PlaneError: one with this tag is expected already.
        """
        key = (source, tag)
        expected = Expected(lambda one: self._withdraw(key, one), offset, nbytes, owner)
        with self._lock:
            if key in self._expected:
                raise PlaneError(f"tag {tag} is in use")
            self._expected[key] = expected
        return expected

    def claim(self, source: int, tag: int, nbytes: int) -> Expected | None:
        """A message has announced itself: who waits for it. None: it is to be dropped."""
        with self._lock:
            expected = self._expected.pop((source, tag), None)
        if expected is not None and expected.nbytes != nbytes:
            expected.settle(f"a piece of {expected.nbytes} bytes was expected, one of {nbytes} has come")
            return None
        return expected

    def fail(self, source: int, reason: str) -> None:
        """Nothing comes from ``source`` any more."""
        with self._lock:
            lost = [key for key in self._expected if key[0] == source]
            failed = [self._expected.pop(key) for key in lost]
        for expected in failed:
            expected.settle(reason)

    def _withdraw(self, key: tuple[int, int], expected: Expected) -> bool:
        with self._lock:
            if self._expected.get(key) is not expected:
                return False
            del self._expected[key]
        expected.settle("given up")
        return True


def bytes_of(region: Region) -> NDArray[np.uint8]:
    """The memory of ``region``, which must outlive the array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.address))


def check_span(region: Region, offset: int, nbytes: int) -> None:
    """Refuse what does not lie in ``region``.

    Raises:
        PlaneError: with the numbers.
    """
    if not (offset >= 0 and 0 < nbytes <= region.nbytes - offset):
        raise PlaneError(f"{nbytes} bytes at {offset} do not lie in a staging region of {region.nbytes} bytes")
