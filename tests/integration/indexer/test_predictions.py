"""What is predicted of a worker counts until its time is over, its events come, or for ever anew where it has none."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from tellers import BLOCK, Teller, tokens
from waiting import until

from kvmesh.config import IndexerSettings
from kvmesh.indexer.app import IndexerService
from kvmesh.net.client import HttpClient
from kvmesh.net.clock import ManualClock
from kvmesh.net.service import serving
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.match import ROUTED, Routed
from kvmesh.protocol.members import Member, MemberEvent

TTL_S = 5.0
APPROXIMATE_TTL_S = 120.0


class Indexer:
    def __init__(self, service: IndexerService, clock: ManualClock, url: str, http: HttpClient) -> None:
        self.service = service
        self.clock = clock
        self._url = url
        self._http = http

    async def post(self, path: str, **body: Any) -> Any:
        return await self._http.call("POST", self._url + path, Any, body=body)

    async def follow(self, teller: Teller, **fields: Any) -> None:
        stream, replay = teller.endpoints
        await self.post("/register", instance_id="w", model="m", endpoint=stream, replay_endpoint=replay, **fields)

    def held(self, *numbers: int, **scope: Any) -> dict[str, int]:
        matches = self.service.index.match(np.array(tokens(*numbers), np.int32), model="m", **scope)
        return {match.instance_id: match.device_tokens // BLOCK for match in matches}


@asynccontextmanager
async def running() -> AsyncIterator[Indexer]:
    clock = ManualClock()
    settings = IndexerSettings(
        match_endpoint="tcp://127.0.0.1:*", drain_s=1, predicted_ttl_s=TTL_S, approximate_ttl_s=APPROXIMATE_TTL_S
    )
    service = IndexerService(settings, clock=clock)
    async with HttpClient() as http, serving(service) as url:
        yield Indexer(service, clock, url, http)


@pytest.fixture
def teller() -> Iterator[Teller]:
    teller = Teller()
    yield teller
    teller.close()


async def test_a_prediction_counts_until_its_time_is_over(teller: Teller) -> None:
    async with running() as indexer:
        await indexer.follow(teller, block_size=BLOCK)
        await indexer.post("/predict", instance_id="w", model="m", token_ids=tokens(1, 2, 3), ttl_s=2.0)
        await until(lambda: indexer.held(1, 2) == {"w": 2}, "the worker is connected to")
        indexer.clock.advance(1.9)
        assert indexer.held(1, 2, 3, 4) == {"w": 3}
        indexer.clock.advance(0.2)
        assert indexer.held(1, 2) == {}


async def test_events_make_it_real(teller: Teller) -> None:
    async with running() as indexer:
        await indexer.follow(teller, block_size=BLOCK)
        await indexer.post("/predict", instance_id="w", model="m", token_ids=tokens(1, 2, 3))
        teller.store(1, 2)
        await until(lambda: indexer.service.statistics()["feed_batches_total"] == 1)
        indexer.clock.advance(TTL_S + 0.1)
        assert indexer.held(1, 2, 3) == {"w": 2}
        teller.remove(2)
        await until(lambda: indexer.held(1, 2, 3) == {"w": 1})


async def test_a_worker_without_events_is_known_by_predictions() -> None:
    """§2.5: decode workers may not emit events."""
    async with running() as indexer:
        await indexer.post("/register", instance_id="w", model="m", events="none", block_size=BLOCK)
        await indexer.post("/predict", instance_id="w", model="m", token_ids=tokens(1, 2), ttl_s=1.0)
        assert indexer.held(1, 2) == {"w": 2}
        indexer.clock.advance(APPROXIMATE_TTL_S - 1)
        assert indexer.held(1, 2) == {"w": 2}
        await indexer.post("/predict", instance_id="w", model="m", token_ids=tokens(1))
        indexer.clock.advance(2)
        assert indexer.held(1, 2) == {"w": 1}, "what is asked for again stays"
        await indexer.post("/unregister", instance_id="w")
        assert indexer.held(1) == {}


async def test_a_member_without_events_is_followed_by_predictions_too() -> None:
    async with running() as indexer:
        feeds = indexer.service._started()
        member = Member(
            instance_id="w", role="generation", url="http://x", model="m", tokens_per_block=BLOCK, epoch=3, dp_size=2
        )
        feeds.hear(MemberEvent(revision=1, kind="joined", member=member))
        await indexer.post("/predict", instance_id="w", dp_rank=1, model="m", token_ids=tokens(1))
        assert indexer.held(1) == {"w": 1}
        assert indexer.service.statistics()["feeds_approximate"] == 2
        feeds.hear(MemberEvent(revision=2, kind="joined", member=msgspec.structs.replace(member, epoch=4)))
        assert indexer.held(1) == {}, "another life has nothing"
        with pytest.raises(ApiError, match="worker of the mesh") as refused:
            await indexer.post("/register", instance_id="w", model="m", events="none", block_size=BLOCK)
        assert refused.value.status == 409
        feeds.hear(MemberEvent(revision=3, kind="dead", member=msgspec.structs.replace(member, epoch=4)))
        assert indexer.service.statistics()["feeds_approximate"] == 0


async def test_routers_tell_over_the_match_socket(teller: Teller) -> None:
    async with running() as indexer:
        await indexer.follow(teller, block_size=BLOCK)
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        try:
            dealer.connect(indexer.service.matching.endpoint)
            prompt = np.array(tokens(1, 2), np.int32).tobytes()
            for worker, salt in (("w", None), ("w", "tenant"), ("nobody", None)):
                routed = Routed(instance_id=worker, model="m", token_ids=prompt, cache_salt=salt, ttl_s=TTL_S)
                await dealer.send_multipart([ROUTED, msgspec.msgpack.encode(routed)])
            await dealer.send_multipart([ROUTED, b"nonsense"])
            await until(lambda: indexer.service.statistics()["malformed_match_requests_total"] == 1)
            await until(lambda: indexer.held(1, 2) == {"w": 2})
            assert indexer.held(1, 2, cache_salt="tenant") == {"w": 2}
            assert indexer.held(1, 2, cache_salt="other") == {}
            statistics = indexer.service.statistics()
            assert (statistics["routed_total"], statistics["predictions_total"]) == (3, 2)
            assert statistics["predictions_refused_total"] == 1
            assert not await dealer.poll(0), "nothing is answered"
        finally:
            dealer.close()
            context.term()


async def test_no_message_ends_the_match_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times and ranks that nobody means are malformed; a defect is counted, and the next question answered."""
    async with running() as indexer:
        await indexer.post("/register", instance_id="w", model="m", events="none", block_size=BLOCK)
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        try:
            dealer.connect(indexer.service.matching.endpoint)
            prompt = np.array(tokens(1, 2), np.int32).tobytes()
            fields = {"instance_id": "w", "model": "m", "token_ids": prompt, "dp_rank": 0, "ttl_s": TTL_S}
            wrong: list[dict[str, Any]] = [{"ttl_s": value} for value in (math.inf, math.nan, 1e300, 0.0, -1.0)]
            wrong += [{"dp_rank": value} for value in (-1, 1 << 16, 1 << 63)]
            for changes in wrong:
                await dealer.send_multipart([ROUTED, msgspec.msgpack.encode(fields | changes)])
            statistics = indexer.service.statistics
            await until(lambda: statistics()["malformed_match_requests_total"] == len(wrong))
            question = {"id": 1, "model": "m", "token_ids": prompt}
            with monkeypatch.context() as broken:
                broken.setattr(indexer.service.matching, "_match", None)
                await dealer.send(msgspec.msgpack.encode(question))
                await until(lambda: statistics()["failed_match_requests_total"] == 1)
            await dealer.send(msgspec.msgpack.encode(question | {"id": 2}))
            assert msgspec.msgpack.decode(await dealer.recv())["id"] == 2
        finally:
            dealer.close()
            context.term()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"instance_id": "w", "dp_rank": 1 << 64}, 400),
        ({"instance_id": "nobody"}, 404),
        ({"instance_id": "w", "dp_rank": 1}, 404),
        ({}, 400),
        ({"instance_id": "w", "model": "other"}, 400),
        ({"instance_id": "w", "ttl_s": -1}, 400),
    ],
)
async def test_predictions_of_nobody(body: dict[str, Any], status: int) -> None:
    async with running() as indexer:
        await indexer.post("/register", instance_id="w", model="m", events="none", block_size=BLOCK)
        with pytest.raises(ApiError) as refused:
            await indexer.post("/predict", **{"model": "m", "token_ids": tokens(1), **body})
        assert refused.value.status == status
