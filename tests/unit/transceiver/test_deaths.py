"""Peers that die, connections that are lost, and new lives of an engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.transceiver.fences import MAX_FENCES, Fences
from kvmesh.transceiver.links import LOST_RETENTION_S
from kvmesh.transceiver.types import PeerKey

Wire = Any
"""tests/unit/transceiver/conftest.py"""


def test_a_dead_receiver_reads_no_more(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    wire.deliver_to_context()
    wire.context.workers.run()
    wire.sender.peer_dead("generation", 1)
    (failure,) = wire.sender.poll(0).failed
    assert (failure.status, failure.code) == (503, "peer_dead")
    assert "generation#1 ended" in failure.message
    assert wire.leases["context", 7].released == 1
    assert wire.context_plane.granted == {}
    wire.context.workers.run()
    assert [str(peer) for peer in wire.context_plane.detached] == ["generation#1"]


def test_the_pages_of_a_dead_receiver_stay_while_they_are_still_read_here(push: Wire) -> None:
    push.ask(7, push.offer(7))
    push.deliver_to_context()

    def dies() -> None:
        push.sender.peer_dead("generation", 1)
        assert push.sender.poll(0).failed
        assert push.leases["context", 7].released == 0

    push.context_plane.during = dies
    push.context.workers.run()
    push.sender.sweep()
    assert push.leases["context", 7].released == 1


@pytest.mark.parametrize(("instance", "epoch"), [("generation", 0), ("another", 1)])
def test_the_death_of_another_life_or_engine_changes_nothing(wire: Wire, instance: str, epoch: int) -> None:
    wire.ask(7, wire.offer(7))
    wire.deliver_to_context()
    wire.sender.peer_dead(instance, epoch)
    wire.receiver.lives.peer_dead(instance, epoch)
    wire.pump()
    assert wire.receiver.poll(0).completed == [7]
    assert wire.sender.poll(0).completed == [7]


def test_an_offer_outlives_the_death_of_a_receiver_that_never_asked(wire: Wire) -> None:
    wire.offer(7)
    wire.sender.peer_dead("generation", 1)
    assert wire.sender.poll(0)[:4] == ([], [], [], [])


def test_a_dead_owner_fails_what_waits_for_it(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    wire.receiver.lives.peer_dead("context", 1)
    (failure,) = wire.receiver.poll(0).failed
    assert (failure.status, failure.code) == (503, "peer_dead")
    assert wire.leases["generation", 7].released == 1, "a dead owner writes no more"
    assert len(wire.receiver.links) == 0


def test_a_copy_from_shared_memory_outlives_its_owner(pull: Wire) -> None:
    pull.ask(7, pull.offer(7))
    pull.deliver_to_context()
    pull.context.workers.run()
    pull.deliver_to_generation()
    pull.receiver.lives.peer_dead("context", 1)
    assert pull.receiver.poll(0)[:4] == ([], [], [], [])
    pull.generation.workers.run()
    assert pull.receiver.poll(0).completed == [7]
    assert [str(peer) for peer in pull.generation_plane.detached] == ["context#1"]


def test_a_copy_without_its_owners_checksums_is_not_accepted(pull: Wire) -> None:
    for engine in (pull.context, pull.generation):
        object.__setattr__(engine, "checksums", SimpleNamespace(of=lambda pages: [], running=lambda pages: sums))
    sums = SimpleNamespace(add_all=lambda: None, encoded=list)
    pull.ask(7, pull.offer(7))
    pull.deliver_to_context()
    pull.context.workers.run()
    pull.deliver_to_generation()
    pull.receiver.lives.peer_dead("context", 1)
    pull.generation.workers.run()
    (failure,) = pull.receiver.poll(0).failed
    assert (failure.status, failure.code) == (503, "peer_dead")
    assert pull.leases["generation", 7].released == 1


def test_quarantined_pages_return_when_the_writer_is_known_dead(push: Wire) -> None:
    push.ask(7, push.offer(7))
    assert not push.receiver.cancel(7)
    push.receiver.poll(0)
    for _ in range(100):
        push.clock.advance(1)
        push.receiver.sweep()
    assert push.leases["generation", 7].released == 0
    push.receiver.lives.peer_dead("context", 1)
    push.receiver.sweep()
    assert push.leases["generation", 7].released == 1
    assert push.receiver.cancel(7)


@pytest.mark.parametrize("ending", ["answers", "process", "connection", "address"])
def test_pages_of_a_writer_that_may_only_stand_still_are_kept(push: Wire, ending: str) -> None:
    """Taken for dead because its lease ran out, it may go on with what it was asked to write."""
    push.ask(7, push.offer(7))
    push.deliver_to_context()
    assert not push.receiver.lives.peer_dead("context", 1, certain=False)
    assert push.receiver.poll(0).failed[0].code == "peer_dead", "the request does not wait"
    for _ in range(100):
        push.clock.advance(1)
        push.receiver.sweep()
    lease = push.leases["generation", 7]
    assert (lease.quarantined, lease.released) == (True, 0)
    # Nothing new is asked of it.
    push.ask(8, push.offer(8))
    assert push.receiver.poll(0).failed[0].code == "peer_dead"
    if ending == "answers":
        push.pump()
    elif ending == "process":
        assert push.receiver.lives.peer_dead("context", 1)
    elif ending == "connection":
        push.receiver.lives.on_disconnected(push.ENDPOINT)
    else:
        push.receiver.links.obtain(push.ENDPOINT, PeerKey("context", 2))
    push.receiver.sweep()
    assert lease.released == 1
    push.receiver.sweep()
    assert len(push.receiver.links) == (1 if ending == "address" else 0)


def test_where_nobody_writes_a_dead_lease_is_enough(pull: Wire) -> None:
    pull.ask(7, pull.offer(7))
    pull.deliver_to_context()
    assert pull.receiver.lives.peer_dead("context", 1, certain=False)
    assert pull.receiver.poll(0).failed[0].code == "peer_dead"
    assert pull.leases["generation", 7].released == 1
    assert len(pull.receiver.links) == 0


def test_a_lost_connection_fails_what_waits_for_an_answer(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    wire.to_context.clear()
    wire.receiver.lives.on_disconnected(wire.ENDPOINT)
    (failure,) = wire.receiver.poll(0).failed
    assert (failure.status, failure.code) == (503, "peer_lost")
    writes = wire.generation_plane.direction == "push"
    assert wire.leases["generation", 7].released == (0 if writes else 1)
    # It is back: the owner hears that it is over, and a new transfer needs no new introduction.
    wire.receiver.lives.on_connected(wire.ENDPOINT)
    wire.pump()
    wire.receiver.sweep()
    assert wire.leases["generation", 7].released == 1
    wire.ask(8, wire.offer(8))
    wire.pump()
    assert wire.receiver.poll(0).completed == [8]
    assert wire.dialled == [wire.ENDPOINT]


def test_a_connection_that_is_refused_fails_at_once(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull")
    wire.ask(7, wire.offer(7))
    wire.receiver.lives.on_disconnected(wire.ENDPOINT)
    assert wire.receiver.poll(0).failed[0].code == "peer_unreachable"
    wire.receiver.lives.on_disconnected(wire.ENDPOINT)
    assert len(wire.receiver.links) == 0


def test_a_lost_connection_that_nobody_needs_is_given_up(pull: Wire) -> None:
    pull.receiver.lives.on_disconnected(pull.ENDPOINT)
    pull.clock.advance(LOST_RETENTION_S - 1)
    pull.receiver.sweep()
    assert len(pull.receiver.links) == 1
    pull.clock.advance(1)
    pull.receiver.sweep()
    assert len(pull.receiver.links) == 0


def test_a_network_that_is_back_after_minutes_unpins_what_was_read(pull: Wire) -> None:
    """The answer, and with it the end of the session, were lost; both sides live."""
    pull.ask(7, pull.offer(7))
    pull.deliver_to_context()
    pull.context.workers.run()
    pull.to_generation.clear()
    pull.receiver.lives.on_disconnected(pull.ENDPOINT)
    assert pull.receiver.poll(0).failed[0].code == "peer_lost"
    pull.to_context.clear()
    pull.clock.advance(600)
    pull.receiver.sweep()
    assert pull.receiver.links.get(pull.ENDPOINT) is not None, "still dialled"
    assert pull.sender.sweep() == [7]
    assert not pull.sender.cancel(7)
    pull.receiver.lives.on_connected(pull.ENDPOINT)
    pull.pump()
    assert pull.sender.poll(0).cancelled == [7]
    assert pull.released(7) == (1, 1)


def test_a_new_life_of_a_receiver_fences_the_old_one(pull: Wire) -> None:
    pull.ask(7, pull.offer(7))
    pull.deliver_to_context()
    object.__setattr__(pull.generation, "key", pull.generation.key._replace(epoch=2))
    pull.generation.handshake.mine = pull.generation.handshake.mine._replace(key=pull.generation.key)
    pull.sender.on_hello(b"new route", pull.generation.handshake.hello("context", b"new route"))
    assert pull.sender.poll(0).failed[0].code == "peer_dead"
    assert len(pull.sender.receivers) == 1


def test_a_new_life_of_an_owner_gets_a_new_link(pull: Wire) -> None:
    pull.ask(7, pull.offer(7))
    newer = pull.context.key._replace(epoch=2)
    object.__setattr__(pull.context, "key", newer)
    pull.context.handshake.mine = pull.context.handshake.mine._replace(key=newer)
    pull.to_context.clear()
    pull.ask(8, pull.handoff(pull.offer(8).ticket, epoch=2))
    assert pull.receiver.poll(0).failed[0].code == "peer_lost"
    pull.pump()
    assert pull.receiver.poll(0).completed == [8]


def test_closing_releases_every_lease_once(wire: Wire) -> None:
    wire.offer(7)
    wire.ask(8, wire.offer(8))
    wire.receiver.cancel(8)
    wire.receiver.poll(0)
    for side in (wire.sender, wire.receiver):
        side.table.stop_movers()
        side.table.close()
    assert wire.leases["context", 7].released == 1
    assert wire.released(8) == (1, 1)


def test_a_life_that_is_over_is_not_asked(wire: Wire) -> None:
    """Its ticket may still be under way: whoever brings it hears at once, not at the deadline."""
    handoff = wire.offer(7)
    wire.receiver.lives.peer_dead("context", 1)
    wire.ask(7, handoff)
    (failure,) = wire.receiver.poll(0).failed
    assert (failure.status, failure.code) == (503, "peer_dead")
    assert "context#1 ended before it was asked" in failure.message
    assert wire.leases["generation", 7].released == 1
    assert len(wire.receiver.links) == 0


def test_a_life_that_is_over_cannot_introduce_itself_again(pull: Wire) -> None:
    """Neither one whose death was told, nor one whose successor was met."""
    old = pull.generation.handshake.hello("context", b"again")
    pull.sender.peer_dead("generation", 1)
    pull.sender.on_hello(b"again", old)
    [reply] = pull.to_generation
    assert "generation#1 is over" in reply.refused
    assert reply.agent == b""
    pull.generation.handshake.mine = pull.generation.handshake.mine._replace(key=PeerKey("generation", 3))
    pull.sender.on_hello(b"third", pull.generation.handshake.hello("context", b"third"))
    pull.generation.handshake.mine = pull.generation.handshake.mine._replace(key=PeerKey("generation", 2))
    pull.sender.on_hello(b"second", pull.generation.handshake.hello("context", b"second"))
    assert [reply.refused is None for reply in pull.to_generation] == [False, True, False]
    assert len(pull.sender.receivers) == 1


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 6)), max_size=30))
def test_a_life_never_returns(endings: list[tuple[str, int]]) -> None:
    """In whatever order endings are told: every life up to the latest of them is over, and later ones are not."""
    fences = Fences()
    latest: dict[str, int] = {}
    for name, epoch in endings:
        fences.end(name, epoch)
        latest[name] = max(epoch, latest.get(name, -1))
        for other in "ab":
            over = [epoch for epoch in range(8) if fences.is_over(PeerKey(other, epoch))]
            assert over == list(range(latest.get(other, -1) + 1))


def test_fences_are_bounded() -> None:
    fences = Fences()
    for number in range(MAX_FENCES + 1):
        fences.end(f"engine-{number}", 1)
    assert not fences.is_over(PeerKey("engine-0", 1))
    assert fences.is_over(PeerKey("engine-1", 1))
