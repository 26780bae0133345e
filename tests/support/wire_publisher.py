"""A publisher written from the wire format alone, whose every message a test can choose."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
import zmq

from kvmesh.events.subscriber import EventSubscriber

__all__ = ["Following", "WirePublisher", "event_payload", "follow", "payload", "wire_publisher"]

END = b"\xff" * 8
SUBSCRIBES = b"\x01"


def payload(*events: Any, ts: float = 0.0, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


class WirePublisher:
    """Sends and keeps exactly what it is told to.

    XPUB instead of PUB, to know when the subscription has arrived; a subscriber cannot tell the difference.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        replay_endpoint: str = "tcp://127.0.0.1:*",
        *,
        connect: bool = False,
        topic: str = "t",
    ) -> None:
        self.topic = topic.encode()
        self.kept: dict[int, bytes] = {}
        self.silent = False
        self.broken_after: int | None = None
        """Messages after which answers turn into something else; a reader need not wait to notice."""
        self.sent_total = 0
        self.with_topic = True
        self.end_marker = [b"", b"", END, b""]
        self.requests: list[int] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stream = self._context.socket(zmq.XPUB)
        self._stream.linger = 0
        self._stream.xpub_verbose = True  # a subscription is told although an earlier reader's has not ended yet
        if connect:
            self._stream.connect(endpoint)
        else:
            self._stream.bind(endpoint)
        self.endpoint = self._stream.get_string(zmq.LAST_ENDPOINT)
        self._replay_bind = replay_endpoint
        self.replay_endpoint = ""
        self._stopping = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._bound.wait(5)

    async def subscribed(self) -> None:
        """Wait for the subscription."""
        with anyio.fail_after(30):
            # What is told may be the end of an earlier reader's subscription. A socket of another library's loop.
            while not self._stream.poll(0) or self._stream.recv()[:1] != SUBSCRIBES:  # noqa: ASYNC110
                await anyio.sleep(0.002)

    def send(self, sequence: int, data: bytes) -> None:
        self.sent_total += 1
        self._stream.send_multipart([self.topic, sequence.to_bytes(8, "big"), data])

    def send_raw(self, *frames: bytes) -> None:
        self._stream.send_multipart(list(frames))

    def publish(self, sequence: int, data: bytes) -> None:
        """Keep and send, as a publisher in order does."""
        self.kept[sequence] = data
        self.send(sequence, data)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(5)
        self._stream.close()
        self._context.term()

    def _serve(self) -> None:
        replay = self._context.socket(zmq.ROUTER)
        replay.linger = 0
        replay.bind(self._replay_bind)
        self.replay_endpoint = replay.get_string(zmq.LAST_ENDPOINT)
        self._bound.set()
        while not self._stopping.is_set():
            if not replay.poll(20):
                continue
            client, empty, start = replay.recv_multipart()
            assert (empty, len(start)) == (b"", 8)
            first = int.from_bytes(start, "big")
            self.requests.append(first)
            if self.silent:
                continue
            wanted = [kept for kept in sorted(self.kept.items()) if kept[0] >= first]
            for sequence, data in wanted[: self.broken_after]:
                topic = [self.topic] if self.with_topic else []
                replay.send_multipart([client, b"", *topic, sequence.to_bytes(8, "big"), data])
            replay.send_multipart([client, *(self.end_marker if self.broken_after is None else [b"", b"broken off"])])
        replay.close()


class Following:
    """A running subscriber and what it has delivered."""

    def __init__(self, subscriber: EventSubscriber) -> None:
        self.subscriber = subscriber
        self.items: list[Any] = []

    def names(self) -> list[Any]:
        """Sequence numbers of batches, names of everything else."""
        return [item.sequence if type(item).__name__ == "Batch" else type(item).__name__ for item in self.items]

    async def until(self, *expected: Any) -> None:
        """Wait, bounded, until exactly this has been delivered."""
        with anyio.move_on_after(5):
            while self.names() != list(expected):  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.002)
        assert self.names() == list(expected)


@pytest.fixture
def wire_publisher() -> Iterator[Callable[..., WirePublisher]]:
    made: list[WirePublisher] = []

    def make(*args: str, **options: Any) -> WirePublisher:
        made.append(WirePublisher(*args, **options))
        return made[-1]

    yield make
    for publisher in made:
        if not publisher._stopping.is_set():
            publisher.close()


@pytest.fixture
def event_payload() -> Callable[..., bytes]:
    return payload


@pytest.fixture
def follow() -> Callable[..., Any]:
    """``async with follow(publisher) as following``."""

    @asynccontextmanager
    async def run(
        publisher: WirePublisher, *, replay: bool = True, deliver: Callable[[Any], None] | None = None, **options: Any
    ) -> AsyncIterator[Following]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        replay_endpoint = publisher.replay_endpoint if replay else None
        following = Following(EventSubscriber(publisher.endpoint, replay_endpoint, context=context, **options))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(following.subscriber.run, deliver or following.items.append)
                await publisher.subscribed()
                yield following
                tasks.cancel_scope.cancel()
        finally:
            context.term()

    return run
