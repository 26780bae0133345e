"""``enable_attention_dp`` with real engines: all ranks serve, prompts go where their prefix is, pages move by rank."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import Any

import anyio
import psutil
import pytest
from soaks import soak_only

from kvmesh.config import WorkerSettings
from kvmesh.config.transfer_backend import installed_backends
from kvmesh.net.groups import leaves
from kvmesh.worker.server import WorkerFailedError

pytestmark = pytest.mark.slow

BLOCK = 32
Serve = Callable[..., Any]
SettingsOf = Callable[..., WorkerSettings]


def with_ranks(settings: WorkerSettings, size: int = 2) -> WorkerSettings:
    return settings.model_copy(
        update={
            "enable_attention_dp": True,
            "tensor_parallel_size": size,
            "device_memory_bytes": size * (settings.device_memory_bytes or 0),
        }
    )


def prompt(number: int, blocks: int = 3) -> list[int]:
    """Token ids of full blocks and a few more; prompts of different numbers have no block in common."""
    return [(number * 101 + 7 * position) % 1000 + 5 for position in range(blocks * BLOCK + 5)]


def tokens_of(answer: Any) -> list[int]:
    return answer["choices"][0]["token_ids"]


def cached(answer: Any) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def of_one_engine() -> list[list[int]]:
    """What one engine answers to prompts 0 to 3, once a test has asked (:func:`known_answers`)."""
    return []


async def known_answers(of_one_engine: list[list[int]], serve: Serve, settings_of: SettingsOf) -> list[list[int]]:
    if not of_one_engine:
        async with serve(settings_of("both", backend=None)) as (alone,):
            of_one_engine += [tokens_of((await alone.complete(prompt(number)))[1]) for number in range(4)]
    return of_one_engine


async def test_two_ranks_are_one_server(serve: Serve, settings_of: SettingsOf, of_one_engine: list[list[int]]) -> None:
    """§2.2: events of both ranks come with ``attention_dp_rank``; answers are those of one engine."""
    expected = await known_answers(of_one_engine, serve, settings_of)
    both = settings_of("both", backend=None, event_buffer_max_size=1000)
    async with serve(with_ranks(both)) as (worker,):
        answers = [(await worker.complete(prompt(number)))[1] for number in range(4)]
        assert [tokens_of(answer) for answer in answers] == expected
        await worker.wait_per_rank("generated_tokens_total", [16, 16])
        assert [cached(answer) for answer in answers] == [0] * 4

        # Each of them again, in another order: wherever it was, there it is found.
        again = {number: (await worker.complete(prompt(number)))[1] for number in (2, 1, 3, 0)}
        assert [tokens_of(again[number]) for number in range(4)] == expected
        assert {cached(answer) for answer in again.values()} == {3 * BLOCK + 4}
        await worker.wait_per_rank("generated_tokens_total", [32, 32])

        total = await worker.stats()
        for key in ("pages_total", "prompt_tokens_total", "cached_tokens_total", "iteration"):
            assert total[key] == sum(rank[key] for rank in total["attention_dp_ranks"])
        info = await worker.get("/server_info")
        assert (info["dp_size"], info["num_pages"]) == (2, total["pages_total"])
        assert [rank["instance_id"] for rank in info["attention_dp_ranks"]] == ["both/0", "both/1"]
        assert (await worker.get("/health_generate"))["tokens"] == 2

        status, events = await worker.post("/kv_cache_events", {})
        assert status == 200
        by_rank = {rank: [event for event in events if event["attention_dp_rank"] == rank] for rank in (0, 1)}
        assert sum(map(len, by_rank.values())) == len(events)
        for of_rank in by_rank.values():
            assert [event["event_id"] for event in of_rank] == list(range(len(of_rank)))
            assert {event["data"]["type"] for event in of_rank} >= {"created", "stored"}
        assert await worker.post("/kv_cache_events", {}) == (200, [])


async def test_a_rank_can_be_asked_for(serve: Serve, settings_of: SettingsOf) -> None:
    async with serve(with_ranks(settings_of("both"))) as (worker,):
        for number in range(3):
            order = {"dp_rank": 1, "request_type": "context_and_generation"}
            assert (await worker.complete(prompt(number), disaggregated_params=order))[0] == 200
        await worker.wait_per_rank("generated_tokens_total", [0, 24])
        # A wish for the rank without the prefix, of somebody who knows more, weighs as much as the prefix.
        wish = {"dp_rank": 0, "dp_matched_tokens": 8 * BLOCK, "request_type": "context_and_generation"}
        assert (await worker.complete(prompt(7), disaggregated_params=wish))[0] == 200
        await worker.wait_per_rank("generated_tokens_total", [8, 24])
        handoff = {"request_type": "context_only", "disagg_request_id": 5, "ctx_dp_rank": 1}
        status, answer = await worker.complete(prompt(8), disaggregated_params=handoff)
        assert (status, answer["choices"][0]["disaggregated_params"]["ctx_dp_rank"]) == (200, 1)
        assert await worker.post("/abort", {"disagg_request_id": 5}) == (200, {"aborted": True})
        await worker.wait_whole()
        status, answer = await worker.complete(prompt(9), disaggregated_params={**order, "dp_rank": 2})
        assert (status, answer["error"]["code"]) == (400, "no_such_rank")
        assert "ranks 0 to 1" in answer["error"]["message"]


async def test_conversations_stay_on_their_rank(serve: Serve, settings_of: SettingsOf) -> None:
    settings = settings_of("both", backend=None, block_reuse_config={"policy": "per_conversation"})
    async with serve(with_ranks(settings)) as (worker,):
        turns = {name: prompt(number) for number, name in enumerate("abcd")}
        for turn in range(3):
            for name, said in turns.items():
                status, answer = await worker.complete(said, conversation_params={"conversation_id": name})
                assert status == 200
                assert (cached(answer) > 0) == (turn > 0)
                turns[name] = said + tokens_of(answer) + [11, 12]
        await worker.wait_per_rank("generated_tokens_total", [48, 48])


NIXL = pytest.mark.skipif("NIXL" not in installed_backends(), reason="needs NIXL: make venv EXTRAS=engine")


@pytest.mark.parametrize(
    ("generation_ranks", "backend"),
    [
        pytest.param(1, "DEFAULT", marks=soak_only),
        (2, "DEFAULT"),
        pytest.param(2, "NIXL", marks=[NIXL, soak_only]),
    ],
)
async def test_pages_move_between_ranks(
    serve: Serve, settings_of: SettingsOf, of_one_engine: list[list[int]], generation_ranks: int, backend: str
) -> None:
    expected = await known_answers(of_one_engine, serve, settings_of)
    context, generation = (
        with_ranks(settings_of("context", backend=backend)),
        settings_of("generation", backend=backend),
    )
    if generation_ranks > 1:
        generation = with_ranks(generation, generation_ranks)
    async with serve(context, generation) as (ctx, gen):
        endpoints = (await ctx.get("/server_info"))["disaggregated_params"]["ctx_info_endpoint"]
        assert len(set(endpoints)) == 2
        for number in range(4):
            source, target = number // 2, number % generation_ranks
            status, answer = await ctx.complete(
                prompt(number),
                disaggregated_params={
                    "request_type": "context_only",
                    "disagg_request_id": 100 + number,
                    "ctx_dp_rank": source,
                },
            )
            assert status == 200, answer
            handoff = answer["choices"][0]["disaggregated_params"]
            assert (handoff["ctx_dp_rank"], handoff["ctx_info_endpoint"]) == (source, endpoints[source])
            status, answer = await gen.decode(prompt(number), {**handoff, "dp_rank": target})
            assert status == 200, answer
            assert tokens_of(answer) == expected[number]
        await ctx.wait_per_rank("transfers_completed_total", [2, 2])
        stats = await gen.wait_whole()
        assert (stats["transfers_completed_total"], stats["transfer_pages_total"]) == (4, 4 * 4)
        if generation_ranks > 1:
            await gen.wait_per_rank("transfers_completed_total", [2, 2])
            # Every rank has met every rank of the other server.
            await gen.wait_per_rank("transfer_links", [2, 2])
            await ctx.wait_per_rank("transfer_links", [2, 2])

        # What was received is a prefix on the rank that got it; both servers find theirs by themselves.
        handoff = await ctx.prefill(prompt(2), 200)
        assert handoff["ctx_dp_rank"] == 1
        status, answer = await gen.decode(prompt(2), handoff)
        assert (status, tokens_of(answer)) == (200, expected[2])
        stats = await gen.wait_stats("the transfer is over", transfers_completed_total=5)
        assert stats["transfer_pages_reused_total"] >= 3
        assert stats["transfer_pages_total"] <= 4 * 4 + 1  # the last block is a partial one


async def kill_one_of_two(serve: Serve, settings: WorkerSettings, survivors: list[psutil.Process]) -> None:
    async with serve(with_ranks(settings)) as (worker,):
        pids = [rank["pid"] for rank in (await worker.get("/server_info"))["attention_dp_ranks"]]
        victim, survivor = (psutil.Process(pid) for pid in pids)
        survivors.append(survivor)
        statuses: list[int] = []

        async def ask() -> None:
            order = {"dp_rank": 0, "request_type": "context_and_generation"}
            statuses.append((await worker.complete(prompt(1), max_tokens=800, disaggregated_params=order))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await worker.wait_stats("the request runs", running=1)
            victim.send_signal(signal.SIGKILL)
        assert statuses == [503]
        async with worker.http.get(worker.url + "/health") as response:
            assert response.status == 503
            assert "attention data-parallel rank 0" in await response.text()
        await anyio.sleep_forever()  # the server ends by itself, and this with it


async def test_one_dead_rank_ends_the_server(serve: Serve, settings_of: SettingsOf) -> None:
    survivors: list[psutil.Process] = []
    with pytest.raises(BaseExceptionGroup) as failure:
        await kill_one_of_two(serve, settings_of("both", backend=None), survivors)
    assert [type(error) for error in leaves(failure.value)] == [WorkerFailedError]
    _, alive = psutil.wait_procs(survivors, timeout=20)
    assert not alive


async def test_a_rank_that_cannot_start_stops_all(serve: Serve, settings_of: SettingsOf) -> None:
    """The second rank's event port is taken: its reason is the server's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port - 1}", "replay_endpoint": None}
        settings = settings_of("both", backend=None)
        cache = settings.kv_cache_config.model_validate({"kv_events_config": events})
        with pytest.raises(BaseExceptionGroup) as failure:
            async with serve(with_ranks(settings.model_copy(update={"kv_cache_config": cache}))):
                pass
    [error] = leaves(failure.value)
    assert str(error).startswith("attention data-parallel rank 1: ")
    assert "is taken; choose another" in str(error)
