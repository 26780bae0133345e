"""Clients that leave at any time cost nothing: pages return on both servers, and the next request is served at once."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import pytest
from freezing import freeze
from meshes.by_hand import Mesh

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLIENTS = 200
AT_A_TIME = 20
LEASE_S = 2.0
SLACK_S = 10.0
"""What a busy machine may add; the deadlines that would bring pages back otherwise are at a minute."""
SERVED_AT_ONCE_S = 10.0  # one small request on a busy machine; it takes a tenth of a second
SLOW_TRANSFERS = "transceiver.during_transfer=pause:0.02,transceiver.before_request=pause:0.02"


@pytest.fixture(scope="module")
def slow_mesh(make_mesh: Callable[..., Mesh]) -> Any:
    """A mesh whose transfers take long enough for clients to leave while they run."""
    return make_mesh(
        {"context": {}, "generation": {}}, coordinator={"lease_s": LEASE_S}, env={"KVMESH_FAULTS": SLOW_TRANSFERS}
    )


def body(choose: random.Random, *, stream: bool) -> dict[str, Any]:
    length = choose.choice([5, 40, 200])
    return {
        "model": DEFAULT_MODEL,
        "prompt": [choose.randrange(1000, 45_000) for _ in range(length)],
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


async def leave(http: aiohttp.ClientSession, url: str, choose: random.Random, left: dict[str, int]) -> None:
    """Ask, and leave before the end: after a while (before or in prefill, in transfer), or after some events."""
    stream = choose.random() < 0.7
    events = choose.choice([1, 2, 10, 30]) if stream and choose.random() < 0.4 else None
    patience_s = choose.choice([0.0, 0.01, 0.03, 0.1, 0.3, 1.0])
    try:
        with anyio.move_on_after(60.0 if events else patience_s):
            async with http.post(f"{url}/v1/completions", json=body(choose, stream=stream)) as response:
                seen = 0
                async for line in response.content:
                    seen += line.startswith(b"data: ")
                    if events is not None and seen >= events:
                        left["in decode"] += 1
                        return
                left["too late"] += 1
                return
        left["before the answer"] += 1
    finally:
        left["all"] += 1


async def storm(url: str, count: int, seed: int) -> dict[str, int]:
    left = dict.fromkeys(("in decode", "before the answer", "too late", "all"), 0)
    limiter = anyio.CapacityLimiter(AT_A_TIME)

    async def client(number: int) -> None:
        async with limiter:
            await leave(http, url, random.Random(seed + number), left)

    # A closed connection is how a client leaves: none is kept.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http, anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(client, number)
    return left


def check_whole(mesh: Mesh, begun: dict[str, int]) -> None:
    """Everything is back with the lease, long before a transfer times out, and the next request is served at once."""
    started_s = time.monotonic()
    mesh.wait_idle(timeout_s=LEASE_S + SLACK_S)
    print(f"pages were back after {time.monotonic() - started_s:.2f} s")
    started_s = time.monotonic()
    status, answer = mesh["router"].post("/v1/completions", {"model": DEFAULT_MODEL, "prompt": "Hi", "max_tokens": 4})
    assert status == 200, answer
    assert time.monotonic() - started_s < SERVED_AT_ONCE_S
    mesh.wait_idle()
    assert {worker.name: worker.stats()["pages_total"] for worker in mesh.workers()} == begun


async def test_two_hundred_clients_leave(slow_mesh: Mesh) -> None:
    begun = {worker.name: worker.stats()["pages_total"] for worker in slow_mesh.workers()}
    left = await storm(slow_mesh["router"].url, CLIENTS, seed=1)
    assert left["all"] == CLIENTS
    assert left["in decode"] >= CLIENTS // 10
    assert left["before the answer"] >= CLIENTS // 5
    assert slow_mesh["router"].metrics()["kvmesh_router_aborted_hand_offs_total"] > 0, "some left between the legs"
    check_whole(slow_mesh, begun)


@pytest.mark.parametrize("stopped", ["context", "generation"])
async def test_clients_leave_while_an_engine_stands_still(slow_mesh: Mesh, stopped: str) -> None:
    """They leave in prefill and in transfer for sure: nothing moves. Nothing is lost once the engine goes on."""
    begun = {worker.name: worker.stats()["pages_total"] for worker in slow_mesh.workers()}
    engine = slow_mesh[stopped].engine()
    transfers = slow_mesh["context"].stats()["transfers_started_total"]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(storm, slow_mesh["router"].url, 20, 500)
        with anyio.fail_after(30):
            while slow_mesh["context"].stats()["transfers_started_total"] == transfers:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        freeze(engine.pid)
        try:
            # The streams that wait for events cannot end by themselves.
            await anyio.sleep(LEASE_S / 2)
            tasks.cancel_scope.cancel()
        finally:
            engine.send_signal(signal.SIGCONT)
    check_whole(slow_mesh, begun)
