"""Page lists: pairing what is wanted with what is held, and merging neighbours into runs."""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.kernels import ops
from kvmesh.transceiver.types import PageIds

__all__ = [
    "MissingPageError",
    "PageRun",
    "all_are_pages",
    "contiguous_runs",
    "decode_pages",
    "encode_pages",
    "only_pages",
    "pair_pages",
    "select",
]


_WIRE: Final = np.dtype("<i4")


class MissingPageError(Exception):
    """A page is wanted that its owner does not hold."""


class PageRun(NamedTuple):
    """``length`` pages that follow each other in the pool, from page ``start``."""

    start: int
    length: int


def encode_pages(pages: PageIds) -> bytes:
    """Page ids as they travel: little-endian int32."""
    return pages.astype(_WIRE, copy=False).tobytes()


def decode_pages(data: bytes) -> PageIds:
    """Page ids from the wire, read-only.

    Raises:
        ValueError: not a whole number of ids.
    """
    pages = np.frombuffer(data, dtype=_WIRE)
    return pages if _WIRE.isnative else pages.astype(np.int32)


def pair_pages(held: PageIds, first_block: int, wanted: PageIds) -> NDArray[np.bool_]:
    """Which of the wanted blocks move: those whose destination is a page.

    Args:
        held: the owner's pages, one for each block of the request, negative where a block is no longer held.
        first_block: the block that ``wanted[0]`` is.
        wanted: the receiver's pages for the blocks from there on, negative where it keeps none (left of a window).

    Raises:
        MissingPageError: the lists do not end at the same block, or a wanted block is not held.
    """
    if first_block < 0 or first_block + len(wanted) != len(held):
        raise MissingPageError(
            f"blocks {first_block}..{first_block + len(wanted)} are wanted but the owner holds blocks 0..{len(held)}"
        )
    moving = wanted >= 0
    missing = moving & (held[first_block:] < 0)
    if np.count_nonzero(missing):
        first_missing = first_block + int(missing.argmax())
        raise MissingPageError(f"block {first_missing} is wanted but the owner holds it no more")
    return moving


def all_are_pages(ids: PageIds) -> bool:
    """Whether no id is negative."""
    return ops.page_bounds(ids)[0] >= 0


def only_pages(ids: PageIds) -> PageIds:
    """Without negative ids; the list itself where there are none, as mostly."""
    return ids if all_are_pages(ids) else ids[ids >= 0]


def select(pages: PageIds, chosen: NDArray[np.bool_]) -> PageIds:
    """The chosen pages, contiguous; the list itself where all are chosen, as they mostly are."""
    return pages if np.count_nonzero(chosen) == len(pages) else pages[chosen]


def contiguous_runs(pages: PageIds) -> list[PageRun]:
    """Merge neighbours: ``[4, 5, 6, 9]`` gives ``[(4, 3), (9, 1)]``. Order is kept."""
    if not len(pages):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(pages) != 1) + 1, [len(pages)]))
    return [PageRun(int(pages[start]), int(end - start)) for start, end in itertools.pairwise(starts)]
