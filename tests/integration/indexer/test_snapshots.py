"""A restarted indexer goes on where it stood, where the worker proves to be the same; else it begins with nothing."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs
from tellers import BLOCK, Teller, tokens
from waiting import until

from kvmesh.config import IndexerSettings
from kvmesh.events.feeds.restored import RESTORED_S
from kvmesh.events.index import Source
from kvmesh.indexer.app import IndexerService
from kvmesh.net.client import HttpClient
from kvmesh.net.clock import ManualClock
from kvmesh.net.service import serving
from kvmesh.protocol.members import Member, MemberEvent

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
async def indexer(path: Path, clock: ManualClock | None = None) -> AsyncIterator[IndexerService]:
    settings = IndexerSettings(
        match_endpoint="tcp://127.0.0.1:*", drain_s=1, snapshot_path=str(path), snapshot_interval_s=0
    )
    service = IndexerService(settings, clock=clock)
    async with serving(service) as url:
        service.url = url  # type: ignore[attr-defined]
        yield service


def member(teller: Teller, epoch: int = 1, **fields: Any) -> MemberEvent:
    stream, replay = teller.endpoints
    return MemberEvent(
        revision=1,
        kind="joined",
        member=Member(
            instance_id="w",
            role="context",
            url="http://x",
            model="m",
            epoch=epoch,
            events_endpoint=stream,
            replay_endpoint=replay,
            tokens_per_block=BLOCK,
            **fields,
        ),
    )


def held(service: IndexerService, *numbers: int) -> int:
    matches = service.index.match(np.array(tokens(*numbers), np.int32), model="m")
    return matches[0].device_tokens // BLOCK if matches else 0


def names(directory: Path) -> list[str]:
    return sorted(one.name for one in directory.iterdir())


def dumped(service: IndexerService) -> list[Any]:
    return sorted(tuple(block) for source in service.index.sources() for block in service.index.dump(source))


async def test_it_goes_on_where_it_stood(tellers: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "index"
    teller = tellers(buffer_steps=3)
    async with indexer(path) as service:
        service._started().hear(member(teller))
        for number in range(1, 9):
            teller.store(number, parent=number - 1 or None)
        await until(lambda: held(service, *range(1, 9)) == 8)
        before = dumped(service)
    teller.store(9, parent=8)
    teller.remove(9, 8)
    async with indexer(path) as service:
        assert service.statistics()["snapshot_restored_blocks"] == 8
        assert dumped(service) == before
        assert held(service, 1) == 0, "nobody has told that the worker still lives"
        service._started().hear(member(teller))
        await until(lambda: held(service, *range(1, 9)) == 7)
        statistics = service.statistics()
        # Two batches were read, of eight that the worker had told; the first ones it does not even keep.
        assert (statistics["feed_batches_total"], statistics["feed_resets_total"]) == (2, 0)
        teller.remove(7)
        await until(lambda: held(service, *range(1, 9)) == 6)
    assert names(path.parent) == ["index"]


async def test_another_life_of_a_worker_begins_with_nothing(tellers: Any, tmp_path: Path) -> None:
    """A new epoch; and the same epoch at the same endpoints, with batches that are not those that were read."""
    path = tmp_path / "index"
    teller = tellers()
    endpoints = teller.endpoints
    async with indexer(path) as service:
        service._started().hear(member(teller))
        teller.store(1, 2)
        await until(lambda: held(service, 1, 2) == 2)
    snapshot = path.read_bytes()
    async with indexer(path) as service:
        service._started().hear(member(teller, epoch=2))
        assert service.index.num_held(W) == 0
        await until(lambda: held(service, 1, 2) == 2)
    path.write_bytes(snapshot)
    teller.close()
    again = tellers(*endpoints)
    again.store(7)
    async with indexer(path) as service:
        service._started().hear(member(again))
        await until(lambda: held(service, 7) == 1)
        assert held(service, 1) == 0
        assert service.statistics()["feed_restarts_total"] == 1


async def test_workers_registered_by_hand_are_followed_again(tellers: Any, tmp_path: Path) -> None:
    path = tmp_path / "index"
    teller = tellers()
    stream, replay = teller.endpoints
    async with HttpClient() as http, indexer(path) as service:
        body = {"endpoint": stream, "replay_endpoint": replay, "instance_id": "w", "modelname": "m"}
        await http.call("POST", f"{service.url}/register", Any, body=body)  # type: ignore[attr-defined]
        silent = {"instance_id": "silent", "modelname": "m", "events": "none", "block_size": BLOCK}
        await http.call("POST", f"{service.url}/register", Any, body=silent)  # type: ignore[attr-defined]
        teller.store(1, 2)
        await until(lambda: held(service, 1, 2) == 2)
    async with indexer(path) as service:
        await until(lambda: held(service, 1, 2) == 2)
        assert service.statistics()["feed_batches_total"] == 0
        assert service.statistics()["feeds_approximate"] == 1
        teller.store(3, parent=2)
        await until(lambda: held(service, 1, 2, 3) == 3)


async def test_who_never_comes_back_is_given_up(tellers: Any, tmp_path: Path) -> None:
    path = tmp_path / "index"
    teller = tellers()
    clock = ManualClock()
    async with indexer(path) as service:
        service._started().hear(member(teller))
        teller.store(1)
        await until(lambda: held(service, 1) == 1)
    async with indexer(path, clock) as service:
        assert service.statistics()["feeds_restored"] == 1
        clock.advance(RESTORED_S - 1)
        await anyio.lowlevel.checkpoint()
        assert service.index.sources() == [W]

        def given_up() -> bool:
            clock.advance(1)
            return not service.index.sources()

        await until(given_up)
        assert service.statistics()["feeds_restored"] == 0


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:40] + b"x" + data[41:], lambda _: b""])
async def test_a_damaged_file_is_put_aside(tellers: Any, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "index"
    teller = tellers()
    async with indexer(path) as service:
        service._started().hear(member(teller))
        teller.store(1)
        await until(lambda: held(service, 1) == 1)
    path.write_bytes(damage(path.read_bytes()))
    with capture_logs() as logs:
        async with indexer(path) as service:
            assert service.index.sources() == []
            assert any("cannot be used" in log["event"] for log in logs)
            service._started().hear(member(teller))
            await until(lambda: held(service, 1) == 1)
    assert names(tmp_path) == ["index", "index.unreadable"]


async def test_questions_are_answered_while_it_is_written_and_events_wait(tellers: Any, tmp_path: Path) -> None:
    """Chunk by chunk; what comes meanwhile is made up for, and is not in the file."""
    path = tmp_path / "index"
    teller = tellers()
    rng = random.Random(1)
    async with indexer(path) as service:
        service._started().hear(member(teller))
        hashes = iter(rng.sample(range(10, 2**30), 40_000))
        for _ in range(40):
            teller.store(*[next(hashes) for _ in range(1000)])
        await until(lambda: service.index.num_held(W) == 40_000)
        before = dumped(service)
        assert service.snapshots is not None
        answers = 0

        async def ask() -> None:
            nonlocal answers
            while not service._index_gate.closed:
                await anyio.lowlevel.checkpoint()
            while service.snapshots.statistics.snapshots_total == 0:  # type: ignore[union-attr]
                teller.store(next(busy))
                assert held(service, 5) == 0
                answers += 1
                await anyio.lowlevel.checkpoint()

        busy = iter(range(2**30, 2**31))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.snapshots.write, service._started().saved)
            tasks.start_soon(ask)
        assert answers > 5
        assert service.statistics()["snapshot_failures_total"] == 0
        print(msgspec.structs.asdict(service.snapshots.statistics), "answers meanwhile:", answers)
        await until(lambda: service.index.num_held(W) == 40_000 + answers)
        written = path.read_bytes()
    path.write_bytes(written)
    async with indexer(path) as service:
        assert dumped(service) == before


async def test_a_directory_that_cannot_be_written_any_more_stops_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "directory"
    async with indexer(directory / "index") as service:
        assert service.snapshots is not None
        directory.rmdir()
        directory.write_text("in the way")
        await service.snapshots.write(service._started().saved)
        assert service.statistics()["snapshot_failures_total"] == 1
