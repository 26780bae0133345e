"""The three time settings, with a clock that only the waits move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Wire = Any
"""tests/unit/transceiver/conftest.py"""

EMPTY = ([], [], [], [], {})


# The sender: the deadline flags, and only flags.


def test_an_absent_peer_times_out_without_ending_and_may_still_complete(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=60, slice_ms=1000)
    wire.offer(7)
    assert wire.sender.poll(1)[:4] == ([], [], [], [7])
    assert wire.clock.monotonic_s() == pytest.approx(0.06)
    assert 7 in wire.sender.table.open
    assert wire.leases["context", 7].released == 0
    assert wire.states("context", 7) == ["registered", "timed_out"]

    # Warned once; further waits go on for their slice and say nothing new.
    assert wire.sender.poll(1) == EMPTY
    assert wire.clock.monotonic_s() == pytest.approx(1.06)
    assert wire.sender.table.counters.timed_out == 1


def test_a_transfer_that_began_in_time_and_ends_late_completes(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=60)
    wire.pair()
    wire.ask(7, wire.offer(7))
    wire.deliver_to_context()
    assert wire.sender.poll(1).timed_out == [7]
    wire.pump()
    assert wire.sender.poll(1)[:4] == ([7], [], [], [])
    assert wire.receiver.poll(0).completed == [7]
    assert wire.released(7) == (1, 1)


def test_the_senders_deadline_is_armed_once(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=60)
    wire.pair()
    handoff = wire.offer(7)
    wire.clock.advance(0.05)
    wire.ask(7, handoff)
    wire.deliver_to_context()
    wire.clock.advance(0.01)
    assert wire.sender.poll(0).timed_out == [7]


def test_an_end_seen_at_the_very_deadline_wins(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=60)
    wire.pair()
    wire.ask(7, wire.offer(7))
    wire.pump()
    wire.clock.advance(0.06)
    assert wire.sender.poll(0)[:4] == ([7], [], [], [])
    assert wire.receiver.poll(1)[:4] == ([7], [], [], [])


def test_a_wait_on_the_senders_side_is_one_slice(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", slice_ms=300)
    wire.offer(7)
    assert wire.sender.poll(1) == EMPTY
    assert wire.clock.monotonic_s() == pytest.approx(0.3)


def test_a_wait_ends_when_enough_have_ended(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull")
    wire.pair()
    for transfer_id in (7, 8, 9):
        wire.ask(transfer_id, wire.offer(transfer_id))
    wire.waiter.between = wire.pump
    assert wire.sender.poll(2).completed == [7, 8, 9]
    assert wire.receiver.poll(3).completed == [7, 8, 9]
    assert len(wire.waiter.waits) == 1


def test_a_wait_ends_when_its_thread_is_needed_elsewhere(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    wire.deliver_to_context()
    wire.waiter.needed_elsewhere = True
    start_s = wire.clock.monotonic_s()
    assert wire.sender.poll(1) == EMPTY
    assert wire.receiver.poll(1) == EMPTY
    assert wire.clock.monotonic_s() == start_s
    assert len(wire.waiter.waits) == 2
    wire.waiter.between = wire.pump
    assert wire.receiver.poll(1).completed == [7], "what has ended meanwhile is reported all the same"


# The receiver: one interval for each poll, and a deadline that fails the task.


def test_nothing_in_flight_returns_at_once(wire: Wire) -> None:
    now_s = wire.clock.monotonic_s()
    assert wire.receiver.poll(1) == EMPTY
    assert wire.sender.poll(1) == EMPTY
    assert wire.clock.monotonic_s() == now_s


def test_one_session_that_never_ends_takes_one_poll_interval(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", poll_ms=50)
    wire.pair()
    wire.ask(7, wire.offer(7))
    start_s = wire.clock.monotonic_s()
    assert wire.receiver.poll(1) == EMPTY
    assert wire.clock.monotonic_s() - start_s == pytest.approx(0.05)
    assert len(wire.waiter.waits) == 1, "nothing is polled in between: whatever changes a session says so"
    assert wire.receiver.poll(0) == EMPTY
    assert wire.clock.monotonic_s() - start_s == pytest.approx(0.05)


def test_more_than_there_are_does_not_burn_the_interval(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull")
    wire.pair()
    wire.ask(7, wire.offer(7))
    wire.waiter.between = wire.pump
    start_s = wire.clock.monotonic_s()
    assert wire.receiver.poll(100).completed == [7]
    assert wire.clock.monotonic_s() - start_s <= 0.002


def test_a_blocking_wait_fails_a_task_at_its_deadline(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=20)
    wire.pair()
    wire.ask(7, wire.offer(7))
    wire.clock.advance(0.01)
    wire.ask(8, wire.offer(8))
    (failure,) = wire.receiver.poll(1).failed
    assert (failure.id, failure.status, failure.code) == (7, 503, "kv_transfer_timeout")
    assert wire.leases["generation", 7].released == 1, "the receiver reads: its pages are free at once"
    assert not wire.leases["generation", 7].quarantined
    (failure,) = wire.receiver.poll(1).failed
    assert failure.id == 8, "each task has its own deadline"
    assert wire.states("generation", 7) == ["registered", "transferring", "timed_out", "failed"]


def test_a_poll_that_does_not_wait_fails_nothing(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=20)
    wire.pair()
    wire.ask(7, wire.offer(7))
    wire.clock.advance(0.02)
    assert wire.receiver.poll(0) == EMPTY
    assert wire.receiver.sweep() == [7]
    assert wire.receiver.cancel(7)
    assert wire.receiver.poll(0).cancelled == [7]


def test_a_written_page_is_not_reused_after_a_timeout_until_the_writer_answers(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("push", timeout_ms=20)
    wire.pair()
    wire.ask(7, wire.offer(7))
    assert wire.receiver.poll(1).failed[0].code == "kv_transfer_timeout"
    assert wire.leases["generation", 7].released == 0
    assert wire.leases["generation", 7].quarantined, "the cache knows that these pages may change"
    assert not wire.leases["context", 7].quarantined, "the owner's are read"
    assert wire.receiver.table.quarantine.pages == 4
    wire.pump()
    wire.receiver.sweep()
    assert wire.leases["generation", 7].released == 1
    assert wire.receiver.table.quarantine.pages == 0


# Sweeps.


def test_a_sweep_flags_each_overdue_transfer_once(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=1000)
    wire.pair()
    wire.offer(7)
    wire.clock.advance(0.5)
    wire.ask(8, wire.offer(8))
    assert (wire.sender.sweep(), wire.receiver.sweep()) == ([], [])
    wire.clock.advance(0.5)
    assert (wire.sender.sweep(), wire.receiver.sweep()) == ([7], [])
    wire.clock.advance(0.5)
    assert (wire.sender.sweep(), wire.receiver.sweep()) == ([8], [8])
    assert (wire.sender.sweep(), wire.receiver.sweep()) == ([], [])
    # Flagged is not ended: nothing is released before the cancel has come through.
    assert wire.released(8) == (0, 0)
    assert wire.sender.poll(0) == EMPTY


def test_pages_that_nobody_asks_for_return_after_the_sweep_and_the_cancel(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=1000)
    wire.offer(7)
    wire.clock.advance(1)
    assert wire.sender.sweep() == [7]
    assert wire.leases["context", 7].released == 0
    assert wire.sender.cancel(7)
    assert wire.sender.poll(0).cancelled == [7]
    assert wire.leases["context", 7].released == 1


def test_an_overdue_reader_keeps_the_owners_pages_until_it_has_stopped(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=1000)
    wire.pair()
    wire.ask(7, wire.offer(7))
    wire.deliver_to_context()
    wire.context.workers.run()
    wire.clock.advance(1)
    assert wire.sender.sweep() == [7]
    for _ in range(3):
        assert not wire.sender.cancel(7)
        wire.sender.poll(0)
        wire.clock.advance(1)
    assert wire.leases["context", 7].released == 0
    wire.pump()
    assert wire.sender.cancel(7)
    wire.sender.poll(0)
    assert wire.leases["context", 7].released == 1


# Connections.


def test_connecting_is_not_charged_to_the_transfer(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=1000)
    wire.ask(7, wire.offer(7))
    wire.clock.advance(9)
    assert wire.receiver.sweep() == []
    assert wire.receiver.poll(0) == EMPTY
    # The ticket has expired meanwhile, so this one fails; its deadline began when the pages were asked for.
    wire.pump()
    assert wire.receiver.poll(0).failed[0].code == "ticket_expired"


def test_a_deadline_begins_when_the_pages_are_asked_for(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", timeout_ms=15_000)
    wire.ask(7, wire.offer(7))
    wire.clock.advance(9)
    wire.deliver_to_context()
    wire.deliver_to_generation()
    wire.generation.workers.run()
    wire.clock.advance(14)
    assert wire.receiver.sweep() == []
    wire.clock.advance(1)
    assert wire.receiver.sweep() == [7]


@pytest.mark.parametrize("at_least", [0, 1])
def test_a_peer_that_does_not_answer_fails_its_transfers_after_ten_seconds(
    make_wire: Callable[..., Wire], at_least: int
) -> None:
    wire = make_wire("push")
    wire.ask(7, wire.offer(7))
    wire.clock.advance(9.999)
    assert wire.receiver.poll(0) == EMPTY
    if not at_least:
        wire.clock.advance(0.001)
    (failure,) = wire.receiver.poll(at_least).failed
    assert (failure.status, failure.code) == (503, "peer_unreachable")
    assert "context#1 at tcp://context:1 did not answer in 10 s" in failure.message
    assert wire.leases["generation", 7].released == 1
