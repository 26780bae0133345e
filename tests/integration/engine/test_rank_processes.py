"""Engines of several ranks as processes: every way in which a rank can fail, and what an idle one costs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import torch
from waiting import until

from kvmesh.config import ConfigError, KvCacheConfig, WorkerSettings
from kvmesh.engine.build import EngineBuildError
from kvmesh.engine.client import EngineClient, EngineDeadError, EngineRefusedError, EngineStartError, TokenStream
from kvmesh.engine.ranks import leader
from kvmesh.engine.ranks.errors import RanksLostError
from kvmesh.models.config import read_config
from kvmesh.models.store import resolve_model
from kvmesh.protocol.errors import ApiError

Make = Callable[..., Any]
PATIENCE_S = 30.0
IDLE_S = 3.0


@pytest.fixture
def settings(tiny_model: Path) -> WorkerSettings:
    return WorkerSettings(
        model=str(tiny_model),
        device="cpu",
        num_threads=1,
        log_level="warning",
        tensor_parallel_size=2,
        kv_cache_config=KvCacheConfig(tokens_per_block=4, max_tokens=2000),
    )


@asynccontextmanager
async def launched(settings: WorkerSettings) -> AsyncIterator[tuple[EngineClient, list[psutil.Process]]]:
    """An engine and its followers; whatever happens, none of the processes may be left."""
    followers: list[psutil.Process] = []
    try:
        async with EngineClient.launch(settings) as client:
            followers += psutil.Process(client.ready.pid).children()
            assert len(followers) == settings.tensor_parallel_size * settings.pipeline_parallel_size - 1
            yield client, followers
    finally:
        await until(lambda: not any(is_alive(process) for process in followers))


def own_followers() -> list[psutil.Process]:
    """Of the engines in this process, which has other children, too."""
    return [child for child in psutil.Process().children() if "kvmesh.engine.ranks.follower" in child.cmdline()]


def is_alive(process: psutil.Process) -> bool:
    # Orphans of a killed leader may be zombies until init has reaped them.
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def ping_without_end(client: EngineClient) -> None:
    """Until it is in a step that a follower does not answer to: a ping may be answered before that begins."""
    while True:
        await client.ping(0.5)


async def tokens_of(stream: TokenStream) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


async def test_an_idle_engine_takes_no_processor(settings: WorkerSettings, prompt: Make, request_of: Make) -> None:
    """Under 2 % of a core over all ranks together, after it has worked."""
    async with launched(settings) as (client, followers):
        assert len(await tokens_of(client.generate(request_of("a", prompt(20))))) == 16
        processes = [psutil.Process(client.ready.pid), *followers]
        await until(lambda: client.stats.running == 0)

        def used_s() -> float:
            return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

        before, start_s = used_s(), time.monotonic()
        await anyio.sleep(IDLE_S)
        assert (used_s() - before) / (time.monotonic() - start_s) < 0.02


async def test_a_killed_follower_ends_the_engine_at_once(
    settings: WorkerSettings, prompt: Make, request_of: Make
) -> None:
    async with launched(settings) as (client, followers):
        stream = client.generate(request_of("a", prompt(6), max_tokens=500))
        await anext(stream)
        followers[0].kill()
        with anyio.fail_after(PATIENCE_S), pytest.raises(EngineDeadError, match="one of its ranks was lost"):
            await tokens_of(stream)


async def test_a_follower_of_an_idle_engine_is_missed_too(settings: WorkerSettings) -> None:
    async with launched(settings) as (client, followers):
        followers[0].kill()
        with anyio.fail_after(PATIENCE_S):
            assert "exit status 71" in await client.wait_dead()


async def test_followers_die_with_their_leader(settings: WorkerSettings) -> None:
    async with launched(settings) as (client, followers):
        os.kill(client.ready.pid, signal.SIGKILL)
        assert "signal 9" in await client.wait_dead()
        await until(lambda: not any(is_alive(process) for process in followers))


async def test_a_stopped_follower_holds_the_engine_up(settings: WorkerSettings, prompt: Make, request_of: Make) -> None:
    async with launched(settings) as (client, followers):
        expected = await tokens_of(client.generate(request_of("a", prompt(6), max_tokens=30)))
        followers[0].suspend()
        stream = client.generate(request_of("b", prompt(6), max_tokens=30, cache_salt="b"))
        with anyio.fail_after(PATIENCE_S), pytest.raises(ApiError) as caught:
            await ping_without_end(client)
        assert caught.value.code == "engine_stalled"
        followers[0].resume()
        assert await tokens_of(stream) == expected


def test_a_follower_that_stays_stopped_ends_the_engine(
    make_engine: Make, request_of: Make, prompt: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "STEP_TIMEOUT_S", 1.0)
    bench = make_engine(tensor_parallel_size=2)
    (follower,) = own_followers()
    follower.suspend()
    bench.submit(request_of("a", prompt(6)))
    with pytest.raises(RanksLostError, match="rank 0 cannot reach another rank"):
        bench.step()


async def test_a_model_error_of_a_follower_fails_the_batch_only(
    settings: WorkerSettings, prompt: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """§8 item 25: all ranks leave the step, and the next one is computed; in the first, two ranks fail."""
    settings = settings.model_copy(update={"pipeline_parallel_size": 2})
    monkeypatch.setenv("KVMESH_FAULTS", "engine.rank1.sum=fail:1,engine.rank2.step=fail:2")
    async with launched(settings) as (client, _):
        for name in ("a", "b"):
            with anyio.fail_after(PATIENCE_S), pytest.raises(ApiError) as caught:
                await tokens_of(client.generate(request_of(name, prompt(20))))
            assert (caught.value.status, caught.value.code) == (500, "model_error")
        assert len(await tokens_of(client.generate(request_of("c", prompt(20))))) == 16
        await until(lambda: client.stats.running == 0 and client.stats.pages_locked == 0)


async def test_a_follower_that_cannot_load_says_why(settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_FAULTS", "engine.rank1.load=fail")
    with pytest.raises(EngineRefusedError, match=r"engine rank 1: injected fault at engine\.rank1\.load"):
        async with launched(settings):
            pass


async def test_a_follower_that_dies_while_it_loads(settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another try may well succeed: this is no refusal."""
    monkeypatch.setenv("KVMESH_FAULTS", "engine.rank1.load=kill")
    with pytest.raises(EngineStartError, match="one of its ranks was lost") as caught:
        async with launched(settings):
            pass
    assert not isinstance(caught.value, EngineRefusedError)


