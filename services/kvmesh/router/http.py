"""The data path's HTTP, by aiohttp: the only module of it that names the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp
import anyio
from aiohttp import web

from kvmesh.net.auth import ApiKeys
from kvmesh.net.http import BODY_TIMEOUT_S, REQUEST_ID_HEADER, ROUTER_HEADER, receiving
from kvmesh.net.tls import Tls, tls_problem
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.sse import SSE_HEADERS
from kvmesh.router.upstream import UpstreamBrokenError, UpstreamUnreachableError

__all__ = ["HttpReply", "HttpUpstream", "read_body"]

CONNECT_TIMEOUT_S = 2.0
"""Workers are a LAN hop away; one that does not accept within this is down."""
KEEPALIVE_S = 15.0
"""Less than a server's own, so that no request is sent into a connection that is just being closed."""


async def read_body(request: web.Request, max_bytes: int, *, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The request's body.

    Raises:
        ApiError: 413 when it is longer than ``max_bytes``, and what :func:`receiving` raises.
    """
    if (request.content_length or 0) <= max_bytes:
        parts: list[bytes] = []
        size = 0
        with receiving(request, timeout_s):
            while (part := await request.content.readany()) and size <= max_bytes:
                parts.append(part)
                size += len(part)
        if size <= max_bytes:
            return b"".join(parts)
    raise ApiError(413, f"The body is over {max_bytes} bytes; send a shorter prompt.", code="too_large")


class HttpReply:
    """The answer to one aiohttp request; :attr:`response` is what the handler returns."""

    def __init__(self, request: web.Request, request_id: str) -> None:
        self._request = request
        self._request_id = request_id
        self.response: web.StreamResponse | None = None
        self._stream: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        """See :class:`kvmesh.router.upstream.Reply`."""
        return self._stream is not None

    def send(self, body: bytes) -> None:
        """See :class:`kvmesh.router.upstream.Reply`."""
        self.response = web.Response(body=body, content_type="application/json")

    async def write(self, data: bytes) -> None:
        """See :class:`kvmesh.router.upstream.Reply`."""
        if self._stream is None:
            headers = {**SSE_HEADERS, REQUEST_ID_HEADER: self._request_id}
            self._stream = self.response = web.StreamResponse(headers=headers)
            await self._stream.prepare(self._request)
        with self._reading_client():
            await self._stream.write(data)

    async def finish(self) -> None:
        """See :class:`kvmesh.router.upstream.Reply`."""
        if self._stream is not None:
            with self._reading_client():
                await self._stream.write_eof()

    @contextmanager
    def _reading_client(self) -> Iterator[None]:
        """A write. It waits only while the client does not read; if that ends it, the connection is closed at once.

        A proper end would wait for what is unsent to be read, which may be for ever.
        """
        try:
            yield
        except anyio.get_cancelled_exc_class():
            if self._request.transport is not None:
                self._request.transport.abort()
            raise


class HttpResponse:
    """A worker's answer; see :class:`kvmesh.router.upstream.UpstreamResponse`."""

    __slots__ = ("_response", "retry_after_s", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        retry_after = response.headers.get("Retry-After", "")
        self.retry_after_s = int(retry_after) if retry_after.isdigit() else None

    async def read(self) -> bytes:
        """See :class:`kvmesh.router.upstream.UpstreamResponse`."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamBrokenError(_say(error)) from error

    async def next_chunk(self) -> bytes:
        """See :class:`kvmesh.router.upstream.UpstreamResponse`."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamBrokenError(_say(error)) from error

    def close(self) -> None:
        """See :class:`kvmesh.router.upstream.UpstreamResponse`."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class HttpUpstream:
    """A keep-alive pool to all workers; use as an async context manager.

    Args:
        keys: the API keys of this mesh now. Servers that ask for one are given the first; clients' keys go no further
            than the router.
        router: instance id under which this router is a member, told to the servers; None: it is none.
        tls: whom to trust behind ``https://`` and what to present.
    """

    def __init__(self, keys: ApiKeys | None = None, *, router: str | None = None, tls: Tls | None = None) -> None:
        self._keys = keys or ApiKeys()
        self._options: Callable[[], Mapping[str, Any]] = dict if tls is None else tls.for_request
        self._own = {} if router is None else {ROUTER_HEADER: router}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the pool."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pool and its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> HttpResponse:
        """See :class:`kvmesh.router.upstream.Upstream`."""
        return await self._request("POST", url, body, headers)

    async def get(self, url: str) -> HttpResponse:
        """The same for a GET, for probes and for what workers report."""
        return await self._request("GET", url, None, {})

    async def _request(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> HttpResponse:
        if self._session is None:
            raise UpstreamUnreachableError("the router is stopping")
        headers = {**headers, **self._own}
        if (key := self._keys.own) is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            response = await self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False, **self._options()
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamUnreachableError(_say(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamBrokenError(_say(error)) from error
        return HttpResponse(response)


def _say(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection closed in mid-answer"
    return tls_problem(error) or str(error) or type(error).__name__
