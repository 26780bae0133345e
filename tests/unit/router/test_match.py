"""The indexer is asked, waited for within a bound, and left alone when it fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from kvmesh.net.clock import ManualClock
from kvmesh.protocol.match import MatchReply, MatchRequest, WorkerMatch
from kvmesh.router.match import NoMatcher
from kvmesh.router.match_client import FAILURES_TO_REST, FIRST_REST_S, MatchClient

IDS = np.arange(64, dtype=np.int32)


class FakeIndexer:
    """A ROUTER that answers what :attr:`answer` says; None keeps silent."""

    def __init__(self) -> None:
        self.asked: list[MatchRequest] = []
        self.answer: Callable[[MatchRequest], bytes | None] = lambda request: msgspec.msgpack.encode(
            MatchReply(id=request.id, matches=[])
        )
        self.endpoint = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        async def serve() -> None:
            while True:
                identity, frame = await socket.recv_multipart()
                request = msgspec.msgpack.decode(frame, type=MatchRequest)
                self.asked.append(request)
                if (reply := self.answer(request)) is not None:
                    await socket.send_multipart([identity, reply])

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                yield f"tcp://127.0.0.1:{port}"
                tasks.cancel_scope.cancel()
        finally:
            socket.close()
            context.term()


@asynccontextmanager
async def matching(
    endpoint: str, clock: ManualClock | None = None, timeout_s: float = 5.0
) -> AsyncIterator[MatchClient]:
    client = MatchClient(endpoint, timeout_s=timeout_s, clock=clock or ManualClock())
    async with anyio.create_task_group() as tasks:
        await tasks.start(client.run)
        yield client
        tasks.cancel_scope.cancel()


async def answered(client: MatchClient) -> dict[str, WorkerMatch]:
    """Ask until the connection is up."""
    with anyio.fail_after(10):
        while True:
            found = await client.match("m", IDS, cache_salt="s")
            if found.state == "answered":
                return dict(found.by_server)
            assert found.state in ("unreachable", "resting")
            client._failures = 0
            await anyio.sleep(0.01)


async def test_answers_and_takes_the_best_rank() -> None:
    indexer = FakeIndexer()
    indexer.answer = lambda request: msgspec.msgpack.encode(
        MatchReply(
            id=request.id,
            matches=[
                WorkerMatch("a", 0, 32),
                WorkerMatch("a", 1, 64, 64, 64),
                WorkerMatch("b", 0, 16),
                WorkerMatch("c", 0, 64, 64, 64),
                WorkerMatch("c", 1, 48, 80, 80),  # on the host 16 more than on the device of the other
                WorkerMatch("c", 2, 48, 48, 96),
            ],
        )
    )
    async with indexer.serving() as endpoint, matching(endpoint) as client:
        found = await answered(client)
    assert {name: match.dp_rank for name, match in found.items()} == {"a": 1, "b": 0, "c": 1}
    assert {name: match.device_tokens for name, match in found.items()} == {"a": 64, "b": 16, "c": 48}
    asked = indexer.asked[-1]
    assert (asked.model, asked.cache_salt) == ("m", "s")
    assert np.frombuffer(asked.token_ids, dtype="<i4").tolist() == IDS.tolist()


async def test_many_questions_at_a_time_in_any_order() -> None:
    indexer = FakeIndexer()
    async with indexer.serving() as endpoint, matching(endpoint) as client:
        await answered(client)
        states: list[str] = []

        async def ask() -> None:
            states.append((await client.match("m", IDS)).state)

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ask)
    assert states == ["answered"] * 20


@pytest.mark.parametrize("reply", [None, b"\xc1nonsense", "late"])
async def test_silence_nonsense_and_answers_to_others_count_as_nothing(reply: bytes | str | None) -> None:
    indexer = FakeIndexer()
    async with indexer.serving() as endpoint, matching(endpoint, timeout_s=0.05) as client:
        await answered(client)
        late = msgspec.msgpack.encode(MatchReply(id=10**6, matches=[WorkerMatch("a", 0, 64)]))
        indexer.answer = lambda _: late if reply == "late" else reply  # type: ignore[return-value]
        found = await client.match("m", IDS)
        assert (found.state, dict(found.by_server)) == ("timed_out", {})
        assert client._pending == {}


async def test_a_dead_indexer_costs_no_wait() -> None:
    async with matching("tcp://127.0.0.1:1", timeout_s=60) as client:
        with anyio.fail_after(5):
            for _ in range(2 * FAILURES_TO_REST):
                assert (await client.match("m", IDS)).state == "unreachable"
    assert client.statistics()["match_unreachable_total"] == 2 * FAILURES_TO_REST


async def test_after_a_rest_one_question_tries() -> None:
    clock, indexer = ManualClock(), FakeIndexer()
    async with indexer.serving() as endpoint, matching(endpoint, clock, timeout_s=0.05) as client:
        await answered(client)
        good, indexer.answer = indexer.answer, lambda _: None
        for _ in range(FAILURES_TO_REST):
            assert (await client.match("m", IDS)).state == "timed_out"
        assert (await client.match("m", IDS)).state == "resting"
        clock.advance(FIRST_REST_S)
        states: list[str] = []

        async def ask() -> None:
            states.append((await client.match("m", IDS)).state)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
        assert sorted(states) == ["resting", "resting", "timed_out"]
        clock.advance(2 * FIRST_REST_S)
        indexer.answer = good
        assert (await client.match("m", IDS)).state == "answered"
        assert (await client.match("m", IDS)).state == "answered"


async def test_without_an_indexer() -> None:
    assert (await NoMatcher().match("m", IDS)).state == "off"
