"""The stream and its replay, read by a subscriber that knows only the wire format (T11 to T13)."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from structlog.testing import capture_logs

from kvmesh.cache.events import StoredBlocks
from kvmesh.events.digests import DigestAnswer, DigestKey, digest_of, parse_answer
from kvmesh.events.encoding import encode_batch
from kvmesh.events.endpoints import EndpointError, rank_endpoint
from kvmesh.events.live import LiveBlocks
from kvmesh.events.published import PublishedSet
from kvmesh.events.publisher import NullPublisher, ZmqPublisher
from kvmesh.events.records import Tier
from kvmesh.events.sender import BatchSender, PublisherStatistics, QueuedBatch, SenderSockets
from kvmesh.events.sink import StreamSink
from kvmesh.events.target import TargetGroup
from kvmesh.hashing import ReuseScope
from kvmesh.net.faults import FaultInjectedError, injected
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent

LOOPBACK = "tcp://127.0.0.1:*"
TIMEOUT_MS = 5000


def stored(*hashes: int) -> BlockStored:
    return BlockStored(block_hashes=list(hashes), parent_block_hash=None, token_ids=list(hashes), block_size=1)


@contextmanager
def reader(kind: int, endpoint: str | None, *, rcvhwm: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    assert endpoint is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(kind)
    socket.linger = 0
    socket.rcvtimeo = TIMEOUT_MS
    socket.rcvhwm = rcvhwm
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


def ask_digest(publisher: ZmqPublisher) -> DigestAnswer | None:
    with reader(zmq.DEALER, publisher.replay_endpoint) as socket:
        socket.send_multipart([b"", b"digest"])
        return parse_answer(socket.recv_multipart())


def test_digests_cover_every_batch_that_has_a_number_also_dropped_ones() -> None:
    published = PublishedSet()
    sending, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        sending.set()
        assert go_on.wait(5)

    def store(*numbers: int) -> bool:
        published.stored(Tier.DEVICE, ReuseScope(), np.array(numbers, np.uint64))
        return publisher.publish([stored(*numbers)])

    with publishing(max_queue_size=1, published=published) as publisher:
        assert ask_digest(publisher) == (2**64 - 1, {})
        with injected("events.before_send", hold):
            assert store(1)
            assert sending.wait(5)
            assert store(2)
            assert not store(3, 4)
            go_on.set()
            drained(publisher, 2)
        assert ask_digest(publisher) == (2, {DigestKey(Tier.DEVICE): digest_of([1, 2, 3, 4])})
        assert publisher.statistics().digests_total == 2
        assert replay(publisher, 0) == [0, 1, -1]


def test_without_digests_the_request_is_ignored() -> None:
    with publishing() as publisher, reader(zmq.DEALER, publisher.replay_endpoint) as socket:
        socket.send_multipart([b"", b"digest"])
        socket.rcvtimeo = 100
        with pytest.raises(zmq.Again):
            socket.recv_multipart()
        assert publisher.statistics().malformed_requests_total == 1


def test_a_dropped_batch_is_warned_of_at_powers_of_two() -> None:
    publisher = ZmqPublisher(LOOPBACK)
    with capture_logs() as logs:
        for number in range(9):
            assert not publisher.publish([stored(number)])
    assert [line["dropped"] for line in logs] == [1, 2, 4, 8]


def test_removals_of_a_dropped_batch_come_with_the_next_one() -> None:
    """§4.3: removals are never dropped. The hole stays; what it took back is taken back after it."""
    sending, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        sending.set()
        assert go_on.wait(5)

    with publishing(max_queue_size=1) as publisher:
        with injected("events.before_send", hold):
            publisher.publish([stored(0)])
            assert sending.wait(5)
            publisher.publish([stored(1)])
            assert not publisher.publish([BlockRemoved(block_hashes=[0, 1]), stored(2)])
            go_on.set()
            drained(publisher, 2)
        publisher.publish([stored(3)])
        drained(publisher, 3)
        assert events_of(publisher, 3) == [("BlockRemoved", [0, 1]), ("BlockStored", [3])]


def events_of(publisher: ZmqPublisher, start: int) -> list[tuple[str, list[int]]]:
    """Of the first batch of a replay."""
    with reader(zmq.DEALER, publisher.replay_endpoint) as socket:
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        _, _, sequence, payload = socket.recv_multipart()
    assert int.from_bytes(sequence, "big") == start
    return [(event["type"], event["block_hashes"]) for event in msgspec.msgpack.decode(payload)[1]]


def test_a_stopping_publisher_tells_what_it_owes() -> None:
    """An idle engine that stops still sends its removals, although the queue was full when they came."""
    sending, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        sending.set()
        assert go_on.wait(5)

    publisher = ZmqPublisher(LOOPBACK, max_queue_size=1)
    publisher.start()
    with reader(zmq.SUB, publisher.endpoint) as socket:
        number = subscribe(socket, publisher)
        with injected("events.before_send", hold):
            publisher.publish([stored(0)])
            assert sending.wait(5)
            publisher.publish([stored(1)])
            assert not publisher.publish([BlockRemoved(block_hashes=[0, 1])])
            go_on.set()
            publisher.shutdown()
        messages = [socket.recv_multipart() for _ in range(3)]
    assert [int.from_bytes(sequence, "big") for _, sequence, _ in messages] == [number, number + 1, number + 3]
    assert msgspec.msgpack.decode(messages[-1][2])[1][0]["block_hashes"] == [0, 1]


@pytest.mark.parametrize("error", [zmq.ZMQError(zmq.EAGAIN), FaultInjectedError("x")])
def test_a_batch_that_cannot_be_sent_leaves_a_hole_and_its_removals_follow(error: Exception) -> None:
    """§4.3: send failure = hole; replays have only what was sent."""

    def fail() -> None:
        raise error

    with publishing() as publisher:
        with injected("events.before_send", fail):
            assert publisher.publish([stored(0), BlockRemoved(block_hashes=[7])])
            until(lambda: publisher.statistics().send_failures_total == 1)
        publisher.publish([stored(1)])
        drained(publisher, 1)
        assert replay(publisher, 0) == [1, -1]
        assert events_of(publisher, 1) == [("BlockRemoved", [7]), ("BlockStored", [1])]


def test_a_batch_that_cannot_be_encoded_ends_nothing() -> None:
    with publishing() as publisher:
        publisher.publish([stored(2**64)])
        publisher.publish([stored(1)])
        drained(publisher, 1)
        assert publisher.statistics().send_failures_total == 1
        assert replay(publisher, 0) == [1, -1]


def test_a_defect_ends_neither_the_stream_nor_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread serves every reader, and nobody would start it again."""
    take_in = LiveBlocks.take_in

    def failing(live: LiveBlocks, events: Sequence[KvEvent]) -> list[KvEvent]:
        if any(isinstance(event, BlockStored) and event.block_hashes == [13] for event in events):
            raise LookupError("a defect")
        return take_in(live, events)

    monkeypatch.setattr(LiveBlocks, "take_in", failing)
    with publishing() as publisher:
        publisher.publish([stored(13)])
        publisher.publish([stored(1)])
        drained(publisher, 1)
        assert publisher.statistics().send_failures_total == 1
        with monkeypatch.context() as patch, reader(zmq.DEALER, publisher.replay_endpoint) as socket:
            asked = threading.Event()

            def defect(live: LiveBlocks) -> None:
                asked.set()
                raise LookupError("a defect")

            patch.setattr(LiveBlocks, "events", defect)
            socket.send_multipart([b"", b"state"])
            assert asked.wait(5)
        assert replay(publisher, 0) == [1, -1]


