"""One transfer as each side sees it: who owns it, what it holds, when it is due, and whether its pages are quiet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from kvmesh.protocol.transfer import Aux, RequestData, Run, Ticket
from kvmesh.transceiver.bounce import BounceRun
from kvmesh.transceiver.integrity import RunningChecksums, checksum_difference
from kvmesh.transceiver.parts import HeldPages, Source
from kvmesh.transceiver.planes.base import MoveControl
from kvmesh.transceiver.promises import Promise
from kvmesh.transceiver.states import INITIAL_STATUS, Status
from kvmesh.transceiver.types import PageIds, PageLease, PeerKey, TransferFailure, TransferNotes

__all__ = ["CANCEL_REPEAT_S", "LastWords", "Piece", "ReceiveSession", "SendSession", "Session", "SliceCheck"]

MAX_NOTED_TIMES: Final = 512
"""Of the slices of one transfer."""
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
    """A thread of this process touches the pages, or is about to."""
    num_pages: int = 0
    num_bytes: int = 0
    run: BounceRun | None = None
    """Where its pages are in one piece: taken until nothing can touch them there any more."""
    overdue_noted: bool = False
    swept: bool = False
    notes: TransferNotes | None = None
    """Receiver: once a slice is in place."""
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

    def note_slices(self, slices_ns: list[int], now_s: float) -> None:
        """Slices are in place since about now; see :class:`TransferNotes`."""
        if self.notes is None:
            self.notes = TransferNotes(now_s - self.started_s, slices_ns[:MAX_NOTED_TIMES])
            return
        noted = self.notes.slices_ns
        noted += slices_ns[: MAX_NOTED_TIMES - len(noted)]

    def give_run(self) -> None:
        """Nothing touches the run any more, if there is one."""
        if self.run is not None:
            self.run.give()

    def cancel_is_due(self, now_s: float) -> bool:
        """Whether to send a cancel now; notes that it was sent."""
        due = now_s - self.cancel_sent_s >= CANCEL_REPEAT_S
        if due:
            self.cancel_sent_s = now_s
        return due


class Piece(NamedTuple):
    """What one job of the owner is about: all that the receiver lacks of a prompt, or one slice of that."""

    sources: list[Source]
    """Per route to the receiver: the pages that go out."""
    number: int = 0
    """Of a slice, from 0."""
    blocks: tuple[int, int] = (0, 0)
    """Of a slice: first block, and behind the last, in layer groups without a window."""
    is_last: bool = True
    aux: Aux | None = None


class LastWords(NamedTuple):
    """How an owner ends a session that it cannot complete."""

    status: Literal["failed", "cancelled"]
    message: str


@dataclass(slots=True, kw_only=True, eq=False)
class SendSession(Session):
    """The page owner's side. The deadline is armed once, when the session opens, and only flags."""

    ticket: Ticket | None = None
    """None of a promised prompt."""
    token: bytes = b""
    """:attr:`ticket` as it was signed."""
    lent: bool = False
    """Whoever holds the ticket may be reading the pages: the loan stands."""
    held: list[HeldPages] = field(default_factory=list)
    """Per layer group: the request's pages, fixed from the moment that somebody asks for them."""
    movable: bool = False
    """Nobody has asked: the pages may be in a colder tier by now."""
    put_off: RequestData | None = None
    """What somebody has asked for meanwhile."""
    promise: Promise | None = None
    """Generation first: the prompt is, or was, still to be computed."""
    moving: int = 0
    """Pieces that are being sent, or wait for it."""
    offered: Run | None = None
    """Room that the receiver has reserved for all pages in one piece."""
    granted: bool = False
    """Pull planes: the receiver may be reading the pages."""
    told_end: bool = False
    """The receiver of a promised prompt was told that it will not come, or is about to be."""
    last_words: LastWords | None = None
    """What to tell it as soon as nothing of the prompt is being sent any more: it may reuse its pages then."""

    @property
    def is_idle(self) -> bool:
        """Whether a prompt is promised of which nothing is being sent now: a cancel need not wait for anybody."""
        return self.promise is not None and not self.moving and not self.granted and not self.terminal

    def asked_by(self, peer: PeerKey | None, session: int) -> bool:
        """Whether a message of ``peer`` about its session number concerns this one."""
        return self.peer is not None and self.peer == peer and self.session == session


@dataclass(slots=True, eq=False)
class SliceCheck:
    """Checksums of one slice of a prompt, or of all of it."""

    ours: RunningChecksums
    theirs: list[bytes] | None = None
    """None until the owner has sent its own."""

    def difference(self) -> str | None:
        """What is wrong with the pages, once both sides' checksums are there; None if nothing."""
        return None if self.theirs is None else checksum_difference(self.ours.encoded(), self.theirs)


@dataclass(slots=True, kw_only=True, eq=False)
class ReceiveSession(Session):
    """The receiver's side. The deadline is armed when the pages are asked for, not while connecting, and fails it."""

    endpoint: str
    """Control endpoint of the page owner."""
    token: bytes
    """The signed ticket; generation first, the signed claim."""
    is_claim: bool = False
    """Generation first: the prompt was asked for before it was computed."""
    aux: Aux | None = None
    """Generation first: what came with the last slice."""
    next_slice: int = 0
    """Slices that have been announced."""
    moving: int = 0
    """Jobs of this process that touch the pages, or wait for it."""
    first_block: list[int]
    wanted: list[PageIds]
    """Per layer group: destination pages of the blocks from ``first_block`` on; negative where none is kept."""
    local: list[PageIds]
    """``wanted`` without its negative entries: the pages that are written."""
    refused: bool = False
    """The owner has refused a request of this session."""
    asked: bool = False
    """The owner has been asked for the pages, and its ticket is spent."""
    acknowledged: bool = False
    """The owner has been told how the session ended."""
    orphaned: bool = False
    """The owner is gone while a mover of ours works with what is left of it."""
    checks: dict[int, SliceCheck] = field(default_factory=dict)
    """Of the pages as they landed, by slice; none of slices that are not checked."""
    arrived_to: list[int] = field(default_factory=list)
    """Slices: by layer group, behind the last block that has come."""
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
