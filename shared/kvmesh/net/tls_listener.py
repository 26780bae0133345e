"""Accepts TLS connections for an HTTP server, and tells those apart that cannot become any.

A plain HTTP request is answered 400 with a sentence instead of silence. Everything else that fails is closed, counted
by reason, and logged now and then.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Iterable

import anyio
import msgspec
from anyio.abc import TaskGroup
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.tls import Tls
from kvmesh.telemetry import get_logger

__all__ = ["REASONS", "TlsListener"]

HANDSHAKE_TIMEOUT_S = 10.0
"""From an accepted connection to a finished handshake."""

LOG_EVERY_S = 10.0
"""Refusals of one reason are logged once in this time, with how many there were."""

EXHAUSTED_S = 0.1
"""Wait when the system has no descriptor left for another connection."""

_TLS_RECORD = 0x16
"""First byte of a TLS handshake; no HTTP method begins with it."""

REASONS = ("plain_http", "no_certificate", "bad_certificate", "timeout", "broken")

_log = get_logger("tls")


class TlsListener(Collector):
    """Connections of one listening socket, each handed to a protocol once its handshake is over.

    Args:
        listener: a listening socket; stays the caller's.
        protocol: makes the protocol of a connection.
        tls: gives the certificate for each connection.
        clock: of the log.
    """

    def __init__(
        self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], tls: Tls, clock: Clock | None = None
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._clock = clock or SystemClock()
        self._scope: anyio.CancelScope | None = None
        self._handshakes = 0
        self._refused = dict.fromkeys(REASONS, 0)
        self._logged: dict[str, tuple[float, int]] = {}

    def statistics(self) -> dict[str, float]:
        """Handshakes that succeeded."""
        return {"handshakes_total": self._handshakes}

    def collect(self) -> Iterable[Metric]:
        """Refusals by reason; see ``prometheus_client.registry.Collector``."""
        refused = CounterMetricFamily("kvmesh_tls_refused", "connections that became no TLS ones", labels=["reason"])
        for reason, count in self._refused.items():
            refused.add_metric([reason], count)
        yield refused

    def start(self, tasks: TaskGroup) -> None:
        """Begin to accept, in ``tasks``."""
        self._listener.setblocking(False)
        tasks.start_soon(self._accept_forever)

    def stop(self) -> None:
        """Accept no more, and give up handshakes that are not over; connections stay. Idempotent."""
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as handshakes:
                while True:
                    try:
                        connection, _ = await loop.sock_accept(self._listener)
                    except OSError as error:
                        if error.errno in (errno.EBADF, errno.EINVAL):
                            return  # the listener is closed
                        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                            await anyio.sleep(EXHAUSTED_S)
                        continue  # else: a client that left before it was accepted
                    connection.setblocking(False)
                    handshakes.start_soon(self._receive, loop, connection)

    async def _receive(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        try:
            with anyio.fail_after(HANDSHAKE_TIMEOUT_S):
                await anyio.wait_readable(connection)
                first = connection.recv(1, socket.MSG_PEEK)
                if not first:
                    connection.close()  # a probe that only connects
                    return
                if first[0] != _TLS_RECORD:
                    self._refuse("plain_http")
                    _answer_plainly(connection)
                    return
                await loop.connect_accepted_socket(
                    self._protocol, connection, ssl=self._tls.server(), ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
                )
            self._handshakes += 1
        except Exception as error:
            # The border of the service: whatever a stranger brings about here must not reach the others.
            connection.close()
            self._refuse(_reason(error), error)
        except anyio.get_cancelled_exc_class():
            connection.close()
            raise

    def _refuse(self, reason: str, error: Exception | None = None) -> None:
        self._refused[reason] += 1
        if isinstance(error, ConnectionError):
            return  # it has left, for reasons of its own
        count, now_s = self._refused[reason], self._clock.monotonic_s()
        last_s, told = self._logged.get(reason, (-LOG_EVERY_S, 0))
        if now_s - last_s >= LOG_EVERY_S:
            self._logged[reason] = now_s, count
            extra = {} if error is None else {"error": str(error) or type(error).__name__}
            _log.warning("connections refused", reason=reason, count=count - told, **extra)


def _answer_plainly(connection: socket.socket) -> None:
    """One answer that a plain HTTP client understands; what does not fit the socket's buffer at once is not sent."""
    message = "This address speaks TLS; use https:// (its certificate has to be trusted, see ca_file)."
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "tls_required"}
    body = msgspec.json.encode({"error": error})
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with connection:
        try:
            connection.send(f"{head}Connection: close\r\n\r\n".encode() + body)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(65_536)  # unread data would turn the end into a reset, which hides the answer
        except OSError:
            return  # it has left already


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    text = str(error).upper()
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in text:
        return "no_certificate"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "bad_certificate"
    return "broken"
