"""The indexer over real sockets: real publishers, lost batches, restarts, matches and HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from kvmesh.config import IndexerSettings
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.indexer.app import IndexerService
from kvmesh.net.client import HttpClient
from kvmesh.net.service import serving
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.events import BlockRemoved, BlockStored
from kvmesh.protocol.match import MatchReply, MatchRequest

BLOCK = 4
LOOPBACK = "tcp://127.0.0.1:*"


def block(number: int, parent: int | None = None) -> BlockStored:
    return BlockStored(block_hashes=[number], parent_block_hash=parent, token_ids=[number] * BLOCK, block_size=BLOCK)


def prompt(*numbers: int) -> list[int]:
    return [number for number in numbers for _ in range(BLOCK)]


class Running:
    """A running indexer and ways to ask it."""

    def __init__(self, service: IndexerService, url: str, client: HttpClient) -> None:
        self.service = service
        self.url = url
        self.client = client

    async def register(self, name: str, publisher: ZmqPublisher, *, replay: bool = True) -> None:
        body = {"endpoint": publisher.endpoint, "instance_id": name, "modelname": "m"}
        if replay:
            body["replay_endpoint"] = publisher.replay_endpoint
        await self.post("/register", body)

    async def post(self, path: str, body: Any) -> Any:
        return await self.client.call("POST", self.url + path, Any, body=body)

    async def query(self, *numbers: int) -> dict[str, int]:
        reply = await self.post("/query", {"model": "m", "token_ids": prompt(*numbers)})
        return {name: found["longest_matched"] for name, found in reply["default"].items()}

    async def until(self, expected: dict[str, int], *numbers: int) -> None:
        """Wait, bounded, until a query gives ``expected``."""
        await eventually(lambda: self.query(*numbers), expected)


async def eventually(ask: Callable[[], Any], expected: Any) -> None:
    for _ in range(1000):
        if await ask() == expected:
            return
        await anyio.sleep(0.01)
    assert await ask() == expected


@asynccontextmanager
async def running_indexer() -> AsyncIterator[Running]:
    service = IndexerService(IndexerSettings(match_endpoint=LOOPBACK, drain_s=1))
    async with HttpClient() as client, serving(service) as url:
        yield Running(service, url, client)


@pytest.fixture
def publisher() -> Any:
    publisher = ZmqPublisher(LOOPBACK, LOOPBACK)
    publisher.start()
    yield publisher
    publisher.shutdown()


async def test_history_then_live_then_removal(publisher: ZmqPublisher) -> None:
    publisher.publish([block(1)])
    async with running_indexer() as indexer:
        await indexer.register("w", publisher)
        await indexer.until({"w": BLOCK}, 1, 2)
        publisher.publish([block(2, parent=1)])
        await indexer.until({"w": 2 * BLOCK}, 1, 2)
        publisher.publish([BlockRemoved(block_hashes=[2])])
        await indexer.until({"w": BLOCK}, 1, 2)


async def test_a_dropped_batch_is_noticed_and_the_rest_read_anew(publisher: ZmqPublisher) -> None:
    async with running_indexer() as indexer:
        await indexer.register("w", publisher)
        publisher.publish([block(1)])
        await indexer.until({"w": BLOCK}, 1)
        publisher._sequence += 1  # a batch that was dropped: its number is used and it is not kept
        publisher.publish([block(2, parent=1)])
        await indexer.until({"w": 2 * BLOCK}, 1, 2)
        assert indexer.service.statistics()["feed_resets_total"] == 1


async def test_a_restarted_publisher_is_cleared(publisher: ZmqPublisher) -> None:
    async with running_indexer() as indexer:
        await indexer.register("w", publisher)
        for number in range(1, 4):
            publisher.publish([block(number)])
        await indexer.until({"w": BLOCK}, 3)
        endpoints = (publisher.endpoint, publisher.replay_endpoint)
        publisher.shutdown()
        again = ZmqPublisher(*endpoints)
        again.start()
        try:
            # What is published before the reader has reconnected is replayed when the restart is noticed.
            async def published() -> dict[str, int]:
                again.publish([block(9)])
                return await indexer.query(9)

            await eventually(published, {"w": BLOCK})
            assert await indexer.query(3) == {}
        finally:
            again.shutdown()


async def test_unregistering_forgets_at_once(publisher: ZmqPublisher) -> None:
    publisher.publish([block(1)])
    async with running_indexer() as indexer:
        await indexer.register("w", publisher)
        await indexer.until({"w": BLOCK}, 1)
        assert (await indexer.post("/unregister", {"instance_id": "w"}))["known"] is True
        assert await indexer.query(1) == {}
        assert (await indexer.post("/unregister", {"instance_id": "w"}))["known"] is False


async def test_what_a_registration_says_of_its_blocks(publisher: ZmqPublisher) -> None:
    salted = block(2)
    salted.extra_keys = [["of the event"]]
    publisher.publish([block(1), salted])
    async with running_indexer() as indexer:
        body = {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "type": "SGLang",
            "instance_id": "w",
            "modelname": "m",
            "lora_name": "adapter",
            "tenant_id": "t",
            "additionalsalt": "of the worker",
            "block_size": BLOCK,
            "dp_rank": 3,
        }
        await indexer.post("/register", body)

        async def ask(number: int, **scope: Any) -> Any:
            question = {"model": "m", "token_ids": prompt(number), "lora_name": "adapter", "tenant_id": "t", **scope}
            return (await indexer.post("/query", question))["t"].get("w", {}).get("DP")

        await eventually(lambda: ask(1, cache_salt="of the worker"), {"3": BLOCK})
        assert await ask(2, cache_salt="of the event") == {"3": BLOCK}
        assert await ask(1) is None
        assert await ask(1, cache_salt="of the worker", lora_name=None) is None
        assert await ask(1, cache_salt="of the worker", block_size=2 * BLOCK) is None
        assert await ask(1, cache_salt="of the worker", instance_id="another") is None
        assert (await indexer.post("/unregister", {"instance_id": "w", "dp_rank": 0}))["known"] is False
        assert (await indexer.post("/unregister", {"instance_id": "w", "dp_rank": 3}))["known"] is True


async def test_a_publisher_without_replay_is_followed_live(publisher: ZmqPublisher) -> None:
    async with running_indexer() as indexer:
        await indexer.register("w", publisher, replay=False)

        async def published() -> dict[str, int]:
            publisher.publish([block(5)])
            return await indexer.query(5)

        await eventually(published, {"w": BLOCK})


async def test_match_socket(publisher: ZmqPublisher) -> None:
    publisher.publish([block(1), block(2, parent=1)])
    async with running_indexer() as indexer:
        await indexer.register("w", publisher)
        await indexer.until({"w": 2 * BLOCK}, 1, 2)
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        try:
            dealer.connect(indexer.service.matching.endpoint)
            await dealer.send(b"nonsense")
            tokens = np.array(prompt(1, 2, 3), np.int32).tobytes()
            for salt in (None, "tenant"):
                request = MatchRequest(id=7, model="m", token_ids=tokens, cache_salt=salt)
                await dealer.send(msgspec.msgpack.encode(request))
                with anyio.fail_after(5):
                    reply = msgspec.msgpack.decode(await dealer.recv(), type=MatchReply)
                assert reply.id == 7
                found = [(match.instance_id, match.device_tokens) for match in reply.matches]
                assert found == ([] if salt else [("w", 2 * BLOCK)])
            assert indexer.service.statistics()["malformed_match_requests_total"] == 1
        finally:
            dealer.close()
            context.term()


async def test_dump_workers_and_metrics(publisher: ZmqPublisher) -> None:
    publisher.publish([block(1)])
    async with running_indexer() as indexer:
        await indexer.register("w", publisher)
        await indexer.until({"w": BLOCK}, 1)
        (dumped,) = await indexer.client.call("GET", f"{indexer.url}/dump?instance_id=w", Any)
        (held,) = dumped["blocks"]
        assert (held["model"], held["block_size"], held["tier"], held["parent_hash"]) == ("m", BLOCK, "device", None)
        (worker,) = await indexer.client.call("GET", f"{indexer.url}/workers", Any)
        assert (worker["blocks"], worker["connected"], worker["last_sequence"]) == (1, True, 0)
        found = await indexer.post("/query_by_hash", {"model": "m", "seq_hashes": [held["seq_hash"], 7]})
        tokens = {"longest_matched": BLOCK, "GPU": BLOCK, "CPU": BLOCK, "DISK": BLOCK, "DP": {"0": BLOCK}}
        assert found["default"] == {"w": tokens}
        async with indexer.client.open("GET", f"{indexer.url}/metrics") as response:
            assert "kvmesh_indexer_residencies 1.0" in await response.text()


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/register", {"endpoint": "udp://x", "instance_id": "w", "modelname": "m"}, "tcp://HOST:PORT"),
        ("/register", {"endpoint": "tcp://x:1", "instance_id": "", "modelname": "m"}, "instance_id"),
        ("/register", {"instance_id": "w"}, "endpoint"),
        ("/query", {"model": "m", "token_ids": [2**40]}, "32 bits"),
    ],
)
async def test_bad_requests(path: str, body: Any, says: str) -> None:
    async with running_indexer() as indexer:
        with pytest.raises(ApiError, match=says) as caught:
            await indexer.post(path, body)
        assert caught.value.status == 400
