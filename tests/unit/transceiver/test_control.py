"""The control sockets for real, between two of them in this process."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmesh.protocol.transfer import CancelSession, ResultAck
from kvmesh.transceiver.control import MAX_STRANGER_BYTES, Control, Route
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
    assert receiver.next() == ("connected", owner.control.endpoint)
    heard = [receiver.next() for _ in range(50)]
    assert [answer[2].transfer_id for answer in heard] == list(range(50))
    assert {answer[1] for answer in heard} == {owner.control.endpoint}


def test_a_lost_owner_is_told_and_messages_to_nobody_are_counted(make: Callable[[str], Recorder]) -> None:
    owner, receiver = make("owner"), make("receiver")
    endpoint = owner.control.endpoint
    receiver.control.connect(endpoint)
    receiver.control.send(endpoint, CancelSession(transfer_id=1))
    route = owner.next()[1]
    assert [receiver.next()[0] for _ in range(2)] == ["connected", "message"]
    receiver.control.disconnect(endpoint)
    receiver.control.send(endpoint, CancelSession(transfer_id=2))
    receiver.control.connect(endpoint)
    receiver.control.send(endpoint, CancelSession(transfer_id=3))
    assert owner.next()[2].transfer_id == 3, "what is sent between is dropped"
    assert receiver.control.dropped_total == 1
    owner.control.send(route, CancelSession(transfer_id=4))
    assert [receiver.next()[0] for _ in range(2)] == ["connected", "message"]
    owner.control.close(WAIT_S)
    assert receiver.next() == ("disconnected", endpoint)
    assert owner.control.dropped_total == 1, "the former connection of a receiver is no route"


def test_an_address_where_nobody_listens_is_told(make: Callable[[str], Recorder]) -> None:
    receiver = make("receiver")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        endpoint = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
    receiver.control.connect(endpoint)
    assert receiver.next() == ("disconnected", endpoint)


def frames(*messages: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(message)) + message for message in messages)


def dial(recorder: Recorder) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(recorder.control.endpoint.rpartition(":")[2])), WAIT_S)


def test_what_is_no_message_is_counted(make: Callable[[str], Recorder]) -> None:
    owner = make("owner")
    with dial(owner) as garbler:
        deep = b"\x82\xa4type\xa9ResultAck\xa1x" + b"\x91" * 100_000 + b"\xc0"
        garbler.sendall(frames(b"KVC1garbler", b"", b"\xc1", b"GET / HTTP/1.1", deep))
        garbler.sendall(frames(msgspec.msgpack.encode(CancelSession(transfer_id=5))))
        assert owner.next()[:2] == ("message", b"garbler"), "the connection lives on"
    assert owner.control.dropped_total == 4


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frames(b"KVC1"),
        frames(b"another protocol"),
        frames(b"KVC1name") + struct.pack("<I", MAX_STRANGER_BYTES + 1),
    ],
)
def test_who_does_not_speak_the_protocol_is_hung_up_on(make: Callable[[str], Recorder], garbage: bytes) -> None:
    owner, receiver = make("owner"), make("receiver")
    with dial(owner) as stranger:
        stranger.sendall(garbage)
        stranger.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert owner.control.dropped_total == 1
    receiver.control.connect(owner.control.endpoint)
    receiver.control.send(owner.control.endpoint, CancelSession(transfer_id=5))
    assert owner.next()[2].transfer_id == 5


def test_a_message_that_cannot_be_handled_ends_its_connection_only(make: Callable[[str], Recorder]) -> None:
    owner, receiver = make("owner"), make("receiver")
    handle = owner.on_message

    def stumble(route: Route, message: Any) -> None:
        if message.transfer_id == 13:
            raise IndexError("a defect that a peer has found")
        handle(route, message)

    owner.on_message = stumble  # type: ignore[method-assign]
    with dial(owner) as peer:
        peer.sendall(frames(b"KVC1peer", msgspec.msgpack.encode(CancelSession(transfer_id=13))))
        peer.settimeout(WAIT_S)
        assert peer.recv(1) == b""
    receiver.control.connect(owner.control.endpoint)
    receiver.control.send(owner.control.endpoint, CancelSession(transfer_id=5))
    assert owner.next()[2].transfer_id == 5


def test_strangers_are_few_and_leave(make: Callable[[str], Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.transceiver.introductions.MAX_STRANGERS", 2)
    monkeypatch.setattr("kvmesh.transceiver.introductions.STRANGER_TIMEOUT_S", 0.2)
    owner = make("owner")
    with dial(owner) as member:
        member.sendall(frames(b"KVC1member", msgspec.msgpack.encode(CancelSession(transfer_id=1))))
        assert owner.next()[1] == b"member"
        owner.control.admit(b"member")
        strangers = [dial(owner) for _ in range(4)]
        for stranger in strangers:
            stranger.settimeout(WAIT_S)
            assert stranger.recv(1) == b"", "too many, or said nothing"
            stranger.close()
        member.sendall(frames(large_message(2)))
        assert owner.next()[2].transfer_id == 2, "members stay"
    with dial(owner) as again:
        again.sendall(frames(b"KVC1member", large_message(3)))
        assert owner.next()[2].transfer_id == 3, "and come back under their name"


def large_message(transfer_id: int) -> bytes:
    """More than a stranger may say."""
    return msgspec.msgpack.encode(CancelSession(transfer_id=transfer_id, ticket=bytes(MAX_STRANGER_BYTES)))


def test_a_shortage_of_descriptors_is_waited_out(
    make: Callable[[str], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = make("owner")
    refusals = iter([OSError(errno.EMFILE, "too many open files")] * 2)
    listener = owner.control._listener

    class ShortListener:
        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

        def accept(self) -> Any:
            if (refusal := next(refusals, None)) is not None:
                raise refusal
            return listener.accept()

    owner.control._listener = ShortListener()  # type: ignore[assignment]
    with dial(owner) as peer:
        peer.sendall(frames(b"KVC1peer", msgspec.msgpack.encode(CancelSession(transfer_id=5))))
        assert owner.next()[2].transfer_id == 5


def test_messages_in_pieces_and_large_ones_arrive_whole(make: Callable[[str], Recorder]) -> None:
    owner, receiver = make("owner"), make("receiver")
    with dial(owner) as slow:
        for byte in frames(b"KVC1slow", msgspec.msgpack.encode(CancelSession(transfer_id=6))):
            slow.sendall(bytes([byte]))
        assert owner.next()[2].transfer_id == 6
    receiver.control.connect(owner.control.endpoint)
    receiver.control.send(owner.control.endpoint, CancelSession(transfer_id=7))
    owner.control.admit(owner.next()[1])
    large = os.urandom(24 << 20)
    for number in range(3):
        receiver.control.send(owner.control.endpoint, CancelSession(transfer_id=number, ticket=large))
    for number in range(3):
        message = owner.next()[2]
        assert (message.transfer_id, message.ticket == large) == (number, True)
        assert receiver.next()[0] in {"connected", "message"}


def test_who_does_not_read_blocks_nobody(make: Callable[[str], Recorder]) -> None:
    owner, other = make("owner"), make("other")
    with dial(owner) as deaf:
        deaf.sendall(frames(b"KVC1deaf", msgspec.msgpack.encode(ResultAck(transfer_id=1, session=1, status="done"))))
        assert owner.next()[1] == b"deaf"
        large = CancelSession(transfer_id=2, ticket=bytes(1 << 20))
        for _ in range(50):
            owner.control.send(b"deaf", large)
        other.control.connect(owner.control.endpoint)
        other.control.send(owner.control.endpoint, CancelSession(transfer_id=3))
        assert owner.next()[2].transfer_id == 3
        deaf.settimeout(WAIT_S)
        wanted = len(frames(msgspec.msgpack.encode(large))) * 50
        while wanted:
            wanted -= len(deaf.recv(1 << 20))
    assert owner.control.dropped_total == 0


def test_a_peer_that_comes_back_keeps_its_name_and_gets_what_waits(make: Callable[[str], Recorder]) -> None:
    receiver = make("receiver")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        receiver.control.connect(endpoint)
        receiver.control.send(endpoint, CancelSession(transfer_id=1))
        hello = []
        for number in (1, 2):
            accepted, _ = listener.accept()
            with accepted, accepted.makefile("rb") as stream:
                hello.append(stream.read(*struct.unpack("<I", stream.read(4))))
                cancel = msgspec.msgpack.decode(stream.read(*struct.unpack("<I", stream.read(4))), type=CancelSession)
                assert cancel.transfer_id == number
                assert receiver.next() == ("connected", endpoint)
            assert receiver.next() == ("disconnected", endpoint)
            receiver.control.send(endpoint, CancelSession(transfer_id=number + 1))
    assert hello[0] == hello[1]
    assert hello[0].startswith(b"KVC1receiver@")


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


def test_processes_of_lives_that_are_over_are_let_go_of_though_they_run_on(make: Callable[[str], Recorder]) -> None:
    recorder = make("owner")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = process_descriptors()
    recorder.control.watch(os.pidfd_open(child.pid), PeerKey("peer", 1))
    recorder.control.watch(os.pidfd_open(child.pid), PeerKey("peer", 2))
    recorder.control.unwatch("peer", 1)
    recorder.control.unwatch("another", 9)
    recorder.control.connect(recorder.control.endpoint)
    assert recorder.next() == ("connected", recorder.control.endpoint)
    assert len(process_descriptors()) == len(before) + 1
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert recorder.next() == ("ended", PeerKey("peer", 2))


def process_descriptors() -> set[str]:
    """Descriptors of this process that are pidfds."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "pidfd" in str(fd.readlink()):
                found.add(fd.name)
    return found
