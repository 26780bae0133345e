"""The merged stream: the events of every worker in one feed, in order, with whose they are; replayed on request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
import zmq
import zmq.asyncio
from tellers import Teller, tokens
from waiting import until

from kvmesh.cli import main as cli
from kvmesh.config import IndexerSettings
from kvmesh.events.decoding import decode_batch
from kvmesh.events.index import Source
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.records import Cleared, EventRecord, Removed, Stored, Tier
from kvmesh.events.replay import ReplayRequest
from kvmesh.indexer.app import IndexerService
from kvmesh.net.client import HttpClient
from kvmesh.net.service import serving
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.events import BlockRemoved, BlockStored
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.protocol.mesh_events import MeshOrigin

BLOCK = 4
LOOPBACK = "tcp://127.0.0.1:*"

envelope = msgspec.msgpack.Decoder(tuple[float, msgspec.Raw, int, MeshOrigin])


def block(number: int, parent: int | None = None, **fields: Any) -> BlockStored:
    return BlockStored(
        block_hashes=[number], parent_block_hash=parent, token_ids=[number] * BLOCK, block_size=BLOCK, **fields
    )


@pytest.fixture
def publishers() -> Iterator[list[ZmqPublisher]]:
    made = [ZmqPublisher(LOOPBACK, LOOPBACK, encoding=encoding) for encoding in ("map", "array")]
    for publisher in made:
        publisher.start()
    yield made
    for publisher in made:
        publisher.shutdown()


async def kept(endpoint: str, start: int = 0) -> list[tuple[str, MeshOrigin, list[Any]]]:
    """What the merged stream replays: topics, origins and records."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    found: list[tuple[str, MeshOrigin, list[Any]]] = []
    try:
        async with ReplayRequest(context, endpoint, start, 5.0) as replay:
            while (batch := await replay.next()) is not None:
                assert batch.sequence == start + len(found)
                origin = envelope.decode(batch.payload)[3]
                found.append((batch.topic.decode(), origin, decode_batch(batch.payload).records))
    finally:
        context.term()
    return found


async def test_every_workers_events_in_one_feed(publishers: list[ZmqPublisher]) -> None:
    settings = IndexerSettings(
        match_endpoint=LOOPBACK, publish_endpoint=LOOPBACK, publish_replay_endpoint=LOOPBACK, drain_s=1
    )
    service = IndexerService(settings)
    async with HttpClient() as http, serving(service) as url:
        for number, publisher in enumerate(publishers):
            publisher.publish([block(1, lora_name="sql"), block(2, parent=1)])
            publisher.publish([block(2, medium="CPU"), BlockRemoved(block_hashes=[2])])
            body = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint, "modelname": "m"}
            await http.call(
                "POST", f"{url}/register", Any, body={**body, "instance_id": f"w{number}", "dp_rank": number}
            )
            await until(lambda number=number: service.statistics()["merged_batches_total"] == 2 * (number + 1))
        await http.call("POST", f"{url}/unregister", Any, body={"instance_id": "w0"})
        stream = await http.call("GET", f"{url}/stream", dict[str, str])
        assert service.merged is not None
        assert stream["endpoint"] == service.merged.endpoint
        feed = await kept(stream["replay_endpoint"])
        assert [topic for topic, _, _ in feed] == ["kvmesh@w0@0@m"] * 2 + ["kvmesh@w1@1@m"] * 2 + ["kvmesh@w0@0@m"]
        for _, origin, records in (feed[0], feed[2]):
            first, second = records
            assert isinstance(first, Stored)
            assert (first.hashes, first.parent, first.lora, first.tier) == ([1], None, "sql", Tier.DEVICE)
            assert (second.parent, second.token_ids.tolist(), second.block_size) == (1, [2] * BLOCK, BLOCK)
            assert (origin.model, origin.tenant, origin.sequence) == ("m", "default", 0)
        stored, removed = feed[1][2]
        assert (stored.tier, removed) == (Tier.HOST, Removed(hashes=[2]))
        assert feed[4][2] == [Cleared()]
        assert len(await kept(stream["replay_endpoint"], start=3)) == 2


async def test_the_replay_is_bounded(publishers: list[ZmqPublisher]) -> None:
    settings = IndexerSettings(
        match_endpoint=LOOPBACK,
        publish_endpoint=LOOPBACK,
        publish_replay_endpoint=LOOPBACK,
        publish_buffer_bytes=1000,
        drain_s=1,
    )
    service = IndexerService(settings)
    publisher = publishers[0]
    async with HttpClient() as http, serving(service) as url:
        for number in range(1, 31):
            publisher.publish([block(number)])
        body = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint, "modelname": "m"}
        await http.call("POST", f"{url}/register", Any, body={**body, "instance_id": "w"})
        await until(lambda: service.statistics()["merged_batches_total"] == 30)
        assert service.statistics()["merged_kept_bytes"] <= 1000


