"""Subscribers at a real worker, one of them written from the wire format alone, with nothing of KVMesh.

They read, miss, replay and are exact.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Stored
from kvmesh.events.subscriber import Batch, EventSubscriber

pytestmark = pytest.mark.slow

END = 2**64 - 1
BLOCK = 32


class Subscriber:
    """Keeps ``hash -> (parent hash, tokens)`` of one publisher, and the media that each block is in."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.media: dict[int, set[str]] = {}
        self.moved_to: set[str] = set()
        self.last = -1
        self.gaps = 0
        self.topics: set[bytes] = set()
        self.endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self.context = zmq.asyncio.Context()
        self.stream = self.context.socket(zmq.SUB)
        self.stream.subscribe(b"")
        self.stream.connect(endpoint)

    def close(self) -> None:
        self.stream.close(linger=0)
        self.context.term()

    async def follow(self) -> None:
        """Apply what has arrived."""
        while await self.stream.poll(0):
            topic, number, payload = await self.stream.recv_multipart()
            self.topics.add(topic)
            (sequence,) = struct.unpack(">Q", number)
            if sequence > self.last + 1:
                self.gaps += 1
                await self.catch_up()
            if sequence == self.last + 1:
                self.apply(sequence, payload)

    async def catch_up(self) -> None:
        """Ask the replay service for everything after the last message."""
        socket = self.context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", struct.pack(">Q", self.last + 1)])
            while True:
                assert await socket.poll(20_000), "the replay broke off"
                *_, number, payload = await socket.recv_multipart()
                (sequence,) = struct.unpack(">Q", number)
                if sequence == END or not payload:
                    return
                assert sequence == self.last + 1
                self.apply(sequence, payload)
        finally:
            socket.close(linger=0)

    async def catch_up_to(self, num_blocks: int) -> None:
        """Replay until so many blocks are known: an answer leaves the worker a moment before its events do."""
        with anyio.fail_after(20):
            while len(self.blocks) < num_blocks:
                await self.catch_up()
        assert len(self.blocks) == num_blocks

    def apply(self, sequence: int, payload: bytes) -> None:
        stamp, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(stamp, float)
        assert rank in (0, None)
        for event in events:
            if event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                for key in event["block_hashes"]:
                    self.media[key].remove(event["medium"])
                    if not self.media[key]:
                        del self.media[key], self.blocks[key]
            else:
                assert event["type"] == "AllBlocksCleared"
                self.blocks.clear()
                self.media.clear()
        self.last = sequence

    def _store(self, event: dict[str, Any]) -> None:
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        assert size == BLOCK
        assert {"lora_id", "lora_name", "medium"} <= set(event)
        for key in hashes:
            media = self.media.setdefault(key, set())
            assert event["medium"] not in media
            if media:
                self.moved_to.add(event["medium"])
            media.add(event["medium"])
        assert len(tokens) == size * len(hashes)
        parent = event["parent_block_hash"]
        assert parent is None or parent in self.blocks, "no orphans"
        for index, key in enumerate(hashes):
            assert 0 <= key < 2**64
            self.blocks[key] = (parent, tuple(tokens[index * size : (index + 1) * size]))
            parent = key

    def prompts(self) -> set[tuple[int, ...]]:
        """Every prefix that the publisher holds."""
        return {tuple(self.prefix(key)) for key in self.blocks}

    def prefix(self, key: int) -> list[int]:
        """All tokens up to the end of a block."""
        parent, tokens = self.blocks[key]
        return [*(self.prefix(parent) if parent is not None else []), *tokens]


@pytest.fixture
def publishing(settings_of: Callable[..., Any], serve: Callable[..., Any]) -> Callable[..., Any]:
    """``async with publishing(n) as (worker, subscribers)``: a worker and ``n`` subscribers of its events."""

    @asynccontextmanager
    async def publishing(count: int) -> AsyncIterator[tuple[Any, list[Subscriber]]]:
        # 20 blocks: later prompts evict earlier ones, so that blocks are removed, too.
        async with serve(settings_of("both", backend=None, events=True, max_tokens=640, host_cache_size=0)) as (
            worker,
        ):
            info = await worker.get("/server_info")
            subscribers = [Subscriber(info["events_endpoint"], info["replay_endpoint"]) for _ in range(count)]
            try:
                yield worker, subscribers
            finally:
                for subscriber in subscribers:
                    subscriber.close()

    return publishing


def prompt(number: int, blocks: int) -> list[int]:
    return [2000 + number * 1000 + i for i in range(blocks * BLOCK + 1)]


async def ask(worker: Any, number: int, blocks: int) -> None:
    status, answer = await worker.complete(prompt(number, blocks), max_tokens=1)
    assert status == 200, answer


