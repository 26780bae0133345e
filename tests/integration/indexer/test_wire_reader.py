"""An ordinary reader of our stream, written from the wire format with pyzmq and msgspec alone (acceptance 9).

Nothing here but the publisher's side is product code. The reader loses messages on purpose and must end up with exactly
what the cache holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvmesh.cache.events import StoredBlocks
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.sink import StreamSink
from kvmesh.hashing import ReuseScope, v2_block_keys, v2_root

BLOCK = 4
SCOPE = ReuseScope()
TIMEOUT_MS = 5000


class Worker:
    """What an engine does: tells its sink, flushes once a step."""

    def __init__(self, encoding: Any, signed: bool) -> None:
        self.sink = StreamSink(BLOCK, signed=signed)
        self.publisher = ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", encoding=encoding)
        self.held: dict[bytes, list[int]] = {}

    def store(self, tokens: list[int], first_new: int = 0) -> None:
        array = np.array(tokens, np.int32)
        keys = v2_block_keys(array, BLOCK, v2_root(SCOPE))
        rows = array.reshape(-1, BLOCK)[first_new:]
        parent = keys[first_new - 1] if first_new else None
        priorities = np.full(len(rows), 35, np.uint8)
        self.sink.on_stored(0, StoredBlocks(SCOPE, parent, keys[first_new:], rows, 0, priorities))
        self.held |= dict(zip(keys[first_new:], rows.tolist(), strict=True))

    def remove(self, *keys: bytes) -> None:
        self.sink.on_removed(0, keys, 0)
        for key in keys:
            del self.held[key]

    def step(self) -> None:
        assert self.publisher.publish(self.sink.take())


class Reader:
    """wire.md and nothing else: three frames, a batch of three elements, events as maps or arrays, replay by DEALER."""

    def __init__(self, publisher: ZmqPublisher) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.expected = 0
        self.gaps = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stream = self._context.socket(zmq.SUB)
        self._stream.linger = 0
        self._stream.rcvtimeo = TIMEOUT_MS
        self._stream.subscribe(b"")
        assert publisher.endpoint is not None
        self._stream.connect(publisher.endpoint)
        self._replay_endpoint = publisher.replay_endpoint

    def read(self, *, lose: bool = False) -> None:
        _topic, number, payload = self._stream.recv_multipart()
        sequence = int.from_bytes(number, "big")
        if lose or sequence < self.expected:
            return
        if sequence > self.expected:
            self.gaps += 1
            self.replay()
        if sequence == self.expected:
            self.apply(sequence, payload)

    def replay(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvtimeo = TIMEOUT_MS
        socket.connect(self._replay_endpoint)
        socket.send_multipart([b"", self.expected.to_bytes(8, "big")])
        while True:
            frames = socket.recv_multipart()
            number, payload = frames[-2], frames[-1]
            if number == b"\xff" * 8:
                break
            if int.from_bytes(number, "big") == self.expected:
                self.apply(self.expected, payload)
        socket.close()

    def apply(self, sequence: int, payload: bytes) -> None:
        _ts, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            if isinstance(event, list):
                names = {
                    "BlockStored": ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size"],
                    "BlockRemoved": ["type", "block_hashes", "medium"],
                    "AllBlocksCleared": ["type"],
                }[event[0]]
                event = dict(zip(names, event, strict=False))
            if event["type"] == "BlockStored":
                size = event["block_size"]
                for i, hash_ in enumerate(event["block_hashes"]):
                    self.blocks[hash_ % 2**64] = event["token_ids"][i * size : (i + 1) * size]
            elif event["type"] == "BlockRemoved":
                for hash_ in event["block_hashes"]:
                    self.blocks.pop(hash_ % 2**64, None)
            else:
                self.blocks.clear()
        self.expected = sequence + 1

    def close(self) -> None:
        self._stream.close()
        self._context.term()


@pytest.fixture(params=[("map", False), ("array", False), ("map", True), ("array", True)])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = Worker(*request.param)
    worker.publisher.start()
    yield worker
    worker.publisher.shutdown()


def truth(worker: Worker) -> dict[int, list[int]]:
    """On the wire a block's hash is the first 8 bytes of its key, big-endian."""
    return {int.from_bytes(key[:8], "big"): tokens for key, tokens in worker.held.items()}


def test_a_reader_that_lost_messages_has_the_exact_index_after_a_replay(worker: Worker) -> None:
    reader = Reader(worker.publisher)
    try:
        worker.store(list(range(8)))
        worker.step()
        reader.replay()  # whoever comes late begins like this
        assert reader.blocks == truth(worker)

        warm_up(worker, reader)
        for number in range(6):
            worker.store([*range(8), *range(100 * number, 100 * number + 8)], first_new=2)
            worker.step()
        first = next(iter(worker.held))
        worker.remove(*(key for key in list(worker.held)[-2:] if key != first))
        worker.step()
        for _ in range(3):
            reader.read(lose=True)
        for _ in range(4):
            reader.read()
        assert reader.gaps == 1
        assert reader.blocks == truth(worker)

        worker.remove(*worker.held)
        worker.store([9] * 8)
        worker.step()
        reader.read()
        assert reader.blocks == truth(worker)
    finally:
        reader.close()


def warm_up(worker: Worker, reader: Reader) -> None:
    """Publish until the subscription stands; what was missed meanwhile is replayed."""
    reader._stream.rcvtimeo = 50
    for number in range(200):
        worker.store([1000 + number] * BLOCK)
        worker.step()
        try:
            reader.read()
        except zmq.Again:
            continue
        break
    reader.replay()
    reader._stream.rcvtimeo = TIMEOUT_MS
    while reader._stream.poll(100):
        reader.read()
    assert reader.blocks == truth(worker)
    reader.gaps = 0
