"""What a sequence number means, from the two watermarks."""

from __future__ import annotations

from kvmesh.events.tracking import Arrival, SequenceTracker


def test_a_replay_overlaps_the_live_stream() -> None:
    tracker = SequenceTracker()
    tracker.apply(4)  # the replay brought 0 to 4 before the stream showed anything
    assert tracker.arrive(3) is Arrival.DUPLICATE
    assert tracker.arrive(4) is Arrival.DUPLICATE
    assert tracker.arrive(5) is Arrival.NEXT


def test_a_number_left_out_is_a_gap_until_it_is_filled() -> None:
    tracker = SequenceTracker()
    assert tracker.arrive(0) is Arrival.NEXT
    tracker.apply(0)
    assert tracker.arrive(3) is Arrival.GAP
    assert tracker.judge(1) is Arrival.NEXT
    tracker.apply(1)
    assert tracker.judge(3) is Arrival.GAP
    tracker.apply(2)
    assert tracker.judge(3) is Arrival.NEXT


def test_live_numbers_that_do_not_grow_mean_a_restart() -> None:
    tracker = SequenceTracker()
    for number in range(3):
        assert tracker.arrive(number) is Arrival.NEXT
        tracker.apply(number)
    assert tracker.arrive(2) is Arrival.RESTART
    assert tracker.arrive(0) is Arrival.RESTART
    tracker.forget()
    tracker.connect()
    assert tracker.knows_nothing
    assert tracker.arrive(0) is Arrival.NEXT


def test_a_new_connection_keeps_what_was_applied() -> None:
    tracker = SequenceTracker()
    tracker.arrive(7)
    tracker.apply(7)
    tracker.connect()
    assert tracker.arrive(7) is Arrival.DUPLICATE
    assert tracker.arrive(8) is Arrival.NEXT


def test_the_first_message_of_a_stream_without_history_is_a_gap() -> None:
    tracker = SequenceTracker()
    assert tracker.knows_nothing
    assert tracker.arrive(12) is Arrival.GAP
