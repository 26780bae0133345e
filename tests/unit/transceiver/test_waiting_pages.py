"""Pages that wait to be asked for may move to the host tier, and are read from wherever they are then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvmesh.transceiver.parts import DEVICE, HOST
from kvmesh.transceiver.states import SessionState
from kvmesh.transceiver.types import PoolMemory

Wire = Any
"""tests/unit/transceiver/conftest.py"""


@pytest.fixture
def wire(make_wire: Callable[..., Wire], request: pytest.FixtureRequest) -> Wire:
    wire = make_wire(request.param)
    pool = wire.context.pools[0]
    host = PoolMemory(address=0, nbytes=pool.nbytes, num_pages=pool.num_pages, page_bytes=pool.page_bytes)
    object.__setattr__(wire.context, "pools", [pool, host])
    wire.pair()
    return wire


both_ways = pytest.mark.parametrize("wire", ["pull", "push"], indirect=True)


class FakeMovableLease:
    """Pages that move to the host tier as soon as they may, except the first."""

    def __init__(self, lease: Any) -> None:
        self._lease = lease
        self.moving = False
        self.room = True
        self.lost = False

    def page_ids(self, group: int) -> np.ndarray:
        ids = self._lease.page_ids(group).copy()
        ids[1:] += 30 * self.moving
        return ids

    def levels(self, group: int) -> np.ndarray:
        levels = np.full(len(self.page_ids(group)), int(self.moving), dtype=np.uint8)
        levels[0] = 0
        return levels

    def let_move(self) -> bool:
        self.moving = True
        return True

    def keep_place(self) -> bool:
        return self.room and not self.lost

    def release(self) -> None:
        self._lease.release()

    def quarantine(self) -> None:
        raise AssertionError("nobody writes into what is offered")


def offered(wire: Wire, transfer_id: int = 7) -> tuple[Any, FakeMovableLease]:
    handoff = wire.offer(transfer_id)
    session = wire.sender.table.open[transfer_id]
    session.lease = FakeMovableLease(session.lease)
    return handoff, session.lease


@both_ways
def test_moved_pages_are_read_from_the_host_tier_after_the_executor_has_looked(wire: Wire) -> None:
    handoff, _lease = offered(wire)
    assert wire.sender.waiting.let_move() == 1
    assert wire.sender.waiting.let_move() == 0
    wire.ask(7, handoff, [20, 21, 22, 23])
    wire.pump()
    assert wire.sender.table.open[7].status.state is SessionState.READY
    assert wire.sender.waiting.any_put_off
    assert not wire.context_plane.moved + wire.generation_plane.moved
    wire.sender.poll(0)
    wire.pump()
    assert not wire.sender.waiting.any_put_off
    assert wire.receiver.poll(0).completed == [7]
    assert wire.sender.poll(0).completed == [7]
    assert wire.released(7) == (1, 1)
    (job,) = wire.context_plane.moved + wire.generation_plane.moved
    pulls = wire.generation_plane.direction == "pull"
    seen = {}
    for part in job.parts:
        pool, theirs, ours = (
            (part.remote_pool, part.remote, part.local) if pulls else (part.local_pool, part.local, part.remote)
        )
        seen[pool] = (theirs.tolist(), ours.tolist())
    assert seen == {DEVICE: ([10], [20]), HOST: ([41, 42, 43], [21, 22, 23])}


@both_ways
def test_pages_that_were_asked_for_do_not_move(wire: Wire) -> None:
    handoff, lease = offered(wire)
    wire.ask(7, handoff)
    wire.deliver_to_context()
    assert wire.sender.waiting.let_move() == 0
    assert not lease.moving


@both_ways
def test_a_cache_without_a_readable_host_tier_keeps_them(wire: Wire) -> None:
    _handoff, lease = offered(wire)
    object.__setattr__(wire.context, "pools", wire.context.pools[:1])
    assert wire.sender.waiting.let_move() == 0
    assert not lease.moving


@both_ways
def test_without_room_to_bring_pages_up_the_receiver_waits(wire: Wire) -> None:
    handoff, lease = offered(wire)
    wire.sender.waiting.let_move()
    lease.room = False
    wire.ask(7, handoff)
    wire.pump()
    wire.sender.poll(0)
    wire.pump()
    assert wire.receiver.poll(0).settled == 0
    lease.room = True
    wire.sender.poll(0)
    wire.pump()
    assert wire.receiver.poll(0).completed == [7]


@both_ways
def test_lost_pages_fail_both_sides_at_once(wire: Wire) -> None:
    handoff, lease = offered(wire)
    wire.sender.waiting.let_move()
    lease.lost = True
    wire.ask(7, handoff)
    wire.pump()
    (failure,) = wire.sender.poll(0).failed
    assert "has lost pages" in failure.message
    wire.pump()
    assert wire.receiver.poll(0).failed[0].message == failure.message
    assert wire.released(7) == (1, 1)


@both_ways
@pytest.mark.parametrize("who", ["owner", "receiver", "death"])
def test_what_is_put_off_can_be_given_up(wire: Wire, who: str) -> None:
    handoff, lease = offered(wire)
    wire.sender.waiting.let_move()
    lease.room = False
    wire.ask(7, handoff)
    wire.pump()
    if who == "owner":
        wire.sender.cancel(7)
    elif who == "receiver":
        wire.receiver.cancel(7)
    else:
        wire.sender.peer_dead("generation", 1)
    wire.pump()
    wire.sender.poll(0)
    wire.pump()
    ended = wire.sender.poll(0)
    if who != "death":
        wire.pump()
        assert wire.receiver.poll(0).cancelled == [7]
        wire.pump()
        wire.receiver.sweep()
        assert wire.released(7) == (1, 1)
    assert 7 not in wire.sender.table.open, ended
    assert wire.released(7)[0] == 1
