"""The open connections of an HTTP server: how many there may be, and how long one may take to begin its first request.

Without bounds, connections that say nothing, or half a request, take the process's file descriptors: nobody else can
reach it then, nor can it reach others.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from aiohttp import web

__all__ = ["FIRST_REQUEST_S", "ConnectionLimits", "most_connections"]

FIRST_REQUEST_S = 10.0
"""From a connection to the whole head of its first request."""

KEEPALIVE_S = 75.0
"""How long a connection may rest between two requests, half a head of the next one included. More than the usual 60 s
of proxies, which so close first."""


def most_connections() -> int:
    """Three quarters of the files that the process may have open; the rest is for its own connections and files."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if soft == resource.RLIM_INFINITY else max(16, soft * 3 // 4)


class ConnectionLimits:
    """The protocol factory of a listening socket, in place of the server's own.

    Args:
        server: whose connections they are.
        first_request_s: None: ``FIRST_REQUEST_S``.
        most: how many may be open; None: :func:`most_connections`. One more takes the place of the one that has waited
            longest to begin its first request; where all have, it is closed itself.
    """

    def __init__(self, server: web.Server, *, first_request_s: float | None = None, most: int | None = None) -> None:
        self._server = server
        self._first_request_s = FIRST_REQUEST_S if first_request_s is None else first_request_s
        self._most = most_connections() if most is None else most
        self._open = 0
        self._silent: dict[_Connection, asyncio.TimerHandle] = {}
        """Those that have not begun a request, the oldest first."""
        self._closed = 0
        self._make_request: Any = server.request_factory
        server.request_factory = self._begin_request

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return _Connection(self, self._server)

    def statistics(self) -> dict[str, float]:
        """Connections now, and how many were closed because they did not begin or were too many."""
        return {"open": self._open, "closed_total": self._closed}

    def arrived(self, connection: _Connection) -> None:
        """It is open."""
        self._open += 1
        loop = asyncio.get_running_loop()
        self._silent[connection] = loop.call_later(self._first_request_s, self._close, connection)
        if self._open > self._most:
            self._close(next(iter(self._silent)))

    def left(self, connection: _Connection) -> None:
        """It is closed."""
        self._open -= 1
        self._has_begun(connection)

    def _close(self, connection: _Connection) -> None:
        self._has_begun(connection)
        self._closed += 1
        if connection.transport is not None:
            connection.transport.abort()

    def _has_begun(self, connection: Any) -> None:
        timer = self._silent.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _begin_request(self, message: Any, payload: Any, protocol: Any, *rest: Any) -> web.BaseRequest:
        """Called by the server with the head of a request."""
        self._has_begun(protocol)
        request: web.BaseRequest = self._make_request(message, payload, protocol, *rest)
        return request


class _Connection(web.RequestHandler):
    """One connection to the server."""

    def __init__(self, limits: ConnectionLimits, server: web.Server) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), keepalive_timeout=KEEPALIVE_S, access_log=None)  # type: ignore[arg-type]  # None: no access log
        self._limits = limits

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._limits.arrived(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limits.left(self)
        super().connection_lost(exc)
