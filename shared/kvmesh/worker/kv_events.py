"""``POST /kv_cache_events``: the buffered KV events of all engines of the server, each to one caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio
import anyio.to_thread
from aiohttp import web

from kvmesh.events.buffered_json import events_as_json
from kvmesh.protocol.engine import KvEventsDrained
from kvmesh.protocol.errors import unavailable

__all__ = ["EventBuffers", "KvEventsRoute"]

TURN_S = 10.0
"""Longest wait for other callers, and longest time that one may take to read its answer."""


class EventBuffers(Protocol):
    """The buffered events of all ranks of a server."""

    async def drain_kv_events(self, confirmed: Sequence[int]) -> list[KvEventsDrained]:
        """By rank, all events after the position that is confirmed of it; positions left out are 0."""


class KvEventsRoute:
    """Serves one caller after the other.

    An engine forgets events only when the next caller comes after an answer that was written completely; what was on
    its way to a caller who left goes to the next one. What a caller has not read from its own socket is lost.
    """

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        self._confirmed: list[int] = []

    async def answer(self, request: web.Request, engines: EventBuffers) -> web.StreamResponse:
        """A JSON array, the events of rank 0 first; empty when nothing is buffered.

        Raises:
            ApiError: 503, an engine does not answer, or another caller does not read its answer.
            ConnectionError: the caller has left.
        """
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        with anyio.move_on_after(TURN_S) as waiting:
            await self._turn.acquire()
        if waiting.cancelled_caught:
            raise unavailable("Other callers are being answered; try again.", code="events_busy", retry_after_s=1)
        try:
            drained = await engines.drain_kv_events(self._confirmed)
            events = [event for rank in drained for event in rank.events]
            body = await anyio.to_thread.run_sync(events_as_json, events)
            with anyio.move_on_after(TURN_S) as writing:
                await response.prepare(request)
                await response.write(body)
                await response.write_eof()
                self._confirmed = [rank.position for rank in drained]
        finally:
            self._turn.release()
        if writing.cancelled_caught and request.transport is not None:
            request.transport.abort()
        return response
