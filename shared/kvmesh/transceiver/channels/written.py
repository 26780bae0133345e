"""Bytes that an owner writes into our memory by itself: they are there when it says so, and nobody can call them back.

Only the owner's answer, or its end, tells that it writes no more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from kvmesh.transceiver.liveness import ProcessGoneError, ProcessIdentity, has_ended, open_process
from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError

__all__ = ["ELSEWHERE_S", "WrittenByOwner"]

ELSEWHERE_S: Final = 1200.0
"""How long an owner on another host may still write after its connection has ended: its system repeats what it has not
delivered for about 15 minutes (tcp(7), ``tcp_retries2``), network cards for seconds.
"""


class WrittenByOwner:
    """An :class:`~kvmesh.transceiver.channels.base.Incoming` of a one-sided channel; also a ``Lingering``.

    Args:
        owner: the process that writes.
        monotonic_s: the time.
    """

    def __init__(self, owner: ProcessIdentity, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._owner = owner
        self._monotonic_s = monotonic_s
        self._quiet_s: float | None = None
        """When an owner elsewhere is taken to write no more."""

    def wait(self, control: MoveControl) -> None:
        """See :meth:`Incoming.wait`."""
        if control.stopped:
            raise MoveStoppedError

    def cancel(self) -> bool:
        """See :meth:`Incoming.cancel`."""
        return False

    @property
    def owner_is_elsewhere(self) -> bool:
        """See :class:`Lingering`."""
        return not self._owner.observable

    def owner_is_gone(self) -> bool:
        """See :class:`Lingering`. The end of a process elsewhere cannot be seen: :data:`ELSEWHERE_S` has to pass."""
        try:
            fd = open_process(self._owner)
        except ProcessGoneError:
            return True
        if fd is None:
            if self._quiet_s is None:
                self._quiet_s = self._monotonic_s() + ELSEWHERE_S
            return self._monotonic_s() >= self._quiet_s
        try:
            return has_ended(fd)
        finally:
            os.close(fd)
