"""Decides which clients may connect to a context's CURVE sockets: the ZeroMQ Authentication Protocol (RFC 27).

libzmq asks ``inproc://zeromq.zap.01`` in the sockets' own context during every handshake. Whoever owns the sockets
answers, in a thread that it has anyway or in a task; there is no thread of its own.
"""

from __future__ import annotations

from typing import NoReturn

import anyio
import zmq
from zmq.utils import z85

from kvmesh.net.curve import ZAP_DOMAIN, CurveSecurity
from kvmesh.telemetry import get_logger

__all__ = ["ZapServer"]

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_KEY_BYTES = 32

_log = get_logger("curve")


class ZapServer:
    """Answers for one context.

    Args:
        context: of the sockets that it protects; made before any of them is bound, closed after all of them.
        security: says who may connect.

    Raises:
        OSError: the context has another one.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], security: CurveSecurity) -> None:
        self._security = security
        self.refused_total = 0
        """Handshakes of clients whose key is not allowed."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        """Poll it, and call :meth:`answer` when it is readable."""
        self.socket.linger = 0
        try:
            self.socket.bind(_ENDPOINT)
        except zmq.ZMQError as error:
            self.socket.close()
            raise OSError(error.errno, f"cannot authenticate clients: {error.strerror}") from error

    def answer(self) -> None:
        """Decide on everyone who waits; never blocks."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._decide(frames))

    async def serve(self) -> NoReturn:
        """Decide on everyone who comes, until cancelled."""
        while True:
            self.answer()
            await anyio.wait_readable(self.socket.FD)

    def close(self) -> None:
        """Nobody can connect any more. Idempotent."""
        self.socket.close()

    def _decide(self, frames: list[bytes]) -> list[bytes]:
        request = frames[1] if len(frames) > 1 else b""
        if len(frames) != 7 or frames[0] != _VERSION or frames[2] != ZAP_DOMAIN or frames[5] != b"CURVE":
            return _reply(request, b"400", b"not a CURVE handshake of this service")
        key = z85.encode(frames[6]) if len(frames[6]) == _KEY_BYTES else b""
        if key in self._security.client_keys():
            return _reply(request, b"200", b"OK", key)
        self.refused_total += 1
        if self.refused_total & (self.refused_total - 1) == 0:
            _log.warning(
                "a client's key is not allowed; if it is one of yours, put it where curve.client_keys names it",
                public_key=key.decode(),
                address=frames[3].decode(errors="replace"),
                so_far=self.refused_total,
            )
        return _reply(request, b"400", b"the key is not allowed")


def _reply(request: bytes, status: bytes, text: bytes, user: bytes = b"") -> list[bytes]:
    return [_VERSION, request, status, text, user, b""]
