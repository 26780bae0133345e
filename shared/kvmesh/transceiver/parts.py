"""The parts of a transfer: which pieces of which pages move, derived alike by both sides from routes and page lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.layout import PageLayout
from kvmesh.transceiver.planes.base import Part
from kvmesh.transceiver.routes import Route
from kvmesh.transceiver.runs import MissingPageError, all_are_pages, pair_pages, select
from kvmesh.transceiver.types import PageIds

__all__ = [
    "DEVICE",
    "HOST",
    "HeldPages",
    "Source",
    "choose_sources",
    "decode_sources",
    "encode_tiers",
    "make_parts",
]

DEVICE: Final = 0
HOST: Final = 1
_TIERS: Final = bytes((DEVICE, HOST))

Tiers = NDArray[np.uint8]
"""By block: :data:`DEVICE` or :data:`HOST`."""


class HeldPages(NamedTuple):
    """The owner's pages of one layer group, by block."""

    ids: PageIds
    """Slots in the pool of their tier; negative where no page is held."""
    tiers: Tiers | None = None
    """None: all on the device."""


class Source(NamedTuple):
    """The pages that one route takes, in the order of the receiver's wanted blocks."""

    ids: PageIds
    tiers: Tiers | None = None


def encode_tiers(sources: Sequence[Source]) -> list[bytes]:
    """The tiers of some sources as they travel; empty when all is on the device."""
    if all(source.tiers is None for source in sources):
        return []
    return [b"" if source.tiers is None else source.tiers.tobytes() for source in sources]


def decode_sources(pages: Sequence[PageIds], tiers: Sequence[bytes]) -> list[Source]:
    """Sources from the wire.

    Args:
        pages: by route.
        tiers: what :func:`encode_tiers` made.

    Raises:
        MissingPageError: the two do not fit together, or a tier is none.
    """
    if not tiers:
        return [Source(ids) for ids in pages]
    if len(tiers) != len(pages) or any(
        encoded and len(encoded) != len(ids) for encoded, ids in zip(tiers, pages, strict=True)
    ):
        raise MissingPageError("the owner's list of tiers does not fit its list of pages")
    if any(encoded.translate(None, _TIERS) for encoded in tiers):
        raise MissingPageError("the owner's pages are in tiers that do not exist")
    decoded = [np.frombuffer(encoded, dtype=np.uint8) if encoded else None for encoded in tiers]
    return [Source(ids, of) for ids, of in zip(pages, decoded, strict=True)]


def choose_sources(
    routes: Sequence[Route],
    held: Sequence[HeldPages],
    first_block: Sequence[int],
    wanted: Sequence[PageIds],
) -> list[Source]:
    """By route, the owner's pages of the blocks that the receiver wants.

    Args:
        routes: from the owner to the receiver.
        held: by layer group of the owner.
        first_block: by layer group of the receiver: the block that ``wanted[group][0]`` is.
        wanted: by layer group of the receiver: its pages, negative where it keeps none.

    Raises:
        MissingPageError: a wanted block is not held, or the lists are of other lengths or numbers than they should be.
    """
    groups = 1 + max(route.receiver_group for route in routes)
    if len(first_block) != groups or len(wanted) != groups:
        raise MissingPageError(f"pages of {len(wanted)} layer groups are wanted, the receiver's layout has {groups}")
    return [
        _source(held[route.owner_group], first_block[route.receiver_group], wanted[route.receiver_group])
        for route in routes
    ]


def _source(held: HeldPages, first_block: int, wanted: PageIds) -> Source:
    ids, tiers = held.ids[first_block:], None if held.tiers is None else held.tiers[first_block:]
    if 0 <= first_block == len(held.ids) - len(wanted) and all_are_pages(wanted) and all_are_pages(ids):
        return Source(ids, tiers)
    moving = pair_pages(held.ids, first_block, wanted)
    return Source(select(ids, moving), None if tiers is None else tiers[moving])


def make_parts(
    routes: Sequence[Route],
    sources: Sequence[Source],
    wanted: Sequence[PageIds],
    *,
    owner: PageLayout,
    receiver: PageLayout,
    side: Literal["owner", "receiver"],
) -> list[Part]:
    """The parts of a transfer, as one of the two sides sees them.

    Args:
        routes: from the owner to the receiver.
        sources: by route, of :func:`choose_sources`.
        wanted: by layer group of the receiver: its pages of the blocks that move.
        owner: the owner's layout; its host-tier pools are numbered after those of the device.
        receiver: the receiver's layout.
        side: whose ``local`` is meant.

    Raises:
        MissingPageError: the two page lists of a route differ in length.
    """
    parts: list[Part] = []
    for route, source in zip(routes, sources, strict=True):
        target = wanted[route.receiver_group]
        if len(source.ids) != len(target):
            raise MissingPageError(f"{len(source.ids)} pages are granted where {len(target)} are wanted")
        owner_pool = owner.groups[route.owner_group].pool
        receiver_pool = receiver.groups[route.receiver_group].pool
        for tier, from_ids, to_ids in _by_tier(source, target):
            from_pool = owner_pool + tier * len(owner.pools)
            for span in route.spans:
                if side == "owner":
                    ends = (from_pool, from_ids, receiver_pool, to_ids)
                    offsets = (span.owner_offset, span.receiver_offset)
                else:
                    ends = (receiver_pool, to_ids, from_pool, from_ids)
                    offsets = (span.receiver_offset, span.owner_offset)
                parts.append(Part(*ends, span.nbytes, *offsets))
    return parts


def _by_tier(source: Source, target: PageIds) -> Iterator[tuple[int, PageIds, PageIds]]:
    if source.tiers is None or not len(source.tiers):
        yield DEVICE, source.ids, target
        return
    for tier in (DEVICE, HOST):
        chosen = source.tiers == tier
        yield tier, select(source.ids, chosen), select(target, chosen)
