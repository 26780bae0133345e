"""The bodies that Dynamo's and Mooncake's clients send, as their documents give them, and the keys that they read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

from kvmesh.config import IndexerSettings
from kvmesh.events.index import Source
from kvmesh.events.index.index import DumpedBlock
from kvmesh.events.records import Stored, Tier
from kvmesh.hashing import local_hashes, sequence_hashes
from kvmesh.indexer.app import IndexerService
from kvmesh.indexer.routes import DUMPED_A_TURN
from kvmesh.net.client import HttpClient
from kvmesh.net.service import serving
from kvmesh.protocol.errors import ApiError

BLOCK = 4
TOKENS = list(range(1, 13))


def stored(first: int, count: int, tier: Tier = Tier.DEVICE) -> Stored:
    """Blocks ``first``... of :data:`TOKENS`."""
    tokens = np.array(TOKENS[first * BLOCK : (first + count) * BLOCK], np.int32)
    hashes = list(range(first + 1, first + count + 1))
    return Stored(hashes=hashes, parent=first or None, token_ids=tokens, block_size=BLOCK, tier=tier)


class Client:
    def __init__(self, service: IndexerService, url: str, http: HttpClient) -> None:
        self.service = service
        self._url = url
        self._http = http

    async def post(self, path: str, body: Any) -> Any:
        return await self._http.call("POST", self._url + path, Any, body=body)

    async def get(self, path: str) -> Any:
        return await self._http.call("GET", self._url + path, Any)

    def hold(self, instance_id: str, rank: int = 0, model: str = "m") -> None:
        """Two blocks on the device, the third on the host."""
        source = Source(instance_id, rank)
        self.service.index.add(source, model=model)
        self.service.index.apply(source, [stored(0, 2), stored(2, 1, Tier.HOST)])


@asynccontextmanager
async def indexer() -> AsyncIterator[Client]:
    service = IndexerService(IndexerSettings(match_endpoint="tcp://127.0.0.1:*", drain_s=1))
    async with HttpClient() as http, serving(service) as url:
        yield Client(service, url, http)


async def test_a_query_of_dynamo() -> None:
    """§2.7: ``model_name``, and counts by instance and rank under ``scores`` and ``instances``."""
    async with indexer() as client:
        client.hold("1", 0)
        client.hold("1", 1)
        answer = await client.post("/query", {"token_ids": TOKENS, "model_name": "m"})
        assert answer["scores"] == {"1": {"0": 8, "1": 8}}
        assert answer["frequencies"] == []
        assert answer["instances"] == {
            "1": {"longest_matched": 12, "gpu": 8, "dp": {"0": 8, "1": 8}, "cpu": 12, "disk": 12}
        }


async def test_a_query_of_mooncake() -> None:
    """§2.7: ``model``, and ``{tenant: {instance: {longest_matched, GPU, CPU, DISK, DP}}}`` in tokens."""
    async with indexer() as client:
        client.hold("vllm-0", 2)
        question = {"model": "m", "lora_name": "", "token_ids": TOKENS, "tenant_id": None, "block_size": BLOCK}
        answer = await client.post("/query", {**question, "cache_salt": ""})
        assert answer["default"] == {
            "vllm-0": {"longest_matched": 12, "GPU": 8, "CPU": 12, "DISK": 12, "DP": {"2": 12}}
        }
        assert (await client.post("/query", {**question, "block_size": 8}))["default"] == {}
        assert (await client.post("/query", {**question, "instance_id": "vllm-1"}))["default"] == {}


async def test_hashes_of_either_kind() -> None:
    """§2.7: Mooncake sends rolling hashes, Dynamo those of each block; both may be signed."""
    async with indexer() as client:
        client.hold("1")
        local = local_hashes(np.array(TOKENS, np.int32), BLOCK)
        rolling = sequence_hashes(local)
        for field, hashes in (("seq_hashes", rolling), ("block_hash", rolling), ("block_hashes", local)):
            for signed in (False, True):
                numbers = hashes.astype(np.int64).tolist() if signed else hashes.tolist()
                answer = await client.post("/query_by_hash", {"model_name": "m", field: numbers})
                assert answer["instances"]["1"]["longest_matched"] == 12, (field, signed)
        with pytest.raises(ApiError) as refused:
            await client.post("/query_by_hash", {"model_name": "m"})
        assert refused.value.status == 400


async def test_registrations_of_both() -> None:
    """§2.7: Dynamo's numbers as instances, Mooncake's ``modelname`` and ``additionalsalt``."""
    async with indexer() as client:
        endpoint = "tcp://127.0.0.1:1"
        dynamo = {"instance_id": 7, "endpoint": endpoint, "model_name": "m", "block_size": 16, "additional_salt": "s"}
        assert (await client.post("/register", dynamo))["status"] == "ok"
        mooncake = {
            "endpoint": endpoint,
            "replay_endpoint": "",
            "type": "vLLM",
            "modelname": "other",
            "lora_name": None,
            "tenant_id": None,
            "instance_id": "vllm-0",
            "block_size": 128,
            "dp_rank": 0,
            "additionalsalt": "w8a8",
        }
        assert (await client.post("/register", mooncake))["instance_id"] == "vllm-0"
        (worker,) = await client.get("/workers?model_name=m")
        assert (worker["instance_id"], worker["block_size"], worker["status"]) == ("7", 16, "pending")
        assert worker["endpoints"] == {"0": endpoint}
        assert [one["model"] for one in await client.get("/workers")] == ["m", "other"]
        ended = await client.post("/unregister", {"instance_id": 7, "model_name": "m"})
        assert ended == {"status": "ok", "known": True, "removed_instances": ["7|default|0"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/query", {"token_ids": [1]}),
        ("/query", {"model": "m", "token_ids": [2**40]}),
        ("/register", {"instance_id": 1, "model": "m"}),
        ("/register", {"instance_id": "", "model": "m", "endpoint": "tcp://a:1"}),
        ("/register", {"instance_id": 1, "model": "m", "events": "none"}),
        ("/register", {"instance_id": 1, "model": "m", "events": "other", "endpoint": "tcp://a:1"}),
    ],
)
async def test_bodies_that_make_no_sense(path: str, body: Any) -> None:
    async with indexer() as client:
        with pytest.raises(ApiError) as refused:
            await client.post(path, body)
        assert refused.value.status == 400


async def test_a_dump_is_filtered() -> None:
    async with indexer() as client:
        client.hold("a", 0)
        client.hold("a", 1)
        client.hold("b", 0, model="other")

        async def dumped(filters: str) -> dict[tuple[str, int], int]:
            found = await client.get(f"/dump?{filters}")
            return {(one["instance_id"], one["dp_rank"]): len(one["blocks"]) for one in found}

        assert await dumped("instance_id=a&dp_rank=1") == {("a", 1): 3}
        assert await dumped("tier=host") == {("a", 0): 1, ("a", 1): 1, ("b", 0): 1}
        assert await dumped("tier=CPU") == await dumped("tier=host"), "as events and /query call it"
        assert await dumped("model=other&salt=") == {("a", 0): 0, ("a", 1): 0, ("b", 0): 3}
        assert await dumped("salt=tenant&instance_id=a&dp_rank=0") == {("a", 0): 0}
        assert await dumped("limit=2&instance_id=b") == {("b", 0): 2}
        with pytest.raises(ApiError) as refused:
            await client.get("/dump?limit=all")
        assert refused.value.status == 400
        with pytest.raises(ApiError, match="write device, host or disk"):
            await client.get("/dump?tier=nonsense")


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        ("/query", {"token_ids": [1], "block_size": 2**31}, "block_size"),
        ("/query", {"token_ids": [2**31]}, "32 bits"),
        ("/query_by_hash", {"seq_hashes": [1], "block_size": 2**31}, "block_size"),
        ("/predict", {"token_ids": [1], "block_size": 2**31, "instance_id": "w"}, "block_size"),
        ("/predict", {"token_ids": [1], "dp_rank": 2**64, "instance_id": "w"}, "dp_rank"),
        ("/register", {"instance_id": "w", "events": "none", "block_size": 2**31}, "block_size"),
        ("/register", {"instance_id": "w", "endpoint": "tcp://x"}, "tcp://HOST:PORT"),
        ("/register", {"instance_id": "w", "endpoint": "tcp://127.0.0.1:99999"}, "tcp://HOST:PORT"),
        ("/register", {"instance_id": "w", "endpoint": "tcp://a\0b:1"}, "character"),
        ("/register", {"instance_id": "w", "endpoint": "ipc://" + "x" * 300}, "107 bytes"),
        ("/register", {"instance_id": "w", "endpoint": "tcp://h:1", "replay_endpoint": "tcp://"}, "replay_endpoint"),
    ],
)
async def test_what_a_client_gets_wrong_is_a_400_with_a_sentence(path: str, fields: dict[str, Any], names: str) -> None:
    async with indexer() as client:
        with pytest.raises(ApiError, match=names) as caught:
            await client.post(path, {"model": "m", **fields})
        assert caught.value.status == 400
        assert await client.get("/workers") == []


async def test_a_number_in_a_query_string_has_a_bound() -> None:
    async with indexer() as client:
        for digits in (19, 5000):
            with pytest.raises(ApiError, match="limit is") as caught:
                await client.get("/dump?limit=" + "9" * digits)
            assert caught.value.status == 400


async def test_others_get_their_turn_during_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at everything, even one that shows nothing, is no reason for routers to wait."""
    async with indexer() as client:
        index, source, count = client.service.index, Source("w"), 20 * DUMPED_A_TURN
        index.add(source, model="m")
        tokens = np.arange(count * BLOCK, dtype=np.int32)
        hashes = list(range(1, count + 1))
        index.apply(source, [Stored(hashes=hashes, parent=None, token_ids=tokens, block_size=BLOCK, tier=Tier.DEVICE)])
        dump, in_a_row, most, done = index.dump, 0, 0, False

        def counted(source: Source) -> Iterator[DumpedBlock]:
            nonlocal in_a_row, most
            for block in dump(source):
                in_a_row += 1
                most = max(most, in_a_row)
                yield block

        async def others() -> None:
            nonlocal in_a_row
            while not done:
                in_a_row = 0
                await anyio.lowlevel.checkpoint()

        monkeypatch.setattr(index, "dump", counted)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others)
            for filters, shown in (("", count), ("?salt=nosuch", 0), ("?limit=300", 300)):
                (dumped,) = await client.get(f"/dump{filters}")
                assert (dumped["num_blocks"], len(dumped["blocks"])) == (count, shown)
                assert len({block["seq_hash"] for block in dumped["blocks"]}) == shown
            done = True
        assert most == DUMPED_A_TURN
        assert await client.get("/dump?instance_id=nobody") == []
