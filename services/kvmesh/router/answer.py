"""An answer that has begun: a whole body, or a stream of complete server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.sse import DONE, SseFramer, event_data
from kvmesh.router.upstream import UpstreamBrokenError, UpstreamResponse, error_from_body

__all__ = ["Answer", "EventSource", "Events", "StreamAnswer", "WholeAnswer", "broken_off", "error_in", "has_error"]

_ERROR_START = b'data: {"error"'


class EventSource:
    """Cuts a worker's answer into complete events."""

    def __init__(self, response: UpstreamResponse) -> None:
        self._response = response
        self._framer = SseFramer()

    async def next(self) -> bytes:
        """The events that have come since, at least one; empty at the end.

        Raises:
            UpstreamBrokenError: the connection broke.
        """
        while data := await self._response.next_chunk():
            if events := self._framer.feed(data):
                return events
        return b""


class Events(Protocol):
    """Where complete events come from."""

    async def next(self) -> bytes:
        """See :meth:`EventSource.next`."""


class WholeAnswer:
    """A JSON body that is complete."""

    def __init__(self, body: bytes) -> None:
        self.body = body


class StreamAnswer:
    """Events of one sequence; iterate :meth:`events` once.

    Args:
        first: events that have come already.
        rest: where the others come from; None when ``first`` is the whole stream.
        rewrite: applied to complete events before they go on.
        on_end: told how it ended: well (None), or with which error. Not called when the consumer loses interest.
    """

    def __init__(
        self,
        first: bytes,
        rest: Events | None = None,
        *,
        rewrite: Callable[[bytes], bytes] | None = None,
        on_end: Callable[[ApiError | None], None] | None = None,
    ) -> None:
        self._first = first
        self._rest = rest
        self._rewrite = rewrite
        self._on_end = on_end

    async def events(self) -> AsyncIterator[bytes]:
        """Complete events, several at a time when they came together; the last is ``[DONE]``.

        Raises:
            ApiError: the server reported an error, or broke off (502); there is no ``[DONE]`` then.
        """
        done = False
        block = self._first
        while block:
            if has_error(block):
                good, error = error_in(block)
                if good:
                    yield good
                self._ended(error)
                raise error
            if not done:
                yield block if self._rewrite is None else self._rewrite(block)
            done = done or block.endswith(DONE)
            try:
                # After [DONE] the rest, which is nothing, is read too: only a connection read to its end is kept.
                block = b"" if self._rest is None else await self._rest.next()
            except UpstreamBrokenError as broken:
                if done:
                    break
                error = broken_off(str(broken))
                self._ended(error)
                raise error from broken
        if not done:
            error = broken_off("before it was finished")
            self._ended(error)
            raise error
        self._ended(None)

    def _ended(self, error: ApiError | None) -> None:
        if self._on_end is not None:
            self._on_end(error)


Answer = WholeAnswer | StreamAnswer


def has_error(events: bytes) -> bool:
    """Whether one of these events reports an error."""
    return _ERROR_START in events


def error_in(events: bytes) -> tuple[bytes, ApiError]:
    """The events before the error event, and the error."""
    good, _, rest = events.partition(_ERROR_START)
    return good, error_from_body(502, event_data(_ERROR_START + rest.partition(b"\n\n")[0]))


def broken_off(how: str) -> ApiError:
    """The error of an answer whose server is gone."""
    return ApiError(
        502,
        f"The server broke off ({how}); what has come is incomplete. Send the request again.",
        type="server_error",
        code="upstream_broken",
    )
