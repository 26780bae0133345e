"""The built-in channel's sockets: a receiver connects to an owner's listener, and the owner sends pieces over it.

A piece is a fixed header (tag, bytes) and the bytes. The receiver's thread reads them straight into the room; where
the room is not wanted any more it reads them into the void, so that the stream stays in step.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from kvmesh.net.address import listen
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError, PlaneError
from kvmesh.transceiver.planes.sockets import STOP_POLL_S, accept, receive_exactly, shut, tune
from kvmesh.transceiver.planes.strangers import Strangers
from kvmesh.transceiver.types import PeerKey

__all__ = ["TOKEN_BYTES", "DataListener", "DataSource", "Way"]

TOKEN_BYTES: Final = 16
MAX_NAME_BYTES: Final = 1024
READ_BYTES: Final = 1 << 20
"""One read: as long may a cancel have to wait for it."""
HELLO_TIMEOUT_S: Final = 5.0
_MAGIC: Final = b"KVD1"
_HELLO: Final = struct.Struct(f"<4s{TOKEN_BYTES}sH")
_PIECE: Final = struct.Struct("<IQ")


class Way(IntEnum):
    """How bytes reach a receiver; the owner's answer to its hello."""

    REFUSED = 0
    MEMORY = 1
    SOCKET = 2


