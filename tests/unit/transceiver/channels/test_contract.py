"""What every channel promises, between two real processes.

Each backend's channels live in processes of their own, because two of the libraries in one process disturb each other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from channel_peers import BACKENDS, ChannelPeer, why_not
from freezing import freeze
from meshes.process import shared_memory

from kvmesh.transceiver.planes.base import MoveStoppedError, PlaneError

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
SOON_S = 30.0
IDLE_S = 1.5
"""The time of which a share is measured."""
REPORTS_DEATH = {"builtin-tcp", "nixl", "ucx", "mooncake"}
NOTICES_NOTHING = {"builtin-memfd"}
"""Shared memory outlives whoever reads it. MPICH is in neither: it says nothing, and does not end by itself."""
RECEIVER_CONNECTS = {"builtin-tcp", "mpi"}
TWO_SIDED = {"ucx", "mpi"}
"""The receiver can tell by itself whether something has arrived."""

Start = Callable[..., ChannelPeer]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if (reason := why_not(request.param)) is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="module")
def shared(backend: str) -> Iterator[list[ChannelPeer]]:
    """Three engines, the second of which receives from the others; what tests leave of them is as they found it."""
    before = shared_memory()
    peers = [ChannelPeer(backend, name) for name in ("ctx-0", "gen", "ctx-1")]
    for peer in peers:
        peer.call("session_opened")
    connect(peers[0], peers[1])
    connect(peers[2], peers[1])
    yield peers
    for peer in peers:
        peer.end()
    assert shared_memory() - before == set()


@pytest.fixture
def pair(shared: list[ChannelPeer]) -> tuple[ChannelPeer, ChannelPeer]:
    """An owner and its receiver, whose room is empty."""
    owner, receiver, _ = shared
    receiver.call("fill", "receive", 0, bytes(receiver.region_bytes))
    return owner, receiver


@pytest.fixture
def start(backend: str) -> Iterator[Start]:
    """Starts engines for one test, which leave nothing behind."""
    before = shared_memory()
    peers: list[ChannelPeer] = []

    def start(name: str, **options: Any) -> ChannelPeer:
        peers.append(ChannelPeer(backend, name, **options))
        peers[-1].call("session_opened")
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()
    assert shared_memory() - before == set()


@pytest.fixture
def doomed(start: Start) -> tuple[ChannelPeer, ChannelPeer]:
    """An owner and its receiver that do not outlive the test."""
    owner, receiver = start("ctx"), start("gen")
    connect(owner, receiver)
    return owner, receiver


def connect(owner: ChannelPeer, receiver: ChannelPeer) -> None:
    owner.attach(receiver, "owner")
    receiver.attach(owner, "receiver")


def move(owner: ChannelPeer, receiver: ChannelPeer, tag: int, src: int, dst: int, nbytes: int) -> Future[Any]:
    """Begin one piece; :func:`arrive` ends it."""
    incoming = receiver.call("expect", owner.key, tag, dst, nbytes)
    sent = owner.start("send", receiver.key, tag, src, dst, nbytes)
    sent.incoming = incoming  # type: ignore[attr-defined]
    return sent


def arrive(receiver: ChannelPeer, sent: Future[Any]) -> None:
    sent.result(SOON_S)
    receiver.call("wait", sent.incoming)  # type: ignore[attr-defined]


def test_pieces_arrive_as_they_were(pair: tuple[ChannelPeer, ChannelPeer]) -> None:
    """Many tags and sizes, several in flight, to other offsets than they came from; nothing else is written."""
    owner, receiver = pair
    sizes = [1, 63, 4096, 100_003, MIB, 5 * MIB + 17]
    pieces = [(tag, sizes[tag % len(sizes)]) for tag in range(4 * len(sizes))]
    data = os.urandom(sum(nbytes for _, nbytes in pieces))
    owner.call("fill", "send", 0, data)
    guard = 16
    under_way: list[tuple[Future[Any], int, int, int]] = []
    src = dst = 0

    def check() -> None:
        sent, src, dst, nbytes = under_way.pop(0)
        arrive(receiver, sent)
        assert receiver.call("read", "receive", dst, nbytes + guard) == data[src : src + nbytes] + bytes(guard)

    for index, (tag, nbytes) in enumerate(pieces):
        under_way.append((move(owner, receiver, 0xFFFF_FF00 + tag, src, dst, nbytes), src, dst, nbytes))
        src += nbytes
        dst += nbytes + guard
        if index % 4 == 3:
            while under_way:
                check()
    assert under_way == []


def test_both_directions_at_once(pair: tuple[ChannelPeer, ChannelPeer]) -> None:
    """An engine may be owner and receiver of the same peer; the same tags mean different pieces each way."""
    first, second = pair
    connect(second, first)
    data = {peer.key: os.urandom(3 * MIB) for peer in pair}
    for peer in pair:
        peer.call("fill", "send", 0, data[peer.key])
    for tag in range(3):
        there = move(first, second, tag, 0, 0, 3 * MIB)
        back = move(second, first, tag, 0, 0, 3 * MIB)
        arrive(second, there)
        arrive(first, back)
        assert second.call("read", "receive", 0, 3 * MIB) == data[first.key]
        assert first.call("read", "receive", 0, 3 * MIB) == data[second.key]


def test_two_owners_with_the_same_tags(shared: list[ChannelPeer]) -> None:
    receiver, owners = shared[1], [shared[0], shared[2]]
    nbytes = 4000
    for owner in owners:
        owner.call("fill", "send", 0, (str(owner.key).encode() * 1000)[:nbytes])
    sent = [move(owner, receiver, 7, 0, index * MIB, nbytes) for index, owner in enumerate(owners)]
    for index, owner in enumerate(owners):
        arrive(receiver, sent[index])
        assert receiver.call("read", "receive", index * MIB, nbytes) == (str(owner.key).encode() * 1000)[:nbytes]


def test_a_send_that_was_stopped_before_it_began_sends_nothing(pair: tuple[ChannelPeer, ChannelPeer]) -> None:
    owner, receiver = pair
    control = owner.call("control")
    owner.call("stop", control)
    incoming = receiver.call("expect", owner.key, 1, 0, MIB)
    with pytest.raises(MoveStoppedError):
        owner.call("send", receiver.key, 1, 0, 0, MIB, control)
    stopped = receiver.call("control")
    receiver.call("stop", stopped)
    with pytest.raises(MoveStoppedError):
        receiver.call("wait", incoming, stopped)
    receiver.call("cancel", incoming)
    # The same tag and room can be used again, since the owner has said that it ended.
    owner.call("fill", "send", 0, b"x" * MIB)
    arrive(receiver, move(owner, receiver, 1, 0, 0, MIB))
    assert receiver.call("read", "receive", 0, MIB) == b"x" * MIB


def test_a_room_that_was_given_up_stays_as_it_is_unless_cancel_says_otherwise(
    pair: tuple[ChannelPeer, ChannelPeer],
) -> None:
    owner, receiver = pair
    owner.call("fill", "send", 0, b"y" * MIB)
    incoming = receiver.call("expect", owner.key, 5, 0, MIB)
    quiet = receiver.call("cancel", incoming)
    # Its owner is not held up by a receiver that has lost interest.
    owner.start("send", receiver.key, 5, 0, 0, MIB).result(SOON_S)
    if quiet:
        assert receiver.call("read", "receive", 0, MIB) == bytes(MIB)
    arrive(receiver, move(owner, receiver, 6, 0, 2 * MIB, MIB))
    assert receiver.call("read", "receive", 2 * MIB, MIB) == b"y" * MIB


def test_what_does_not_fit_is_refused(pair: tuple[ChannelPeer, ChannelPeer]) -> None:
    owner, receiver = pair
    for offset, nbytes in [(owner.region_bytes - 10, 11), (-1, 5), (0, 0), (0, owner.region_bytes + 1)]:
        with pytest.raises(PlaneError):
            owner.call("send", receiver.key, 1, offset, 0, nbytes)
        with pytest.raises(PlaneError):
            receiver.call("expect", owner.key, 1, offset, nbytes)


def test_only_attached_peers(pair: tuple[ChannelPeer, ChannelPeer]) -> None:
    owner, receiver = pair
    owner.call("detach", receiver.key)
    owner.call("detach", receiver.key)
    with pytest.raises(PlaneError, match="not attached"):
        owner.call("send", receiver.key, 1, 0, 0, 10)
    receiver.call("detach", owner.key)
    connect(owner, receiver)


def test_a_frozen_receiver_holds_up_nobody_else(doomed: tuple[ChannelPeer, ChannelPeer], start: Start) -> None:
    owner, frozen = doomed
    other = start("gen-1")
    connect(owner, other)
    owner.call("fill", "send", 0, b"z" * (8 * MIB))
    freeze(frozen.pid)
    try:
        held = owner.start("send", frozen.key, 1, 0, 0, 8 * MIB)
        arrive(other, move(owner, other, 1, 0, 0, 8 * MIB))
        assert other.call("read", "receive", 0, 8 * MIB) == b"z" * (8 * MIB)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    held.result(SOON_S)  # Nobody expected it: it is dropped, or written where it was sent to.


@pytest.mark.parametrize("whose", ["receiver", "owner"])
def test_a_dead_peer_ends_what_waits_for_it(
    doomed: tuple[ChannelPeer, ChannelPeer], backend: str, whose: str, start: Start
) -> None:
    """§8: with a library that reports nothing, the move is ended by whoever sees the death; nothing hangs."""
    owner, receiver = doomed
    survivor, dead = (owner, receiver) if whose == "receiver" else (receiver, owner)
    control = survivor.call("control")
    if whose == "receiver":
        freeze(dead.pid)
        waiting = owner.start("send", dead.key, 1, 0, 0, 16 * MIB, control)
        dead.kill()
        if backend in REPORTS_DEATH:
            with pytest.raises(PlaneError):
                waiting.result(SOON_S)
            with pytest.raises(PlaneError):
                owner.call("send", dead.key, 2, 0, 0, MIB)
        elif backend not in NOTICES_NOTHING:
            owner.call("abandon", control)
            with pytest.raises((MoveStoppedError, PlaneError)):
                waiting.result(SOON_S)
    else:
        incoming = receiver.call("expect", dead.key, 1, 0, MIB)
        waiting = receiver.start("wait", incoming, control) if backend in TWO_SIDED else None
        dead.kill()
        receiver.call("abandon", control)
        if waiting is not None:
            with pytest.raises((MoveStoppedError, PlaneError)):
                waiting.result(SOON_S)
        receiver.call("cancel", incoming)
    survivor.call("detach", dead.key)
    # The same instance lives again under a new epoch.
    again = start(dead.key.instance_id, epoch=2)
    first, second = (survivor, again) if whose == "receiver" else (again, survivor)
    connect(first, second)
    first.call("fill", "send", 0, b"again" * 1000)
    arrive(second, move(first, second, 1, 0, 0, 5000))
    assert second.call("read", "receive", 0, 5000) == b"again" * 1000


def test_a_dead_peer_cannot_be_attached(start: Start, backend: str) -> None:
    """Connection set-up is bounded, and fails with a sentence."""
    survivor, dead = start("one"), start("other")
    dead.kill()
    with pytest.raises(PlaneError):
        survivor.attach(dead, "receiver" if backend in RECEIVER_CONNECTS else "owner")


def test_detach_and_attach_again(pair: tuple[ChannelPeer, ChannelPeer]) -> None:
    owner, receiver = pair
    for round_ in range(3):
        owner.call("fill", "send", 0, bytes([round_]) * MIB)
        arrive(receiver, move(owner, receiver, round_, 0, 0, MIB))
        assert receiver.call("read", "receive", 0, MIB) == bytes([round_]) * MIB
        receiver.call("detach", owner.key)
        owner.call("detach", receiver.key)
        connect(owner, receiver)


def test_close_is_bounded_and_idempotent(doomed: tuple[ChannelPeer, ChannelPeer]) -> None:
    owner, receiver = doomed
    arrive(receiver, move(owner, receiver, 1, 0, 0, MIB))
    for peer in doomed:
        before_s = time.monotonic()
        peer.call("close")
        peer.call("close")
        assert time.monotonic() - before_s < SOON_S
    with pytest.raises(PlaneError):
        owner.call("send", receiver.key, 1, 0, 0, 10)


@pytest.mark.slow
def test_idle_channels_take_no_processor_time(pair: tuple[ChannelPeer, ChannelPeer]) -> None:
    """§8.5: under 2 % of a core without sessions, after some traffic."""
    owner, receiver = pair
    arrive(receiver, move(owner, receiver, 1, 0, 0, 8 * MIB))
    for peer in pair:
        peer.call("session_closed")
    before_s = [peer.call("processor_s") for peer in pair]
    begin_s = time.monotonic()
    time.sleep(IDLE_S)
    elapsed_s = time.monotonic() - begin_s
    for peer, before in zip(pair, before_s, strict=True):
        assert (peer.call("processor_s") - before) / elapsed_s < 0.02
        peer.call("session_opened")
