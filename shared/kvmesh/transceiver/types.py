"""The vocabulary of the transceiver: pools, leases, peers, and what a poll reports."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PageIds",
    "PageLease",
    "PeerKey",
    "PoolMemory",
    "StagingStats",
    "TransceiverStats",
    "TransferFailure",
    "TransferNotes",
    "TransferPoll",
    "TransferSize",
]

PageIds = NDArray[np.int32]
"""Page ids of one layer group, ``[blocks]``; a negative id is a block whose page is not held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """One layer group's pages in this process: page ``i`` lies at ``address + i * page_bytes``."""

    address: int
    nbytes: int
    num_pages: int
    page_bytes: int
    fd: int | None = None
    """A memfd that backs the pool, so that a process of the same user can map it; None where there is none."""
    fd_offset_bytes: int = 0
    """Where page 0 lies in ``fd``; a multiple of the machine's page size."""
    device: Literal["cpu", "cuda"] = "cpu"
    device_id: int = 0


class PageLease(Protocol):
    """The pages of one request, pinned until :meth:`release`. Used on the thread that drives the transceiver."""

    def page_ids(self, group: int) -> PageIds:
        """Page ids of ``group``, one for each block of the request, in order."""

    def levels(self, group: int) -> NDArray[np.uint8]:
        """By block the cache level that its page is on: 0 is the device, any other one is in the host tier's pool."""

    def let_move(self) -> bool:
        """Nobody has asked for the pages: the cache may move them; whether it will."""

    def keep_place(self) -> bool:
        """They stay where they are from now on; False: there is no room where they could be read from, or lost."""

    @property
    def lost(self) -> bool:
        """The cache has lost pages: the lease can only be released."""

    def quarantine(self) -> None:
        """The transfer has ended, but something may still write into the pages. At most once, before the release."""

    def release(self) -> None:
        """Unpin. Called exactly once."""


class PeerKey(NamedTuple):
    """One life of one engine."""

    instance_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.instance_id}#{self.epoch}"

    @property
    def number(self) -> int:
        """A uint64 that stands for it where there is no room for its name."""
        return int.from_bytes(hashlib.blake2b(str(self).encode(), digest_size=8).digest(), "little")


class TransferFailure(NamedTuple):
    """Why a transfer failed; the fields are those of an HTTP error."""

    id: int
    status: int
    code: str
    message: str


class TransferNotes(NamedTuple):
    """When the pages of a received transfer moved."""

    first_slice_s: float
    """From asking to the first slice being in place; on planes where the owner writes, to its saying so."""
    slices_ns: list[int]
    """For each slice when it began and ended, in Unix time; those of a very long transfer's beginning."""


class TransferPoll(NamedTuple):
    """What changed since the last poll. Each transfer ends in exactly one of the first three lists, once."""

    completed: list[int]
    failed: list[TransferFailure]
    cancelled: list[int]
    timed_out: list[int]
    """Past their deadline and still open: their pages stay pinned and they may yet complete. Reported once each."""
    notes: dict[int, TransferNotes]
    """Of the completed ones that pages were received for."""

    @property
    def settled(self) -> int:
        """How many transfers are reported."""
        return len(self.completed) + len(self.failed) + len(self.cancelled) + len(self.timed_out)


class TransferSize(NamedTuple):
    """How much a transfer moves."""

    pages: int
    nbytes: int


class StagingStats(NamedTuple):
    """Gauges of the two staging or bounce regions of an engine; all zero where there are none."""

    capacity_bytes: int = 0
    """Of each region."""
    send_used_bytes: int = 0
    receive_used_bytes: int = 0
    """With rooms that are out of use because an owner may still write into them."""
    send_waiting: int = 0
    """Transfers whose owner waits until its send region has room for them."""
    receive_waiting: int = 0
    """Transfers whose receiver waits until its receive region has room for them."""


class TransceiverStats(NamedTuple):
    """Gauges now, then counters since start."""

    send_sessions: int
    receive_sessions: int
    quarantined_pages: int
    links: int
    started_total: int
    completed_total: int
    failed_total: int
    cancelled_total: int
    timed_out_total: int
    refused_total: int
    """Refused here: forged, expired, foreign, stale or replayed tickets, and requests for pages not held any more."""
    dropped_messages_total: int
    """Control messages that could not be sent or understood, and answers to older sessions."""
    isolated_errors_total: int
    """Defects that ended one peer's transfer or connection in this process, and nothing else."""
    ledger_dropped_total: int
    """Ledger entries lost because nobody drained them."""
    bytes_moved_total: int
    pages_moved_total: int
    pages_reused_total: int
    """Pages that were not asked for because the receiver already held them."""
    borrowed_total: int
    """Transfers that this engine has read on loan, with nothing but the hand-off."""
    staging_capacity_bytes: int
    """As in :class:`StagingStats`, and so the following."""
    staging_send_used_bytes: int
    staging_receive_used_bytes: int
    staging_send_waiting: int
    staging_receive_waiting: int
    bounced_total: int
    """Transfers that this engine has sent in one piece, through its bounce region."""
    bounce_fallbacks: dict[str, int]
    """Transfers whose pages moved one by one although this engine has bounce regions, by the reason."""
    bounce_orphaned_bytes: int
    """Of the receive region: kept for transfers that have ended while their owner may still write."""
