"""``kill -9`` of every kind of process under load: it is restarted and rejoins, and no client is lied to or left alone.

Clients ask without end. Every answer must be the right one, or an error in OpenAI's shape, or (where the router itself
was killed) a closed connection; in streams nothing may look like an end that is none.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import psutil
import pytest
from meshes.process import request
from meshes.up import Up

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLIENTS = 4
REQUEST_TIMEOUT_S = 20.0
DEADLINE_S = REQUEST_TIMEOUT_S + 5.0
"""What no client may wait longer than: the deadline, and what a busy machine needs to say so."""
BACK_S = 60.0
SETTINGS = (
    f"request_timeout_s={REQUEST_TIMEOUT_S}",
    "lease_s=2",
    "restart_backoff_s=0.2",
    # Bounds how long pages wait for a reader that a killed router never sent.
    "context.cache_transceiver_config.kv_transfer_timeout_ms=5000",
    "generation.cache_transceiver_config.kv_transfer_timeout_ms=5000",
)
SAFE_MARGIN = 1e-3


@pytest.fixture(scope="module")
def up(make_up: Callable[..., Up]) -> Any:
    return make_up(*(part for setting in SETTINGS for part in ("--set", setting))).start()


class Crowd:
    """Clients that ask golden prompts until told to stop, and what came of it."""

    def __init__(self, url: str, golden: list[dict[str, Any]]) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest_s = 0.0
        self._url = url
        # The long one would fill the run with prefill.
        self._items = [item for item in golden if len(item["prompt_ids"]) < 100]
        self._leaving = False

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Crowd]:
        """Ask during the block; at its end every client finishes what it has begun."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http, anyio.create_task_group() as tasks:
            for number in range(CLIENTS):
                tasks.start_soon(self._client, http, random.Random(number))
            await self.answered(CLIENTS)
            try:
                yield self
            finally:
                self._leaving = True

    async def answered(self, more: int, timeout_s: float = 60.0) -> None:
        """Wait for so many further right answers."""
        wanted = self.outcomes["right"] + more
        with anyio.fail_after(timeout_s):
            while self.outcomes["right"] < wanted:  # noqa: ASYNC110 - counted by tasks of this loop, at their pace
                await anyio.sleep(0.02)

    async def _client(self, http: aiohttp.ClientSession, choose: random.Random) -> None:
        while not self._leaving:
            item = choose.choice(self._items)
            stream = choose.random() < 0.6
            started_s = time.monotonic()
            try:
                with anyio.fail_after(DEADLINE_S + 5.0):
                    outcome = await self._ask(http, item, stream=stream, max_tokens=choose.choice([1, 8, 40]))
            except TimeoutError:
                outcome = "hung"
            except AssertionError as error:
                outcome = "wrong"
                self.wrong.append(str(error))
            except aiohttp.ClientConnectorError:
                outcome = "refused"
                await anyio.sleep(0.05)
            except aiohttp.ClientError:
                outcome = "closed"
            self.longest_s = max(self.longest_s, time.monotonic() - started_s)
            self.outcomes[outcome] += 1
            if outcome == "error":
                await anyio.sleep(0.05)

    async def _ask(self, http: aiohttp.ClientSession, item: dict[str, Any], *, stream: bool, max_tokens: int) -> str:
        body = {
            "model": DEFAULT_MODEL,
            "prompt": item["prompt_ids"],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        async with http.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                check_error(await response.json(), response.status)
                return "error"
            if not stream:
                [choice] = (await response.json())["choices"]
                check_tokens(choice["token_ids"], item, max_tokens)
                return "right"
            return await self._read(response, item, max_tokens)

    async def _read(self, response: aiohttp.ClientResponse, item: dict[str, Any], max_tokens: int) -> str:
        tokens: list[int] = []
        finish = None
        async for raw in response.content:
            line = raw.decode().strip()
            if not line:
                continue
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                assert finish == "length", f"[DONE] after finish_reason {finish}"
                check_tokens(tokens, item, max_tokens)
                return "right"
            event = json.loads(data)
            if "error" in event:
                assert finish is None
                check_error(event, 0)
                return "error"
            [choice] = event["choices"]
            tokens += choice.get("token_ids") or []
            finish = choice["finish_reason"] or finish
        raise AssertionError(f"the stream ended well without [DONE] or an error after {len(tokens)} tokens")


def check_tokens(tokens: list[int], item: dict[str, Any], max_tokens: int) -> None:
    assert len(tokens) == max_tokens
    sure = item["certain"][:max_tokens]
    assert tokens[: len(sure)] == sure


def check_error(body: dict[str, Any], status: int) -> None:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert status in (0, 429, 500, 502, 503, 504), f"{status}: {error}"


async def until(condition: Callable[[], Any], what: str, timeout_s: float = BACK_S) -> None:
    with anyio.move_on_after(timeout_s) as scope:
        while not await anyio.to_thread.run_sync(condition):  # noqa: ASYNC110 - another process has no event
            await anyio.sleep(0.05)
    assert not scope.cancelled_caught, f"not within {timeout_s:g} s: {what}"


def check(crowd: Crowd) -> None:
    print(dict(crowd.outcomes), f"longest {crowd.longest_s:.1f} s")
    assert crowd.wrong == []
    assert crowd.outcomes["hung"] == 0
    assert crowd.longest_s < DEADLINE_S


@pytest.mark.parametrize("name", ["context-0", "generation-0"])
@pytest.mark.parametrize("part", ["front", "engine"])
async def test_worker_dies(up: Up, golden: list[dict[str, Any]], name: str, part: str) -> None:
    before, member = up.child(name), up.members()[name]
    victim = before.pid
    if part == "engine":
        [engine] = [one for one in psutil.Process(before.pid).children() if "kvmesh.engine" in " ".join(one.cmdline())]
        victim = engine.pid
    async with Crowd(up.url, golden).asking() as crowd:
        os.kill(victim, signal.SIGKILL)
        await until(lambda: restarted(up, name, before), f"{name} is started again")
        await until(lambda: rejoined(up, name, member), f"{name} rejoins with a later epoch")
        await crowd.answered(2 * CLIENTS)
    check(crowd)
    assert crowd.outcomes["closed"] == crowd.outcomes["refused"] == 0, "the router was there all the time"


@pytest.mark.parametrize("name", ["coordinator", "indexer"])
async def test_nobody_notices(up: Up, golden: list[dict[str, Any]], name: str) -> None:
    before, members = up.child(name), up.members()
    async with Crowd(up.url, golden).asking() as crowd:
        os.kill(before.pid, signal.SIGKILL)
        await crowd.answered(2 * CLIENTS)
        await until(lambda: restarted(up, name, before), f"{name} is started again")
        await until(lambda: workers(up.members()) == workers(members), "everybody is a member again")
        await until(lambda: any(one["role"] == "indexer" for one in up.members().values()), "the indexer rejoins")
        await crowd.answered(2 * CLIENTS)
    check(crowd)
    assert set(crowd.outcomes) == {"right"}


async def test_router_dies(up: Up, golden: list[dict[str, Any]]) -> None:
    before = up.child("router")
    async with Crowd(up.url, golden).asking() as crowd:
        os.kill(before.pid, signal.SIGKILL)
        await until(lambda: restarted(up, "router", before), "the router is started again")
        await crowd.answered(2 * CLIENTS)
    check(crowd)
    assert crowd.outcomes["closed"] > 0, "clients of the killed router see their connections closed"


async def test_pages_are_all_there_afterwards(up: Up) -> None:
    def idle() -> bool:
        stats = [json.loads(request(f"{member['url']}/stats")[1]) for member in workers_of(up)]
        return all(
            one["pages_free"] + one["pages_evictable"] == one["pages_total"] and one["integrity_failures_total"] == 0
            for one in stats
        )

    await until(idle, "every page is back")


def workers_of(up: Up) -> list[dict[str, Any]]:
    return [member for member in up.members().values() if member["role"] in ("context", "generation")]


def workers(members: dict[str, Any]) -> dict[str, int]:
    return {name: one["epoch"] for name, one in members.items() if one["role"] in ("context", "generation")}


def restarted(up: Up, name: str, before: Any) -> bool:
    child = up.child(name)
    return child is not None and child.pid != before.pid and child.restarts > before.restarts


def rejoined(up: Up, name: str, before: dict[str, Any]) -> bool:
    member = up.members().get(name)
    return member is not None and member["epoch"] > before["epoch"]
