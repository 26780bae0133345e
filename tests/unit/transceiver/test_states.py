from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.transceiver.states import (
    INITIAL_STATUS,
    TERMINAL_STATES,
    InvalidTransitionError,
    ReceiveEvent,
    SendEvent,
    SessionState,
    Status,
    next_receive_status,
    next_send_status,
)


def send(*events: SendEvent) -> Status:
    status = INITIAL_STATUS
    for event in events:
        status = next_send_status(status, event)
    return status


def receive(*events: ReceiveEvent) -> Status:
    status = INITIAL_STATUS
    for event in events:
        status = next_receive_status(status, event)
    return status


E, R, S = SendEvent, ReceiveEvent, SessionState


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((), S.INIT),
        ((E.ASKED,), S.READY),
        ((E.ASKED, E.STARTED), S.TRANSFERRING),
        ((E.ASKED, E.STARTED, E.WRITTEN), S.KV_TRANSFERRED),
        ((E.ASKED, E.STARTED, E.WRITTEN, E.ACK_DONE), S.FULLY_TRANSFERRED),
        ((E.ASKED, E.STARTED, E.ACK_DONE), S.FULLY_TRANSFERRED),
        ((E.FAIL,), S.ERROR),
        ((E.ASKED, E.ACK_FAILED), S.ERROR),
        ((E.ASKED, E.STARTED, E.PEER_DEAD), S.ERROR),
        ((E.ASKED, E.STARTED, E.ACK_CANCELLED), S.CANCELLED),
        # A cancel ends at once what nothing reads, and waits for the reader elsewhere.
        ((E.CANCEL,), S.CANCELLED),
        ((E.ASKED, E.STARTED, E.WRITTEN, E.CANCEL), S.CANCELLED),
        ((E.ASKED, E.STARTED, E.CANCEL), S.TRANSFERRING),
        ((E.ASKED, E.CANCEL, E.STARTED, E.WRITTEN), S.CANCELLED),
        ((E.ASKED, E.STARTED, E.CANCEL, E.ACK_FAILED), S.CANCELLED),
        ((E.ASKED, E.STARTED, E.CANCEL, E.PEER_DEAD), S.CANCELLED),
        ((E.ASKED, E.STARTED, E.CANCEL, E.FAIL), S.CANCELLED),
        ((E.ASKED, E.STARTED, E.CANCEL, E.ACK_DONE), S.FULLY_TRANSFERRED),
        # Sticky: CANCELLED is not overwritten by ERROR, nor the other way round.
        ((E.CANCEL, E.FAIL), S.CANCELLED),
        ((E.FAIL, E.CANCEL), S.ERROR),
    ],
)
def test_sender_transitions(events: tuple[SendEvent, ...], state: SessionState) -> None:
    assert send(*events).state is state


@pytest.mark.parametrize(
    "events",
    [(E.STARTED,), (E.WRITTEN,), (E.ACK_DONE,), (E.PEER_DEAD,), (E.ASKED, E.ASKED), (E.ASKED, E.ACK_DONE)],
)
def test_what_cannot_happen_to_a_sender_is_refused(events: tuple[SendEvent, ...]) -> None:
    with pytest.raises(InvalidTransitionError, match="cannot happen to a session that is"):
        send(*events)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((R.ASKED,), S.READY),
        ((R.ASKED, R.MOVING), S.TRANSFERRING),
        ((R.ASKED, R.MOVING, R.MOVED), S.KV_TRANSFERRED),
        ((R.ASKED, R.MOVED), S.KV_TRANSFERRED),
        ((R.ASKED, R.MOVED, R.VERIFIED), S.FULLY_TRANSFERRED),
        ((R.CANCEL,), S.CANCELLED),
        ((R.ASKED, R.MOVING, R.CANCEL, R.FAIL), S.CANCELLED),
        ((R.ASKED, R.FAIL, R.CANCEL), S.ERROR),
        ((R.ASKED, R.MOVED, R.FAIL), S.ERROR),
    ],
)
def test_receiver_transitions(events: tuple[ReceiveEvent, ...], state: SessionState) -> None:
    assert receive(*events).state is state


@pytest.mark.parametrize("events", [(R.MOVING,), (R.MOVED,), (R.ASKED, R.VERIFIED), (R.ASKED, R.MOVING, R.MOVING)])
def test_what_cannot_happen_to_a_receiver_is_refused(events: tuple[ReceiveEvent, ...]) -> None:
    with pytest.raises(InvalidTransitionError):
        receive(*events)


@given(st.lists(st.sampled_from(SendEvent), max_size=12))
def test_a_sender_that_has_ended_stays_as_it_is(events: list[SendEvent]) -> None:
    status = INITIAL_STATUS
    for event in events:
        try:
            following = next_send_status(status, event)
        except InvalidTransitionError:
            assert not status.terminal
            continue
        assert not status.terminal or following == status
        assert not (following.terminal and following.cancelling)
        status = following


@given(st.sampled_from(sorted(TERMINAL_STATES)), st.sampled_from(ReceiveEvent))
def test_a_receiver_that_has_ended_stays_as_it_is(state: SessionState, event: ReceiveEvent) -> None:
    assert next_receive_status(Status(state), event) == Status(state)
