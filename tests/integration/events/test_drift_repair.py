"""A drift injected on purpose is repaired: with plain and keyed streams, after more than the publisher keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import numpy as np
import pytest
import zmq

from kvmesh.cache.events import StoredBlocks
from kvmesh.events.digests import DigestKey
from kvmesh.events.feeds import Feed, Feeds
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.keyed import KeyRing, StreamKey
from kvmesh.events.published import PublishedSet
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.records import Removed
from kvmesh.events.sink import StreamSink
from kvmesh.hashing import ReuseScope, v2_block_keys, v2_root
from kvmesh.net.faults import injected

WORKER = Source("w")
SIZE = 4
KEY = StreamKey(bytes(range(32)))
PROMPTS = [np.arange(number * 100, number * 100 + 2 * SIZE, dtype=np.int32) for number in range(6)]


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.005)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])
async def test_the_index_finds_out_and_reads_anew(key: StreamKey | None) -> None:
    published = PublishedSet((None, None if key is None else key.salt))
    publisher = ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", buffer_steps=1, published=published)
    sink = StreamSink(SIZE, published=published, key=key)
    publisher.start()
    index = PrefixIndex()
    for prompt in PROMPTS:
        keys = v2_block_keys(prompt, SIZE, v2_root(ReuseScope()))
        sink.on_stored(0, StoredBlocks(ReuseScope(), None, keys, prompt.reshape(-1, SIZE), 0, np.zeros(2, np.uint8)))
        publisher.publish(sink.take())
    names = published.answer().digests
    try:
        with zmq.Context() as context:
            async with anyio.create_task_group() as tasks:
                feeds = Feeds(index, tasks, context, keys=KeyRing([key]) if key else None, anti_entropy_interval_s=0.05)
                feeds.follow(Feed(WORKER, "m", publisher.endpoint, publisher.replay_endpoint, in_mesh=True))
                await until(lambda: index.num_held(WORKER) == 12)
                # An error of the index: a block that the worker holds is forgotten.
                hashes = (KEY.names(keys) if key else np.array([int.from_bytes(keys[-1][:8], "big")])).tolist()
                index.apply(WORKER, [Removed(hashes=hashes[-1:])])
                assert index.num_held(WORKER) == 11
                await until(lambda: index.num_held(WORKER) == 12)
                held = index.digests(WORKER)
                tasks.cancel_scope.cancel()
    finally:
        publisher.shutdown()
    assert held is not None
    assert {DigestKey(tier, scope.lora, scope.salt): of for (tier, scope), of in held.items()} == names


async def test_without_the_key_nothing_is_held_and_that_is_no_drift() -> None:
    published = PublishedSet((None, KEY.salt))
    publisher = ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", published=published)
    sink = StreamSink(SIZE, published=published, key=KEY)
    publisher.start()
    keys = v2_block_keys(PROMPTS[0], SIZE, v2_root(ReuseScope()))
    sink.on_stored(0, StoredBlocks(ReuseScope(), None, keys, PROMPTS[0].reshape(-1, SIZE), 0, np.zeros(2, np.uint8)))
    publisher.publish(sink.take())
    index = PrefixIndex()
    try:
        with zmq.Context() as context:
            async with anyio.create_task_group() as tasks:
                feeds = Feeds(index, tasks, context, anti_entropy_interval_s=0.02)
                feeds.follow(Feed(WORKER, "m", publisher.endpoint, publisher.replay_endpoint, in_mesh=True))
                await until(lambda: publisher.statistics().digests_total > 5)
                tasks.cancel_scope.cancel()
    finally:
        publisher.shutdown()
    assert index.num_held(WORKER) == 0
    assert feeds.statistics()["feed_rejected_events_total"] >= 1
    assert feeds.statistics()["feed_resets_total"] == 0


async def test_what_the_publisher_dropped_is_told_to_who_finds_out() -> None:
    """The last batch before a rest is lost, its store with it: nothing in the stream or a replay ever shows it."""
    sending, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        sending.set()
        assert go_on.wait(5)

    published = PublishedSet()
    publisher = ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", max_queue_size=1, published=published)
    sink = StreamSink(SIZE, published=published)
    publisher.start()
    index = PrefixIndex()
    try:
        with injected("events.before_send", hold):
            for number, prompt in enumerate(PROMPTS[:3]):
                keys = v2_block_keys(prompt, SIZE, v2_root(ReuseScope()))
                rows = prompt.reshape(-1, SIZE)
                sink.on_stored(0, StoredBlocks(ReuseScope(), None, keys, rows, 0, np.zeros(2, np.uint8)))
                assert publisher.publish(sink.take()) is (number < 2)
                assert sending.wait(5)
            go_on.set()
            await until(lambda: publisher.statistics().published_total == 2)
        with zmq.Context() as context:
            async with anyio.create_task_group() as tasks:
                feeds = Feeds(index, tasks, context, anti_entropy_interval_s=0.05)
                feeds.follow(Feed(WORKER, "m", publisher.endpoint, publisher.replay_endpoint, in_mesh=True))
                await until(lambda: index.num_held(WORKER) == 6)
                [match] = index.match(PROMPTS[2], model="m")
                resets = feeds.statistics()["feed_resets_total"]
                asked = publisher.statistics().digests_total
                await until(lambda: publisher.statistics().digests_total > asked + 3)
                assert feeds.statistics()["feed_resets_total"] == resets, "it is at rest"
                tasks.cancel_scope.cancel()
    finally:
        publisher.shutdown()
    assert match.device_tokens == 2 * SIZE
