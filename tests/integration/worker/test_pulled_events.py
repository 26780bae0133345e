"""``POST /kv_cache_events``: from the cache of a real engine process to JSON, each event to one caller (§4.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from aiohttp import web

from kvmesh.engine.client import EngineClient
from kvmesh.events.names import NamedRun, block_names
from kvmesh.hashing import ReuseScope, as_token_ids, salt_id, v2_block_keys, v2_root
from kvmesh.protocol.engine import KvEventsDrained
from kvmesh.worker.kv_events import EventBuffers, KvEventsRoute

pytestmark = pytest.mark.slow

BLOCK = 32
PROMPT = [(7 * i) % 1000 + 5 for i in range(70)]


async def pull(worker: Any) -> list[dict[str, Any]]:
    status, events = await worker.post("/kv_cache_events", {})
    assert status == 200
    return events


def summary(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(event["event_id"], event["data"]["type"]) for event in events]


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [block for event in events if event["data"]["type"] == "stored" for block in event["data"]["blocks"]]


@pytest.mark.parametrize(("v2", "algo"), [(True, "auto"), (True, "v1_block_key"), (False, "auto")])
async def test_a_salted_prompt(serve: Callable[..., Any], settings_of: Callable[..., Any], v2: bool, algo: str) -> None:
    """§2.2 kv_cache_event_hash_algo, §4.2; what is advertised is what is used."""
    settings = settings_of(
        "both",
        backend=None,
        event_buffer_max_size=100,
        kv_cache_event_hash_algo=algo,
        use_kv_cache_manager_v2=v2,
    )
    async with serve(settings) as (worker,):
        info = await worker.get("/server_info")
        assert info["tokens_per_block"] == BLOCK
        effective = info["kv_cache_hash_algo"]
        assert effective == ("v2_sha256" if v2 and algo == "auto" else "v1_block_key")
        status, _ = await worker.complete(PROMPT, max_tokens=1, cache_salt="tenant-a")
        assert status == 200
        await worker.wait_whole()
        events = await pull(worker)
        scope = ReuseScope(salt=salt_id("tenant-a"))
        tokens = as_token_ids(PROMPT)
        keys = v2_block_keys(tokens, BLOCK, v2_root(scope))
        # The V1 manager's own keys are the chain that the V2 manager's are named by.
        names = block_names(effective, manager_v2=True, tokens_per_block=BLOCK)
        names.learn([NamedRun(scope, None, keys, tokens[: 2 * BLOCK].reshape(2, BLOCK))])
        expected = names.of(keys)
        assert summary(events)[:2] == [(0, "created"), (1, "stored")]
        assert [event["event_id"] for event in events] == list(range(len(events)))
        assert {event["hash_algo"] for event in events} == {effective}
        assert {event.get("layer_group_id") for event in events} == {0 if v2 else None}
        blocks = blocks_of(events)
        assert [block["block_hash"] for block in blocks[:2]] == expected
        assert [token["token_id"] for block in blocks for token in block["tokens"]][: 2 * BLOCK] == PROMPT[: 2 * BLOCK]
        assert {block["cache_salt"] for block in blocks} == {str(scope.salt)}
        assert await pull(worker) == []
        await worker.wait_stats(
            "the figures of what was fetched",
            events_buffered=0,
            events_buffered_total=len(events),
            events_blocks_stored_total=len(blocks),
        )


async def test_without_a_buffer_there_is_nothing(serve: Callable[..., Any], settings_of: Callable[..., Any]) -> None:
    """§2.2: size 0 answers [] forever; streaming wins over buffering."""
    streamed = settings_of("both", events=True, event_buffer_max_size=10)
    async with serve(settings_of("both"), streamed) as workers:
        for worker in workers:
            assert (await worker.complete(PROMPT, max_tokens=1))[0] == 200
            await worker.wait_whole()
            assert await pull(worker) == []
        await workers[1].wait_stats("the stream has both full blocks", events_blocks_stored_total=2)


async def test_each_event_reaches_one_of_many_callers(
    serve: Callable[..., Any], settings_of: Callable[..., Any]
) -> None:
    async with serve(settings_of("both", event_buffer_max_size=1000)) as (worker,):
        pulled: list[dict[str, Any]] = []

        async def caller() -> None:
            for _ in range(5):
                pulled.extend(await pull(worker))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(caller)
            for number in range(4):
                assert (await worker.complete([number + 10] * 40, max_tokens=1))[0] == 200
        await worker.wait_whole()
        pulled.extend(await pull(worker))
        assert sorted(event["event_id"] for event in pulled) == list(range(len(pulled)))
        assert len(blocks_of(pulled)) >= 4


async def test_events_of_a_caller_who_left_go_to_the_next(
    serve: Callable[..., Any], settings_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(settings_of("both", event_buffer_max_size=1000)) as (worker,):
        assert (await worker.complete(PROMPT, max_tokens=1))[0] == 200
        await worker.wait_whole()
        asked, left = anyio.Event(), anyio.Event()
        drain = EngineClient.drain_kv_events

        async def slow_drain(self: EngineClient, confirmed: int = 0, timeout_s: float = 5.0) -> KvEventsDrained:
            drained = await drain(self, confirmed, timeout_s)
            asked.set()
            await left.wait()
            return drained

        requests: list[web.Request] = []
        answer = KvEventsRoute.answer

        async def noted(self: KvEventsRoute, request: web.Request, engines: EventBuffers) -> web.StreamResponse:
            requests.append(request)
            return await answer(self, request, engines)

        monkeypatch.setattr(KvEventsRoute, "answer", noted)
        monkeypatch.setattr(EngineClient, "drain_kv_events", slow_drain)
        host, port = worker.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /kv_cache_events HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        await asked.wait()
        writer.transport.abort()
        with anyio.fail_after(20):
            while requests[0].transport is not None:  # noqa: ASYNC110 - the server's own loop notices
                await anyio.sleep(0.01)
        left.set()
        monkeypatch.undo()
        events = await pull(worker)
        assert summary(events)[:2] == [(0, "created"), (1, "stored")]
        assert await pull(worker) == []
