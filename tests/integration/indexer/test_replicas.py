"""Indexers that lose different messages of the same workers hold the same in the end."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tellers import Teller
from waiting import until

from kvmesh.config import IndexerSettings
from kvmesh.events.feeds import Feed, Feeds
from kvmesh.events.index import Source
from kvmesh.events.subscriber import EventSubscriber
from kvmesh.indexer.app import IndexerService
from kvmesh.net.service import serving

STEPS = 60


class Lossy:
    """Loses live messages; replays arrive."""

    def __init__(self, subscriber: EventSubscriber, seed: int) -> None:
        self._take = subscriber._take_live
        self._rng = random.Random(seed)
        self.lost = 0
        self.losing = True

    async def __call__(self, frames: list[bytes]) -> None:
        if self.losing and self._rng.random() < 0.3:
            self.lost += 1
        else:
            await self._take(frames)


@asynccontextmanager
async def replica(tellers: list[Teller], seed: int) -> AsyncIterator[tuple[IndexerService, list[Lossy]]]:
    settings = IndexerSettings(match_endpoint="tcp://127.0.0.1:*", drain_s=1, anti_entropy_interval_s=0.2)
    service = IndexerService(settings)
    async with serving(service):
        feeds: Feeds = service._started()
        for number, teller in enumerate(tellers):
            feeds.follow(Feed(Source(f"w{number}"), "m", *teller.endpoints))
        losses = []
        for _, subscriber in feeds.subscribers():
            losses.append(Lossy(subscriber, seed))
            subscriber._take_live = losses[-1]  # type: ignore[method-assign]
        await until(lambda: service.statistics()["feeds_connected"] == len(tellers))
        yield service, losses


def counts(service: IndexerService) -> list[int]:
    return [service.index.num_held(Source(f"w{which}")) for which in (0, 1)]


def dumped(service: IndexerService) -> dict[Source, list[Any]]:
    return {source: sorted(map(tuple, service.index.dump(source))) for source in service.index.sources()}


@pytest.mark.parametrize("seed", [1, 2])
async def test_replicas_converge(seed: int) -> None:
    rng = random.Random(seed)
    tellers = [Teller(), Teller()]
    held: list[list[int]] = [[], []]
    try:
        async with AsyncExitStack() as stack:
            replicas = [await stack.enter_async_context(replica(tellers, seed * 10 + number)) for number in range(3)]
            fresh = 0
            for _ in range(STEPS):
                which = rng.randrange(2)
                if held[which] and rng.random() < 0.4:
                    gone = held[which].pop(rng.randrange(len(held[which])))
                    tellers[which].remove(gone)
                else:
                    fresh += 1
                    tellers[which].store(fresh, parent=rng.choice([None, *held[which]]))
                    held[which].append(fresh)
                await until(lambda: all(teller.publisher.statistics().queued == 0 for teller in tellers))
            for _, losses in replicas:
                for loss in losses:
                    loss.losing = False
            # Nothing but a later message shows that the last one was lost.
            for which, teller in enumerate(tellers):
                teller.store(10_000 + which)
                held[which].append(10_000 + which)
            expected = [len(blocks) for blocks in held]
            for service, _ in replicas:
                await until(lambda service=service: counts(service) == expected)
            first, *others = [dumped(service) for service, _ in replicas]
            assert all(other == first for other in others)
            lost = [sum(loss.lost for loss in losses) for _, losses in replicas]
            assert min(lost) > 0
            assert sum(len(blocks) for blocks in first.values()) == sum(expected)
    finally:
        for teller in tellers:
            teller.close()
