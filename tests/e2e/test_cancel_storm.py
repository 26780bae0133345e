"""Streams that are cancelled at random inside the transfer window, in rounds: pages return, and nobody waits longer.

``KVMESH_STORM=2000,4`` (streams, rounds) is what ``make cancel-storm`` runs.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import pytest
from fault_cases import footprint
from meshes.by_hand import Mesh
from soaks import soak_only

from kvmesh.models.store import DEFAULT_MODEL

STREAMS, ROUNDS = map(int, os.environ.get("KVMESH_STORM", "40,2").split(","))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + 2 * STREAMS * ROUNDS)]

ENOUGH = 80
"""Streams in all from which on it is no luck how many leave while pages move."""
AT_A_TIME = 12
PROMPT_TOKENS = (70, 100, 130)
"""More pages than are read on loan: a loan is no time in which a client could leave."""
PROBES = 5
SHARE_THAT_STAYS = 0.1
SLOW_TRANSFERS = "transceiver.during_transfer=pause:0.06"
"""Of one pair of servers one after the other: most of the time to a first token is the transfer's."""
FLAT_MIB = 32.0


class Storm:
    """Clients that leave around the time at which their pages move.

    Attributes:
        left: how they left: ``before`` the first token, ``after`` it, or too late, ``finished``.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.left: Counter[str] = Counter()
        self._url = f"{url}/v1/completions"
        self._choose = random.Random(seed)
        self._first_token_s = 0.0
        self._stays = SHARE_THAT_STAYS

    async def learn(self) -> None:
        """How long a first token takes in such a crowd."""
        self._stays, self._first_token_s = 1.0, 0.0
        await self.run(2 * AT_A_TIME)
        self._stays = SHARE_THAT_STAYS
        self.left.clear()

    async def run(self, streams: int) -> None:
        """Ask and leave, so many times."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # A closed connection is how a client leaves.
        limiter = anyio.CapacityLimiter(AT_A_TIME)

        async def client() -> None:
            async with limiter:
                await self._ask(http)

        async with aiohttp.ClientSession(connector=connector) as http, anyio.create_task_group() as tasks:
            for _ in range(streams):
                tasks.start_soon(client)

    async def _ask(self, http: aiohttp.ClientSession) -> None:
        """The window ends with the first token; how far away that is, is learnt from those that see it."""
        started_s = time.monotonic()
        patience_s = self._choose.uniform(0.5, 1.1) * self._first_token_s
        stays = self._choose.random() < self._stays
        how = "before"
        with anyio.move_on_after(60.0 if stays else patience_s):
            async with http.post(self._url, json=body(self._choose, stream=True)) as response:
                assert response.status == 200, await response.text()
                await response.content.readline()
                how = "after"
                took_s = time.monotonic() - started_s
                self._first_token_s += 0.1 * (took_s - self._first_token_s) if self._first_token_s else took_s
                if not stays:
                    await response.read()
                    how = "finished"
        self.left[how] += 1


def body(choose: random.Random, *, stream: bool, tokens: int = 0) -> dict[str, Any]:
    """A prompt that was never asked before."""
    return {
        "model": DEFAULT_MODEL,
        "prompt": [choose.randrange(1000, 45_000) for _ in range(tokens or choose.choice(PROMPT_TOKENS))],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def probe_s(mesh: Mesh, choose: random.Random) -> float:
    """Seconds that one request takes."""
    started_s = time.monotonic()
    status, answer = mesh["router"].post("/v1/completions", body(choose, stream=False, tokens=70))
    assert status == 200, answer
    return time.monotonic() - started_s


def totals(mesh: Mesh, key: str) -> int:
    return sum(worker.stats()[key] for worker in mesh.workers())


@pytest.mark.parametrize("backend", ["DEFAULT", pytest.param("NIXL", marks=soak_only)])
async def test_cancel_storm(make_brief_mesh: Callable[..., Mesh], backend: str) -> None:
    settings = {"cache_transceiver_config": {"backend": backend}}
    mesh = make_brief_mesh(
        {"context": dict(settings), "generation": dict(settings)}, env={"KVMESH_FAULTS": SLOW_TRANSFERS}
    )
    choose = random.Random(7)
    probe_s(mesh, choose)
    idle_s = statistics.median(probe_s(mesh, choose) for _ in range(PROBES))
    mesh.wait_idle()
    begun = {worker.name: worker.stats()["pages_total"] for worker in mesh.workers()}
    storm = Storm(mesh["router"].url, seed=11)
    await storm.learn()
    marks: list[dict[int, float]] = []
    for number in range(ROUNDS):
        await storm.run(STREAMS)
        mesh.wait_idle()
        # Free or reusable, all of them.
        assert {worker.name: worker.stats()["pages_total"] for worker in mesh.workers()} == begun
        # The best of some: the machine may be busy with something else.
        served_s = min(probe_s(mesh, choose) for _ in range(PROBES))
        mesh.wait_idle()
        family = [one for process in mesh.processes.values() for one in process.family()]
        marks.append({one.pid: footprint(one.pid).anonymous_mib for one in family})
        print(f"round {number}: {dict(storm.left)}, a probe took {served_s:.3f} s of {idle_s:.3f} s idle")
        assert served_s < 2 * idle_s
    cancelled = totals(mesh, "transfers_cancelled_total")
    print(f"{cancelled} of {totals(mesh, 'transfers_started_total')} transfers were cancelled")
    if STREAMS * ROUNDS >= ENOUGH:
        assert storm.left["before"] > STREAMS * ROUNDS // 3
        # Both sides count.
        assert cancelled >= STREAMS * ROUNDS // 3, "not enough of them left while pages moved"
    assert totals(mesh, "transfers_timed_out_total") == 0
    grown = {pid: after - marks[0][pid] for pid, after in marks[-1].items() if after - marks[0][pid] > FLAT_MIB}
    assert not grown, f"MiB by process: {grown}"
