"""The control sockets for real, between two of them in this process."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kvmesh.protocol.transfer import CancelSession, ResultAck
from kvmesh.transceiver.control import Control, Route
from kvmesh.transceiver.types import PeerKey

WAIT_S = 20


class Recorder:
    """Notes what happens; answers cancels."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.control: Control

    def next(self) -> tuple[Any, ...]:
        return self.events.get(timeout=WAIT_S)

    def on_message(self, route: Route, message: Any) -> None:
        self.events.put(("message", route, message))
        if isinstance(message, CancelSession):
            self.control.send(route, ResultAck(transfer_id=message.transfer_id, session=0, status="cancelled"))

    def on_connected(self, endpoint: str) -> None:
        self.events.put(("connected", endpoint))

    def on_disconnected(self, endpoint: str) -> None:
        self.events.put(("disconnected", endpoint))

    def on_process_ended(self, peer: PeerKey) -> None:
        self.events.put(("ended", peer))


@pytest.fixture
def make() -> Iterator[Callable[[str], Recorder]]:
    made: list[Recorder] = []

    def start(name: str) -> Recorder:
        recorder = Recorder()
        recorder.control = Control(name, "127.0.0.1", recorder)
        recorder.control.start()
        made.append(recorder)
        return recorder

    yield start
    for recorder in made:
        recorder.control.close(WAIT_S)
        recorder.control.close(WAIT_S)
        assert recorder.control.error is None


def test_messages_go_both_ways(make: Callable[[str], Recorder]) -> None:
    owner, receiver = make("owner"), make("receiver")
    receiver.control.connect(owner.control.endpoint)
    for number in range(50):
        receiver.control.send(owner.control.endpoint, CancelSession(transfer_id=number))
    for number in range(50):
        kind, route, message = owner.next()
        assert (kind, message.transfer_id) == ("message", number)
        assert route.startswith(b"receiver@")
    heard = [receiver.next() for _ in range(51)]
    heard.remove(("connected", owner.control.endpoint))  # Told by a socket of its own, sooner or later.
    assert [answer[2].transfer_id for answer in heard] == list(range(50))
    assert {answer[1] for answer in heard} == {owner.control.endpoint}


def test_a_lost_owner_is_told_and_messages_to_nobody_are_counted(make: Callable[[str], Recorder]) -> None:
    owner, receiver = make("owner"), make("receiver")
    endpoint = owner.control.endpoint
    receiver.control.connect(endpoint)
    receiver.control.send(endpoint, CancelSession(transfer_id=1))
    route = owner.next()[1]
    assert sorted(receiver.next()[0] for _ in range(2)) == ["connected", "message"], "two sockets: in either order"
    receiver.control.disconnect(endpoint)
    receiver.control.send(endpoint, CancelSession(transfer_id=2))
    receiver.control.connect(endpoint)
    receiver.control.send(endpoint, CancelSession(transfer_id=3))
    assert owner.next()[2].transfer_id == 3, "what is sent between is dropped"
    assert receiver.control.dropped_total == 1
    owner.control.send(route, CancelSession(transfer_id=4))
    assert sorted(receiver.next()[0] for _ in range(2)) == ["connected", "message"], "two sockets: in either order"
    owner.control.close(WAIT_S)
    assert receiver.next() == ("disconnected", endpoint)
    assert owner.control.dropped_total == 1, "the former connection of a receiver is no route"


def test_an_address_where_nobody_listens_is_told(make: Callable[[str], Recorder]) -> None:
    receiver = make("receiver")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    receiver.control.connect(endpoint)
    assert receiver.next() == ("disconnected", endpoint)


def test_what_is_no_message_is_counted(make: Callable[[str], Recorder]) -> None:
    owner = make("owner")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(owner.control.endpoint)
        for garbage in (b"", b"\xc1", b"GET / HTTP/1.1"):
            socket.send(garbage)
        receiver = make("receiver")
        receiver.control.connect(owner.control.endpoint)
        while owner.control.dropped_total < 3:
            receiver.control.send(owner.control.endpoint, CancelSession(transfer_id=5))
            assert owner.next()[2].transfer_id == 5


def test_the_end_of_a_process_is_told_once(make: Callable[[str], Recorder]) -> None:
    recorder, peer = make("owner"), PeerKey("peer", 1)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for _ in range(2):
        recorder.control.watch(os.pidfd_open(child.pid), peer)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert recorder.next() == ("ended", peer)
    recorder.control.connect(recorder.control.endpoint)
    assert recorder.next() == ("connected", recorder.control.endpoint), "and not a second time"
