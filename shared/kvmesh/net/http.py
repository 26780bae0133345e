"""HTTP plumbing every service shares: bodies, OpenAI-shaped errors, request ids, keys and metrics.

Middlewares are plain callables; :func:`middlewares` gives the usual stack in its order.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import msgspec
import structlog
from aiohttp import http_exceptions, web

from kvmesh.net.auth import ApiKeys
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.telemetry import exemplars, get_logger
from kvmesh.telemetry.metrics import Metrics

__all__ = [
    "BODY_TIMEOUT_S",
    "OPEN_PATHS",
    "REQUEST_ID",
    "REQUEST_ID_HEADER",
    "ROUTER_HEADER",
    "api_key_middleware",
    "decode_json",
    "error_response",
    "json_response",
    "middlewares",
    "no_browsers",
    "read_json",
    "receiving",
]

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Middleware = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]

REQUEST_ID_HEADER = "X-Request-Id"
ROUTER_HEADER = "X-KVMesh-Router"
"""The instance id of the router that sends a leg: when that router is gone, nobody asks for what it left behind."""
REQUEST_ID = web.RequestKey("kvmesh_request_id", str)
MAX_BODY_BYTES = 32 * 1024 * 1024
"""A million-token prompt as JSON integers is about 7 MB."""
BODY_TIMEOUT_S = 30.0
"""How long a client may take to send a body; the largest takes seconds on a slow line."""
CLIENT_LEFT = 499
"""Counted when a client left before its answer was complete; nginx's number, never sent."""
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/prometheus/metrics", "/version"})
"""Probes and scrapers carry no API key."""

_log = get_logger("http")


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON response encoded by msgspec (structs, dataclasses and plain data)."""
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    """An error as OpenAI's clients expect it, with ``Retry-After`` where one is known."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else None
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return json_response(error.body(), error.status, headers)


@contextmanager
def receiving(request: web.Request, timeout_s: float | None = None) -> Iterator[None]:
    """A block that reads the body of ``request``.

    Args:
        request: whose body.
        timeout_s: bound; None: ``BODY_TIMEOUT_S``.

    Raises:
        ApiError: 408 when it does not come within ``timeout_s``; 400 when it breaks off or is not in its stated coding.
    """
    timeout_s = BODY_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        with anyio.fail_after(timeout_s):
            yield
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {timeout_s:g} s; send the request again.",
            type="timeout_error",
            code="body_timeout",
        ) from None
    except (web.RequestPayloadError, http_exceptions.HttpProcessingError):
        request.content.feed_eof()  # the library would read on after the answer, and log what it then meets
        raise bad_request(
            "The body is incomplete, or not in the coding that its headers name.", code="invalid_body"
        ) from None


async def read_json(request: web.Request, type: type[T]) -> T:
    """Decode the body.

    Raises:
        ApiError: 400 when the body is no JSON or not of ``type``, and what :func:`receiving` raises.
    """
    with receiving(request):
        body = await request.read()
    return decode_json(body, type)


def decode_json(body: bytes, type: type[T]) -> T:
    """Decode a body that has been read.

    Raises:
        ApiError: 400 when it is no JSON or not of ``type``.
    """
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise bad_request(f"Invalid request body: {error}.") from None
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from None


def middlewares(metrics: Metrics, extra: Iterable[Middleware] = ()) -> list[Any]:
    """Request id and metrics outside, then errors, then ``extra`` (keys, drain), then the handler."""
    return [_request_id, _measured(metrics), _errors, *map(_adapted, extra)]


def _adapted(middleware: Middleware) -> Any:
    @web.middleware
    async def run(request: web.Request, handler: Handler) -> web.StreamResponse:  # a bound method cannot be marked
        return await middleware(request, handler)

    return run


@web.middleware
async def _request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    request_id = request.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex
    request[REQUEST_ID] = request_id
    with structlog.contextvars.bound_contextvars(request_id=request_id):
        response = await handler(request)
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = request_id
    return response


def _measured(metrics: Metrics) -> Any:
    @web.middleware
    async def measure(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        status = str(CLIENT_LEFT)
        started = time.perf_counter()
        exemplars.begin()
        metrics.http_in_flight.inc()
        try:
            response = await handler(request)
            status = str(response.status)
            return response
        finally:
            metrics.http_in_flight.dec()
            metrics.http_requests.labels(route, status).inc()
            metrics.http_seconds.labels(route).observe(time.perf_counter() - started, exemplars.current())

    return measure


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return _answer(request, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _answer(request, _from_aiohttp(request, error))
    except ConnectionResetError:
        return _broken_off(request)  # the client left in mid-answer; there is nobody to tell
    except Exception:
        # The border of the service: whatever went wrong is logged here and no stack trace leaves.
        _log.exception("request failed", path=request.path)
        return _answer(
            request,
            ApiError(500, "Internal error; the server's log has the details.", type="server_error", code="internal"),
        )


def _answer(request: web.Request, error: ApiError) -> web.Response:
    """The error as a response, unless one has begun: a second head would become part of the first one's body."""
    return _broken_off(request) if request.writer.output_size else error_response(error)


def _broken_off(request: web.Request) -> web.Response:
    """Close the connection. The response is for aiohttp, which cannot send it any more and takes note in silence."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=CLIENT_LEFT)


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return ApiError(404, f"No such path: {request.path}.", code="not_found")
    if error.status == 405:
        return ApiError(405, f"{request.path} does not accept {request.method}.", code="method_not_allowed")
    if error.status == 413:
        return ApiError(413, f"The body is over {MAX_BODY_BYTES} bytes; send a shorter prompt.", code="too_large")
    return ApiError(error.status, error.reason)


async def no_browsers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a web page has a browser ask, on services that are for other services only.

    Any page may send a POST without asking first, also to this machine; it cannot leave ``Origin`` out.
    """
    headers = request.headers
    if request.path not in OPEN_PATHS and (
        "Origin" in headers or headers.get("Sec-Fetch-Site", "none") in ("cross-site", "same-site")
    ):
        raise ApiError(403, "This service is not for web pages; browsers talk to the router.", code="web_page")
    return await handler(request)


def api_key_middleware(keys: ApiKeys, open_paths: frozenset[str] = OPEN_PATHS) -> Middleware:
    """Require ``Authorization: Bearer KEY`` while there are ``keys``; probes stay open."""

    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys.asked and request.path not in open_paths:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            if keys.admit(key.strip() if scheme.lower() == "bearer" else "") is None:
                raise ApiError(
                    401,
                    "Missing or unknown API key; send it as 'Authorization: Bearer KEY'.",
                    code="invalid_api_key",
                )
        return await handler(request)

    return check
