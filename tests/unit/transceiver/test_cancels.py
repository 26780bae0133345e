"""Cancels: at every state, from either side, before the session, and lost ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.protocol.transfer import CancelSession, ResultAck, TransferResult

Wire = Any
"""tests/unit/transceiver/conftest.py"""


def asked(wire: Wire) -> None:
    """The request has been sent."""


def ready(wire: Wire) -> None:
    """The owner has taken the request and has not begun."""
    wire.deliver_to_context()


def served(wire: Wire) -> None:
    """The owner has granted the pages (pull) or has written them (push)."""
    wire.deliver_to_context()
    wire.context.workers.run()


def moving(wire: Wire) -> None:
    """The receiver has begun to work on its answer."""
    served(wire)
    wire.deliver_to_generation()


def moved(wire: Wire) -> None:
    """The receiver is done; its acknowledgement is under way."""
    moving(wire)
    wire.generation.workers.run()


def drained(wire: Wire) -> None:
    wire.pump()
    assert wire.context_plane.granted == {}
    assert wire.generation_plane.open_sessions == 0
    assert not wire.sender.table.open
    assert not wire.receiver.table.open
    assert len(wire.sender.table.quarantine) == len(wire.receiver.table.quarantine) == 0


STAGES = [asked, ready, served, moving, moved]


@pytest.mark.parametrize("stage", STAGES)
def test_the_receiver_cancels(wire: Wire, stage: Callable[[Wire], None]) -> None:
    wire.ask(7, wire.offer(7))
    stage(wire)
    done = wire.receiver.cancel(7)
    if stage in (asked, ready, served) and wire.generation_plane.direction == "pull":
        assert done, "the receiver reads: nothing can write into its pages"
    if stage in (asked, ready, served) and wire.generation_plane.direction == "push":
        assert not done, "the owner may be writing"
        wire.receiver.poll(0)
        assert wire.receiver.table.quarantine.pages == 4
        assert wire.leases["generation", 7].released == 0
    wire.pump()
    assert wire.receiver.cancel(7)
    wire.sender.poll(0)
    wire.receiver.poll(0)
    assert wire.released(7) == (1, 1)
    assert wire.receiver.table.quarantine.pages == 0
    drained(wire)


@pytest.mark.parametrize("stage", STAGES)
def test_the_owner_cancels(wire: Wire, stage: Callable[[Wire], None]) -> None:
    wire.ask(7, wire.offer(7))
    stage(wire)
    nobody_reads = wire.sender.cancel(7)
    assert nobody_reads == (stage is asked or (stage is not ready and wire.context_plane.direction == "push"))
    wire.sender.poll(0)
    assert wire.leases["context", 7].released == nobody_reads
    wire.pump()
    assert wire.sender.cancel(7)
    received, sent = wire.receiver.poll(0), wire.sender.poll(0)
    if stage is asked:
        assert received.failed[0].code == "transfer_unknown", "the offer was gone before it was asked for"
    else:
        assert received.completed == [7] if stage is moved else received.cancelled + received.completed == [7]
    assert not sent.failed
    assert wire.released(7) == (1, 1)
    drained(wire)


def test_an_offer_that_nobody_asked_for_is_cancelled_at_once(wire: Wire) -> None:
    wire.offer(7)
    assert wire.sender.cancel(7)
    assert wire.leases["context", 7].released == 0
    assert wire.sender.poll(0).cancelled == [7]
    assert wire.leases["context", 7].released == 1
    assert wire.sender.poll(0)[:4] == ([], [], [], [])


def test_a_receiver_that_gives_up_while_connecting_returns_the_owners_pages(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("push")
    wire.ask(7, wire.offer(7))
    assert wire.receiver.cancel(7), "nobody was asked to write"
    assert wire.receiver.poll(0).cancelled == [7]
    wire.pump()
    assert wire.sender.poll(0).cancelled == [7]
    assert wire.released(7) == (1, 1)
    drained(wire)


def test_a_declined_hand_off_returns_the_owners_pages(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull")
    wire.receiver.decline(7, wire.offer(7))
    wire.pump()
    assert wire.sender.poll(0).cancelled == [7]
    assert wire.leases["context", 7].released == 1


def test_a_cancel_without_a_ticket_takes_nothing_away(wire: Wire) -> None:
    handoff = wire.offer(7)
    wire.sender.on_cancel(wire.ROUTE, CancelSession(transfer_id=7))
    wire.sender.on_cancel(b"a stranger", CancelSession(transfer_id=7, session=1))
    wire.sender.on_cancel(b"a stranger", CancelSession(transfer_id=7, ticket=handoff.ticket[:-1] + b"x"))
    assert wire.sender.table.counters.refused == 1
    wire.to_generation.clear()
    wire.ask(7, handoff)
    wire.pump()
    assert wire.receiver.poll(0).completed == [7]


def test_a_cancel_that_comes_before_the_offer_is_remembered(wire: Wire) -> None:
    token = wire.offer(7).ticket
    assert wire.sender.cancel(7)
    wire.sender.poll(0)
    wire.sender.on_cancel(wire.ROUTE, CancelSession(transfer_id=7, ticket=token))
    handoff = wire.offer(7)
    assert wire.sender.poll(0).cancelled == [7]
    assert wire.leases["context", 7].released == 1
    # Whoever still asks hears that it is over.
    wire.ask(7, handoff)
    wire.pump()
    assert wire.receiver.poll(0).failed[0].code == "transfer_unknown"


def test_a_cancel_that_comes_before_the_receive_session_is_remembered(wire: Wire) -> None:
    wire.receiver.answers.on_cancel(wire.ENDPOINT, CancelSession(transfer_id=7))
    wire.ask(7, wire.offer(7))
    assert not any(isinstance(message, str) for message in wire.to_context)
    assert wire.receiver.poll(0).cancelled == [7]
    wire.pump()
    assert wire.sender.poll(0).cancelled == [7]
    assert wire.released(7) == (1, 1)
    drained(wire)


def test_a_cancel_stops_a_move_between_its_slices(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    pulls = wire.generation_plane.direction == "pull"
    plane = wire.generation_plane if pulls else wire.context_plane
    answers = []

    def cancel_midway() -> None:
        answers.append(wire.receiver.cancel(7))
        wire.deliver_to_context()
        wire.receiver.poll(0)
        assert wire.leases["generation", 7].released == 0, "the pages are still written"
        assert wire.receiver.table.quarantine.pages == 4

    plane.during = cancel_midway
    wire.pump()
    assert answers == [False]
    assert not plane.moved
    assert wire.receiver.cancel(7)
    wire.receiver.poll(0)
    assert wire.sender.poll(0).cancelled == [7]
    assert wire.released(7) == (1, 1)
    drained(wire)


def test_the_owner_cancels_in_the_middle_of_a_move(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    pulls = wire.generation_plane.direction == "pull"
    plane = wire.generation_plane if pulls else wire.context_plane

    def cancel_midway() -> None:
        assert not wire.sender.cancel(7)
        wire.deliver_to_generation()
        wire.sender.poll(0)
        assert wire.leases["context", 7].released == 0, "the pages are still read"

    plane.during = cancel_midway
    wire.pump()
    assert wire.sender.cancel(7)
    assert wire.receiver.poll(0).cancelled == [7]
    assert wire.sender.poll(0).cancelled == [7]
    assert wire.released(7) == (1, 1)
    drained(wire)


def test_a_lost_acknowledgement_is_asked_for_again(pull: Wire) -> None:
    pull.ask(7, pull.offer(7))
    moved(pull)
    lost = pull.to_context.pop()
    assert isinstance(lost, ResultAck)
    pull.receiver.poll(0)
    assert not pull.sender.cancel(7)
    assert len(pull.to_generation) == 1
    assert not pull.sender.cancel(7)
    assert len(pull.to_generation) == 1, "not more often than once a second"
    pull.to_generation.clear()
    pull.clock.advance(1)
    assert not pull.sender.cancel(7)
    pull.pump()
    assert pull.sender.cancel(7)
    assert pull.sender.poll(0).cancelled == [7]
    assert pull.released(7) == (1, 1)


def test_a_lost_cancel_is_sent_again_until_the_writer_answers(push: Wire) -> None:
    push.ask(7, push.offer(7))
    ready(push)
    assert not push.receiver.cancel(7)
    assert isinstance(push.to_context.pop(), CancelSession)
    push.receiver.poll(0)
    assert not push.to_context
    push.clock.advance(1)
    push.receiver.sweep()
    assert isinstance(push.to_context[-1], CancelSession)
    push.pump()
    assert push.receiver.cancel(7)
    push.receiver.poll(0)
    push.sender.poll(0)
    assert push.released(7) == (1, 1)


def test_a_receiver_that_has_its_pages_gets_their_checksums_though_the_owner_cancels(push: Wire) -> None:
    push.ask(7, push.offer(7))
    push.deliver_to_context()

    def sum_pages(_pages: Any) -> list[bytes]:
        assert not push.sender.cancel(7), "the pages are still read here"
        push.sender.poll(0)
        assert push.leases["context", 7].released == 0
        return []

    sums = SimpleNamespace(add_all=lambda: None, encoded=lambda: [b""])
    for engine in (push.context, push.generation):
        object.__setattr__(
            engine, "checksums", SimpleNamespace(of=lambda pages: [*sum_pages(pages), b""], running=lambda pages: sums)
        )
    push.pump()
    assert push.receiver.poll(0).completed == [7]
    assert push.sender.cancel(7)
    push.sender.poll(0)
    assert push.released(7) == (1, 1)


def test_a_late_done_does_not_revive_a_cancelled_session(push: Wire) -> None:
    push.ask(7, push.offer(7))
    served(push)
    assert not push.receiver.cancel(7)
    push.receiver.poll(0)
    (message,) = push.to_generation
    assert isinstance(message, TransferResult)
    assert message.status == "done"
    push.pump()
    assert push.receiver.cancel(7)
    push.receiver.poll(0)
    push.sender.poll(0)
    assert push.released(7) == (1, 1)
    assert push.states("generation", 7)[-1] == "cancelled"