@pytest.mark.parametrize("in_mesh", [True, False], ids=["a member", "a foreign engine"])
async def test_restored_blocks_are_told_again(in_mesh: bool, tmp_path: Path) -> None:
    """A reader of the restarted indexer hears of what the snapshot had; of a member also what it keeps no batch of."""
    teller = Teller(buffer_steps=3 if in_mesh else 100)
    stream, replay = teller.endpoints
    settings = IndexerSettings(
        match_endpoint=LOOPBACK,
        publish_endpoint=LOOPBACK,
        publish_replay_endpoint=LOOPBACK,
        snapshot_path=str(tmp_path / "index"),
        snapshot_interval_s=0,
        drain_s=1,
    )
    member = Member(
        instance_id="w",
        role="context",
        url="http://x",
        model="m",
        epoch=1,
        events_endpoint=stream,
        replay_endpoint=replay,
        tokens_per_block=BLOCK,
    )
    body = {"endpoint": stream, "replay_endpoint": replay, "modelname": "m", "instance_id": "w"}
    joined = MemberEvent(revision=1, kind="joined", member=member)
    try:
        service = IndexerService(settings)
        async with HttpClient() as http, serving(service) as url:
            if in_mesh:
                service._started().hear(joined)
            else:
                await http.call("POST", f"{url}/register", Any, body=body)
            for number in range(1, 9):
                teller.store(number, parent=number - 1 or None)
            await until(lambda: service.index.num_held(Source("w")) == 8)
        teller.store(9, parent=8)
        teller.remove(9, 8)
        service = IndexerService(settings)
        async with serving(service):
            assert service.statistics()["snapshot_restored_blocks"] == 8
            if in_mesh:
                service._started().hear(joined)
            await until(lambda: service.statistics()["feeds_connected"] == 1)
            assert service.statistics()["feed_resets_total"] == 0
            assert service.merged is not None
            assert service.merged.replay_endpoint is not None
            told: dict[int, list[int]] = {}
            hidden = True
            for _, origin, records in await kept(service.merged.replay_endpoint):
                hidden = origin.hidden
                for record in records:
                    if isinstance(record, Cleared):
                        told.clear()
                    elif isinstance(record, Removed):
                        for number in record.hashes:
                            told.pop(number, None)
                    else:
                        parts = record.token_ids.reshape(-1, BLOCK).tolist()
                        told |= dict(zip(record.hashes, parts, strict=True))
            assert told == {number: tokens(number) for number in range(1, 8)}
            assert not hidden
    finally:
        teller.close()


