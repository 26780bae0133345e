"""Generation first, owner: a prompt promised to a receiver before it is computed, and the slices it goes out in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.protocol.transfer import Aux
from kvmesh.transceiver.parts import HeldPages, Source, choose_sources
from kvmesh.transceiver.routes import Route
from kvmesh.transceiver.runs import select
from kvmesh.transceiver.slices import BlockSpan
from kvmesh.transceiver.types import PageIds, PageLease

__all__ = ["OutgoingSlice", "Promise", "SliceLeases", "SlicePages", "Wanted", "slice_pages"]


class SliceLeases:
    """A :class:`~kvmesh.transceiver.types.PageLease` of all that a promised prompt has sent so far."""

    def __init__(self) -> None:
        self._leases: list[PageLease] = []

    def add(self, lease: PageLease) -> None:
        """Keep one more."""
        self._leases.append(lease)

    def page_ids(self, group: int) -> PageIds:
        """Page ids of ``group`` in the newest lease, which has all blocks up to its slice's end."""
        return self._leases[-1].page_ids(group)

    def levels(self, group: int) -> NDArray[np.uint8]:
        """All on the device: the prompt is still being computed."""
        return np.zeros(len(self.page_ids(group)), dtype=np.uint8)

    def let_move(self) -> bool:
        """Somebody has asked for them already."""
        return False

    def keep_place(self) -> bool:
        """They never left."""
        return True

    @property
    def lost(self) -> bool:
        """Never."""
        return False

    def quarantine(self) -> None:
        """See :class:`~kvmesh.transceiver.types.PageLease`."""
        for lease in self._leases:
            lease.quarantine()

    def release(self) -> None:
        """Unpin everything."""
        for lease in self._leases:
            lease.release()
        self._leases = []


class Wanted(NamedTuple):
    """What the receiver of a promised prompt has asked for."""

    first_block: list[int]
    """By layer group of the receiver."""
    pages: list[PageIds]
    """By layer group of the receiver: its pages of the blocks from there on, negative where it keeps none."""


class OutgoingSlice(NamedTuple):
    """Blocks that may go out."""

    number: int
    """From 0."""
    span: BlockSpan
    """Of layer groups without a window."""
    spans: list[BlockSpan]
    """By layer group of the owner."""
    held: list[HeldPages]
    """By layer group of the owner: pages of all blocks up to the end of the slice; none of groups that send nothing."""
    aux: Aux | None
    """With the last slice."""

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with it."""
        return self.aux is not None


@dataclass(slots=True)
class Promise:
    """What a send session of a promised prompt knows beside what every session knows."""

    prompt_digest: bytes
    leases: SliceLeases = field(default_factory=SliceLeases)
    wanted: Wanted | None = None
    """None until the receiver has come."""
    waiting: deque[OutgoingSlice] = field(default_factory=deque)
    """Slices that are not sent yet, because the receiver has not come."""
    num_slices: int = 0
    complete: bool = False
    """The last slice is among them."""

    @property
    def is_sent(self) -> bool:
        """Whether all of it has been handed on to be sent."""
        return self.complete and not self.waiting


class SlicePages(NamedTuple):
    """The pages of one slice, at both ends."""

    sources: list[Source]
    """By route."""
    targets: list[PageIds]
    """By layer group of the receiver."""


def slice_pages(piece: OutgoingSlice, routes: Sequence[Route], wanted: Wanted) -> SlicePages:
    """What of a slice the receiver lacks.

    Raises:
        MissingPageError: a wanted block is not held, or the lists do not fit together.
    """
    groups = len(wanted.pages)
    first_block, pages = list(wanted.first_block), list(wanted.pages)
    held = list(piece.held)
    for group in range(groups):
        # Layers have the same windows on both sides, so all routes into a group take the same blocks.
        owner_groups = [route.owner_group for route in routes if route.receiver_group == group]
        span = piece.spans[owner_groups[0]]
        begin = max(span.first, wanted.first_block[group])
        end = max(span.end, begin)
        first = wanted.first_block[group]
        first_block[group] = begin
        pages[group] = wanted.pages[group][begin - first : end - first]
        for owner_group in owner_groups:
            ids, tiers = piece.held[owner_group]
            known = np.full(end, -1, dtype=np.int32)
            known[: min(end, len(ids))] = ids[:end]
            held[owner_group] = HeldPages(known, None if tiers is None else tiers[:end])
    sources = choose_sources(routes, held, first_block, pages)
    return SlicePages(sources, [select(ids, ids >= 0) for ids in pages])
