"""Publishers that connect to the indexer: known by their topic, or registered and waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from tellers import BLOCK, tokens
from waiting import until

from kvmesh.config import IndexerSettings
from kvmesh.events.feeds import Feed
from kvmesh.events.feeds.feeds import SILENT_S
from kvmesh.events.index import Source
from kvmesh.indexer.app import IndexerService
from kvmesh.net.client import HttpClient
from kvmesh.net.clock import ManualClock
from kvmesh.net.service import serving
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.events import BlockStored, EventBatch


class Connecting:
    """vLLM with an endpoint without ``*``: its PUB socket connects."""

    def __init__(self, socket: zmq.Socket[bytes], topic: str, rank: int) -> None:
        self._socket = socket
        self._topic = topic.encode()
        self._rank = rank
        self._sequence = 0

    def store(self, *numbers: int) -> None:
        event = BlockStored(
            block_hashes=list(numbers), parent_block_hash=None, token_ids=tokens(*numbers), block_size=BLOCK
        )
        payload = msgspec.msgpack.encode(EventBatch(0.0, [event], self._rank))
        self._socket.send_multipart([self._topic, self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1


@contextmanager
def connecting(endpoint: str, topic: str, rank: int = 0) -> Iterator[Connecting]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.linger = 0
    socket.connect(endpoint)
    try:
        yield Connecting(socket, topic, rank)
    finally:
        socket.close()
        context.term()


class Listening:
    def __init__(self, service: IndexerService, clock: ManualClock, url: str, http: HttpClient) -> None:
        self.service = service
        self.clock = clock
        self._url = url
        self._http = http

    @property
    def endpoint(self) -> str:
        return self.service._started().listen_endpoint

    async def post(self, path: str, **body: Any) -> Any:
        return await self._http.call("POST", self._url + path, Any, body=body)

    def held(self, *numbers: int) -> dict[str, int]:
        matches = self.service.index.match(np.array(tokens(*numbers), np.int32), model="m")
        return {match.instance_id: match.device_tokens // BLOCK for match in matches}

    async def heard(self, publisher: Connecting, name: str, *numbers: int) -> None:
        """Publish until it has been heard: who connects does not know when."""

        def arrived() -> bool:
            publisher.store(*numbers)
            return name in self.held(*numbers)

        await until(arrived, f"{name} is heard")


@asynccontextmanager
async def listening(endpoint: str | None = "tcp://127.0.0.1:*") -> AsyncIterator[Listening]:
    clock = ManualClock()
    settings = IndexerSettings(match_endpoint="tcp://127.0.0.1:*", listen_endpoint=endpoint, drain_s=1)
    service = IndexerService(settings, clock=clock)
    async with HttpClient() as http, serving(service) as url:
        one = Listening(service, clock, url, http)
        if endpoint is not None:
            await until(lambda: one.endpoint)
        yield one


async def test_whoever_connects_is_known_by_its_topic() -> None:
    """§2.1: llm-d's topics name instance and model; payloads name neither."""
    async with listening() as indexer:
        with (
            connecting(indexer.endpoint, "kv@pod-1:8000@m") as one,
            connecting(indexer.endpoint, "kv@pod-2@m", rank=3) as two,
            connecting(indexer.endpoint, "something else") as stranger,
        ):
            await indexer.heard(one, "pod-1:8000", 1)
            await indexer.heard(two, "pod-2", 1, 2)
            stranger.store(1)
            assert indexer.held(1, 2) == {"pod-1:8000": 1, "pod-2": 2}
            (rank,) = [source.dp_rank for source in indexer.service.index.sources("pod-2")]
            assert rank == 3
            await indexer.post("/unregister", instance_id="pod-1:8000")
            one.store(1)
            await indexer.heard(two, "pod-2", 5)
            assert indexer.held(1) == {"pod-2": 1}, "who was unregistered stays out"
        await until(lambda: indexer.held(1) == {})
        assert len(indexer.service.index.sources()) == 1

        def forgotten() -> bool:
            indexer.clock.advance(SILENT_S / 4)
            return not indexer.service.index.sources()

        await until(forgotten, "who is gone for long is forgotten")


async def test_a_registered_publisher_is_waited_for() -> None:
    async with listening() as indexer:
        await indexer.post("/register", instance_id="w", model="m", bind=True, topic="kv-events", block_size=BLOCK)
        indexer.clock.advance(10 * SILENT_S)
        with connecting(indexer.endpoint, "kv-events") as publisher:
            await indexer.heard(publisher, "w", 1)
        (worker,) = indexer.service._started().describe()
        assert (worker["endpoint"], worker["block_size"]) == (indexer.endpoint, BLOCK)


async def test_without_an_endpoint_nothing_is_bound() -> None:
    async with listening(None) as indexer:
        with pytest.raises(ApiError, match="listen_endpoint") as refused:
            await indexer.post("/register", instance_id="w", model="m", bind=True)
        assert refused.value.status == 400


async def test_a_replay_endpoint_that_is_none_costs_its_publisher_the_replays_alone() -> None:
    """Not the listener, which is everybody's; and the sockets are closed, or the service would never end."""
    async with listening() as indexer:
        feeds = indexer.service._started()
        feeds.follow(Feed(Source("w"), "m", indexer.endpoint, "tcp://x", topic="kv-events"), by_hand=True)
        with connecting(indexer.endpoint, "kv-events") as one, connecting(indexer.endpoint, "kv@other@m") as two:
            await indexer.heard(one, "w", 1)
            await indexer.heard(two, "other", 1)
        assert feeds.statistics()["feed_replay_failures_total"] >= 1
