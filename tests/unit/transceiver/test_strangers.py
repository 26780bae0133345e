"""Whoever connects without belonging here takes little, and not for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvmesh.transceiver.channels import builtin_sockets
from kvmesh.transceiver.channels.builtin_sockets import TOKEN_BYTES, DataListener, DataSource, Way
from kvmesh.transceiver.channels.mpi_meeting import Meeting
from kvmesh.transceiver.planes.base import PlaneError
from kvmesh.transceiver.planes.sockets import receive_exactly
from kvmesh.transceiver.planes.strangers import MAX_STRANGERS, Strangers
from kvmesh.transceiver.types import PeerKey

TOKEN = b"t" * TOKEN_BYTES
WAIT_S = 20


@pytest.fixture
def listener() -> Iterator[DataListener]:
    made = DataListener("127.0.0.1", TOKEN, lambda _name: (PeerKey("receiver", 1), Way.SOCKET))
    yield made
    made.close()


def come_down_to(most: int, name: str) -> bool:
    """Whether so many threads of a name are left, once those who were hung up on have noticed."""
    until_s = time.monotonic() + WAIT_S
    while (found := [thread for thread in threading.enumerate() if thread.name == name])[most:]:
        if time.monotonic() >= until_s:
            return False
        found[0].join(0.01)
    return True


def is_ended(connection: socket.socket) -> bool:
    connection.settimeout(WAIT_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_silent_strangers_of_the_data_listener_are_few_and_keep_nobody_out(listener: DataListener) -> None:
    silent = [socket.create_connection(listener.address) for _ in range(MAX_STRANGERS + 20)]
    try:
        assert all(is_ended(connection) for connection in silent[:20]), "the oldest go"
        assert come_down_to(MAX_STRANGERS, "kvmesh-channel-hello")
        source = DataSource(listener.address, TOKEN, "receiver#1", connect_timeout_s=WAIT_S)
        assert source.way is Way.SOCKET
        source.close()
    finally:
        for connection in silent:
            connection.close()


def test_a_receiver_that_is_known_is_no_stranger(listener: DataListener) -> None:
    source = DataSource(listener.address, TOKEN, "receiver#1", connect_timeout_s=WAIT_S)
    silent = [socket.create_connection(listener.address) for _ in range(MAX_STRANGERS + 1)]
    assert is_ended(silent[0])
    assert not source.lost
    source.close()
    for connection in silent:
        connection.close()


def test_a_greeting_has_one_deadline_however_slowly_it_comes(
    listener: DataListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"12")
        assert receive_exactly(ours, 1, by_s=time.monotonic() + WAIT_S) == b"1"
        with pytest.raises(TimeoutError):
            receive_exactly(ours, 2, by_s=time.monotonic() + 0.01)
        theirs.sendall(b"3")
        with pytest.raises(TimeoutError, match="too slow"):
            receive_exactly(ours, 1, by_s=time.monotonic())
    monkeypatch.setattr(builtin_sockets, "HELLO_TIMEOUT_S", 0.05)
    with socket.create_connection(listener.address) as slow:
        slow.sendall(b"K")
        assert is_ended(slow)


def test_strangers_of_a_meeting_of_mpi_processes_are_few() -> None:
    def nothing(*_arguments: str) -> str:
        raise PlaneError("nobody is attached")

    meeting = Meeting("127.0.0.1", TOKEN, WAIT_S, nothing, nothing)
    silent = [socket.create_connection(meeting.address) for _ in range(MAX_STRANGERS + 20)]
    try:
        assert all(is_ended(connection) for connection in silent[:20])
        assert come_down_to(MAX_STRANGERS + 1, "kvmesh-mpi-meeting")
        wrong = msgspec.msgpack.encode([b"wrong token", "receiver"])
        with socket.create_connection(meeting.address) as stranger:
            stranger.sendall(len(wrong).to_bytes(4, "big") + wrong)
            assert is_ended(stranger)
    finally:
        for connection in silent:
            connection.close()
        meeting.close()


def test_a_connection_for_which_there_is_no_thread_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    strangers = Strangers("test")
    ours, theirs = socket.socketpair()
    with theirs:
        with monkeypatch.context() as shortage:
            shortage.setattr(threading.Thread, "start", no_thread)
            assert strangers.meet(ours, lambda _connection: None) is None
        assert is_ended(theirs)
    assert len(strangers) == 0


def test_a_defect_in_serving_ends_one_connection() -> None:
    def fail(_connection: socket.socket) -> None:
        raise ZeroDivisionError

    strangers = Strangers("test")
    ours, theirs = socket.socketpair()
    with theirs:
        thread = strangers.meet(ours, fail)
        assert is_ended(theirs)
        assert thread is not None
        thread.join(WAIT_S)
    assert len(strangers) == 0
