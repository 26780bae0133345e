"""One bound socket, many publishers that connect to it: each is followed as if it were alone (§2.1)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import zmq

from kvmesh.events.listener import Admission, EventListener, StreamName

CLEARED = {"type": "AllBlocksCleared"}
A, B = "kv@pod-a:8000@m", "kv@pod-b:8000@m"


class Heard:
    """A listener that admits everybody, and what it has delivered by publisher."""

    def __init__(self) -> None:
        self.items: dict[StreamName, list[Any]] = {}
        self.replay: dict[str, str] = {}
        self.unwanted: set[str] = set()
        self.listener: EventListener

    def admit(self, name: StreamName) -> Admission | None:
        if name.topic in self.unwanted:
            return None
        return Admission(self.items.setdefault(name, []).append, self.replay.get(name.topic))

    def names(self, topic: str, rank: int = 0) -> list[Any]:
        """Numbers of batches, names of everything else but connections: those stand before or after a replay."""
        items = self.items.get(StreamName(topic, rank), [])
        names = [item.sequence if type(item).__name__ == "Batch" else type(item).__name__ for item in items]
        return [name for name in names if name != "Connected"]

    async def until(self, topic: str, *expected: Any, rank: int = 0) -> None:
        with anyio.move_on_after(8):
            while self.names(topic, rank) != list(expected):  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.002)
        assert self.names(topic, rank) == list(expected)


@asynccontextmanager
async def listening(endpoint: str = "tcp://127.0.0.1:*", **options: Any) -> AsyncIterator[Heard]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heard = Heard()
    heard.listener = EventListener(endpoint, heard.admit, context=context, replay_silence_s=1.0, **options)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(heard.listener.run)
            with anyio.fail_after(5):
                while not heard.listener.bound_endpoint:  # noqa: ASYNC110 - what is waited for has no event
                    await anyio.sleep(0.002)
            yield heard
            tasks.cancel_scope.cancel()
    finally:
        context.term()


@pytest.fixture
def batch(event_payload: Callable[..., bytes]) -> Callable[..., bytes]:
    return lambda number, life=0, rank=0: event_payload(CLEARED, ts=number + life / 10, rank=rank)


@pytest.fixture
def connect(wire_publisher: Callable[..., Any]) -> Callable[..., Any]:
    async def make(heard: Heard, topic: str, *, replay: bool = True) -> Any:
        publisher = wire_publisher(heard.listener.bound_endpoint, connect=True, topic=topic)
        if replay:
            heard.replay[topic] = publisher.replay_endpoint
        await publisher.subscribed()
        return publisher

    return make


async def test_publishers_are_told_apart_by_topic(connect: Any, batch: Any) -> None:
    async with listening() as heard:
        first, second = await connect(heard, A), await connect(heard, B)
        for number in range(3):
            first.publish(number, batch(number))
            second.publish(number, batch(number))
        await heard.until(A, 0, 1, 2)
        await heard.until(B, 0, 1, 2)


async def test_ranks_that_share_a_topic_are_told_apart_by_their_batches(connect: Any, batch: Any) -> None:
    """vLLM's ranks count each for itself and all have the same topic."""
    async with listening() as heard:
        publisher = await connect(heard, A, replay=False)
        for number in range(2):
            publisher.send(number, batch(number, rank=0))
            publisher.send(number, batch(number, rank=1))
        await heard.until(A, 0, 1)
        await heard.until(A, 0, 1, rank=1)


async def test_what_was_sent_before_the_socket_was_there_is_replayed(connect: Any, batch: Any) -> None:
    async with listening() as heard:
        publisher = await connect(heard, A)
        publisher.kept = {number: batch(number) for number in range(4)}
        publisher.publish(4, batch(4))
        await heard.until(A, 0, 1, 2, 3, 4)
        publisher.kept |= {5: batch(5)}
        publisher.publish(6, batch(6))
        await heard.until(A, 0, 1, 2, 3, 4, 5, 6)


