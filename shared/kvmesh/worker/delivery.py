"""Brings answers to clients within the time that a request may take, whole or as server-sent events."""

from __future__ import annotations

import contextlib

import anyio
from aiohttp import web

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.responses import encode
from kvmesh.protocol.openai.sse import SSE_HEADERS, error_event
from kvmesh.worker.answers import Answerer
from kvmesh.worker.plans import Plan

__all__ = ["deliver_stream", "deliver_whole"]

FAREWELL_S = 2.0
"""How long a client may take to read the end of its stream."""


async def deliver_whole(plan: Plan, answerer: Answerer, timeout_s: float) -> web.Response:
    """The answer as one JSON object.

    Raises:
        ApiError: the request failed; 504, it was not finished within ``timeout_s``.
    """
    with anyio.move_on_after(timeout_s):
        return web.Response(body=encode(await answerer.whole(plan)), content_type="application/json")
    raise _too_late(timeout_s)


async def deliver_stream(request: web.Request, plan: Plan, answerer: Answerer, timeout_s: float) -> web.StreamResponse:
    """The answer event by event; an error after the first event is the last one.

    Raises:
        ApiError: as :func:`deliver_whole`, before the first event.
    """
    response = web.StreamResponse(headers=SSE_HEADERS)
    failure: ApiError | None = None
    with anyio.move_on_after(timeout_s) as scope:
        async with contextlib.aclosing(answerer.events(plan)) as events:  # type: ignore[type-var]
            # The status line waits for the first event: a request that fails before it still gets a status.
            first = await anext(events)
            await response.prepare(request)
            try:
                await response.write(first)
                async for event in events:
                    await response.write(event)
            except ApiError as error:
                failure = error
    if scope.cancelled_caught:
        failure = _too_late(timeout_s)
        if not response.prepared:
            raise failure
    with anyio.move_on_after(FAREWELL_S) as farewell:
        if failure is not None:
            await response.write(error_event(failure))
        await response.write_eof()
    if farewell.cancelled_caught and request.transport is not None:
        request.transport.abort()  # the client does not read
    return response


def _too_late(timeout_s: float) -> ApiError:
    return ApiError(
        504,
        f"The request was not finished within {timeout_s:g} s; ask for fewer tokens.",
        type="timeout_error",
        code="request_timeout",
    )
