"""An HTTP client for talk between services: bounded in time, OpenAI-shaped errors raised as they came."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urljoin, urlsplit

import aiohttp
import msgspec

from kvmesh.net.auth import ApiKeys
from kvmesh.net.tls import Tls, tls_problem
from kvmesh.protocol.errors import ApiError

__all__ = ["HttpClient", "PeerUnreachableError"]

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2.0
"""Services of a mesh are a LAN hop apart; a peer that does not accept within this is treated as down."""

_REDIRECT = 307
"""What a coordinator that does not lead answers: the same request, at the one that does."""

MAX_REDIRECTS = 4

MAX_REPLY_BYTES = 64 << 20
"""Of one answer that is read whole: lists of a mesh's members, transfers and workers are far smaller."""

MAX_ERROR_BYTES = 1 << 20

_NO_OPTIONS: Mapping[str, Any] = {}


class PeerUnreachableError(ConnectionError):
    """The peer could not be reached, or its connection broke before it answered."""


class _ErrorDetail(msgspec.Struct):
    message: str
    type: str = "server_error"
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


class _HealthBody(msgspec.Struct):
    """What a service that is not ready says of itself."""

    detail: str


class HttpClient:
    """A pooled client; use as an async context manager.

    Args:
        timeout_s: bound of a whole exchange unless a call gives its own.
        headers: sent with each request.
        tls: whom to trust behind ``https://`` and what to present; None: the system's authorities, and nothing.
        keys: the API keys of this mesh now, of which the first is sent along.
        follow_leader: whether to go, with the API key, where a coordinator that does not lead sends to. Only for
            clients of coordinators that settings or flags name: nobody else may send a key, or this process, elsewhere.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        headers: Mapping[str, str] | None = None,
        tls: Tls | None = None,
        keys: ApiKeys | None = None,
        follow_leader: bool = False,
    ) -> None:
        self._keys = keys
        self._follow_leader = follow_leader
        self._timeout_s = timeout_s
        self._tls = tls
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the pool."""
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=30)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pool and its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        url: str,
        reply: type[T],
        *,
        body: Any = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> T:
        """One JSON exchange.

        Args:
            method: HTTP method.
            url: absolute URL.
            reply: type of the answer.
            body: see :meth:`open`.
            timeout_s: see :meth:`open`.
            headers: see :meth:`open`.
            max_bytes: of the answer's body.

        Raises:
            PeerUnreachableError: no connection, a broken one, the time ran out, or the answer is too large.
            ApiError: the peer answered 4xx or 5xx (status and body are its own), or sends elsewhere.
        """
        async with self.open(method, url, body=body, timeout_s=timeout_s, headers=headers) as response:
            data = await _body(response, max_bytes)
        return msgspec.json.decode(data, type=reply)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        url: str,
        *,
        body: Any = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response whose body the caller streams; leaving the block early closes the connection.

        Args:
            method: HTTP method.
            url: absolute URL.
            body: bytes are sent as they are, anything else as JSON; None sends no body.
            timeout_s: bound of the whole exchange.
            headers: further headers.

        Raises:
            PeerUnreachableError: no connection within :data:`CONNECT_TIMEOUT_S`, or it broke.
            ApiError: the peer answered 4xx or 5xx, or sends elsewhere.
        """
        if self._session is None:
            raise RuntimeError("HttpClient is used outside its async with block")
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        sent = {"Content-Type": "application/json", **(headers or {})} if data is not None else headers
        if self._keys is not None and (key := self._keys.own) is not None:
            sent = {**(sent or {}), "Authorization": f"Bearer {key}"}
        options = self._tls.for_request() if self._tls is not None else _NO_OPTIONS
        for _ in range(MAX_REDIRECTS + 1):
            try:
                # Followed here: the library would not take credentials along to another coordinator.
                response = await self._session.request(
                    method, url, data=data, headers=sent, timeout=timeout, allow_redirects=False, **options
                )
            except (TimeoutError, aiohttp.ClientError) as error:
                raise PeerUnreachableError(f"cannot reach {url}: {_reason(error, url)}") from error
            leader = self._leader(url, response)
            if leader is None:
                break
            response.release()
            url = leader
        try:
            if response.status >= 300:
                raise await _api_error(response)
            yield response
        finally:
            response.close() if not response.content.at_eof() else response.release()

    def _leader(self, url: str, response: aiohttp.ClientResponse) -> str | None:
        """The URL of the same request at the leader, if that is what the coordinator at ``url`` answered."""
        if not self._follow_leader or response.status != _REDIRECT:
            return None
        return _same_request(url, response.headers.get("Location", ""))


def _same_request(url: str, location: str) -> str | None:
    """Where a coordinator at ``url`` sends to, if that is this request at another one; None for any other place."""
    try:
        here, there = urlsplit(url), urlsplit(urljoin(url, location))
        usable = there.port != 0 and there.netloc != here.netloc
    except ValueError:
        return None
    same = (there.scheme, there.path, there.query) == (here.scheme, here.path, here.query)
    return there.geturl() if usable and same and "@" not in there.netloc and not there.fragment else None


def _reason(error: Exception, url: str) -> str:
    if url.startswith("https:") and _hung_up(error):
        # A client learns of a missing certificate only when it sends something, which may cross the reason on its way.
        return "it closed the connection; perhaps it asks for a client certificate (cert_file, key_file)"
    if (problem := tls_problem(error)) is not None:
        return problem
    if isinstance(error, aiohttp.ClientConnectorError):
        # Its own text has the TLS context in it, as an object; asyncio's repeats the address.
        number = error.os_error.errno or 0
        why = os.strerror(number) if number > 0 else error.os_error.strerror or error.os_error
        return f"cannot connect to {error.host}:{error.port} ({why})"
    return str(error) or type(error).__name__


def _hung_up(error: Exception) -> bool:
    """Whether the server has closed a connection that was there."""
    is_reset = isinstance(error, aiohttp.ClientOSError) and error.errno in (errno.ECONNRESET, errno.EPIPE)
    is_there = not isinstance(error, aiohttp.ClientConnectorError)
    return isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionResetError)) or (is_reset and is_there)


async def _body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The whole body, of which no more than that is kept in memory: who answers need not be a friend."""
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in response.content.iter_any():
            size += len(piece)
            if size > max_bytes:
                raise PeerUnreachableError(f"{response.url} answers with more than {max_bytes} bytes")
            pieces.append(piece)
    except (TimeoutError, aiohttp.ClientError) as error:
        raise PeerUnreachableError(f"{response.url} broke off: {error}") from error
    return b"".join(pieces)


async def _api_error(response: aiohttp.ClientResponse) -> ApiError:
    data = await _body(response, MAX_ERROR_BYTES)
    if response.status < 400:
        text = f"{response.url} sends elsewhere ({response.status}), where this client does not follow"
        return ApiError(response.status, text, type="server_error", code="redirect")
    retry_after = response.headers.get("Retry-After", "")
    retry_after_s = int(retry_after) if retry_after.isdigit() else None
    try:
        detail = msgspec.json.decode(data, type=_ErrorBody).error
    except msgspec.DecodeError:
        text = _health_detail(data) or data[:200].decode(errors="replace")
        return ApiError(response.status, f"{response.url} answered {response.status}: {text}", type="server_error")
    code = None if detail.code is None else str(detail.code)
    return ApiError(
        response.status,
        detail.message,
        type=detail.type,
        code=code,
        param=detail.param,
        retry_after_s=retry_after_s,
    )


def _health_detail(data: bytes) -> str:
    try:
        return msgspec.json.decode(data, type=_HealthBody).detail
    except msgspec.DecodeError:
        return ""
