"""One transfer as each side sees it: who owns it, what it holds, when it is due, and whether its pages are quiet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from kvmesh.protocol.transfer import Ticket
from kvmesh.transceiver.integrity import RunningChecksums
from kvmesh.transceiver.parts import HeldPages, Source
from kvmesh.transceiver.planes.base import MoveControl
from kvmesh.transceiver.states import INITIAL_STATUS, Status
from kvmesh.transceiver.types import PageIds, PageLease, PeerKey, TransferFailure

__all__ = ["CANCEL_REPEAT_S", "ReceiveSession", "SendSession", "Session"]

CANCEL_REPEAT_S: Final = 1.0
"""A cancel is sent again after this long without an answer: an acknowledgement may have been lost with a connection."""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """What both sides have in common."""

    transfer_id: int
    request_id: str
    lease: PageLease
    started_s: float
    deadline_s: float = math.inf
    num_tokens: int
    session: int = 0
    """The receiver's number of it, echoed in every message."""
    peer: PeerKey | None = None
    status: Status = INITIAL_STATUS
    failure: TransferFailure | None = None
    control: MoveControl = field(default_factory=MoveControl)
    """Stops this side's mover."""
    busy: bool = False
    """A thread of this process touches the pages."""
    num_pages: int = 0
    num_bytes: int = 0
    overdue_noted: bool = False
    swept: bool = False
    cancel_sent_s: float = -math.inf

    @property
    def terminal(self) -> bool:
        """Whether it has ended."""
        return self.status.terminal

    @property
    def quiet(self) -> bool:
        """Whether nothing touches the pages any more, so that they may be released."""
        return self.terminal and not self.busy

    @property
    def may_be_written(self) -> bool:
        """Whether what the pages hold is uncertain, because something may be writing into them."""
        return False

    def cancel_is_due(self, now_s: float) -> bool:
        """Whether to send a cancel now; notes that it was sent."""
        due = now_s - self.cancel_sent_s >= CANCEL_REPEAT_S
        if due:
            self.cancel_sent_s = now_s
        return due


@dataclass(slots=True, kw_only=True, eq=False)
class SendSession(Session):
    """The page owner's side. The deadline is armed once, when the session opens, and only flags."""

    ticket: Ticket
    held: list[HeldPages]
    """Per layer group: the request's pages, fixed from the moment that somebody asks for them."""
    sources: list[Source] = field(default_factory=list)
    """Per route to the receiver: the pages that it asked for."""

    def asked_by(self, peer: PeerKey | None, session: int) -> bool:
        """Whether a message of ``peer`` about its session number concerns this one."""
        return self.peer is not None and self.peer == peer and self.session == session


@dataclass(slots=True, kw_only=True, eq=False)
class ReceiveSession(Session):
    """The receiver's side. The deadline is armed when the pages are asked for, not while connecting, and fails it."""

    endpoint: str
    """Control endpoint of the page owner."""
    token: bytes
    """The signed ticket."""
    first_block: list[int]
    wanted: list[PageIds]
    """Per layer group: destination pages of the blocks from ``first_block`` on; negative where none is kept."""
    local: list[PageIds]
    """``wanted`` without its negative entries: the pages that are written."""
    asked: bool = False
    """The owner has been asked for the pages, and its ticket is spent."""
    acknowledged: bool = False
    """The owner has been told how the session ended."""
    orphaned: bool = False
    """The owner is gone while a mover of ours works with what is left of it."""
    sums: RunningChecksums | None = None
    """Checksums of the pages as they landed; None when they are not checked."""
    owner_sums: list[bytes] | None = None
    peer_may_write: bool = False
    """Push planes: the owner has been asked to write and has not said that it ended."""

    @property
    def quiet(self) -> bool:
        """Whether nothing writes into the pages any more, so that they may be reused."""
        return self.terminal and not self.may_be_written

    @property
    def may_be_written(self) -> bool:
        """See :attr:`Session.may_be_written`."""
        return self.busy or self.peer_may_write