async def test_one_that_waits_for_its_replay_does_not_hold_up_the_others(connect: Any, batch: Any) -> None:
    async with listening() as heard:
        slow, quick = await connect(heard, A), await connect(heard, B)
        slow.silent = True
        slow.publish(0, batch(0))
        with anyio.fail_after(5):
            while not slow.requests:  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.002)
        quick.publish(0, batch(0))
        await heard.until(B, 0)
        assert heard.names(A) == []
        await heard.until(A, 0)


async def test_a_lost_connection_is_told_of_its_publisher_alone(
    connect: Any, batch: Any, wire_publisher: Callable[..., Any]
) -> None:
    async with listening() as heard:
        first, second = await connect(heard, A), await connect(heard, B)
        first.publish(0, batch(0))
        second.publish(0, batch(0))
        await heard.until(A, 0)
        await heard.until(B, 0)
        first.close()
        await heard.until(A, 0, "Disconnected")
        again = wire_publisher(
            heard.listener.bound_endpoint, replay_endpoint=first.replay_endpoint, connect=True, topic=A
        )
        await again.subscribed()
        again.publish(0, batch(0, life=1))
        await heard.until(A, 0, "Disconnected", "Reset", 0)
        with anyio.fail_after(5):
            while not heard.listener.streams[StreamName(A, 0)].connected:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.002)
        assert heard.names(B) == [0]


async def test_a_restart_behind_a_forwarder_is_seen_by_its_numbers(connect: Any, batch: Any) -> None:
    async with listening() as heard:
        publisher = await connect(heard, A)
        for number in range(3):
            publisher.publish(number, batch(number))
        await heard.until(A, 0, 1, 2)
        publisher.kept = {}
        publisher.publish(0, batch(0, life=1))
        await heard.until(A, 0, 1, 2, "Reset", 0)


async def test_whoever_is_not_wanted_is_ignored_until_he_is(connect: Any, batch: Any) -> None:
    async with listening() as heard:
        heard.unwanted.add(A)
        publisher = await connect(heard, A)
        publisher.publish(0, batch(0))
        with anyio.fail_after(5):
            while not heard.listener.ignored_total:  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.002)
        heard.unwanted.clear()
        publisher.publish(1, batch(1))
        await heard.until(A, 0, 1)


async def test_a_retired_publisher_is_admitted_anew_with_its_next_message(connect: Any, batch: Any) -> None:
    async with listening() as heard:
        publisher = await connect(heard, A)
        publisher.publish(0, batch(0))
        await heard.until(A, 0)
        heard.listener.retire(StreamName(A, 0))
        heard.listener.retire(StreamName("nobody", 0))
        assert not heard.listener.streams
        heard.items.clear()
        publisher.publish(1, batch(1))
        await heard.until(A, 0, 1)


async def test_one_publisher_is_read_anew_when_asked(connect: Any, batch: Any) -> None:
    async with listening() as heard:
        first, second = await connect(heard, A), await connect(heard, B)
        first.publish(0, batch(0))
        second.publish(0, batch(0))
        await heard.until(A, 0)
        await heard.until(B, 0)
        heard.listener.resync(StreamName(A, 0))
        heard.listener.resync(StreamName("nobody", 0))
        await heard.until(A, 0, "Reset", 0)
        assert heard.names(B) == [0]


async def test_messages_of_nobody_are_counted(connect: Any, batch: Any) -> None:
    async with listening(topic="kv@") as heard:
        publisher = await connect(heard, A)
        publisher.send_raw(b"kv@", b"only two")
        publisher.send_raw(b"kv@\xff", bytes(8), batch(0))
        publisher.send_raw(b"kv@", bytes(8), b"\xc1")
        publisher.send_raw(b"other", bytes(8), batch(0))
        publisher.publish(0, batch(0))
        await heard.until(A, 0)
        assert heard.listener.unreadable_total == 3
        assert list(heard.items) == [StreamName(A, 0)]


async def test_transports_that_do_not_tell_connections_apart(tmp_path: Any, connect: Any, batch: Any) -> None:
    async with listening(f"ipc://{tmp_path}/events") as heard:
        publisher = await connect(heard, A)
        publisher.kept = {0: batch(0)}
        publisher.publish(1, batch(1))
        await heard.until(A, 0, 1)
