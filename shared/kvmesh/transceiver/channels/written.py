"""Bytes that an owner writes into our memory by itself: they are there when it says so, and nobody can call them back.

Only the owner's answer, or its end, tells that it writes no more.
"""

from __future__ import annotations

import os
import select

from kvmesh.transceiver.liveness import ProcessGoneError, ProcessIdentity, open_process
from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError

__all__ = ["WrittenByOwner"]


class WrittenByOwner:
    """An :class:`~kvmesh.transceiver.channels.base.Incoming` of a one-sided channel; also a ``Lingering``.

    Args:
        owner: the process that writes.
    """

    def __init__(self, owner: ProcessIdentity) -> None:
        self._owner = owner

    def wait(self, control: MoveControl) -> None:
        """See :meth:`Incoming.wait`."""
        if control.stopped:
            raise MoveStoppedError

    def cancel(self) -> bool:
        """See :meth:`Incoming.cancel`."""
        return False

    def owner_is_gone(self) -> bool:
        """See :class:`Lingering`. Of a process elsewhere the end of its connection has to be enough."""
        try:
            fd = open_process(self._owner)
        except ProcessGoneError:
            return True
        if fd is None:
            return True
        try:
            # Readable once the process has ended, even before its parent has taken note.
            return bool(select.select([fd], [], [], 0)[0])
        finally:
            os.close(fd)
