"""However often readers ask, the engine beside the publisher loses a share of its processor and not more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from kvmesh.events import answers
from kvmesh.events.allowance import Allowance
from kvmesh.events.answers import Answers, PublisherStatistics
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.events import BlockStored

TIMEOUT_MS = 30_000
END = b"\xff" * 8


@contextmanager
def sockets(readers: int) -> Iterator[list[zmq.Socket[bytes]]]:
    """A ROUTER, and DEALERs that are connected to it."""
    with zmq.Context() as context:
        opened = [context.socket(zmq.ROUTER), *(context.socket(zmq.DEALER) for _ in range(readers))]
        opened[0].bind("inproc://replay")
        for reader in opened[1:]:
            reader.connect("inproc://replay")
            reader.rcvtimeo = TIMEOUT_MS
        try:
            yield opened
        finally:
            for socket in opened:
                socket.close(linger=0)


def test_who_asks_for_the_state_at_the_same_time_gets_the_same_one() -> None:
    made: list[None] = []

    def state() -> list[tuple[int, bytes]]:
        made.append(None)
        return [(7, b"all")]

    statistics = PublisherStatistics()
    with sockets(2) as (router, one, other):
        asked = Answers(router, b"t", kept=[(7, b"batch")], state=state, published=None, statistics=statistics)
        for _ in range(5):
            one.send_multipart([b"", b"state"])
        other.send_multipart([b"", bytes(8)])
        other.send_multipart([b"", b"state"])
        while statistics.replays_total < 3:
            asked.answer_next()
        for reader, payloads in ((one, [b"all", b""]), (other, [b"all", b"", b"batch", b""])):
            assert sorted(reader.recv_multipart()[-1] for _ in payloads) == sorted(payloads)
            assert not reader.poll(0)
    assert len(made) == 1


def test_a_request_that_goes_wrong_costs_its_reader_an_answer() -> None:
    def state() -> list[tuple[int, bytes]]:
        raise RuntimeError("a defect")

    with sockets(1) as (router, reader), capture_logs() as logs:
        asked = Answers(router, b"t", kept=[], state=state, published=None, statistics=PublisherStatistics())
        reader.send_multipart([b"", b"state"])
        reader.send_multipart([b"", bytes(8)])
        while not reader.poll(0):
            asked.answer_next()
        assert reader.recv_multipart()[-2] == END
    assert [line["event"] for line in logs] == ["a request could not be answered"]


def test_answers_rest_when_their_time_is_used_up() -> None:
    clock = ManualClock()
    with sockets(1) as (router, reader), capture_logs() as logs:
        asked = Answers(
            router,
            b"t",
            kept=[(number, bytes(1000)) for number in range(1000)],
            state=list,
            published=None,
            statistics=PublisherStatistics(),
            allowance=Allowance(0.001, 0.0, clock),
        )
        reader.send_multipart([b"", bytes(8)])
        while not reader.poll(0):
            asked.answer_next()
        rest_s = asked.rest_s()
        assert rest_s > 0.0
        clock.advance(rest_s + 1e-6)
        assert asked.rest_s() == 0.0
    assert [line["event"] for line in logs] == ["readers ask for more than they get; answers come late"]


def test_while_answers_rest_the_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SHARE", 1e-9)
    monkeypatch.setattr(answers, "AT_ONCE_S", 0.0)
    publisher = ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    publisher.start()
    assert publisher.endpoint is not None
    assert publisher.replay_endpoint is not None
    with zmq.Context() as context, context.socket(zmq.SUB) as stream, context.socket(zmq.DEALER) as reader:
        reader.linger = 0
        reader.rcvtimeo = stream.rcvtimeo = TIMEOUT_MS
        stream.subscribe(b"")
        stream.connect(publisher.endpoint)
        reader.connect(publisher.replay_endpoint)
        reader.send_multipart([b"", b"state"])
        assert reader.recv_multipart()[-2] == END
        reader.send_multipart([b"", b"state"])
        received: set[int] = set()
        while len(received) < 5:
            publisher.publish(
                [BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=[1], block_size=1)],
            )
            while stream.poll(10):
                _, number, payload = stream.recv_multipart()
                received.add(int.from_bytes(number, "big"))
                assert msgspec.msgpack.decode(payload)[1]
        assert not reader.poll(0)
        assert publisher.statistics().replays_total == 1
    publisher.shutdown()
