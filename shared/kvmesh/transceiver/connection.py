"""One control connection: messages in frames (uint32 length, little-endian) over a TCP socket that never blocks.

Any thread may send: a message goes to the kernel at once, on the sender's thread, and waits in a bounded queue only
where the kernel does not take it. One thread receives, and sends what waits when the socket can take it.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from typing import Final

__all__ = ["Connection", "FrameError", "tune"]

MAX_QUEUED_MESSAGES: Final = 10_000
CHUNK_BYTES: Final = 64 << 10
_LENGTH: Final = struct.Struct("<I")


class FrameError(Exception):
    """A peer announces a longer message than it may send."""


class Connection:
    """See the module. It begins without a socket, and may get another one when it has lost its own.

    Args:
        poller: learns whether the socket is to be watched for room.
    """

    def __init__(self, poller: select.epoll) -> None:
        self._poller = poller
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._waiting: deque[bytes] = deque()
        self._sent_bytes = 0
        """Of the first frame that waits."""
        self._received = bytearray()

    def open(self, connected: socket.socket, first: bytes | None = None) -> int:
        """Take a connected socket over and watch it; returns its descriptor.

        Args:
            connected: non-blocking.
            first: a message that goes before those that wait. A frame that an earlier socket took in part is sent anew.
        """
        with self._lock:
            self._socket = connected
            self._sent_bytes = 0
            self._received.clear()
            if first is not None:
                self._waiting.appendleft(_frame(first))
            self._flush(connected)
            self._poller.register(connected, select.EPOLLIN | select.EPOLLOUT if self._waiting else select.EPOLLIN)
            return connected.fileno()

    def send(self, message: bytes) -> bool:
        """Send, or queue; False where the queue is full. What a broken socket takes is lost."""
        with self._lock:
            if len(self._waiting) >= MAX_QUEUED_MESSAGES:
                return False
            self._waiting.append(_frame(message))
            if self._socket is not None and len(self._waiting) == 1:
                self._flush(self._socket)
                if self._waiting:
                    self._poller.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)
            return True

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        with self._lock:
            if self._socket is not None:
                self._flush(self._socket)
                if not self._waiting:
                    self._poller.modify(self._socket, select.EPOLLIN)

    def receive(self) -> None:
        """Read what has arrived; :meth:`take` gives the messages in it.

        Raises:
            OSError: the connection is lost.
        """
        if self._socket is None:
            return
        try:
            data = self._socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the peer has closed the connection")
        self._received += data

    def take(self, longest: int) -> bytes | None:
        """The next message, if it is there whole.

        Raises:
            FrameError: it has more than ``longest`` bytes; the rest of the stream cannot be read.
        """
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(received)
        if length > longest:
            raise FrameError(f"a message of {length} bytes, {longest} at most are read")
        end = _LENGTH.size + length
        if len(received) < end:
            return None
        message = bytes(memoryview(received)[_LENGTH.size : end])
        del received[:end]
        return message

    def lose(self) -> None:
        """Close the socket; what waits goes over the next one."""
        with self._lock:
            lost, self._socket = self._socket, None
        if lost is not None:
            lost.close()

    def close(self, linger_s: float) -> None:
        """Send what waits, for ``linger_s`` at most, and close. Returns at once: a thread does the rest, if any."""
        with self._lock:
            last, self._socket = self._socket, None
            rest = b"".join(self._waiting)[self._sent_bytes :]
            self._waiting.clear()
        if last is None:
            return
        self._poller.unregister(last)
        if rest:
            threading.Thread(target=_finish, args=(last, rest, linger_s), name="kvmesh-last-words", daemon=True).start()
        else:
            last.close()

    def _flush(self, to: socket.socket) -> None:
        while self._waiting:
            frame = self._waiting[0]
            try:
                self._sent_bytes += to.send(memoryview(frame)[self._sent_bytes :] if self._sent_bytes else frame)
            except BlockingIOError:
                return
            except OSError:
                # The receiving thread hears of it, too, and deals with it.
                self._waiting.popleft()
                self._sent_bytes = 0
                return
            if self._sent_bytes == len(frame):
                self._waiting.popleft()
                self._sent_bytes = 0


def tune(connected: socket.socket) -> None:
    """Make a connected socket fit for a :class:`Connection`."""
    connected.setblocking(False)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _frame(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def _finish(last: socket.socket, rest: bytes, linger_s: float) -> None:
    with last:
        last.settimeout(linger_s)
        try:
            last.sendall(rest)
        except OSError:
            # Nobody reads it any more.
            return
