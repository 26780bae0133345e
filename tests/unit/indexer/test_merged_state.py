"""The state of the merged stream: told to all who ask together, by a share of the time, and never half for whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio
import zmq
from structlog.testing import capture_logs
from waiting import until

from kvmesh.events.feeds import Feed
from kvmesh.events.index import Source
from kvmesh.events.subscriber import Batch
from kvmesh.indexer.merged_state import SHARE, StateAnswers
from kvmesh.net.clock import ManualClock

FEED = Feed(Source("w"), "m", "tcp://127.0.0.1:1")
READERS = (b"one", b"other")


class Told:
    """What publishers hold: one feed, and what goes wrong after it."""

    def __init__(self, clock: ManualClock, takes_s: float = 0.0, error: Exception | None = None) -> None:
        self.times = 0
        self._clock = clock
        self._takes_s = takes_s
        self.error = error

    async def again(self) -> AsyncGenerator[tuple[Feed, Batch | None], None]:
        self.times += 1
        yield FEED, None
        self._clock.advance(self._takes_s)
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def answering(told: Told, clock: ManualClock) -> AsyncIterator[tuple[StateAnswers, list[zmq.Socket[bytes]]]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.router_mandatory = True
        router.bind("inproc://replay")
        readers = [context.socket(zmq.DEALER) for _ in READERS]
        for name, reader in zip(READERS, readers, strict=True):
            reader.setsockopt(zmq.IDENTITY, name)
            reader.connect("inproc://replay")
            reader.send(b"")
            router.recv_multipart()
        answers = StateAnswers(router, told.again, lambda feed, _batch: (b"topic", feed.model.encode()), clock=clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answers.serve)
            yield answers, readers
            tasks.cancel_scope.cancel()
        for reader in readers:
            reader.close(linger=0)


async def received(reader: zmq.Socket[bytes], count: int) -> list[tuple[int, bytes]]:
    """Numbers and payloads; -1 is the end."""
    found: list[tuple[int, bytes]] = []
    while len(found) < count:
        await until(lambda: reader.poll(0))
        _, _, number, payload = reader.recv_multipart()
        found.append((int.from_bytes(number, "big", signed=True), payload))
    return found


async def test_readers_that_ask_together_get_one_answer_and_its_earliest_number() -> None:
    clock = ManualClock()
    told = Told(clock)
    async with answering(told, clock) as (answers, readers):
        answers.ask(READERS[0], 8)
        answers.ask(READERS[1], 7)
        for reader in readers:
            assert await received(reader, 2) == [(7, b"m"), (-1, b"")]
        answers.ask(READERS[1], 9)
        assert await received(readers[1], 2) == [(9, b"m"), (-1, b"")]
    assert told.times == 2


async def test_answers_have_a_share_of_the_time() -> None:
    clock = ManualClock()
    told = Told(clock, takes_s=100.0)
    async with answering(told, clock) as (answers, readers):
        answers.ask(READERS[0], 1)
        await received(readers[0], 2)
        answers.ask(READERS[0], 2)
        await until(lambda: clock.sleepers == 1)
        assert told.times == 1
        clock.advance(100.0 / SHARE)
        assert await received(readers[0], 2) == [(2, b"m"), (-1, b"")]


async def test_an_answer_that_breaks_off_has_no_end_and_the_next_is_whole() -> None:
    clock = ManualClock()
    told = Told(clock, error=RuntimeError("a defect"))
    with capture_logs() as logs:
        async with answering(told, clock) as (answers, readers):
            answers.ask(READERS[0], 1)
            assert await received(readers[0], 1) == [(1, b"m")]
            await until(lambda: logs)
            told.error = None
            answers.ask(READERS[0], 2)
            assert await received(readers[0], 2) == [(2, b"m"), (-1, b"")]
    assert [line["event"] for line in logs] == ["the state of the merged stream could not be told"]


async def test_a_reader_that_has_gone_costs_the_others_nothing() -> None:
    clock = ManualClock()
    async with answering(Told(clock), clock) as (answers, readers):
        answers.ask(b"nobody", 1)
        answers.ask(READERS[1], 1)
        assert await received(readers[1], 2) == [(1, b"m"), (-1, b"")]
