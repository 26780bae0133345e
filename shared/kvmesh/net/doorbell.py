"""A pipe that ends waits: of its owner's other threads, and of other processes of the same user on the same host.

A process that knows the number of the descriptor opens it as ``/proc/PID/fd/N``, for which it needs nobody's help and
no connection; that it is the pipe which was meant is told by device and inode.
"""

from __future__ import annotations

import math
import os
import select
import stat
import threading
import weakref
from typing import Final

import msgspec

__all__ = ["BellRope", "BellSign", "Doorbell"]

LONGEST_S: Final = 3600.0
"""The system takes 32 bits of milliseconds."""

_READ_BYTES: Final = 4096


class BellSign(msgspec.Struct, frozen=True, array_like=True):
    """Where another process finds a doorbell."""

    fd: int
    device: int
    inode: int


class Doorbell:
    """See the module. Any thread may ring; one thread waits."""

    def __init__(self) -> None:
        self.fd, self._ring_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self.fd, select.POLLIN)
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _close, self.fd, self._ring_fd)

    @property
    def sign(self) -> BellSign:
        """What other processes need to ring."""
        status = os.fstat(self.fd)
        return BellSign(self.fd, status.st_dev, status.st_ino)

    def ring(self) -> None:
        """End the current wait, or the next one; never blocks, and does nothing once the bell is closed."""
        with self._lock:  # A descriptor that was closed may be somebody else's by now.
            if self._close.alive:
                _ring(self._ring_fd)

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody rings, ``timeout_s`` or :data:`LONGEST_S` at most; returns whether anybody has.

        Raises:
            RuntimeError: another thread waits.
        """
        return bool(self._poller.poll(math.ceil(min(timeout_s, LONGEST_S) * 1000)))

    def silence(self) -> None:
        """Forget who has rung until now."""
        try:  # Here and below no context manager: whole microseconds, of a wait's end that takes few.
            os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return  # Nobody has.

    def close(self) -> None:
        """Close it; idempotent. Nobody may wait."""
        with self._lock:
            self._close()


class BellRope:
    """Rings the doorbell of another process; it is let go with its last reference.

    Args:
        pid: of the process, on this host.
        sign: its bell's.

    Raises:
        OSError: there is no such bell.
    """

    def __init__(self, pid: int, sign: BellSign) -> None:
        self._fd = os.open(f"/proc/{pid}/fd/{sign.fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # Not by a close: another thread may be about to ring.
        weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        if not stat.S_ISFIFO(status.st_mode) or (status.st_dev, status.st_ino) != (sign.device, sign.inode):
            raise FileNotFoundError(f"descriptor {sign.fd} of process {pid} is another file than its doorbell")

    def pull(self) -> None:
        """End the current wait of that process, or its next one; never blocks, and does nothing if it has ended."""
        try:
            _ring(self._fd)
        except BrokenPipeError:
            return


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _ring(fd: int) -> None:
    try:
        os.write(fd, b"\0")
    except BlockingIOError:
        return  # Full: nobody has looked since thousands have rung.
