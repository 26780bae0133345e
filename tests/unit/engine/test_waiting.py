"""Waits of the loop: what ends them, over a real channel."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvmesh.engine.channel import FrontChannel
from kvmesh.engine.waiting import LoopWaiter
from kvmesh.net.clock import SystemClock
from kvmesh.protocol.engine import Ping

LONG_S = 20.0
"""A wait that nothing ends; no test gets there."""


@pytest.fixture
def front(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.bind(f"ipc://{tmp_path / 'e.sock'}")
        yield socket


@pytest.fixture
def channel(front: zmq.Socket[bytes]) -> Iterator[FrontChannel]:
    channel = FrontChannel(front.getsockopt_string(zmq.LAST_ENDPOINT))
    yield channel
    channel.close()


@pytest.fixture
def waiter(channel: FrontChannel) -> LoopWaiter:
    return LoopWaiter(channel, SystemClock())


def test_a_wake_up_is_remembered_until_the_next_receive(channel: FrontChannel) -> None:
    assert not channel.wait(0.0)
    channel.bell.ring()
    channel.bell.ring()
    assert channel.wait(LONG_S)
    assert channel.wait(LONG_S), "nobody has looked yet"
    assert channel.receive() == []
    assert not channel.wait(0.0)


def test_a_wake_up_from_another_thread_ends_a_wait(channel: FrontChannel) -> None:
    waker = threading.Thread(target=channel.bell.ring)
    started_s = time.monotonic()
    waker.start()
    assert channel.wait(LONG_S)
    assert time.monotonic() - started_s < LONG_S / 2
    waker.join()


def test_a_message_ends_a_wait(channel: FrontChannel, front: zmq.Socket[bytes]) -> None:
    front.send(msgspec.msgpack.encode(Ping(3)))
    assert channel.wait(LONG_S)
    assert channel.receive() == [Ping(3)]


def test_a_closed_channel_is_not_woken(front: zmq.Socket[bytes]) -> None:
    channel = FrontChannel(front.getsockopt_string(zmq.LAST_ENDPOINT))
    channel.close()
    channel.bell.ring()


def test_a_poll_waits_its_time_without_the_lock(waiter: LoopWaiter) -> None:
    changed = threading.Condition(threading.RLock())
    got = threading.Event()

    def take_the_lock() -> None:
        with changed:
            got.set()

    other = threading.Thread(target=take_the_lock)
    with changed, waiter.limited(LONG_S):
        other.start()
        while not got.is_set():
            assert waiter.wait(changed, 0.001)
    other.join()


def test_progress_ends_a_poll(waiter: LoopWaiter) -> None:
    changed = threading.Condition(threading.RLock())

    def progress() -> None:
        with changed:
            waiter.notify(changed)

    other = threading.Thread(target=progress)
    with changed, waiter.limited(LONG_S):
        other.start()  # It gets the lock when the wait gives it up.
        assert not waiter.wait(changed, LONG_S)
    other.join()


def test_a_message_from_the_front_ends_a_poll(waiter: LoopWaiter, front: zmq.Socket[bytes]) -> None:
    front.send(msgspec.msgpack.encode(Ping(3)))
    changed = threading.Condition(threading.RLock())
    with changed, waiter.limited(LONG_S):
        assert not waiter.wait(changed, LONG_S)


def test_a_poll_never_waits_past_the_loop_s_next_duty(waiter: LoopWaiter) -> None:
    changed = threading.Condition(threading.RLock())
    with changed, waiter.limited(0.002):
        assert not waiter.wait(changed, LONG_S)
        assert not waiter.wait(changed, LONG_S), "the duty is still due"
