"""The interface of a data plane, and the handle with which a running move is stopped."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmesh.net.faults import fault_point
from kvmesh.transceiver.types import PageIds, PeerKey

if TYPE_CHECKING:
    from kvmesh.transceiver.planes.loans import Loans

__all__ = [
    "DataPlane",
    "MoveControl",
    "MoveJob",
    "MoveStoppedError",
    "PageSums",
    "Part",
    "PlaneError",
    "Side",
    "Sums",
]

Side = Literal["owner", "receiver"]
Sums = NDArray[np.uint64]
"""XXH3-64 of pieces, ``[n]``."""

MAX_NOTED_SLICES: Final = 64


class PlaneError(Exception):
    """A plane could not attach to a peer or move its pages; the message is a sentence."""


class MoveStoppedError(Exception):
    """A move ended early because it was told to; nothing of it touches memory any more."""


class MoveControl:
    """Stops a move from another thread: the mover asks between its slices."""

    def __init__(self) -> None:
        self._stopped = False
        self._looks_ns: list[int] = []
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
        """Called by the mover before each slice, and after the last one.

        Raises:
            MoveStoppedError: the mover was asked to end.
        """
        fault_point("transceiver.during_transfer")
        if self._stopped:
            raise MoveStoppedError
        if len(self._looks_ns) <= MAX_NOTED_SLICES:
            self._looks_ns.append(time.time_ns())

    def take_slices(self) -> list[int]:
        """When the slices since the last call began and ended: two Unix times in nanoseconds for each, in order.

        The first :data:`MAX_NOTED_SLICES` of one move; on the thread that moves.
        """
        looks, self._looks_ns = self._looks_ns, []
        return [time_ns for slice_ns in itertools.pairwise(looks) for time_ns in slice_ns]


class Part(NamedTuple):
    """Equal pieces of pages: piece ``i`` goes between page ``local[i]`` here and page ``remote[i]`` at the peer.

    A piece lies at ``pool.address + page * pool.page_bytes + offset``.
    """

    local_pool: int
    """Index into this engine's pools: those of the device, then those of the host tier."""
    local: PageIds
    """int32 ``[n]``."""
    remote_pool: int
    """Index into the peer's pools."""
    remote: PageIds
    """int32 ``[n]``."""
    nbytes: int
    """Of each piece; a whole page where both layouts are equal."""
    local_offset: int = 0
    """Inside the page."""
    remote_offset: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        return len(self.local) * self.nbytes


class PageSums(Protocol):
    """Checksums of the pieces of a job: every piece is given once, in either way."""

    def put(self, part: int, pieces: slice, sums: NDArray[np.uint64]) -> None:
        """Take those that the mover computed while it wrote ``pieces`` of ``parts[part]``."""

    def add(self, part: int, pieces: slice) -> None:
        """Compute those of ``pieces`` of ``parts[part]`` from what lies there now."""


@dataclass(slots=True, kw_only=True, eq=False)
class MoveJob:
    """What to move."""

    transfer_id: int
    session: int
    parts: Sequence[Part]
    access: bytes = b""
    """What the owner gave out with :meth:`DataPlane.grant` (pull planes)."""
    control: MoveControl = field(default_factory=MoveControl)
    sums: PageSums | None = None
    """Gets the checksums of the pages as they arrive (pull planes)."""

    @property
    def num_bytes(self) -> int:
        """Bytes over all parts."""
        return sum(part.total_bytes for part in self.parts)


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

    @property
    def attaches(self) -> Literal["owner", "receiver", "both"]:
        """Which side calls :meth:`attach` before pages move; of both, the owner first."""

    @property
    def loans(self) -> Loans | None:
        """How few pages are read unasked, by a receiver and of an owner; None where they are not."""

    def describe(self) -> bytes:
        """What a peer needs to attach, sent in the handshake."""

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> str:
        """Make the peer's memory reachable; blocks for connection set-up at most. Idempotent.

        Args:
            peer: the other engine, which may be attached on either side, or on both.
            descriptor: what it said of itself.
            side: which of the two this engine is.

        Returns:
            What was chosen, for the log: ``memfd``, ``tcp``, ``nixl``...

        Raises:
            PlaneError: it cannot be reached this way.
        """

    def detach(self, peer: PeerKey, side: Side) -> None:
        """Forget the peer on one side. No move with it may be running; unknown peers are ignored."""

    def grant(self, transfer_id: int, session: int, parts: Sequence[Part]) -> bytes:
        """Owner, pull planes: let a session read ``parts``; returns what its receiver must present."""

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