class DataListener:
    """The owner's end: the sockets of its receivers.

    Args:
        bind_host: address to listen on, at an ephemeral port.
        token: what a receiver must present.
        way_to: the peer of a name and how to reach it; None where nobody of that name is attached.
    """

    def __init__(self, bind_host: str, token: bytes, way_to: Callable[[str], tuple[PeerKey, Way] | None]) -> None:
        self.token = token
        self._way_to = way_to
        self._lock = threading.Lock()
        self._sockets: dict[PeerKey, socket.socket] = {}
        self._closed = False
        self._strangers = Strangers("kvmesh-channel-hello")
        self._listener = listen(bind_host)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="kvmesh-channel-accept", daemon=True)
        self._thread.start()

    def send(self, peer: PeerKey, tag: int, data: memoryview, control: MoveControl) -> None:
        """Send one piece. A stop takes effect at once only where the receiver is given up; see the module.

        Raises:
            PlaneError: the connection is lost.
            MoveStoppedError: stopped; the bytes are not read any more.
        """
        with self._lock:
            connection = self._sockets.get(peer)
        if connection is None:
            raise PlaneError(f"the data connection of {peer} was lost")
        if control.stopped:
            raise MoveStoppedError
        buffers = [memoryview(_PIECE.pack(tag, len(data))), data]
        try:
            while buffers:
                if control.abandoned:
                    raise MoveStoppedError
                try:
                    count = connection.sendmsg(buffers)
                except TimeoutError:
                    continue
                while buffers and count >= len(buffers[0]):
                    count -= len(buffers.pop(0))
                if buffers and count:
                    buffers[0] = buffers[0][count:]
        except (OSError, MoveStoppedError) as error:
            # What is left of the piece would be taken for the next one.
            self.drop(peer)
            if isinstance(error, MoveStoppedError):
                raise
            raise PlaneError(f"sending to {peer} failed: {error}") from error

    def drop(self, peer: PeerKey) -> None:
        """Close a receiver's connection, if there is one."""
        with self._lock:
            connection = self._sockets.pop(peer, None)
        if connection is not None:
            shut(connection)
            connection.close()

    def close(self) -> None:
        """Close the listener and every connection; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._sockets)
        shut(self._listener)
        self._listener.close()
        self._strangers.close()
        for peer in peers:
            self.drop(peer)
        self._thread.join(1.0)

    def _accept(self) -> None:
        while (connection := accept(self._listener)) is not None:
            # In a thread of its own: whoever connects and says nothing holds nobody up.
            self._strangers.meet(connection, self._greet)

    def _greet(self, connection: socket.socket) -> None:
        try:
            by_s = time.monotonic() + HELLO_TIMEOUT_S
            magic, token, name_bytes = _HELLO.unpack(receive_exactly(connection, _HELLO.size, by_s=by_s))
            known = None
            if magic == _MAGIC and secrets.compare_digest(token, self.token) and name_bytes <= MAX_NAME_BYTES:
                name = receive_exactly(connection, name_bytes, by_s=by_s).decode(errors="replace")
                self._strangers.know(connection)
                known = self._way_to(name)
            if known is not None and known[1] is Way.SOCKET:
                self._keep(known[0], connection)
            else:
                connection.sendall(bytes([Way.REFUSED if known is None else known[1]]))
                connection.close()
        except OSError:
            connection.close()

    def _keep(self, peer: PeerKey, connection: socket.socket) -> None:
        tune(connection)
        connection.settimeout(STOP_POLL_S)
        self.drop(peer)
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._sockets[peer] = connection
        connection.sendall(bytes([Way.SOCKET]))


class _Expected:
    """One piece that is to come."""

    def __init__(self, room: memoryview, forget: Callable[[], None]) -> None:
        self.room = room
        self.lock = threading.Lock()
        self.cancelled = False
        self._forget = forget
        self._settled = threading.Event()
        self._failure = ""

    def settle(self, failure: str = "") -> None:
        """All of it is there, or the connection was lost."""
        self._failure = failure
        self._settled.set()

    def wait(self, control: MoveControl) -> None:
        """See :meth:`Incoming.wait`."""
        while not self._settled.wait(STOP_POLL_S):
            if control.stopped:
                raise MoveStoppedError
        if self._failure:
            raise PlaneError(self._failure)

    def cancel(self) -> bool:
        """See :meth:`Incoming.cancel`."""
        self._forget()
        with self.lock:
            self.cancelled = True
        return True


class DataSource:
    """A receiver's connection to one owner.

    Args:
        address: the owner's listener.
        token: what the owner described.
        name: of this engine.
        connect_timeout_s: bound of connection set-up.

    Raises:
        PlaneError: the owner cannot be reached or refuses.
    """

    def __init__(self, address: tuple[str, int], token: bytes, name: str, *, connect_timeout_s: float) -> None:
        self._where = "{}:{}".format(*address)
        self._lock = threading.Lock()
        self._expected: dict[int, _Expected] = {}
        self._lost = ""
        try:
            self._connection = socket.create_connection(address, connect_timeout_s)
        except OSError as error:
            raise PlaneError(f"cannot reach {self._where}: {error}") from error
        try:
            tune(self._connection)
            encoded = name.encode()
            self._connection.sendall(_HELLO.pack(_MAGIC, token, len(encoded)) + encoded)
            self.way = Way(receive_exactly(self._connection, 1)[0])
            if self.way is Way.REFUSED:
                raise PlaneError(f"{self._where} refuses this engine")
        except (OSError, ValueError) as error:
            self._connection.close()
            raise PlaneError(f"{self._where} does not answer: {error}") from error
        except PlaneError:
            self._connection.close()
            raise
        self._thread: threading.Thread | None = None
        if self.way is Way.SOCKET:
            self._connection.settimeout(None)
            self._thread = threading.Thread(target=self._run, name="kvmesh-channel-read", daemon=True)
            self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether the connection has ended."""
        return bool(self._lost)

    def expect(self, tag: int, room: memoryview) -> _Expected:
        """A piece with this tag will fill ``room``.

        Raises:
            PlaneError: the connection is lost.
        """
        expected = _Expected(room, lambda: self._forget(tag))
        with self._lock:
            if self._lost:
                raise PlaneError(self._lost)
            self._expected[tag] = expected
        return expected

    def close(self) -> None:
        """Close the connection, wait for its thread."""
        shut(self._connection)
        if self._thread is not None:
            self._thread.join(1.0)
        self._connection.close()

    def _forget(self, tag: int) -> None:
        with self._lock:
            self._expected.pop(tag, None)

    def _run(self) -> None:
        expected: _Expected | None = None
        try:
            while True:
                expected = None
                tag, nbytes = _PIECE.unpack(receive_exactly(self._connection, _PIECE.size))
                with self._lock:
                    expected = self._expected.pop(tag, None)
                if expected is None:
                    # It was cancelled before it came.
                    expected = _Expected(memoryview(b""), lambda: None)
                    expected.cancelled = True
                elif len(expected.room) != nbytes:
                    raise ConnectionError(f"{nbytes} bytes came where {len(expected.room)} were asked for")
                self._fill(expected, nbytes)
                expected.settle()
        except OSError as error:
            self._lose(str(error), expected)
        except Exception as error:
            # The border of error isolation: what one owner sends ends its own connection only.
            isolated(get_logger("transceiver.channel"), "a data connection failed", owner=self._where)
            self._lose(repr(error), expected)

    def _lose(self, reason: str, expected: _Expected | None) -> None:
        with self._lock:
            self._lost = f"the data connection to {self._where} was lost: {reason}"
            left, self._expected = list(self._expected.values()), {}
        for one in left if expected is None else [*left, expected]:
            one.settle(self._lost)

    def _fill(self, expected: _Expected, nbytes: int) -> None:
        readable = select.poll()
        readable.register(self._connection, select.POLLIN)
        void: memoryview | None = None
        done = 0
        while done < nbytes:
            # The room may be taken back while nothing comes, never during a read.
            readable.poll()
            with expected.lock:
                if expected.cancelled:
                    void = memoryview(bytearray(min(READ_BYTES, nbytes))) if void is None else void
                    target = void[: nbytes - done]
                else:
                    target = expected.room[done : done + READ_BYTES]
                try:
                    count = self._connection.recv_into(target, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
            if not count:
                raise ConnectionResetError("the owner closed it")
            done += count
