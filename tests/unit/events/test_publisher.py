"""The stream and its replay, read by a subscriber that knows only the wire format (T11 to T13)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvmesh.events.encoding import encode_batch
from kvmesh.events.endpoints import EndpointError, check_port_ranges, rank_endpoint
from kvmesh.events.publisher import NullPublisher, ZmqPublisher
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


def test_a_full_queue_leaves_a_hole() -> None:
    publisher = ZmqPublisher(LOOPBACK, LOOPBACK, max_queue_size=2)
    assert publisher.publish([stored(0)]) is False  # not started: nothing would ever send it
    publisher.start()
    try:
        assert publisher.publish([stored(1)]) is True
        drained(publisher, 1)
        assert replay(publisher, 0) == [1, -1]
        assert publisher.statistics().dropped_total == 1
    finally:
        publisher.shutdown()


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
    ("publish", "replay_port", "ranks", "overlaps"),
    [
        (5557, 5558, 2, True),
        (5557, 5558, 1, False),
        (5557, 5657, 2, False),
        (5558, 5557, 2, True),
        (5557, 5559, 2, False),
        (5557, 5565, 8, False),
    ],
)
def test_t12_overlap(publish: int, replay_port: int, ranks: int, overlaps: bool) -> None:
    endpoints = (f"tcp://*:{publish}", f"tcp://*:{replay_port}")
    if overlaps:
        with pytest.raises(EndpointError, match="overlap"):
            check_port_ranges(*endpoints, ranks_per_host=ranks, world_size=ranks)
    else:
        check_port_ranges(*endpoints, ranks_per_host=ranks, world_size=ranks)


@pytest.mark.parametrize(
    ("port", "world", "fits"), [(65535, 2, False), (65535, 1, True), (65534, 2, True), (65534, 3, False)]
)
def test_t12_overflow(port: int, world: int, fits: bool) -> None:
    if fits:
        check_port_ranges(f"tcp://*:{port}", None, ranks_per_host=1, world_size=world)
    else:
        with pytest.raises(EndpointError, match="above the maximum port 65535"):
            check_port_ranges(f"tcp://*:{port}", None, ranks_per_host=1, world_size=world)
        with pytest.raises(EndpointError, match="above the maximum port 65535"):
            check_port_ranges("tcp://*:5557", f"tcp://*:{port}", ranks_per_host=1, world_size=world)


def test_ipc_needs_no_ports() -> None:
    check_port_ranges("ipc:///tmp/a", "tcp://*:5557", ranks_per_host=8, world_size=8)


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
