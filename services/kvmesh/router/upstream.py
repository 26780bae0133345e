"""What the data path needs of HTTP, in both directions, so that it knows no HTTP library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from kvmesh.protocol.errors import ApiError

__all__ = [
    "Reply",
    "Upstream",
    "UpstreamBrokenError",
    "UpstreamResponse",
    "UpstreamUnreachableError",
    "error_from_body",
]


class UpstreamUnreachableError(ConnectionError):
    """No connection could be made: nothing was sent, so another server can be asked instead."""


class UpstreamBrokenError(ConnectionError):
    """The connection broke before the answer was whole."""


class UpstreamResponse(Protocol):
    """A worker's answer whose head has arrived."""

    status: int
    retry_after_s: int | None

    async def read(self) -> bytes:
        """The whole body. Raises :class:`UpstreamBrokenError`."""

    async def next_chunk(self) -> bytes:
        """The next piece of the body, as it comes; empty at the end. Raises :class:`UpstreamBrokenError`."""

    def close(self) -> None:
        """Done with it: a connection whose body was read to its end is kept, any other is closed at once.

        Closing is how a worker learns that nobody wants the rest.
        """


class Upstream(Protocol):
    """Connections to workers."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a request and wait for the answer's head; being cancelled closes the connection.

        Raises:
            UpstreamUnreachableError: no connection.
            UpstreamBrokenError: it broke before the head arrived.
        """


class Reply(Protocol):
    """The answer to the client. Exactly one of :meth:`send`, or :meth:`write` and then :meth:`finish`, is used.

    A client that left shows as cancellation, or as ``ConnectionResetError`` from a write.
    """

    @property
    def started(self) -> bool:
        """Whether the status line is out: from then on an error can only be an event of the stream."""

    def send(self, body: bytes) -> None:
        """A whole JSON body with status 200."""

    async def write(self, data: bytes) -> None:
        """Bytes of an event stream; the first call sends the head.

        Waits while the client reads too slowly. To be cancelled then closes the connection, whatever is still unsent.
        """

    async def finish(self) -> None:
        """The stream is over; waits like :meth:`write`."""


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


_error_decoder = msgspec.json.Decoder(_ErrorBody)


def error_from_body(status: int, body: bytes, retry_after_s: int | None = None) -> ApiError:
    """A worker's error as ours: its own words where it sent OpenAI's shape, else its text."""
    try:
        detail = _error_decoder.decode(body).error
    except msgspec.DecodeError:
        text = body[:200].decode(errors="replace").strip()
        return ApiError(status, f"A server answered {status}: {text or 'nothing'}.", type="server_error")
    return ApiError(
        status,
        detail.message,
        type=detail.type or ("invalid_request_error" if status < 500 else "server_error"),
        code=None if detail.code is None else str(detail.code),
        param=detail.param,
        retry_after_s=retry_after_s,
    )
