"""Workers come, go, die and come back, as the coordinator tells it; the index follows at once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from waiting import until

from kvmesh.config import IndexerSettings
from kvmesh.coordinator.app import CoordinatorService
from kvmesh.coordinator.ledger import TransferLedger
from kvmesh.coordinator.registry import MemberRegistry
from kvmesh.coordinator.storage import MemoryStore
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.indexer.app import IndexerService
from kvmesh.net.client import HttpClient
from kvmesh.net.clock import SystemClock
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.service import serving
from kvmesh.protocol.events import BlockStored
from kvmesh.protocol.members import Member, MemberList

BLOCK = 4
LOOPBACK = "tcp://127.0.0.1:*"
LEASE_S = 0.6


def block(number: int, parent: int | None = None) -> BlockStored:
    return BlockStored(block_hashes=[number], parent_block_hash=parent, token_ids=[number] * BLOCK, block_size=BLOCK)


def held(service: IndexerService, *numbers: int) -> dict[str, int]:
    tokens = np.repeat(np.array(numbers, np.int32), BLOCK)
    return {match.instance_id: match.device_tokens // BLOCK for match in service.index.match(tokens, model="m")}


@asynccontextmanager
async def mesh() -> AsyncIterator[tuple[IndexerService, str, anyio.CancelScope]]:
    """A coordinator and an indexer; cancelling the scope kills the coordinator."""
    clock = SystemClock()
    coordinator = CoordinatorService(
        clock, MemberRegistry(clock, lease_s=LEASE_S, incarnation="one"), TransferLedger(clock), MemoryStore(clock)
    )
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        url = await tasks.start(_serve, coordinator, scope)
        service = IndexerService(IndexerSettings(match_endpoint=LOOPBACK, coordinator_url=url, drain_s=1))
        async with serving(service):
            yield service, url, scope
        scope.cancel()


async def _serve(service: Any, scope: anyio.CancelScope, *, task_status: Any) -> None:
    with scope:
        async with serving(service) as url:
            task_status.started(url)
            await anyio.sleep_forever()


@asynccontextmanager
async def member(
    url: str, publisher: Any, epoch: int = 1, dp_size: int = 1, *, single_group: bool = False
) -> AsyncIterator[Any]:
    """A worker that is a member for the length of the block; ``vanish()`` ends it without a goodbye."""
    client = CoordinatorClient(url, watch=False)
    async with anyio.create_task_group() as tasks:
        await client.start(tasks)
        client.announce(
            Member(
                instance_id="w",
                role="context",
                url="http://127.0.0.1:1",
                epoch=epoch,
                model="m",
                dp_size=dp_size,
                events_endpoint=publisher.endpoint,
                replay_endpoint=publisher.replay_endpoint,
                events_single_group=single_group,
            )
        )
        try:
            yield tasks.cancel_scope.cancel
        finally:
            with anyio.CancelScope(shield=True):
                if not tasks.cancel_scope.cancel_called:
                    await client.stop()


async def members(client: HttpClient, url: str) -> list[Member]:
    return (await client.call("GET", f"{url}/members", MemberList)).members


@pytest.fixture
def publishers() -> Iterator[Callable[..., ZmqPublisher]]:
    made: list[ZmqPublisher] = []

    def make(*endpoints: str | None) -> ZmqPublisher:
        publisher = ZmqPublisher(*(endpoints or (LOOPBACK, LOOPBACK)))
        publisher.start()
        made.append(publisher)
        return publisher

    yield make
    for publisher in made:
        publisher.shutdown()


async def test_a_worker_is_followed_while_it_is_a_member(publishers: Any) -> None:
    publisher = publishers()
    publisher.publish([block(1)])
    async with mesh() as (indexer, url, _):
        async with member(url, publisher):
            await until(lambda: held(indexer, 1, 2) == {"w": 1})
            publisher.publish([block(2, parent=1)])
            await until(lambda: held(indexer, 1, 2) == {"w": 2})
        await until(lambda: held(indexer, 1) == {})
        assert indexer.index.sources() == []


async def test_a_worker_whose_lease_runs_out_is_forgotten(publishers: Any) -> None:
    publisher = publishers()
    publisher.publish([block(1)])
    async with mesh() as (indexer, url, _):
        async with member(url, publisher) as vanish:
            await until(lambda: held(indexer, 1) == {"w": 1})
            vanish()
        await until(lambda: held(indexer, 1) == {})


async def test_a_new_epoch_begins_with_nothing(publishers: Any) -> None:
    first, second = publishers(), publishers()
    first.publish([block(1)])
    second.publish([block(2)])
    async with mesh() as (indexer, url, _):
        async with member(url, first) as vanish:
            await until(lambda: held(indexer, 1) == {"w": 1})
            vanish()
        async with member(url, second, epoch=2):
            await until(lambda: held(indexer, 2) == {"w": 1})
            assert held(indexer, 1) == {}


@pytest.mark.parametrize("single_group", [True, False])
async def test_windowed_blocks_count_for_members_that_say_so(publishers: Any, single_group: bool) -> None:
    publisher = publishers()
    windowed = msgspec.structs.replace(
        block(1), group_idx=0, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=64
    )
    publisher.publish([windowed, block(2)])
    async with mesh() as (indexer, url, _), member(url, publisher, single_group=single_group):
        await until(lambda: held(indexer, 2) == {"w": 1})
        assert held(indexer, 1) == ({"w": 1} if single_group else {})


async def test_the_coordinators_death_changes_nothing(publishers: Any) -> None:
    publisher = publishers()
    publisher.publish([block(1)])
    async with mesh() as (indexer, url, coordinator), member(url, publisher):
        await until(lambda: held(indexer, 1) == {"w": 1})
        coordinator.cancel()
        await anyio.sleep(2 * LEASE_S)
        publisher.publish([block(2, parent=1)])
        await until(lambda: held(indexer, 1, 2) == {"w": 2})


async def test_every_rank_of_a_worker_is_followed() -> None:
    # Nobody listens there, and nobody has to: a publisher may be late.
    publisher = SimpleNamespace(endpoint="tcp://127.0.0.1:1", replay_endpoint="tcp://127.0.0.1:101")
    async with mesh() as (indexer, url, _), member(url, publisher, dp_size=2):
        await until(lambda: len(indexer.index.sources("w")) == 2)
        assert [source.dp_rank for source in indexer.index.sources("w")] == [0, 1]
        async with HttpClient() as client:
            (url,) = [found.url for found in await members(client, url) if found.role == "indexer"]
            workers = await client.call("GET", f"{url}/workers", Any)
        assert [worker["endpoint"] for worker in workers] == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
        assert [worker["replay_endpoint"] for worker in workers] == ["tcp://127.0.0.1:101", "tcp://127.0.0.1:102"]


PUBLISHER = """
import sys, time
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.protocol.events import BlockStored
publisher = ZmqPublisher(sys.argv[1], sys.argv[2])
publisher.start()
for number in map(int, sys.argv[3:]):
    event = BlockStored(block_hashes=[number], parent_block_hash=None, token_ids=[number] * 4, block_size=4)
    publisher.publish([event])