async def test_a_late_subscriber_replays_from_the_start(publishing: Callable[..., Any]) -> None:
    async with publishing(1) as (worker, [subscriber]):
        await ask(worker, 0, 3)
        await subscriber.catch_up_to(3)
        assert sorted(len(subscriber.prefix(key)) for key in subscriber.blocks) == [BLOCK, 2 * BLOCK, 3 * BLOCK]
        longest = max(subscriber.blocks, key=lambda key: len(subscriber.prefix(key)))
        assert subscriber.prefix(longest) == prompt(0, 3)[: 3 * BLOCK]


async def test_a_gap_is_seen_and_replayed(publishing: Callable[..., Any]) -> None:
    async with publishing(2) as (worker, [steady, forgetful]):
        await check_gap(worker, steady, forgetful)


async def test_blocks_move_to_the_host_and_a_clean_stop_takes_them_all_back(
    settings_of: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    """§8.23: every stored hash is removed exactly once by the end; decisions.md 6: moves are told."""
    settings = settings_of("both", backend=None, events=True, max_tokens=640, host_cache_size=16 << 20)
    async with serve(settings) as (worker,):
        info = await worker.get("/server_info")
        subscriber = Subscriber(info["events_endpoint"], info["replay_endpoint"])
        number = 0
        while not subscriber.moved_to:
            await ask(worker, number, 4)
            number += 1
            if await subscriber.stream.poll(200):
                await subscriber.follow()
        assert subscriber.moved_to == {"CPU"}
        assert all(len(media) == 1 for media in subscriber.media.values())
    try:
        with anyio.fail_after(20):
            while subscriber.blocks:
                assert await subscriber.stream.poll(10_000), "blocks were left behind"
                await subscriber.follow()
    finally:
        subscriber.close()


async def test_a_model_with_windows_only_says_so(settings_of: Callable[..., Any], serve: Callable[..., Any]) -> None:
    """What it tells is its widest group, and readers may count it: the index finds a prompt that was served."""
    settings = settings_of("both", backend=None, events=True, max_attention_window=[64, 96])
    tokens = [1000 + i for i in range(5 * BLOCK + 1)]
    index, source = PrefixIndex(), Source("w")
    kinds = set()

    def take(item: Any) -> None:
        if isinstance(item, Batch):
            kinds.update(record.kind for record in item.records.records if isinstance(record, Stored))
            index.apply(source, item.records.records)

    async with serve(settings) as (worker,):
        info = await worker.get("/server_info")
        index.add(source, model="m", single_group=info["events_single_group"])
        with zmq.Context() as context:
            subscriber = EventSubscriber(info["events_endpoint"], info["replay_endpoint"], context=context)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(subscriber.run, take)
                status, answer = await worker.complete(tokens, max_tokens=1)
                assert status == 200, answer
                with anyio.fail_after(20):
                    while index.num_held(source) < 5:  # noqa: ASYNC110 - what is waited for has no event
                        await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()
    assert kinds == {"sliding_window"}
    [found] = index.match(np.array(tokens, np.int32), model="m")
    assert found.device_tokens == 5 * BLOCK


async def check_gap(worker: Any, steady: Subscriber, forgetful: Subscriber) -> None:
    await ask(worker, 0, 2)
    for subscriber in (steady, forgetful):
        await subscriber.catch_up_to(2)
    # One of them misses what follows: more prompts than the cache holds, so blocks are stored and removed.
    forgetful.stream.disconnect(forgetful.endpoint)
    for number in range(1, 9):
        await ask(worker, number, 4)
    published = (await worker.wait_whole())["events_published_total"]
    assert published > 0
    await steady.catch_up()
    missed = steady.last - forgetful.last
    assert missed >= 8
    assert len(steady.blocks) < 2 + 8 * 4, "some blocks were evicted"
    # Then it is back, and the next message that it gets tells it what it missed.
    forgetful.stream.connect(forgetful.endpoint)
    gaps = forgetful.gaps
    number = 9
    while forgetful.gaps == gaps:  # its subscription takes a moment to reach the publisher
        await ask(worker, number, 1)
        number += 1
        if await forgetful.stream.poll(200):
            await forgetful.follow()
    with anyio.fail_after(20):
        while forgetful.prompts() != steady.prompts() or tuple(prompt(number - 1, 1)[:BLOCK]) not in steady.prompts():
            await forgetful.catch_up()
            await steady.catch_up()
    assert forgetful.last == steady.last
    assert forgetful.blocks == steady.blocks
    # The index is the cache: every prompt's blocks are matched by the worker as the index says.
    held = steady.prompts()
    for asked in range(number):
        tokens = prompt(asked, 4)
        known = max((n for n in range(1, 5) if tuple(tokens[: n * BLOCK]) in held), default=0)
        if known == 4:
            _, answer = await worker.complete(tokens, max_tokens=1)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= known * BLOCK