class Held:
    """What a reader of the merged stream knows: tokens of each block, by worker and tier."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, Tier, int], list[int]] = {}
        self.hidden: set[str] = set()
        self.last = -1

    async def read(self, endpoint: str, start: int, *, with_state: bool = False) -> None:
        """The answer to one request."""
        with zmq.Context() as context:
            async with ReplayRequest(context, endpoint, start, 30.0, with_state=with_state) as replay:
                while (batch := await replay.next()) is not None:
                    self.last = batch.sequence
                    self._take(envelope.decode(batch.payload)[3], decode_batch(batch.payload).records)

    async def read_until(self, endpoint: str, expected: dict[tuple[str, Tier, int], list[int]]) -> None:
        """Ask for the state until it is this: a worker that is slow to answer is left out of one."""
        with anyio.fail_after(60):
            while self.blocks != expected:
                await self.read(endpoint, 0, with_state=True)

    def _take(self, origin: MeshOrigin, records: list[EventRecord]) -> None:
        worker = origin.instance_id
        (self.hidden.add if origin.hidden else self.hidden.discard)(worker)
        for record in records:
            if isinstance(record, Cleared):
                self.blocks = {place: told for place, told in self.blocks.items() if place[0] != worker}
            elif isinstance(record, Removed):
                for number in record.hashes:
                    self.blocks.pop((worker, record.tier, number), None)
            else:
                for number, told in zip(record.hashes, record.token_ids.reshape(-1, BLOCK).tolist(), strict=True):
                    self.blocks[worker, record.tier, number] = told


async def test_who_comes_too_late_for_the_replay_asks_for_the_state(publishers: list[ZmqPublisher]) -> None:
    """Of members that is everything, of other engines what they keep; and the stream goes on behind it."""
    teller = Teller(buffer_steps=3)
    settings = IndexerSettings(
        match_endpoint=LOOPBACK,
        publish_endpoint=LOOPBACK,
        publish_replay_endpoint=LOOPBACK,
        publish_buffer_bytes=2000,
        drain_s=1,
    )
    member = Member(
        instance_id="ours",
        role="context",
        url="http://x",
        model="m",
        epoch=1,
        events_endpoint=teller.endpoints[0],
        replay_endpoint=teller.endpoints[1],
        tokens_per_block=BLOCK,
    )
    service = IndexerService(settings)
    try:
        async with HttpClient() as http, serving(service) as url:
            merged = service.merged
            assert merged is not None
            assert merged.replay_endpoint is not None
            empty = Held()
            await empty.read(merged.replay_endpoint, 0, with_state=True)
            assert (empty.blocks, empty.last) == ({}, -1)
            service._started().hear(MemberEvent(revision=1, kind="joined", member=member))
            for name, publisher in zip(("theirs", "gone"), publishers, strict=True):
                body = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
                named = {"modelname": "m", "instance_id": name}
                await http.call("POST", f"{url}/register", Any, body=body | named)
                publisher.publish([block(1), block(2, parent=1, medium="CPU")])
            for number in range(1, 41):
                teller.store(number, parent=number - 1 or None)
            teller.remove(40)
            await until(lambda: service.index.statistics().residencies == 39 + 4)
            await until(lambda: service.statistics()["feeds_connected"] == 3)
            publishers[1].shutdown()
            await until(lambda: service.statistics()["feeds_connected"] == 2)
            ours = {("ours", Tier.DEVICE, number): tokens(number) for number in range(1, 40)}
            theirs = {("theirs", tier, number): tokens(number) for tier, number in ((Tier.DEVICE, 1), (Tier.HOST, 2))}
            readers = [Held(), Held()]
            async with anyio.create_task_group() as tasks:
                for reader in readers:
                    tasks.start_soon(reader.read_until, merged.replay_endpoint, ours | theirs)
            assert [reader.hidden for reader in readers] == [{"gone"}, {"gone"}]
            teller.remove(39)
            await until(lambda: service.index.num_held(Source("ours")) == 38)
            await readers[0].read(merged.replay_endpoint, readers[0].last + 1)
            del ours["ours", Tier.DEVICE, 39]
            assert readers[0].blocks == ours | theirs
    finally:
        teller.close()


async def test_a_worker_that_is_not_heard_is_told_as_hidden(publishers: list[ZmqPublisher]) -> None:
    service = IndexerService(
        IndexerSettings(match_endpoint=LOOPBACK, publish_endpoint=LOOPBACK, publish_replay_endpoint=LOOPBACK, drain_s=1)
    )
    publisher = publishers[0]
    async with HttpClient() as http, serving(service) as url:
        publisher.publish([block(1)])
        body = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint, "modelname": "m"}
        await http.call("POST", f"{url}/register", Any, body={**body, "instance_id": "w"})
        await until(lambda: service.statistics()["merged_batches_total"] == 1)
        await until(lambda: service.statistics()["feeds_connected"] == 1)
        publisher.shutdown()
        await until(lambda: service.statistics()["merged_batches_total"] == 2)
        await http.call("POST", f"{url}/unregister", Any, body={"instance_id": "w"})
        assert service.merged is not None
        assert service.merged.replay_endpoint is not None
        feed = await kept(service.merged.replay_endpoint)
        assert [(origin.hidden, len(records)) for _, origin, records in feed] == [
            (False, 1),
            (True, 0),
            (True, 1),
            (False, 0),
        ]


async def test_without_one_there_is_none() -> None:
    service = IndexerService(IndexerSettings(match_endpoint=LOOPBACK, drain_s=1))
    async with HttpClient() as http, serving(service) as url:
        with pytest.raises(ApiError, match="publish_endpoint") as refused:
            await http.call("GET", f"{url}/stream", Any)
        assert refused.value.status == 404


async def test_the_command_reads_it(publishers: list[ZmqPublisher], capfd: pytest.CaptureFixture[str]) -> None:
    service = IndexerService(IndexerSettings(match_endpoint=LOOPBACK, publish_endpoint=LOOPBACK, drain_s=1))
    publisher, other = publishers
    async with HttpClient() as http, serving(service) as url, anyio.create_task_group() as tasks:
        for name, one in (("w", publisher), ("other", other)):
            body = {"endpoint": one.endpoint, "instance_id": name, "modelname": "m", "dp_rank": 1}
            await http.call("POST", f"{url}/register", Any, body=body)
        status: list[int] = []
        arguments = ["events", "--indexer", url, "--worker=w", "--worker=late", "--type", "removed", "--count", "2"]

        async def command() -> None:
            status.append(await anyio.to_thread.run_sync(cli.main, arguments))

        tasks.start_soon(command)
        with anyio.fail_after(30):
            while not status:
                publisher.publish([block(1), BlockRemoved(block_hashes=[7])])
                other.publish([BlockRemoved(block_hashes=[8])])
                await anyio.sleep(0.02)
    assert status == [0]
    told = capfd.readouterr()
    assert "kvmesh events: waiting for events of late; workers that publish now: other, w\n" in told.err
    shown = [line for line in told.out.splitlines() if "removed" in line]
    assert len(shown) == 2
    assert all(" w/1 #" in line and "0000000000000007" in line for line in shown)
