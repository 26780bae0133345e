"""Where two MPI processes agree to connect: MPI's Accept waits for whoever comes, so nobody accepts unannounced.

The owner listens on TCP. A receiver says who it is and presents the owner's token, which only those know whom the owner
has told it in a signed introduction. The owner opens an MPI port and names it; the receiver says "go" and connects, and
only then the owner accepts. Each step is bounded, and a peer that dies in between is seen as the end of the stream.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from kvmesh.net.address import listen, reachable_host
from kvmesh.transceiver.planes.base import PlaneError
from kvmesh.transceiver.planes.sockets import accept, receive_exactly, shut
from kvmesh.transceiver.planes.strangers import Strangers

__all__ = ["Meeting", "announce"]

MAX_BYTES: Final = 64 << 10
GO: Final = b"go"
BACKLOG: Final = 16


class _Announcement(msgspec.Struct, frozen=True, array_like=True):
    token: bytes
    name: str
    """Of the receiver."""


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    port: str
    """MPI's name of the port; empty after the connection is made."""
    error: str = ""


class Meeting:
    """The owner's side.

    Args:
        bind_host: where to listen, at a port of the system's choice.
        token: what receivers must present.
        step_timeout_s: bound of each step.
        open_port: makes an MPI port for the receiver of that name and returns its name, or refuses with PlaneError.
        accept: takes that receiver's connection at that port, or fails with PlaneError.
    """

    def __init__(
        self,
        bind_host: str,
        token: bytes,
        step_timeout_s: float,
        open_port: Callable[[str], str],
        accept: Callable[[str, str], None],
    ) -> None:
        self._token = token
        self._step_timeout_s = step_timeout_s
        self._open_port, self._accept = open_port, accept
        self._strangers = Strangers("kvmesh-mpi-meeting")
        self._listener = listen(bind_host, backlog=BACKLOG)
        self.address: tuple[str, int] = (reachable_host(bind_host).strip("[]"), self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, name="kvmesh-mpi-meeting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        shut(self._listener)
        self._listener.close()
        self._strangers.close()
        self._thread.join(2 * self._step_timeout_s)

    def _run(self) -> None:
        while (connection := accept(self._listener)) is not None:
            self._strangers.meet(connection, self._serve)

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, msgspec.MsgspecError):  # The other side sees the end of the stream.
            self._meet(connection)

    def _meet(self, connection: socket.socket) -> None:
        said = msgspec.msgpack.decode(_receive(connection, self._step_timeout_s), type=_Announcement)
        if not hmac.compare_digest(said.token, self._token):
            return
        self._strangers.know(connection)
        try:
            port = self._open_port(said.name)
            _send(connection, msgspec.msgpack.encode(_Answer(port)))
            if _receive(connection, self._step_timeout_s) != GO:
                return
            self._accept(said.name, port)
        except PlaneError as error:
            _send(connection, msgspec.msgpack.encode(_Answer("", str(error))))
        else:
            _send(connection, msgspec.msgpack.encode(_Answer("")))


def announce(
    address: tuple[str, int], token: bytes, name: str, step_timeout_s: float, connect: Callable[[str], None]
) -> None:
    """The receiver's side: meet the owner at ``address`` and have ``connect`` connect to the port that it names.

    Raises:
        PlaneError: the owner cannot be reached, or refuses, or ``connect`` has failed.
    """
    try:
        with socket.create_connection(address, step_timeout_s) as connection:
            connection.settimeout(step_timeout_s)
            _send(connection, msgspec.msgpack.encode(_Announcement(token, name)))
            port = _answer(connection, step_timeout_s)
            _send(connection, GO)
            connect(port)
            _answer(connection, step_timeout_s)
    except (OSError, msgspec.MsgspecError) as error:
        raise PlaneError(f"the owner at {address[0]}:{address[1]} did not let us in: {error}") from error


def _answer(connection: socket.socket, step_timeout_s: float) -> str:
    answer = msgspec.msgpack.decode(_receive(connection, step_timeout_s), type=_Answer)
    if answer.error:
        raise PlaneError(answer.error)
    return answer.port


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(4, "big") + message)


def _receive(connection: socket.socket, step_timeout_s: float) -> bytes:
    by_s = time.monotonic() + step_timeout_s
    nbytes = int.from_bytes(receive_exactly(connection, 4, by_s=by_s), "big")
    if nbytes > MAX_BYTES:
        raise OSError("a message is too long")
    return receive_exactly(connection, nbytes, by_s=by_s)
