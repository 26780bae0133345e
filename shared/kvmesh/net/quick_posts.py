"""Answers the simplest requests of an HTTP server without its framework, which costs several times the answer.

A connection begins here. As long as every request on it is a plain POST to one of a few paths, it is answered on the
spot. Whatever else comes (other methods, headers that mean something, a body that takes its time, an error to report)
is handed over with the connection: the framework reads what has come so far, and everything after it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import cast

from kvmesh.net.http import MAX_BODY_BYTES, REQUEST_ID_HEADER
from kvmesh.telemetry.metrics import Metrics

__all__ = ["Answer", "QuickPosts"]

Answer = Callable[[bytes], bytes]
"""From a body to the JSON of a 200; it does not block. Whatever it raises is left to the framework's route, which
gets the same request: it must have changed nothing."""

REST_S = 30.0
"""A connection without a request for this long is handed over: the framework knows when to close it."""

MAX_HEAD_BYTES = 8190

_WITHOUT_MEANING = frozenset({b"host", b"user-agent", b"accept", b"accept-encoding", b"accept-language"})
"""Headers that do not change the answer."""


class QuickPosts:
    """The protocol factory of a listening socket.

    Args:
        framework: makes the protocol of a connection that is handed over.
        answers: by path.
        metrics: in which these requests count as well.
        open: whether requests may be answered now; else every one is handed over.
        rest_s: see ``REST_S``.
    """

    def __init__(
        self,
        framework: Callable[[], asyncio.Protocol],
        answers: Mapping[str, Answer],
        metrics: Metrics,
        *,
        open: Callable[[], bool],
        rest_s: float = REST_S,
    ) -> None:
        self._framework = framework
        self.open = open
        self.rest_s = rest_s
        self.answers = {
            b"POST " + path.encode() + b" HTTP/1.1": (
                answer,
                metrics.http_requests.labels(path, "200").inc,
                metrics.http_seconds.labels(path).observe,
            )
            for path, answer in answers.items()
        }
        self.connections: set[_Connection] = set()
        """Those that have not been handed over."""
        self.answered_total = 0
        self._server: asyncio.Server | None = None

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return _Connection(self)

    def take(self, connection: _Connection) -> asyncio.Protocol:
        """The framework's protocol for a connection that is none of ours any more."""
        self.connections.discard(connection)
        return self._framework()

    def served_by(self, server: asyncio.Server) -> None:
        """The server whose connections these are; it ends with them."""
        self._server = server

    def close(self) -> None:
        """Accept no more, and close every connection that has not been handed over."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close()


class _Connection(asyncio.Protocol):
    def __init__(self, posts: QuickPosts) -> None:
        self._posts = posts
        self._buffer = b""
        self._wanted = 0
        """Length of the request that has begun, once its head is known."""
        self._body_at = 0
        self._answer: tuple[Answer, Callable[[], None], Callable[[float], None]] | None = None
        self._rested = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._posts.connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(self._posts.rest_s, self._rest)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._timer.cancel()
        self._posts.connections.discard(self)

    def pause_writing(self) -> None:
        # The client asks without reading what it is told.
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._rested = False
        self._buffer = self._buffer + data if self._buffer else data
        while self._buffer:
            if not self._wanted and not self._read_head():
                return
            if len(self._buffer) < self._wanted:
                return
            if not self._reply():
                return

    def _read_head(self) -> bool:
        """Whether a request has begun that can be answered here."""
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(self._buffer) >= MAX_HEAD_BYTES or not self._buffer.startswith(b"POST "[: len(self._buffer)]):
                self._hand_over()
            return False
        line, *headers = self._buffer[:end].split(b"\r\n")
        self._answer = self._posts.answers.get(line)
        length = _body_length(headers)
        if self._answer is None or length is None or not self._posts.open():
            self._hand_over()
            return False
        self._body_at = end + 4
        self._wanted = self._body_at + length
        return True

    def _reply(self) -> bool:
        """Answer the request that is complete; False when that is left to the framework."""
        assert self._answer is not None
        answer, count, observe = self._answer
        started = time.perf_counter()
        try:
            body = answer(self._buffer[self._body_at : self._wanted])
        except Exception:
            self._hand_over()  # whatever it is, the framework meets it again and says or logs it
            return False
        self._transport.write(_HEAD % (len(body), random.getrandbits(128), _date(int(time.time()))) + body)
        self._buffer = self._buffer[self._wanted :]
        self._wanted = 0
        self._posts.answered_total += 1
        count()
        observe(time.perf_counter() - started)
        return not self._transport.is_closing()

    def _rest(self) -> None:
        if self._rested:
            self._hand_over()
            return
        self._rested = True
        self._timer = asyncio.get_running_loop().call_later(self._posts.rest_s, self._rest)

    def _hand_over(self) -> None:
        self._timer.cancel()
        protocol = self._posts.take(self)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._buffer:
            protocol.data_received(self._buffer)
        self._buffer = b""


_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    + REQUEST_ID_HEADER.encode()
    + b": %032x\r\nDate: %s\r\n\r\n"
)


def _body_length(headers: list[bytes]) -> int | None:
    """From ``Content-Length``; None where any header says something that has to be looked at."""
    length = None
    for header in headers:
        name, _, value = header.partition(b":")
        name, value = name.lower(), value.strip()
        if name == b"content-length" and length is None and value.isdigit():
            length = int(value)
        elif name == b"content-type" or name in _WITHOUT_MEANING:
            continue
        elif name != b"connection" or value.lower() != b"keep-alive":
            return None
    return length if length is not None and length <= MAX_BODY_BYTES else None


_last_date = (0, b"")


def _date(now_s: int) -> bytes:
    global _last_date
    if _last_date[0] != now_s:
        _last_date = (now_s, formatdate(now_s, usegmt=True).encode())
    return _last_date[1]
