"""``POST /kv_cache_events``: the buffered KV events of the engine, each to one caller."""

from __future__ import annotations

import anyio
import anyio.to_thread
from aiohttp import web

from kvmesh.engine.client import EngineClient
from kvmesh.events.buffered_json import events_as_json
from kvmesh.protocol.errors import unavailable

__all__ = ["KvEventsRoute"]

TURN_S = 10.0
"""Longest wait for other callers, and longest time that one may take to read its answer."""


class KvEventsRoute:
    """Serves one caller after the other.

    The engine forgets events only when the next caller comes after an answer that was written completely; what was on
    its way to a caller who left goes to the next one. What a caller has not read from its own socket is lost.
    """

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        self._confirmed = 0

    async def answer(self, request: web.Request, engine: EngineClient) -> web.StreamResponse:
        """A JSON array; empty when nothing is buffered.

        Raises:
            ApiError: 503, the engine does not answer, or another caller does not read its answer.
            ConnectionError: the caller has left.
        """
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        with anyio.move_on_after(TURN_S) as waiting:
            await self._turn.acquire()
        if waiting.cancelled_caught:
            raise unavailable("Other callers are being answered; try again.", code="events_busy", retry_after_s=1)
        try:
            drained = await engine.drain_kv_events(self._confirmed)
            body = await anyio.to_thread.run_sync(events_as_json, drained.events)
            with anyio.move_on_after(TURN_S) as writing:
                await response.prepare(request)
                await response.write(body)
                await response.write_eof()
                self._confirmed = drained.position
        finally:
            self._turn.release()
        if writing.cancelled_caught and request.transport is not None:
            request.transport.abort()
        return response
