"""A reader that comes when the publisher has forgotten most batches still hears of every block, and of no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
import zmq

from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.published import PublishedSet
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.records import Tier
from kvmesh.events.subscriber import Batch, Connected, EventSubscriber, Reset
from kvmesh.hashing import ReuseScope
from kvmesh.protocol.events import BlockRemoved, BlockStored

WORKER = Source("w")


class Worker:
    """Stores and removes chains of one block."""

    def __init__(self, buffer_steps: int) -> None:
        self.published = PublishedSet()
        loopback = "tcp://127.0.0.1:*"
        self.publisher = ZmqPublisher(loopback, loopback, buffer_steps=buffer_steps, published=self.published)
        self.publisher.start()
        self.sent = 0

    def store(self, number: int) -> None:
        self.published.stored(Tier.DEVICE, ReuseScope(), np.array([number], np.uint64))
        tokens = [number, number]
        self._publish(BlockStored(block_hashes=[number], parent_block_hash=None, token_ids=tokens, block_size=2))

    def remove(self, number: int) -> None:
        self.published.removed(Tier.DEVICE, np.array([number], np.uint64))
        self._publish(BlockRemoved(block_hashes=[number]))

    def _publish(self, event: BlockStored | BlockRemoved) -> None:
        assert self.publisher.publish([event])
        self.sent += 1

    async def rest(self) -> None:
        await until(lambda: self.publisher.statistics().published_total == self.sent)


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.005)


@pytest.mark.parametrize("with_state", [True, False])
async def test_a_late_reader_and_one_that_reads_anew_are_exact(with_state: bool) -> None:
    """Whoever does not ask for the state knows only what the last batches say, as with any publisher."""
    worker = Worker(buffer_steps=3)
    assert worker.publisher.endpoint is not None
    index = PrefixIndex()
    index.add(WORKER, model="m")
    items: list[Any] = []

    def take(item: Any) -> None:
        items.append(item)
        if isinstance(item, Batch):
            index.apply(WORKER, item.records.records)
        elif isinstance(item, Reset):
            index.clear(WORKER)

    try:
        for number in range(100):
            worker.store(number)
        for number in range(0, 100, 2):
            worker.remove(number)
        worker.store(1000)
        await worker.rest()
        with zmq.Context() as context:
            subscriber = EventSubscriber(
                worker.publisher.endpoint, worker.publisher.replay_endpoint, context=context, with_state=with_state
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(subscriber.run, take)
                await until(lambda: any(isinstance(item, Connected) for item in items))
                counts = [index.num_held(WORKER)]
                subscriber.resync()
                await until(lambda: any(isinstance(item, Reset) for item in items))
                await until(lambda: subscriber.applied == worker.sent - 1)
                counts.append(index.num_held(WORKER))
                tasks.cancel_scope.cancel()
        assert counts == ([51, 51] if with_state else [1, 1])
        told = worker.published.answer()
        assert told.sequence == subscriber.applied
        assert sum(digest.num_blocks for digest in told.digests.values()) == 51
    finally:
        worker.publisher.shutdown()