def until(holds: Callable[[], bool]) -> None:
    """Wait, bounded, for what the background thread does."""
    tick = threading.Event()
    for _ in range(500):
        if holds():
            return
        tick.wait(0.01)
    raise AssertionError("it did not happen")


def test_the_highest_number_is_reserved_for_the_end_of_replays() -> None:
    """§2.6: 2^64-1 is never a batch's."""
    with publishing() as publisher:
        publisher._sequence = 2**64 - 2
        publisher.publish([stored(0)])
        publisher.publish([stored(1)])
        drained(publisher, 2)
        assert replay(publisher, 0) == [-2, 0, -1]


def test_a_queue_that_never_empties_does_not_keep_a_replay_waiting() -> None:
    """§4.3: replays are answered between sends."""
    with publishing() as publisher:
        sent = threading.Event()

        def feed() -> None:
            # Two come for each that goes, until the replay has been answered.
            if not sent.is_set() and publisher.statistics().published_total < 20_000:
                publisher.publish([stored(0)])
                publisher.publish([stored(1)])

        with injected("events.before_send", feed):
            publisher.publish([stored(2)])
            with reader(zmq.DEALER, publisher.replay_endpoint) as socket:
                socket.send_multipart([b"", (2**64 - 2).to_bytes(8, "big")])
                assert socket.recv_multipart()[2] == b"\xff" * 8
            assert publisher.statistics().queued > 0
            sent.set()


