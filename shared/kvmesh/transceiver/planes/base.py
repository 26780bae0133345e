"""The interface of a data plane, and the handle with which a running move is stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmesh.net.faults import fault_point
from kvmesh.transceiver.types import PageIds, PeerKey

__all__ = ["DataPlane", "MoveControl", "MoveJob", "MoveStoppedError", "PageSums", "PlaneError"]


class PlaneError(Exception):
    """A plane could not attach to a peer or move its pages; the message is a sentence."""


class MoveStoppedError(Exception):
    """A move ended early because it was told to; nothing of it touches memory any more."""


class MoveControl:
    """Stops a move from another thread: the mover asks between its slices."""

    def __init__(self) -> None:
        self._stopped = False
        self.abandoned = False
        """The peer is dead, or this process ends: the mover need not wait for what it has begun."""

    def stop(self) -> None:
        """Ask the mover to end at its next slice."""
        self._stopped = True

    def abandon(self) -> None:
        """Ask the mover to end at once, because the other side cannot touch anything any more."""
        self.abandoned = True
        self._stopped = True

    @property
    def stopped(self) -> bool:
        """Whether the mover was asked to end."""
        return self._stopped

    def checkpoint(self) -> None:
        """Called by the mover before each slice.

        Raises:
            MoveStoppedError: the mover was asked to end.
        """
        fault_point("transceiver.during_transfer")
        if self._stopped:
            raise MoveStoppedError


class PageSums(Protocol):
    """Checksums of the pages of a job, by (layer group, part): every page is given once, in either way."""

    def put(self, group: int, part: slice, sums: NDArray[np.uint64]) -> None:
        """Take those that the mover computed while it wrote ``local[group][part]``."""

    def add(self, group: int, part: slice) -> None:
        """Compute those of ``local[group][part]`` from what lies there now."""


@dataclass(slots=True, kw_only=True, eq=False)
class MoveJob:
    """Which pages to move: page ``local[g][i]`` here and page ``remote[g][i]`` at the peer, for every layer group."""

    transfer_id: int
    session: int
    local: Sequence[PageIds]
    remote: Sequence[PageIds]
    access: bytes = b""
    """What the owner gave out with :meth:`DataPlane.grant` (pull planes)."""
    control: MoveControl = field(default_factory=MoveControl)
    sums: PageSums | None = None
    """Gets the checksums of the pages as they arrive (pull planes)."""

    @property
    def num_pages(self) -> int:
        """Pages over all groups."""
        return sum(len(pages) for pages in self.local)


class DataPlane(Protocol):
    """A way to move pages. Methods may be called from different threads; those that block say so.

    ``pull``: the receiver moves (a late or frozen owner can never write into pages that were reused).
    ``push``: the owner moves; the receiver must not reuse pages until the owner is known to be quiet.
    """

    @property
    def name(self) -> str:
        """The backend's name: both engines of a pair must have the same."""

    @property
    def direction(self) -> Literal["pull", "push"]:
        """Which side moves."""

    def describe(self) -> bytes:
        """What a peer needs to attach, sent in the handshake."""

    def attach(self, peer: PeerKey, descriptor: bytes) -> str:
        """Make the peer's memory reachable; blocks for connection set-up at most. Idempotent.

        Returns:
            What was chosen, for the log: ``memfd``, ``tcp``, ``nixl``...

        Raises:
            PlaneError: it cannot be reached this way.
        """

    def detach(self, peer: PeerKey) -> None:
        """Forget the peer. No move to it may be running; unknown peers are ignored."""

    def grant(self, transfer_id: int, session: int, pages: Sequence[PageIds]) -> bytes:
        """Owner, pull planes: let a session read ``pages``; returns what its receiver must present."""

    def revoke(self, transfer_id: int, session: int) -> None:
        """Owner: the session reads no more. Unknown sessions are ignored."""

    def move(self, peer: PeerKey, job: MoveJob) -> int:
        """Move the pages of ``job``; blocks until all are in place. Called by the side that moves.

        Returns:
            Bytes moved.

        Raises:
            MoveStoppedError: ``job.control`` was stopped and the move has ended; nothing touches memory any more.
            PlaneError: the peer cannot be reached, or reported an error; nothing touches memory any more.
        """

    def is_quick(self, peer: PeerKey, nbytes: int) -> bool:
        """Whether this side's part in a move of ``nbytes`` with ``peer`` takes no longer than handling a message.

        It may then run on the thread that handles messages: it must not wait for anybody.
        """

    def session_opened(self) -> None:
        """A session with a peer is open: the plane may have to make progress."""

    def session_closed(self) -> None:
        """Matches :meth:`session_opened`; without open sessions a plane takes no processor time."""

    def close(self) -> None:
        """Release everything; idempotent. Blocks for a bounded time."""
