"""CURVE end to end: a publisher, a subscriber, and the indexer's match service with real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import zmq
from structlog.testing import capture_logs

from kvmesh.config.curve import CurveSettings
from kvmesh.events.feeds import Feed, Feeds
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.subscriber import Batch, Connected, EventSubscriber
from kvmesh.indexer.matching import MatchServer
from kvmesh.net.clock import SystemClock
from kvmesh.net.curve import CurveSecurity, create_key_pair
from kvmesh.net.zap import ZapServer
from kvmesh.protocol.events import BlockStored
from kvmesh.router.match_client import MatchClient

LOOPBACK = "tcp://127.0.0.1:*"
PROMPT = np.arange(9, dtype=np.int32)
STORED = BlockStored(block_hashes=[1, 2], parent_block_hash=None, token_ids=list(range(8)), block_size=4)


@pytest.fixture
def security(tmp_path: Path) -> CurveSecurity:
    return loaded(tmp_path, "mesh")


def loaded(directory: Path, name: str) -> CurveSecurity:
    _, secret = create_key_pair(directory, name)
    security = CurveSecurity.load(CurveSettings(key_file=str(secret)))
    assert security is not None
    return security


@pytest.fixture
def publisher(security: CurveSecurity) -> Iterator[ZmqPublisher]:
    publisher = ZmqPublisher(LOOPBACK, LOOPBACK, security=security)
    publisher.start()
    publisher.publish([STORED])
    yield publisher
    publisher.shutdown()


@asynccontextmanager
async def running(function: Callable[..., Any], *args: Any) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(function, *args)
        yield
        tasks.cancel_scope.cancel()


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.005)


async def test_stream_and_replay_are_read_with_the_key(publisher: ZmqPublisher, security: CurveSecurity) -> None:
    assert publisher.endpoint is not None
    items: list[Any] = []
    with zmq.Context() as context:
        subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint, context=context, security=security)
        async with running(subscriber.run, items.append):
            await until(lambda: any(isinstance(item, Connected) for item in items))
            publisher.publish([STORED])
            await until(lambda: subscriber.applied == 1)
            publisher.publish([STORED])
            await until(lambda: subscriber.applied == 2)
    # Of the first that is sent the reader asks whether the replay says the same.
    assert [item.replayed for item in items if isinstance(item, Batch)] == [True, True, False]


@pytest.mark.parametrize("has_key", [False, True])
async def test_others_are_refused_and_told_what_to_check(
    publisher: ZmqPublisher, security: CurveSecurity, tmp_path: Path, has_key: bool
) -> None:
    assert publisher.endpoint is not None
    other = loaded(tmp_path, "other")._replace(server_key=security.own.public) if has_key else None
    items: list[Any] = []
    with zmq.Context() as context, capture_logs() as logs:
        subscriber = EventSubscriber(
            publisher.endpoint, publisher.replay_endpoint, context=context, security=other, replay_silence_s=0.1
        )
        async with running(subscriber.run, items.append):
            await until(lambda: any("refuses the connection" in line["event"] for line in logs))
    assert items == []
    assert next(line for line in logs if "refuses" in line["event"])["with_keys"] is has_key


async def test_the_indexer_follows_the_mesh_with_keys_and_others_without(
    publisher: ZmqPublisher, security: CurveSecurity
) -> None:
    """Of two workers one belongs to the mesh; the other was registered by hand and is plain, as vLLM is."""
    foreign = ZmqPublisher(LOOPBACK, LOOPBACK)
    foreign.start()
    foreign.publish([STORED])
    index = PrefixIndex()
    try:
        with zmq.Context() as context:
            async with anyio.create_task_group() as tasks:
                feeds = Feeds(index, tasks, context, security=security)
                feeds.follow(Feed(Source("ours"), "m", publisher.endpoint, publisher.replay_endpoint, in_mesh=True))
                feeds.follow(Feed(Source("theirs"), "m", foreign.endpoint, foreign.replay_endpoint))
                await until(lambda: all(index.num_held(Source(name)) == 2 for name in ("ours", "theirs")))
                tasks.cancel_scope.cancel()
    finally:
        foreign.shutdown()


async def test_the_router_asks_with_its_key_and_nobody_asks_without(security: CurveSecurity) -> None:
    index, source = PrefixIndex(), Source("w")
    index.add(source, model="m")
    index.apply(source, [])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    zap = ZapServer(context, security)
    server = MatchServer(index, LOOPBACK, on_routed=lambda *_: None, security=security)
    server.bind(context)
    try:
        async with running(zap.serve), running(server.serve):
            for with_key, expected in ((security, "answered"), (None, "unreachable")):
                client = MatchClient(server.endpoint, timeout_s=1.0, clock=SystemClock(), security=with_key)
                async with anyio.create_task_group() as tasks:
                    await tasks.start(client.run)
                    with anyio.fail_after(5):
                        # Until the connection stands, which has no event.
                        while (  # noqa: ASYNC110
                            found := await client.match("m", PROMPT)
                        ).state == "unreachable" and with_key is not None:
                            await anyio.sleep(0.01)
                    assert found.state == expected
                    tasks.cancel_scope.cancel()
    finally:
        server.close()
        zap.close()
        context.term()
    assert server.answered_total == 1
