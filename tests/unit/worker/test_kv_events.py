"""``POST /kv_cache_events`` over the buffers of engines: who gets the events, and when they are forgotten."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from kvmesh.events.buffer import EventBuffer
from kvmesh.protocol.engine import KvEventsDrained
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.kv_cache_events import KvCacheEvent, RemovedData, StoredData
from kvmesh.worker import kv_events
from kvmesh.worker.kv_events import KvEventsRoute

LARGE = 4000
"""Stored events whose JSON, some 8 MB, no socket takes at once."""


class FakeEngines:
    """The buffers of the ranks of a server, without the processes around them."""

    def __init__(self, size: int = 1) -> None:
        self.buffers = [EventBuffer(10_000) for _ in range(size)]
        self.buffer = self.buffers[0]
        self.confirmed: list[list[int]] = []

    async def drain_kv_events(self, confirmed: Sequence[int]) -> list[KvEventsDrained]:
        self.confirmed.append(list(confirmed))
        known = dict(enumerate(confirmed))
        return [
            KvEventsDrained(0, *buffer.get_latest_events(confirmed=known.get(rank, 0)))
            for rank, buffer in enumerate(self.buffers)
        ]

    def removed(self, *numbers: int, rank: int = 0) -> None:
        self.buffers[rank].extend(
            KvCacheEvent(event_id=number, data=RemovedData([number]), window_size=1, attention_dp_rank=rank)
            for number in numbers
        )

    def stored(self, count: int) -> None:
        data = StoredData(
            parent_hash=None, block_hashes=[1], token_ids=bytes(128), block_size=32, cache_levels=[0], priorities=b"\1"
        )
        self.buffer.extend(KvCacheEvent(event_id=number, data=data, window_size=1) for number in range(count))


@pytest.fixture
async def engine() -> FakeEngines:
    return FakeEngines()


@asynccontextmanager
async def serving(engine: FakeEngines, *, handler_cancellation: bool) -> AsyncIterator[int]:
    route = KvEventsRoute()

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await route.answer(request, engine)
        except ApiError as error:
            return web.Response(status=error.status)

    app = web.Application()
    app.router.add_post("/kv_cache_events", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=handler_cancellation)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


async def pull(port: int) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.post(f"http://127.0.0.1:{port}/kv_cache_events") as response:
        assert response.status == 200
        assert response.content_type == "application/json"
        return json.loads(await response.read())


async def ask(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A caller who has sent the request and has read nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(b"POST /kv_cache_events HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    return reader, writer


def ids(events: list[dict[str, Any]]) -> list[int]:
    return [event["event_id"] for event in events]


async def test_an_answer_confirms_the_one_before(engine: FakeEngines) -> None:
    async with serving(engine, handler_cancellation=True) as port:
        assert await pull(port) == []
        engine.removed(0, 1)
        assert ids(await pull(port)) == [0, 1]
        engine.removed(2)
        assert ids(await pull(port)) == [2]
        assert await pull(port) == []
    assert engine.confirmed == [[], [0], [2], [3]]
    assert engine.buffer.dropped_total == 0


async def test_2_2_events_of_all_ranks_come_with_one_answer_and_are_confirmed_by_rank() -> None:
    engines = FakeEngines(size=2)
    async with serving(engines, handler_cancellation=True) as port:
        engines.removed(0, 1, rank=1)
        engines.removed(0)
        events = await pull(port)
        assert [(event["attention_dp_rank"], event["event_id"]) for event in events] == [(0, 0), (1, 0), (1, 1)]
        engines.removed(1)
        assert ids(await pull(port)) == [1]
    assert engines.confirmed == [[], [1, 2]]


@pytest.mark.parametrize("handler_cancellation", [False, True])
async def test_events_of_a_caller_who_leaves_amid_the_answer_go_to_the_next(
    engine: FakeEngines, handler_cancellation: bool
) -> None:
    engine.stored(LARGE)
    async with serving(engine, handler_cancellation=handler_cancellation) as port:
        reader, writer = await ask(port)
        assert await reader.readexactly(12) == b"HTTP/1.1 200"
        writer.transport.abort()
        with anyio.fail_after(20):
            assert ids(await pull(port)) == list(range(LARGE))
        assert await pull(port) == []


async def test_a_caller_who_does_not_read_holds_nobody_up_for_long(
    engine: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "TURN_S", 1.0)
    engine.stored(LARGE)
    async with serving(engine, handler_cancellation=True) as port:
        reader, writer = await ask(port)
        assert await reader.readexactly(12) == b"HTTP/1.1 200"
        monkeypatch.setattr(kv_events, "TURN_S", 20.0)
        with anyio.fail_after(20):
            assert ids(await pull(port)) == list(range(LARGE))
        writer.close()


async def test_a_turn_that_does_not_come_is_a_503(engine: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.stored(LARGE)
    async with serving(engine, handler_cancellation=True) as port:
        reader, writer = await ask(port)
        assert await reader.readexactly(12) == b"HTTP/1.1 200"
        monkeypatch.setattr(kv_events, "TURN_S", 0.01)
        async with aiohttp.ClientSession() as http, http.post(f"http://127.0.0.1:{port}/kv_cache_events") as response:
            assert response.status == 503
        writer.transport.abort()