def test_a_subscriber_that_does_not_read_costs_it_messages_and_nobody_else() -> None:
    """§2c hwm: messages beyond the mark are dropped for that reader, who sees the gap; all are kept for replay."""
    batches, payload = 300, [stored(*range(2**40, 2**40 + 10_000))]  # 40 MB, more than the sockets' buffers hold
    with publishing(hwm=2) as publisher, reader(zmq.SUB, publisher.endpoint, rcvhwm=1) as socket:
        first = subscribe(socket, publisher)
        for _ in range(batches):
            publisher.publish(payload)
        drained(publisher, first + batches)
        assert replay(publisher, first) == [*range(first, first + batches), -1]
        got = []
        socket.rcvtimeo = 200
        with contextlib.suppress(zmq.Again):
            while True:
                got.append(int.from_bytes(socket.recv_multipart()[1], "big"))
        assert len(got) < batches


@pytest.mark.parametrize("transport", ["ipc", "inproc"])
def test_other_transports(transport: str, tmp_path: Path) -> None:
    """§4.3: tcp, ipc and inproc; the stream always binds."""
    stem = f"ipc://{tmp_path}/kv" if transport == "ipc" else f"inproc://{uuid.uuid4()}"
    publisher = ZmqPublisher(stem, f"{stem}-replay")
    publisher.start()
    try:
        assert (publisher.endpoint, publisher.replay_endpoint) == (stem, f"{stem}-replay")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance() if transport == "inproc" else zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger, socket.rcvtimeo = 0, TIMEOUT_MS
        socket.connect(f"{stem}-replay")
        socket.send_multipart([b"", bytes(8)])
        assert socket.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        socket.close()
        if transport == "ipc":
            context.term()
    finally:
        publisher.shutdown()


def test_a_topic_is_text() -> None:
    with publishing(topic="kv-ü", topic_model="m") as publisher, reader(zmq.SUB, publisher.endpoint) as socket:
        subscribe(socket, publisher)
        publisher.publish([stored(1)])
        assert socket.recv_multipart()[0].decode() == "kv-ü", "the configured topic wins"


def test_a_reader_may_have_the_whole_state() -> None:
    """One batch with the number of the last one; it clears everything first, so it is right for anybody."""
    with publishing(buffer_steps=1, topic="t") as publisher:
        with reader(zmq.DEALER, publisher.replay_endpoint) as socket:
            socket.send_multipart([b"", b"state"])
            assert socket.recv_multipart() == [b"", b"", b"\xff" * 8, b""], "nothing has been sent"
        publisher.publish([stored(1, 2, 3)])
        publisher.publish([BlockRemoved(block_hashes=[3]), stored(4)])
        publisher.publish([BlockRemoved(block_hashes=[4]), BlockStored(**MOVED), BlockRemoved(block_hashes=[2])])
        drained(publisher, 3)
        assert replay(publisher, 0) == [2, -1], "who does not ask for it is answered as ever"
        with reader(zmq.DEALER, publisher.replay_endpoint) as socket:
            socket.send_multipart([b"", b"state"])
            messages = [socket.recv_multipart() for _ in range(3)]
    numbers = [int.from_bytes(sequence, "big", signed=True) for _, _, sequence, _ in messages]
    assert numbers == [2, 2, -1], "the batch of that number follows: by it the publisher is known again"
    assert msgspec.msgpack.decode(messages[1][3])[1][0] == {
        "type": "BlockRemoved",
        "block_hashes": [4],
        "medium": "GPU",
    }
    assert messages[0][:2] == [b"", b"t"]
    _, [cleared, device, host], rank = msgspec.msgpack.decode(messages[0][3])
    assert rank == 0
    assert cleared == {"type": "AllBlocksCleared"}
    assert (device["block_hashes"], device["parent_block_hash"], device["token_ids"]) == ([1], None, [1])
    assert (host["block_hashes"], host["parent_block_hash"], host["medium"], host["token_ids"]) == ([2], 1, "CPU", [2])


