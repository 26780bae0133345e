"""An index that is wrong about a worker finds out by the worker's digest, and reads it anew by itself."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tellers import BLOCK, Teller, tokens
from waiting import until

from kvmesh.config import IndexerSettings
from kvmesh.events.index import Source
from kvmesh.events.records import Removed, Stored
from kvmesh.indexer.app import IndexerService
from kvmesh.net.client import HttpClient
from kvmesh.net.service import serving

INTERVAL_S = 0.1
W = Source("w")


@pytest.fixture
def tellers() -> Iterator[Callable[..., Teller]]:
    made: list[Teller] = []

    def make(*args: Any, **options: Any) -> Teller:
        made.append(Teller(*args, **options))
        return made[-1]

    yield make
    for teller in made:
        teller.close()


@asynccontextmanager
async def following(teller: Teller, interval_s: float = INTERVAL_S) -> AsyncIterator[IndexerService]:
    settings = IndexerSettings(match_endpoint="tcp://127.0.0.1:*", drain_s=1, anti_entropy_interval_s=interval_s)
    service = IndexerService(settings)
    async with HttpClient() as http, serving(service) as url:
        stream, replay = teller.endpoints
        body = {"endpoint": stream, "replay_endpoint": replay, "instance_id": "w", "modelname": "m"}
        await http.call("POST", f"{url}/register", Any, body=body)
        yield service


def held(service: IndexerService, *numbers: int) -> int:
    """Leading blocks of a prompt that the worker is known to hold."""
    matches = service.index.match(np.array(tokens(*numbers), np.int32), model="m")
    return matches[0].device_tokens // BLOCK if matches else 0


def checked(service: IndexerService) -> Callable[[], bool]:
    """Whether a comparison has been made from now on."""
    before = service.statistics()["drift_checks_total"]
    return lambda: service.statistics()["drift_checks_total"] > before


@pytest.mark.parametrize(
    "drift",
    [
        Removed(hashes=[2]),
        Stored(hashes=[9], parent=3, token_ids=np.array(tokens(9), np.int32), block_size=BLOCK),
        Stored(hashes=[9], parent=None, token_ids=np.array(tokens(9), np.int32), block_size=BLOCK),
    ],
)
async def test_a_drift_is_repaired_within_an_interval(tellers: Any, drift: Any) -> None:
    """A drift injected on purpose is repaired within a stated time: ``anti_entropy_interval_s`` and the replay."""
    teller = tellers()
    teller.store(1, 2, 3)
    async with following(teller) as service:
        await until(lambda: held(service, 1, 2, 3) == 3)
        await until(checked(service))
        assert service.statistics()["drift_total"] == 0
        right = service.index.digests(W)
        with capture_logs() as logs:
            service.index.apply(W, [drift])
            began_s = time.monotonic()
            assert service.index.digests(W) != right
            await until(lambda: service.index.digests(W) == right and held(service, 1, 2, 3) == 3)
            print(f"repaired after {time.monotonic() - began_s:.3f} s, interval {INTERVAL_S} s")
        await until(checked(service))
        assert service.statistics()["drift_total"] == 1
        assert service.statistics()["feed_resets_total"] == 1
        (said,) = [log for log in logs if log["event"] == "the index is wrong about a worker"]
        assert (said["instance_id"], said["repaired"]) == ("w", True)


async def test_a_busy_stream_is_compared_and_found_equal(tellers: Any) -> None:
    teller = tellers()
    async with following(teller) as service:
        number = 0

        def churned() -> bool:
            nonlocal number
            number += 1
            teller.store(number)
            if number > 20:
                teller.remove(number - 20)
            return service.statistics()["drift_checks_total"] >= 5

        await until(churned)
        assert service.statistics()["drift_total"] == 0


async def test_what_the_worker_no_longer_keeps_is_not_read_anew_for_ever(tellers: Any) -> None:
    teller = tellers(buffer_steps=2)
    for number in range(1, 6):
        teller.store(number)
    async with following(teller) as service:
        await until(lambda: service.statistics()["drift_total"] >= 4)
        assert service.statistics()["feed_resets_total"] <= 3, "repairs become rare"
        await until(lambda: held(service, 5) == 1)


@pytest.mark.parametrize(("digests", "interval_s"), [(False, INTERVAL_S), (True, 0.0)])
async def test_without_digests_nothing_is_compared(tellers: Any, digests: bool, interval_s: float) -> None:
    teller = tellers(digests=digests)
    teller.store(1)
    async with following(teller, interval_s) as service:
        await until(lambda: held(service, 1) == 1)
        service.index.apply(W, [Removed(hashes=[1])])
        if interval_s:
            await until(lambda: teller.publisher.statistics().malformed_requests_total >= 1)
        teller.store(2)
        await until(lambda: held(service, 2) == 1)
        statistics = service.statistics()
        assert (statistics["drift_checks_total"], statistics["feed_resets_total"]) == (0, 0)
