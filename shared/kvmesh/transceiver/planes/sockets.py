"""TCP connections that carry pages: how they are set up, read and ended."""

from __future__ import annotations

import errno
import socket
import time
from typing import Final

__all__ = [
    "SHORTAGE_ERRORS",
    "SHORTAGE_WAIT_S",
    "SOCKET_BUFFER_BYTES",
    "STOP_POLL_S",
    "accept",
    "receive_exactly",
    "shut",
    "tune",
]

SOCKET_BUFFER_BYTES: Final = 4 << 20
STOP_POLL_S: Final = 0.05
"""A blocked send or receive looks this often whether it was stopped."""
KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 3
"""A host that is gone, or cut off, is noticed after 25 s of silence; the system answers for a stopped process."""


SHORTAGE_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""With which the system refuses a connection because it, or this process, is short of something for now."""
SHORTAGE_WAIT_S: Final = 0.2


def accept(listener: socket.socket) -> socket.socket | None:
    """Wait for the next connection; None once the listener was shut. A shortage of descriptors is waited out."""
    while True:
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno in SHORTAGE_ERRORS:
                time.sleep(SHORTAGE_WAIT_S)
            elif error.errno != errno.ECONNABORTED:
                return None


def tune(connection: socket.socket) -> None:
    """No delays, large buffers, and a peer whose host is gone is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


def shut(connection: socket.socket) -> None:
    """Wake whoever is blocked in the connection (or listener); that one closes it. Harmless where it is gone."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def receive_exactly(connection: socket.socket, nbytes: int, *, by_s: float | None = None) -> bytes:
    """The next ``nbytes`` bytes.

    Args:
        connection: to read from; its timeout is changed when there is a ``by_s``.
        nbytes: how many.
        by_s: the monotonic time by which all of them must be there, however many pieces they come in.

    Raises:
        OSError: the connection ended before, or they did not come in time.
    """
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        if by_s is not None:
            if (left_s := by_s - time.monotonic()) <= 0:
                raise TimeoutError("the peer is too slow")
            connection.settimeout(left_s)
        if not (count := connection.recv_into(view)):
            raise ConnectionResetError("the peer closed the connection")
        view = view[count:]
    return bytes(data)