async def test_a_follower_that_dies_while_the_ranks_meet(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is watched then too: the other ranks would wait for it as long as they wait for each other."""
    monkeypatch.setenv("KVMESH_FAULTS", "engine.rank1.join=kill")
    with anyio.fail_after(leader.STEP_TIMEOUT_S), pytest.raises(EngineStartError, match="ranks was lost") as caught:
        async with launched(settings):
            pass
    assert not isinstance(caught.value, EngineRefusedError)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_parallel_size": 3}, "its 4 query heads cannot be divided by 3"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size 3 is more than the 2 layers"),
        ({"context_parallel_size": 2}, "not supported yet: context_parallel_size=2"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], message: str, make_engine: Make) -> None:
    with pytest.raises(EngineBuildError, match=message):
        make_engine(**sizes)
    assert not own_followers()


def test_followers_of_a_leader_that_cannot_start_leave_in_silence(
    make_engine: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    """Why it cannot is the leader's to say, once."""
    with pytest.raises(EngineBuildError):
        make_engine(
            tensor_parallel_size=2,
            device_memory_bytes=1000,
            cache={"max_tokens": None, "free_gpu_memory_fraction": 0.1},
        )
    assert not own_followers()
    assert "Traceback" not in capfd.readouterr().err


def test_ranks_work_in_host_memory_only(settings: WorkerSettings) -> None:
    config = read_config(resolve_model(settings.model))
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 and pipeline_parallel_size 1 need device cpu"):
        leader.RankGroup(settings, config, torch.device("cuda"))
    assert not own_followers()
