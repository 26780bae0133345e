"""Workers for the tests: the HTTP face in the test's own loop over a real socket, its engine as a real process."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import anyio
import pytest
from freezing import is_frozen

from kvmesh.config import CacheTransceiverConfig, KvCacheConfig, KVEventsConfig, WorkerSettings
from kvmesh.engine.report import STATS_INTERVAL_S
from kvmesh.models.store import DEFAULT_MODEL, resolve_model
from kvmesh.net.service import serving
from kvmesh.worker.server import WorkerService

PATIENCE_S = 30.0
GENERATED = 8


@pytest.fixture(scope="session", autouse=True)
def _model() -> None:
    """The built-in model is there before anything is timed."""
    resolve_model(DEFAULT_MODEL)


@dataclass
class Worker:
    """One worker that serves, and how to talk to it."""

    url: str
    http: aiohttp.ClientSession
    engine_pid: int

    async def get(self, path: str) -> Any:
        async with self.http.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def stats(self) -> dict[str, Any]:
        return await self.get("/stats")

    async def complete(self, prompt: list[int], **options: Any) -> tuple[int, Any]:
        """A greedy completion; also one leg of it, with ``disaggregated_params``."""
        body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": GENERATED, "temperature": 0, "ignore_eos": True}
        return await self.post("/v1/completions", {**body, "return_token_ids": True, **options})

    async def prefill(self, prompt: list[int], transfer_id: int) -> dict[str, Any]:
        """The context leg; what to hand to :meth:`decode`."""
        params = {"request_type": "context_only", "disagg_request_id": transfer_id}
        status, answer = await self.complete(prompt, disaggregated_params=params)
        assert status == 200, answer
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "not_finished"
        return choice["disaggregated_params"]

    async def decode(self, prompt: list[int], handoff: dict[str, Any]) -> tuple[int, Any]:
        """The generation leg."""
        return await self.complete(prompt, disaggregated_params={**handoff, "request_type": "generation_only"})

    def signal(self, number: int) -> None:
        """Signal the engine process."""
        os.kill(self.engine_pid, number)

    async def wait_stopped(self) -> None:
        """Until the engine process stands still."""

        async def stopped() -> bool:
            return is_frozen(self.engine_pid)

        await until(stopped, "the engine is stopped")

    async def wait_stats(self, what: str, timeout_s: float = PATIENCE_S, **wanted: int) -> dict[str, Any]:
        """Statistics that have these values."""
        seen: dict[str, Any] = {}

        async def there() -> bool:
            nonlocal seen
            seen = await self.stats()
            return all(seen[key] == value for key, value in wanted.items())

        await until(there, lambda: f"{what}; {wanted}, last seen {seen}", timeout_s)
        return seen

    async def wait_per_rank(self, key: str, expected: list[int]) -> None:
        """Until each rank's statistics say so, and no page is lent out."""
        seen: list[int] = []

        async def there() -> bool:
            seen[:] = [rank[key] for rank in (await self.stats())["attention_dp_ranks"]]
            return seen == expected

        await until(there, lambda: f"{key} of each rank {expected}; last seen {seen}")
        await self.wait_whole()

    async def wait_whole(self) -> dict[str, Any]:
        """Until no page is lent out; all of them are accounted for."""
        none = dict.fromkeys(
            ("running", "waiting", "in_transfer", "pages_held", "pages_pinned", "pages_locked", "pages_quarantined"), 0
        )
        latest: tuple[float, dict[str, Any]] = (time.monotonic(), {})

        async def still() -> bool:
            # An engine tells its statistics at most every STATS_INTERVAL_S: what lasts longer is no older state.
            nonlocal latest
            stats = await self.stats()
            if stats != latest[1]:
                latest = (time.monotonic(), stats)
            since_s, stats = latest
            idle = all(stats[key] == value for key, value in none.items())
            return idle and time.monotonic() > since_s + 2 * STATS_INTERVAL_S

        await until(still, lambda: f"every page is back; last seen {latest[1]}")
        stats = latest[1]
        assert stats["pages_free"] + stats["pages_evictable"] == stats["pages_total"]
        assert stats["integrity_failures_total"] == 0
        return stats


async def until(condition: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = PATIENCE_S) -> None:
    """Wait for what another process does."""
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        await anyio.sleep(0.02)


@pytest.fixture(scope="session")
def settings_of() -> Callable[..., WorkerSettings]:
    """``settings_of(role, backend=..., timeout_ms=..., events=..., **cache)``: a small worker."""

    def make(
        role: str, *, backend: str | None = "DEFAULT", timeout_ms: int = 60_000, events: bool = False, **cache: Any
    ) -> WorkerSettings:
        publishing = KVEventsConfig(
            enable_kv_cache_events=events, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"
        )
        return WorkerSettings(
            role=role,
            instance_id=role,
            num_threads=1,
            device_memory_bytes=96 << 20,
            cluster_secret="integration",
            log_level="warning",
            cache_transceiver_config=CacheTransceiverConfig(backend=backend, kv_transfer_timeout_ms=timeout_ms),
            kv_cache_config=KvCacheConfig(kv_events_config=publishing, **cache),
        )

    return make


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``async with serve(settings, ..., faults=...) as workers``: workers that serve for the length of the block.

    ``faults`` (one text a worker) arms points in their engines.
    """

    @asynccontextmanager
    async def serve(*settings: WorkerSettings, faults: tuple[str, ...] = ()) -> AsyncIterator[list[Worker]]:
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60.0)))
            workers = []
            for one, armed in zip(settings, faults or [""] * len(settings), strict=True):
                monkeypatch.setenv("KVMESH_FAULTS", armed)
                service = WorkerService(one)
                url = await stack.enter_async_context(serving(service))
                assert service._engine is not None
                workers.append(Worker(url, http, service._engine.ranks[0].pid))
            yield workers

    return serve
