"""The engine as a process: start, talk, leave early, drain, and every way to die."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import pytest_asyncio
from freezing import freeze
from waiting import until

from kvmesh.config import CacheTransceiverConfig, KvCacheConfig, WorkerSettings
from kvmesh.engine.client import EngineClient, EngineDeadError, EngineStartError, TokenStream
from kvmesh.protocol.errors import ApiError

pytestmark = pytest.mark.asyncio(loop_scope="module")

Make = Callable[..., Any]
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def settings(tiny_model: Path) -> WorkerSettings:
    return WorkerSettings(
        model=str(tiny_model),
        device="cpu",
        num_threads=1,
        log_level="warning",
        kv_cache_config=KvCacheConfig(tokens_per_block=4, max_tokens=2000),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(settings: WorkerSettings) -> AsyncIterator[EngineClient]:
    """One engine for the tests that leave it alive; it lives in a task of its own, as task groups must."""
    started: asyncio.Future[EngineClient] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def live() -> None:
        async with EngineClient.launch(settings) as client:
            started.set_result(client)
            await leave.wait()

    life = asyncio.create_task(live())
    yield await started
    leave.set()
    await life


async def tokens_of(stream: TokenStream) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


def entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def test_a_life(engine: EngineClient, prompt: Make, request_of: Make) -> None:
    ready = engine.ready
    assert (ready.tokens_per_block, ready.max_batch_size, ready.max_seq_len) == (4, 64, 512)
    assert ready.device == "cpu"
    assert ready.ctx_info_endpoint is None
    assert psutil.Process(ready.pid).ppid() == os.getpid()
    first = await tokens_of(engine.generate(request_of("a", prompt(20))))
    assert len(first) == 16
    assert await tokens_of(engine.generate(request_of("b", prompt(20)))) == first
    assert (await engine.ping()).iteration > 0
    assert (await engine.drain_kv_events()).events == []
    await until(lambda: engine.stats.generated_tokens_total >= 32)
    assert engine.stats.cached_tokens_total == 19
    assert engine.under_way == 0
    assert engine.alive


async def test_many_at_once(engine: EngineClient, prompt: Make, request_of: Make) -> None:
    alone = [await tokens_of(engine.generate(request_of(f"solo{i}", prompt(5 + i, i)))) for i in range(6)]
    results: dict[int, list[int]] = {}

    async def run(index: int) -> None:
        results[index] = await tokens_of(engine.generate(request_of(f"r{index}", prompt(5 + index, index))))

    async with anyio.create_task_group() as tasks:
        for index in range(6):
            tasks.start_soon(run, index)
    assert [results[index] for index in range(6)] == alone


async def test_a_refusal_is_an_api_error(engine: EngineClient, prompt: Make, request_of: Make) -> None:
    with pytest.raises(ApiError, match="takes at most 512") as caught:
        await tokens_of(engine.generate(request_of("a", prompt(600))))
    assert caught.value.status == 400
    assert len(await tokens_of(engine.generate(request_of("a", prompt(6))))) == 16


async def test_an_id_in_use_is_refused(engine: EngineClient, prompt: Make, request_of: Make) -> None:
    async with engine.generate(request_of("a", prompt(6), max_tokens=400)):
        with pytest.raises(ApiError, match="already in use"):
            engine.generate(request_of("a", prompt(6)))


async def test_leaving_a_stream_aborts_it(engine: EngineClient, prompt: Make, request_of: Make) -> None:
    before = engine.stats.generated_tokens_total
    async with engine.generate(request_of("block", prompt(6), max_tokens=500)) as stream:
        await anext(stream)
    cancelled = engine.generate(request_of("cancel", prompt(6), max_tokens=500))
    await anext(cancelled)
    with anyio.move_on_after(0.0):
        while True:
            await anext(cancelled)
    with pytest.raises(StopAsyncIteration):
        await anext(cancelled)
    await engine.ping()
    await until(lambda: engine.stats.running == 0 and engine.stats.pages_locked == 0)
    assert engine.under_way == 0
    assert engine.stats.generated_tokens_total - before < 500


async def test_a_killed_engine_fails_its_streams_at_once(
    settings: WorkerSettings, prompt: Make, request_of: Make
) -> None:
    async with EngineClient.launch(settings) as client:
        stream = client.generate(request_of("a", prompt(6), max_tokens=500))
        await anext(stream)
        os.kill(client.ready.pid, signal.SIGKILL)
        with anyio.fail_after(PATIENCE_S), pytest.raises(EngineDeadError) as caught:
            await tokens_of(stream)
        assert (caught.value.status, caught.value.code) == (503, "engine_dead")
        assert "signal 9" in await client.wait_dead()
        assert not client.alive
        for call in (lambda: client.ping(), lambda: client.drain_kv_events()):
            with pytest.raises(EngineDeadError):
                await call()
        with pytest.raises(EngineDeadError):
            client.generate(request_of("b", prompt(6)))
        client.abort("b")
        client.peer_dead("somebody", 1)


async def test_a_defect_in_the_loop_ends_the_process(
    settings: WorkerSettings, prompt: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_FAULTS", "engine.step=fail")
    async with EngineClient.launch(settings.model_copy(update={"log_level": "error"})) as client:
        with anyio.fail_after(PATIENCE_S):
            assert "exit status 70" in await client.wait_dead()
        with pytest.raises(EngineDeadError):
            client.generate(request_of("a", prompt(6)))


async def test_a_stopped_engine_does_not_answer_pings(engine: EngineClient) -> None:
    freeze(engine.ready.pid)
    try:
        with pytest.raises(ApiError) as caught:
            await engine.ping(0.1)
        assert (caught.value.status, caught.value.code) == (503, "engine_stalled")
    finally:
        os.kill(engine.ready.pid, signal.SIGCONT)
    await engine.ping(PATIENCE_S)


async def test_drain_finishes_what_runs_and_refuses_what_is_new(
    settings: WorkerSettings, prompt: Make, request_of: Make
) -> None:
    async with EngineClient.launch(settings) as client:
        stream = client.generate(request_of("a", prompt(6), max_tokens=100))
        first = await anext(stream)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.drain, PATIENCE_S)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            with pytest.raises(ApiError) as caught:
                await tokens_of(client.generate(request_of("b", prompt(6))))
            assert caught.value.status == 503
            assert len(first.token_ids) + len(await tokens_of(stream)) == 100
        assert not client.alive


async def test_requests_end_with_a_server_that_is_cancelled(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch, prompt: Make, request_of: Make
) -> None:
    """Whoever hosts the engine is cancelled, as by a defect elsewhere in the server; answers are still owed."""
    monkeypatch.setattr("kvmesh.engine.client.STOP_GRACE_S", 10 * PATIENCE_S)
    started: asyncio.Future[EngineClient] = asyncio.get_running_loop().create_future()

    async def live() -> None:
        async with EngineClient.launch(settings) as client:
            started.set_result(client)
            await asyncio.sleep(math.inf)

    host = asyncio.create_task(live())
    client = await started
    stream = client.generate(request_of("cut short", prompt(20), max_tokens=400))
    await anext(stream)
    host.cancel()
    with anyio.fail_after(PATIENCE_S):
        with pytest.raises(ApiError):
            await tokens_of(stream)
        with pytest.raises(asyncio.CancelledError):
            await host
    assert not client.alive
    client.abort("cut short")  # Nobody is there to hear it.


async def test_nothing_is_left_behind(settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's have names that are too long for sockets
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr("tempfile.tempdir", None)
        async with EngineClient.launch(settings) as client:
            pid = client.ready.pid
            assert len(entries(Path(directory))) == 1
        assert not psutil.pid_exists(pid)
        assert entries(Path(directory)) == []


async def test_an_error_in_the_block_comes_out_as_it_is(settings: WorkerSettings) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with EngineClient.launch(settings):
            raise KeyError("mine")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/nowhere/at/all"}, "There is no model"),
        ({"max_seq_len": 1000}, "exceeds the 512 tokens"),
        ({"kv_cache_config": KvCacheConfig(mamba_ssm_philox_rounds=7)}, "not supported yet"),
        ({"kv_cache_config": KvCacheConfig(host_cache_size=1)}, "host tier of 1 bytes"),
        ({"kv_cache_config": KvCacheConfig(max_gpu_total_bytes=10)}, "no room for one block"),
        ({"cache_transceiver_config": CacheTransceiverConfig(backend="DEFAULT")}, "cluster secret"),
    ],
)
async def test_a_start_that_cannot_work_says_why(settings: WorkerSettings, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineStartError, match=words):
        async with EngineClient.launch(settings.model_copy(update=changes)):
            pass


LONELY = """
import sys, anyio
from kvmesh.config import WorkerSettings
from kvmesh.engine.client import EngineClient
async def main():
    async with EngineClient.launch(WorkerSettings.model_validate_json(sys.argv[1])) as client:
        print(client.ready.pid, flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


async def test_an_engine_dies_with_its_front(settings: WorkerSettings) -> None:
    command = [sys.executable, "-c", LONELY, settings.model_dump_json()]
    async with await anyio.open_process(command, stderr=None) as front:
        assert front.stdout is not None
        pid = int(await front.stdout.receive())
        assert psutil.pid_exists(pid)
        front.kill()
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
