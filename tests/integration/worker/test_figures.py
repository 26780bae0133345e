"""A worker's figures of its cache: ``/stats``, ``/iteration_stats`` and ``/metrics`` of a real engine process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
PROMPT = [1000 + 37 * i for i in range(70)]
PAGES = 3
PAGE_BYTES = 1_474_560
RETENTION = {
    "token_range_retention_configs": [{"token_start": 0, "token_end": 32, "priority": 90, "duration_ms": 60_000}],
    "decode_retention_priority": 5,
}


async def metrics(worker: Any) -> dict[str, float]:
    async with worker.http.get(f"{worker.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def evictable(worker: Any) -> bool:
    """Whether the only tier shows the pages of the one prompt, and nothing else in use."""
    [gpu] = (await worker.stats())["cache"]["tiers"]
    [group] = gpu["groups"]
    in_use = group["locked"] + group["pinned"] + group["held"]
    return (in_use, group["evictable"], sum(gpu["total"]) - sum(gpu["free"])) == (0, PAGES, PAGES)


async def test_the_cache_s_figures(settings_of: Make, serve: Make) -> None:
    """Acceptance 7, §3.10."""
    async with serve(settings_of("both", iteration_stats_interval=2, host_cache_size=0)) as (worker,):
        for _ in range(2):
            status, answer = await worker.complete(PROMPT, max_tokens=6, kv_cache_retention_config=RETENTION)
            assert status == 200, answer
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 69
        await worker.wait_stats("everything is counted", generated_tokens_total=12, running=0)
        records = await worker.get("/iteration_stats")
        assert {record["iterations"] for record in records} == {2}
        assert sum(record["generated_tokens"] for record in records) == 12
        assert sum(record["missed_blocks"] for record in records) == PAGES
        assert sum(record["reused_blocks"] for record in records) == PAGES
        assert await worker.get("/iteration_stats") == [], "each record is given once"

        with anyio.fail_after(10.0):
            while not await evictable(worker):  # noqa: ASYNC110 - its figures of tiers are a second old at most
                await anyio.sleep(0.05)
        assert [group for record in records for group in record["groups"]] == [
            {"tier": "gpu", "group": 0, "reused_full": 2, "reused_partial": 1, "copied": 1, "copied_bytes": PAGE_BYTES}
        ]
        assert [use for record in records for use in record["uses"]] == [
            {"group": 0, "allocated": 3, "new": 3, "missed": 3},
            {"group": 0, "allocated": 1, "reused_full": 2, "reused_partial": 1},
        ]

        found = await metrics(worker)
        assert found['kvmesh_cache_tier_reused_full_pages_total{group="0",tier="gpu"}'] == 2
        assert found['kvmesh_cache_pages{group="0",state="evictable",tier="gpu"}'] == PAGES
        assert found['kvmesh_cache_free_pages{pool="0",tier="gpu"}'] > 0
        assert found['kvmesh_cache_reused_blocks_total{match="full"}'] == 2
        assert found['kvmesh_cache_reused_blocks_total{match="partial"}'] == 1
        assert found["kvmesh_cache_missed_blocks_total"] == PAGES
        assert found["kvmesh_engine_cached_tokens_total"] == 69


async def test_health_probes_are_in_no_statistics(settings_of: Make, serve: Make) -> None:
    """§3.10: excluded caches never count; nor do they leave anything that could be reused."""
    async with serve(settings_of("both", iteration_stats_interval=1)) as (worker,):
        for _ in range(2):
            assert (await worker.get("/health_generate"))["tokens"] == 1
        status, answer = await worker.complete([0] * 5, max_tokens=1)
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "a probe is four zeros"
        stats = await worker.wait_stats("the request is counted", generated_tokens_total=1, running=0)
        assert (stats["prompt_tokens_total"], stats["prefilled_tokens_total"]) == (5, 5)
        counters = {name: value for name, value in stats["cache"]["counters"].items() if value}
        assert counters == {
            "prompt_tokens": 5,
            "missed_blocks": 1,
            "allocated_pages": 1,
            "new_pages": 1,
            "stored_blocks": 1,
        }
        records = await worker.get("/iteration_stats")
        told = [(record["prompt_tokens"], record["generated_tokens"], record["uses"]) for record in records]
        assert [one for one in told if one != (0, 0, [])] == [
            (5, 1, [{"group": 0, "allocated": 1, "new": 1, "missed": 1}])
        ]


async def test_pins_of_an_offer_have_an_age(settings_of: Make, serve: Make) -> None:
    async with serve(settings_of("both")) as (worker,):
        await worker.prefill(PROMPT, 11)
        await worker.wait_stats("the offer stands", in_transfer=1)
        assert sum((await worker.stats())["cache"]["pinned_pages_by_age"]) == PAGES
        pinned = {name: value for name, value in (await metrics(worker)).items() if "cache_pinned_pages" in name}
        assert sum(pinned.values()) == PAGES
        await worker.post("/abort", {"disagg_request_id": 11})
        await worker.wait_whole()
        assert sum((await worker.stats())["cache"]["pinned_pages_by_age"]) == 0


async def test_turns_of_one_conversation_at_a_time(settings_of: Make, serve: Make) -> None:
    """§1.3: the second of two concurrent ones is served, too, as one without a conversation."""
    turn = {"conversation_params": {"conversation_id": " chat "}}
    async with serve(settings_of("both")) as (worker,):
        statuses = []

        async def ask() -> None:
            statuses.append((await worker.complete(PROMPT, max_tokens=20, **turn))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)
        assert statuses == [200, 200]
        await worker.wait_whole()
