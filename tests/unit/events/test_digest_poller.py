"""The poller of digests with real sockets: publishers of ours, of others, and none at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
import zmq

from kvmesh.config.curve import CurveSettings
from kvmesh.events.digests import DigestAnswer, DigestKey, DigestPoller, digest_of
from kvmesh.events.polling import readable, receive
from kvmesh.events.published import PublishedSet
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.records import Tier
from kvmesh.hashing import ReuseScope
from kvmesh.net.curve import CurveSecurity, create_key_pair
from kvmesh.protocol.events import BlockStored

LOOPBACK = "tcp://127.0.0.1:*"
FAST_S = 0.01

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        yield context


class Reader:
    """Collects answers."""

    def __init__(self) -> None:
        self.answers: list[DigestAnswer] = []
        self.poller: DigestPoller

    async def until(self, holds: Callable[[], bool]) -> None:
        with anyio.fail_after(5):
            while not holds():  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.005)


@asynccontextmanager
async def polling(
    context: Context, endpoint: str | None, *, answer_s: float = 5.0, security: CurveSecurity | None = None
) -> AsyncIterator[Reader]:
    assert endpoint is not None
    reader = Reader()
    reader.poller = DigestPoller(
        context, endpoint, reader.answers.append, interval_s=FAST_S, answer_s=answer_s, security=security
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.poller.run)
        yield reader
        tasks.cancel_scope.cancel()


def tell(publisher: ZmqPublisher, published: PublishedSet, number: int) -> None:
    published.stored(Tier.HOST, ReuseScope(salt=5), np.array([number], np.uint64))
    publisher.publish([BlockStored(block_hashes=[number], parent_block_hash=None, token_ids=[1], block_size=1)])


async def test_answers_come_in_a_rhythm_and_say_what_they_cover(context: Context) -> None:
    published = PublishedSet()
    publisher = ZmqPublisher(LOOPBACK, LOOPBACK, published=published)
    publisher.start()
    try:
        async with polling(context, publisher.replay_endpoint) as reader:
            await reader.until(lambda: len(reader.answers) > 1)
            tell(publisher, published, 7)
            await reader.until(lambda: reader.answers[-1].sequence == 0)
        assert reader.answers[-1].digests == {DigestKey(Tier.HOST, salt="5"): digest_of([7])}
        assert reader.poller.offered is True
        assert reader.poller.statistics.answered_total == len(reader.answers)
    finally:
        publisher.shutdown()


async def test_a_publisher_that_comes_back_is_asked_again(context: Context) -> None:
    first = ZmqPublisher(LOOPBACK, LOOPBACK, published=PublishedSet())
    first.start()
    try:
        async with polling(context, first.replay_endpoint, answer_s=0.05) as reader:
            await reader.until(lambda: bool(reader.answers))
            first.shutdown()
            unanswered = reader.poller.statistics.unanswered_total
            await reader.until(lambda: reader.poller.statistics.unanswered_total > unanswered)
            published = PublishedSet()
            again = ZmqPublisher(LOOPBACK, first.replay_endpoint, published=published)
            again.start()
            try:
                tell(again, published, 1)
                await reader.until(lambda: reader.answers[-1].sequence == 0)
            finally:
                again.shutdown()
    finally:
        first.shutdown()


@pytest.mark.parametrize(
    "answer",
    [[b"", b"", b"\xff" * 8, b""], [b"", b"\xff" * 8, b""], [b"", b""], None],
    ids=["trt", "vllm", "old", "none"],
)
async def test_publishers_of_others_offer_none(context: Context, answer: list[bytes] | None) -> None:
    """wire.md §2.2: to vLLM the request is a replay from beyond its end; others ignore it."""
    foreign = context.socket(zmq.ROUTER)
    foreign.linger = 0
    foreign.bind(LOOPBACK)
    try:
        async with polling(context, str(foreign.get_string(zmq.LAST_ENDPOINT)), answer_s=0.2) as reader:
            with anyio.fail_after(5):
                while (request := receive(foreign)) is None:
                    await readable(foreign)
            assert request[1:] == [b"", b"digest"]
            if answer is not None:
                foreign.send_multipart([request[0], *answer])
            await reader.until(lambda: reader.poller.offered is False)
            assert reader.poller.statistics.asked_total == 1, "it is left alone now"
            assert reader.answers == []
    finally:
        foreign.close()


async def test_a_damaged_answer_is_passed_over(context: Context) -> None:
    foreign = context.socket(zmq.ROUTER)
    foreign.linger = 0
    foreign.bind(LOOPBACK)
    try:
        async with polling(context, str(foreign.get_string(zmq.LAST_ENDPOINT))) as reader:
            for payload in (b"\xc1", b"\x90"):
                with anyio.fail_after(5):
                    while (request := receive(foreign)) is None:
                        await readable(foreign)
                foreign.send_multipart([request[0], b"", b"digest", bytes(8), payload])
            await reader.until(lambda: reader.answers == [DigestAnswer(0, {})])
    finally:
        foreign.close()


async def test_nobody_there_is_not_taken_for_a_publisher_without_digests(context: Context) -> None:
    async with polling(context, "tcp://127.0.0.1:1", answer_s=0.02) as reader:
        await reader.until(lambda: reader.poller.statistics.unanswered_total > 1)
        assert reader.poller.offered is None


async def test_with_keys(context: Context, tmp_path: Path) -> None:
    _, secret = create_key_pair(tmp_path)
    security = CurveSecurity.load(CurveSettings(key_file=str(secret)))
    publisher = ZmqPublisher(LOOPBACK, LOOPBACK, published=PublishedSet(), security=security)
    publisher.start()
    try:
        async with polling(context, publisher.replay_endpoint, answer_s=0.3) as stranger:
            await stranger.until(lambda: stranger.poller.statistics.unanswered_total > 0)
            async with polling(context, publisher.replay_endpoint, security=security) as reader:
                await reader.until(lambda: bool(reader.answers))
            assert stranger.answers == []
    finally:
        publisher.shutdown()