class Racing(deque[QueuedBatch]):
    """A queue of which something happens as soon as it was found empty."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def __bool__(self) -> bool:
        if not len(self):
            self._happens()
            return False
        return True


def test_the_state_takes_nothing_in_that_was_lost_after_what_still_waits() -> None:
    """The engine queues a batch, and loses the next one, while the state is told: their order is kept."""

    def go_on() -> None:
        batches = [QueuedBatch(at, EventBatch(0.0, [stored(at)], 0)) for at in (1, 2)]
        queue.append(batches[0])
        sender.lost.append(batches[1])

    queue = Racing(go_on)
    with zmq.Context() as context, context.socket(zmq.PUB) as stream:
        sender = BatchSender(
            SenderSockets(context, stream, None, None, shares_context=True),
            queue,
            -1,
            topic="",
            encoding="map",
            data_parallel_rank=0,
            buffer_steps=10,
            published=None,
            statistics=PublisherStatistics(),
        )
        assert sender._state() == []
        sender._send_queued(1)
        numbers = [number for number, _ in sender._state()]
        assert numbers == [2], "first what waited, then what was lost"


def test_a_move_is_told_with_tokens_and_parent() -> None:
    """§2.6: store(new tier, with tokens and parent), then remove(old tier). Beginnings come first; a block that nobody
    was told of, because its batch was dropped, is told by its hash alone.
    """
    stored_event = BlockStored(
        block_hashes=[1, 2, 3],
        parent_block_hash=None,
        token_ids=[10, 11, 20, 21, 30, 31],
        block_size=2,
        lora_id=7,
        extra_keys=[["5"], None, None],
    )
    moved = BlockStored(block_hashes=[3, 9, 1, 2], parent_block_hash=None, token_ids=[], block_size=2, medium="CPU")
    with publishing() as publisher:
        publisher.publish([stored_event, moved, BlockRemoved(block_hashes=[3, 9, 1, 2])])
        back = BlockStored(block_hashes=[2], parent_block_hash=None, token_ids=[], block_size=2, medium="GPU")
        publisher.publish([back])
        drained(publisher, 2)
        batches = []
        with reader(zmq.DEALER, publisher.replay_endpoint) as socket:
            socket.send_multipart([b"", bytes(8)])
            batches += [msgspec.msgpack.decode(socket.recv_multipart()[3])[1] for _ in range(2)]
    _, host, unknown, removed = batches[0]
    assert (host["block_hashes"], host["parent_block_hash"], host["medium"]) == ([1, 2, 3], None, "CPU")
    assert (host["token_ids"], host["lora_id"], host["extra_keys"]) == (
        [10, 11, 20, 21, 30, 31],
        7,
        [["5"], None, None],
    )
    assert (unknown["block_hashes"], unknown["token_ids"], unknown["medium"]) == ([9], [], "CPU")
    assert removed["type"] == "BlockRemoved"
    [device] = batches[1]
    assert (device["block_hashes"], device["parent_block_hash"], device["medium"]) == ([2], 1, "GPU")
    assert (device["token_ids"], device["lora_id"]) == ([20, 21], 7)
    assert "extra_keys" not in device, "the salt is its parents'"


MOVED: dict[str, Any] = {
    "block_hashes": [2],
    "parent_block_hash": None,
    "token_ids": [],
    "block_size": 1,
    "medium": "CPU",
}