print(publisher.endpoint, publisher.replay_endpoint, flush=True)
time.sleep(60)
"""


@asynccontextmanager
async def publisher_process(*arguments: str) -> AsyncIterator[tuple[Process, list[str]]]:
    process = await anyio.open_process([sys.executable, "-c", PUBLISHER, *arguments], stderr=None)
    assert process.stdout is not None
    try:
        line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 1000)
        yield process, line.decode().split()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def test_a_killed_publisher_stops_counting_at_once_and_its_next_life_begins_anew() -> None:
    service = IndexerService(IndexerSettings(match_endpoint=LOOPBACK, drain_s=1))
    async with serving(service) as url:
        async with publisher_process(LOOPBACK, LOOPBACK, "1", "2", "3") as (process, endpoints):
            body = {"endpoint": endpoints[0], "replay_endpoint": endpoints[1], "instance_id": "w", "modelname": "m"}
            async with HttpClient() as client:
                await client.call("POST", f"{url}/register", msgspec.Raw, body=body)
            await until(lambda: held(service, 3) == {"w": 1})
            process.kill()
            await until(lambda: held(service, 3) == {})
        # The next life is silent, and its numbers have not caught up with the old ones.
        async with publisher_process(*endpoints, "7"):
            await until(lambda: held(service, 7) == {"w": 1})
            assert held(service, 3) == {}
            assert service.index.statistics().residencies == 1
