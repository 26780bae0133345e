"""The states of a transfer session as pure transition functions: one for the sender, one for the receiver.

A session goes INIT (nobody has asked) -> READY (the other side is known) -> TRANSFERRING (pages may be read or
written) -> KV_TRANSFERRED (the bytes are in place) -> FULLY_TRANSFERRED (verified and acknowledged), or ends in ERROR
or CANCELLED. The last three are terminal and sticky: an event after them changes nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "INITIAL_STATUS",
    "TERMINAL_STATES",
    "InvalidTransitionError",
    "ReceiveEvent",
    "SendEvent",
    "SessionState",
    "Status",
    "next_receive_status",
    "next_send_status",
]


class SessionState(StrEnum):
    """Where a session is."""

    __hash__ = str.__hash__  # Native, unlike Enum's: members are keys of the tables below.

    INIT = "init"
    READY = "ready"
    TRANSFERRING = "transferring"
    KV_TRANSFERRED = "kv_transferred"
    FULLY_TRANSFERRED = "fully_transferred"
    ERROR = "error"
    CANCELLED = "cancelled"


TERMINAL_STATES = frozenset({SessionState.FULLY_TRANSFERRED, SessionState.ERROR, SessionState.CANCELLED})


class SendEvent(StrEnum):
    """What can happen to the session of a page owner."""

    __hash__ = str.__hash__  # Native, unlike Enum's: members are keys of the tables below.

    ASKED = "asked"
    """A receiver has redeemed the ticket."""
    TAKEN = "taken"
    """A receiver has read all pages on loan, which redeems the ticket."""
    STARTED = "started"
    """From here on pages may be read (pull) or are being written (push)."""
    WRITTEN = "written"
    """Push only: every page has been written; nothing reads the source any more."""
    ACK_DONE = "ack_done"
    ACK_FAILED = "ack_failed"
    ACK_CANCELLED = "ack_cancelled"
    CANCEL = "cancel"
    """Not wanted any more, by either side."""
    FAIL = "fail"
    """This side gave up, and nothing reads the pages."""
    PEER_DEAD = "peer_dead"


class ReceiveEvent(StrEnum):
    """What can happen to the session of a receiver."""

    __hash__ = str.__hash__  # Native, unlike Enum's: members are keys of the tables below.

    ASKED = "asked"
    """The request for pages is on its way."""
    BORROWED = "borrowed"
    """All bytes were read on loan, and verified: nobody has to be asked."""
    MOVING = "moving"
    """Pull only: the owner has granted the pages and they are being read."""
    MOVED = "moved"
    """All bytes are in place."""
    VERIFIED = "verified"
    CANCEL = "cancel"
    FAIL = "fail"


class Status(NamedTuple):
    """A session's state, and whether a cancel waits for its readers to finish."""

    state: SessionState
    cancelling: bool = False

    @property
    def terminal(self) -> bool:
        """Whether nothing can change this any more."""
        return self.state in TERMINAL_STATES


INITIAL_STATUS = Status(SessionState.INIT)


class InvalidTransitionError(Exception):
    """An event that cannot happen in this state: a defect of this program or of a peer."""

    def __init__(self, status: Status, event: StrEnum) -> None:
        super().__init__(f"{event.value!r} cannot happen to a session that is {status.state.value!r}")
        self.status = status
        self.event = event


_S = SessionState

_SEND: dict[tuple[SessionState, SendEvent], SessionState] = {
    (_S.INIT, SendEvent.ASKED): _S.READY,
    (_S.INIT, SendEvent.TAKEN): _S.FULLY_TRANSFERRED,
    (_S.READY, SendEvent.STARTED): _S.TRANSFERRING,
    (_S.TRANSFERRING, SendEvent.WRITTEN): _S.KV_TRANSFERRED,
    (_S.TRANSFERRING, SendEvent.ACK_DONE): _S.FULLY_TRANSFERRED,
    (_S.KV_TRANSFERRED, SendEvent.ACK_DONE): _S.FULLY_TRANSFERRED,
}

_RECEIVE: dict[tuple[SessionState, ReceiveEvent], SessionState] = {
    (_S.INIT, ReceiveEvent.ASKED): _S.READY,
    (_S.INIT, ReceiveEvent.BORROWED): _S.FULLY_TRANSFERRED,
    (_S.READY, ReceiveEvent.MOVING): _S.TRANSFERRING,
    (_S.READY, ReceiveEvent.MOVED): _S.KV_TRANSFERRED,
    (_S.TRANSFERRING, ReceiveEvent.MOVED): _S.KV_TRANSFERRED,
    (_S.KV_TRANSFERRED, ReceiveEvent.VERIFIED): _S.FULLY_TRANSFERRED,
}

_SEND_ENDINGS = frozenset({SendEvent.ACK_FAILED, SendEvent.ACK_CANCELLED, SendEvent.FAIL, SendEvent.PEER_DEAD})


def next_send_status(status: Status, event: SendEvent) -> Status:
    """The sender's status after ``event``.

    A cancel ends a session at once only where nothing reads its pages (INIT, KV_TRANSFERRED); elsewhere it is noted and
    the session ends CANCELLED when its reader stops, unless the reader turns out to have everything.

    Raises:
        InvalidTransitionError: the event cannot happen in this state.
    """
    if status.terminal:
        return status
    state, cancelling = status
    if event is SendEvent.CANCEL:
        ends = state in {_S.INIT, _S.KV_TRANSFERRED}
        return Status(_S.CANCELLED) if ends else Status(state, cancelling=True)
    if event in _SEND_ENDINGS:
        if state is _S.INIT and event is not SendEvent.FAIL:
            raise InvalidTransitionError(status, event)
        return Status(_S.CANCELLED if cancelling or event is SendEvent.ACK_CANCELLED else _S.ERROR)
    if (following := _SEND.get((state, event))) is None:
        raise InvalidTransitionError(status, event)
    if cancelling and following is _S.KV_TRANSFERRED:
        return Status(_S.CANCELLED)
    return Status(following, cancelling and following is not _S.FULLY_TRANSFERRED)


def next_receive_status(status: Status, event: ReceiveEvent) -> Status:
    """The receiver's status after ``event``.

    A cancel or a failure is terminal at once; whether the destination pages are quiet is a separate question
    (:attr:`kvmesh.transceiver.sessions.ReceiveSession.quiet`).

    Raises:
        InvalidTransitionError: the event cannot happen in this state.
    """
    if status.terminal:
        return status
    if event is ReceiveEvent.CANCEL:
        return Status(_S.CANCELLED)
    if event is ReceiveEvent.FAIL:
        return Status(_S.ERROR)
    if (following := _RECEIVE.get((status.state, event))) is None:
        raise InvalidTransitionError(status, event)
    return Status(following)
