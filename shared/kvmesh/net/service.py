"""The life cycle of a service: an app (routes) inside a runner (sockets, signals, drain).

A service is a :class:`Service`; :func:`run_service` is a whole process around it, :func:`serving` the same in a test.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from aiohttp import web
from anyio.abc import TaskGroup

from kvmesh.net.address import BindError, listen, reachable_host
from kvmesh.net.connections import ConnectionLimits
from kvmesh.net.faults import arm_from_environment
from kvmesh.net.http import MAX_BODY_BYTES, Handler, Middleware, json_response, middlewares, no_browsers
from kvmesh.net.quick_posts import Answer, QuickPosts
from kvmesh.net.tls import Tls
from kvmesh.net.tls_listener import TlsListener
from kvmesh.protocol.errors import unavailable
from kvmesh.telemetry import get_logger
from kvmesh.telemetry.metrics import Metrics

__all__ = ["Health", "Service", "run_service", "serving"]

_log = get_logger("service")

LISTEN_BACKLOG = 1024
LAST_WORDS_S = 2.0
"""For requests that a drain has cut short to say so."""


class Health(NamedTuple):
    """Whether a service can do its work, and why not."""

    ok: bool
    detail: str = ""


class Service:
    """Routes plus what lives beside them. Constructors open nothing; :meth:`start` does.

    Subclasses add routes to ``self.app.router`` in their constructor.

    Args:
        name: ``router``, ``context``...; appears in logs and metrics.
        middleware: further middlewares, innermost last (API keys).
        drain_s: how long a stopping service waits for the requests it has begun.
        tls: certificates of its HTTP face; None, or without one to serve: plain HTTP.
    """

    for_web_pages = False
    """Whether a browser may ask on behalf of a web page."""
    open_while_draining: frozenset[str] = frozenset()
    """Paths of POST requests that are still served while the service drains."""
    quick_posts: Mapping[str, Answer] = {}
    """Answers to plain POST requests without keys, by path, that need not go through the application. It has routes
    for these paths, too: see :class:`kvmesh.net.quick_posts.QuickPosts`."""

    def __init__(
        self,
        name: str,
        *,
        middleware: Iterable[Middleware] = (),
        drain_s: float = 10.0,
        tls: Tls | None = None,
    ) -> None:
        self.name = name
        self.tls = tls
        self.metrics = Metrics()
        self.draining = False
        self.drain_s = drain_s
        self._in_flight = 0
        self._idle: anyio.Event | None = None
        first = [] if self.for_web_pages else [no_browsers]
        self.app = web.Application(
            middlewares=middlewares(self.metrics, [*first, *middleware, self._gate]), client_max_size=MAX_BODY_BYTES
        )
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_get("/prometheus/metrics", self._metrics)

    async def start(self, tasks: TaskGroup, url: str) -> None:
        """Begin work. The socket already listens at ``url``; a request that needs more answers 503 until then."""

    async def stop(self) -> None:
        """Release everything; called once, after the drain, with a shielded scope."""

    def health(self) -> Health:
        """The truth about this service now."""
        return Health(True)

    async def probe(self) -> Health:
        """What ``/health`` answers; services whose truth lives in another process ask it here."""
        return self.health()

    def statistics(self) -> dict[str, float]:
        """Numbers of this service; see subclasses."""
        return {"in_flight": self._in_flight}

    def drain_detail(self) -> str:
        """What ``/health`` says while the service drains: what it waits for."""
        return f"draining; {self._in_flight} requests run" if self._in_flight else "draining"

    async def drain(self) -> None:
        """Refuse new work and wait, at most ``drain_s``, for what has begun."""
        self.draining = True
        self.metrics.drain_deadline.set(time.time() + self.drain_s)
        if not self._in_flight:
            return
        self._idle = anyio.Event()
        with anyio.move_on_after(self.drain_s) as scope:
            await self._idle.wait()
        if scope.cancelled_caught:
            _log.warning("drain ended with requests unfinished", requests=self._in_flight)
            if self.cut_short():
                with anyio.move_on_after(LAST_WORDS_S):
                    await self._idle.wait()

    def cut_short(self) -> bool:
        """The drain is over: have requests that still run end with an error. Whether that takes a moment."""
        return False

    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        if self.draining and request.path not in self.open_while_draining:
            raise unavailable(
                f"This {self.name} server is shutting down; send the request to another.", code="draining"
            )
        self._in_flight += 1
        try:
            return await handler(request)
        finally:
            self._in_flight -= 1
            if self._idle is not None and not self._in_flight:
                self._idle.set()

    async def _health(self, _request: web.Request) -> web.Response:
        health = Health(False, self.drain_detail()) if self.draining else await self.probe()
        body = {"status": "ok" if health.ok else "unavailable", "detail": health.detail, "service": self.name}
        return json_response(body, 200 if health.ok else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = self.metrics.answer(",".join(request.headers.getall("Accept", ())))
        return web.Response(body=body, headers={"Content-Type": content_type})


@asynccontextmanager
async def serving(service: Service, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve for the length of an ``async with`` block; gives the base URL.

    Raises:
        BindError: the address cannot be bound.
    """
    try:
        listener = listen(host, port, backlog=LISTEN_BACKLOG)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise BindError("port", port, error.errno) from error
        raise BindError("host", host, error.errno or 0) from error
    secure = None
    if service.tls is not None and service.tls.serves:
        secure = service.tls
    url = f"{'https' if secure else 'http'}://{reachable_host(host)}:{listener.getsockname()[1]}"
    # A client that leaves cancels its handler: that is how a request learns that nobody wants it any more.
    runner = web.AppRunner(service.app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    accepting: TlsListener | None = None
    quick: QuickPosts | None = None
    server: asyncio.Server | None = None
    async with anyio.create_task_group() as tasks:
        try:
            await runner.setup()
            assert runner.server is not None, "the runner is set up"
            limits = ConnectionLimits(runner.server)
            service.metrics.collect_statistics("kvmesh_http_connections", limits.statistics)
            if secure is not None:
                accepting = _accept_tls(service, limits, listener, secure, tasks)
            elif service.quick_posts:
                quick = QuickPosts(limits, service.quick_posts, service.metrics, open=lambda: not service.draining)
                quick.served_by(await _accept(quick, listener))
            else:
                server = await _accept(limits, listener)
            await service.start(tasks, url)
            yield url
        finally:
            with anyio.CancelScope(shield=True):
                await service.drain()
                if accepting is not None:
                    accepting.stop()
                if quick is not None:
                    quick.close()
                if server is not None:
                    server.close()
                await runner.cleanup()
                await service.stop()
            listener.close()
            tasks.cancel_scope.cancel()


async def _accept(protocol: Callable[[], asyncio.Protocol], listener: socket.socket) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(protocol, sock=listener, backlog=LISTEN_BACKLOG)


def _accept_tls(
    service: Service, limits: ConnectionLimits, listener: socket.socket, tls: Tls, tasks: TaskGroup
) -> TlsListener:
    accepting = TlsListener(listener, limits, tls)
    service.metrics.collect_statistics("kvmesh_tls", lambda: {**tls.statistics(), **accepting.statistics()})
    service.metrics.collect(accepting)
    accepting.start(tasks)
    return accepting


def run_service(service: Service, host: str, port: int, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Be the process of ``service`` until SIGTERM or SIGINT.

    Args:
        service: what to run.
        host: address to bind.
        port: TCP port, 0 for any free one.
        on_ready: called with the base URL once the service has started.
    """
    arm_from_environment()
    anyio.run(_main, service, host, port, on_ready, backend_options={"use_uvloop": True})


async def _main(service: Service, host: str, port: int, on_ready: Callable[[str], None] | None) -> None:
    up, stop = anyio.Event(), anyio.Event()

    async def serve() -> None:
        async with serving(service, host, port) as url:
            _log.info("serving", url=url)
            if on_ready is not None:
                on_ready(url)
            up.set()
            await stop.wait()
        tasks.cancel_scope.cancel()

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            async for number in signals:
                _log.info("stopping", signal=signal.Signals(number).name)
                if up.is_set():
                    # Not cancelled: the service's own tasks carry what still runs to its end, and the heartbeats too.
                    stop.set()
                else:
                    tasks.cancel_scope.cancel()
                break
