"""The stream and its replay, read by a subscriber that knows only the wire format (T11 to T13)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvmesh.cache.events import StoredBlocks
from kvmesh.events.encoding import encode_batch
from kvmesh.events.endpoints import EndpointError, rank_endpoint
from kvmesh.events.publisher import NullPublisher, ZmqPublisher
from kvmesh.events.sink import StreamSink
from kvmesh.events.target import TargetGroup
from kvmesh.net.faults import injected
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

LOOPBACK = "tcp://127.0.0.1:*"
TIMEOUT_MS = 5000


def stored(*hashes: int) -> BlockStored:
    return BlockStored(block_hashes=list(hashes), parent_block_hash=None, token_ids=list(hashes), block_size=1)


@contextmanager
def reader(kind: int, endpoint: str | None) -> Iterator[zmq.Socket[bytes]]:
    assert endpoint is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(kind)
    socket.linger = 0
    socket.rcvtimeo = TIMEOUT_MS
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


@contextmanager
def publishing(**options: Any) -> Iterator[ZmqPublisher]:
    publisher = ZmqPublisher(LOOPBACK, LOOPBACK, **options)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.shutdown()


def replay(publisher: ZmqPublisher, start: int) -> list[int]:
    """Sequence numbers of a replay; -1 is the end marker."""
    with reader(zmq.DEALER, publisher.replay_endpoint) as socket:
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        numbers = []
        while True:
            empty, _topic, sequence, payload = socket.recv_multipart()
            assert empty == b""
            numbers.append(int.from_bytes(sequence, "big", signed=True))
            if sequence == b"\xff" * 8:
                assert payload == b""
                return numbers


def subscribe(socket: zmq.Socket[bytes], publisher: ZmqPublisher) -> int:
    """Subscribe and publish until the subscription is known to stand; gives the next sequence number."""
    socket.subscribe(b"")
    socket.rcvtimeo = 50
    for attempt in range(200):
        publisher.publish([stored(attempt)])
        try:
            _topic, sequence, _payload = socket.recv_multipart()
        except zmq.Again:
            continue
        number = int.from_bytes(sequence, "big")
        while number < attempt:
            number = int.from_bytes(socket.recv_multipart()[1], "big")
        socket.rcvtimeo = TIMEOUT_MS
        return attempt + 1
    raise AssertionError("no subscription")


def test_stream_is_three_frames_with_a_three_element_batch() -> None:
    with publishing(topic="kv") as publisher, reader(zmq.SUB, publisher.endpoint) as socket:
        number = subscribe(socket, publisher)
        event = BlockStored(block_hashes=[2**64 - 1], parent_block_hash=None, token_ids=[5], block_size=1)
        assert publisher.publish([event, BlockRemoved(block_hashes=[3]), AllBlocksCleared()])
        topic, sequence, payload = socket.recv_multipart()
    assert topic == b"kv"
    assert int.from_bytes(sequence, "big") == number
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float)
    assert rank == 0
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1],
        "parent_block_hash": None,
        "token_ids": [5],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert events[1] == {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}
    assert events[2] == {"type": "AllBlocksCleared"}


def test_t9_two_batches_for_those_who_asked_for_the_topic(make_blocks: Callable[..., StoredBlocks]) -> None:
    sink = StreamSink(4, TargetGroup(0, "sliding_window", 128))
    with (
        publishing(topic="kv-events") as publisher,
        reader(zmq.SUB, publisher.endpoint) as socket,
        reader(zmq.SUB, publisher.endpoint) as stranger,
    ):
        stranger.subscribe(b"other")
        first = subscribe(socket, publisher)
        sink.on_stored(0, make_blocks([1], [[1, 2, 3, 4]]))
        sink.on_stored(0, make_blocks([2], [[5, 6]], parent=1))
        sink.on_removed(0, make_blocks([2]).keys, 0)
        sink.on_stored(0, make_blocks([3], [[5, 6, 7, 8]], parent=1))
        sink.on_stored(1, make_blocks([1], [[1, 2, 3, 4]]))
        publisher.publish(sink.take())
        sink.on_removed(0, make_blocks([3, 1]).keys, 0)
        sink.on_removed(1, make_blocks([1]).keys, 0)
        publisher.publish(sink.take())
        batches = [socket.recv_multipart() for _ in range(2)]
        assert not stranger.poll(0)
    assert [topic for topic, _, _ in batches] == [b"kv-events"] * 2
    assert [int.from_bytes(sequence, "big") for _, sequence, _ in batches] == [first, first + 1]
    [stored_event], [removed_event] = [msgspec.msgpack.decode(payload)[1] for _, _, payload in batches]
    assert stored_event == {
        "type": "BlockStored",
        "block_hashes": [1, 3],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 128,
    }
    assert removed_event == {"type": "BlockRemoved", "block_hashes": [3, 1], "medium": "GPU", "group_idx": 0}
    counts = sink.statistics
    assert (counts.stored_total, counts.removed_total) == (2, 2)
    assert (counts.suppressed_total, counts.non_target_total) == (1, 1)


def test_array_encoding() -> None:
    payload = encode_batch(EventBatch(1.5, [stored(7), BlockRemoved(block_hashes=[7])], 2), "array")
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            ["BlockStored", [7], None, [7], 1, None, "GPU", None, None, None, None, None],
            ["BlockRemoved", [7], "GPU", None],
        ],
        2,
    ]


def test_t13_replay_keeps_the_last_steps() -> None:
    with publishing(buffer_steps=3) as publisher:
        for number in range(5):
            publisher.publish([stored(number)])
        drained(publisher, 5)
        assert replay(publisher, 0) == [2, 3, 4, -1]
        assert replay(publisher, 4) == [4, -1]
        assert replay(publisher, 10) == [-1]


def drained(publisher: ZmqPublisher, batches: int) -> None:
    """Wait, bounded, until the background thread has sent so many batches."""
    done = threading.Event()
    for _ in range(500):
        if publisher.statistics().published_total >= batches:
            return
        done.wait(0.01)
    raise AssertionError(publisher.statistics())


def test_malformed_replay_requests_are_ignored() -> None:
    with publishing() as publisher:
        with reader(zmq.DEALER, publisher.replay_endpoint) as socket:
            socket.send_multipart([b"x", b"\0" * 8])
            socket.send_multipart([b"", b"\0" * 7])
            socket.send_multipart([b"", b"\0" * 8, b"more"])
            socket.rcvtimeo = 100
            with pytest.raises(zmq.Again):
                socket.recv_multipart()
        assert replay(publisher, 0) == [-1]


def test_t11_life_cycle() -> None:
    threads = threading.active_count()
    publisher = ZmqPublisher("tcp://127.0.0.1:*")
    assert threading.active_count() == threads
    publisher.shutdown()
    publisher.start()
    endpoint = publisher.endpoint
    publisher.start()
    assert publisher.endpoint == endpoint
    assert endpoint is not None
    publisher.shutdown()
    publisher.shutdown()
    again = ZmqPublisher(endpoint)
    again.start()
    with pytest.raises(OSError, match="cannot publish"):
        ZmqPublisher(endpoint).start()
    again.shutdown()
    assert threading.active_count() == threads


def test_a_full_queue_drops_the_batch_and_leaves_a_hole() -> None:
    sending, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        sending.set()
        assert go_on.wait(5)

    with publishing(max_queue_size=2) as publisher:
        with injected("events.before_send", hold):
            assert publisher.publish([stored(0)])
            assert sending.wait(5), "the thread holds batch 0; nothing leaves the queue"
            assert publisher.publish([stored(1)])
            assert publisher.publish([stored(2)])
            assert not publisher.publish([stored(3)])
            assert not publisher.publish([stored(4)])
            assert publisher.statistics().queued == 2
            go_on.set()
            drained(publisher, 3)
        assert publisher.publish([stored(5)])
        drained(publisher, 4)
        assert replay(publisher, 0) == [0, 1, 2, 5, -1]
        assert publisher.statistics().dropped_total == 2


def test_what_was_never_started_drops_everything() -> None:
    publisher = ZmqPublisher(LOOPBACK)
    assert not publisher.publish([stored(0)])
    assert publisher.statistics().dropped_total == 1


def test_a_long_replay_is_whole_though_the_reader_is_slow() -> None:
    batches = 5000  # more than the sockets' own queues hold
    with publishing(buffer_steps=batches) as publisher:
        for number in range(batches):
            publisher.publish([stored(number)])
        drained(publisher, batches)
        with reader(zmq.DEALER, publisher.replay_endpoint) as socket:
            socket.send_multipart([b"", bytes(8)])
            while publisher.statistics().replays_total < 1:
                threading.Event().wait(0.01)
            publisher.publish([stored(1)])
            drained(publisher, batches + 1)  # the stream goes on before anything has been read
            numbers = [int.from_bytes(socket.recv_multipart()[2], "big", signed=True) for _ in range(batches + 1)]
        assert numbers == [*range(batches), -1]


def test_an_empty_step_sends_nothing() -> None:
    with publishing() as publisher:
        assert publisher.publish([]) is True
        publisher.publish([stored(1)])
        drained(publisher, 1)
        assert replay(publisher, 0) == [0, -1]


def test_topic_of_a_router_that_shards_by_pod() -> None:
    with publishing(topic_model="m/1") as publisher:
        assert publisher.endpoint is not None
        assert publisher.topic == f"kv@{publisher.endpoint.removeprefix('tcp://')}@m/1"


def test_null_publisher() -> None:
    publisher = NullPublisher()
    publisher.start()
    assert publisher.publish([stored(1)]) is False
    assert publisher.statistics().published_total == 0
    publisher.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://127.0.0.1:0", 3, "tcp://127.0.0.1:*"),
        ("ipc:///tmp/a", 0, "ipc:///tmp/a"),
        ("ipc:///tmp/a", 2, "ipc:///tmp/a_dp2"),
        ("inproc://a", 1, "inproc://a_dp1"),
    ],
)
def test_rank_endpoints(endpoint: str, rank: int, expected: str) -> None:
    assert rank_endpoint(endpoint, rank) == expected


@pytest.mark.parametrize(("endpoint", "rank"), [("udp://x:1", 0), ("tcp://x", 0), ("tcp://x:65535", 1)])
def test_impossible_endpoints(endpoint: str, rank: int) -> None:
    with pytest.raises(EndpointError):
        rank_endpoint(endpoint, rank)
