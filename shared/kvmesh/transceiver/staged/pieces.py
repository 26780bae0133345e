"""How the parts of a move are cut into pieces that fit a staging buffer: small ones share one, large ones take several.

Items are numbered through all parts in order, so that both engines name a piece by its first item and a count.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvmesh.transceiver.planes.base import PlaneError
from kvmesh.transceiver.staged.rooms import ALIGNMENT_BYTES

__all__ = ["ItemTable", "Piece", "PiecePlan", "Segment", "plan_pieces"]

PIECES_IN_FLIGHT: Final = 2
"""One is scattered while the next one is on its way."""
PIECE_BYTES: Final = 4 << 20
"""As large as the libraries need a message to be to move it at full speed."""


class Piece(NamedTuple):
    """``num_items`` items from item ``first`` on, back to back in ``nbytes``."""

    first: int
    num_items: int
    nbytes: int


class Segment(NamedTuple):
    """The items ``start`` to ``stop`` of one part."""

    part: int
    start: int
    stop: int


class ItemTable:
    """The items of a move: pieces of pages of equal size within each part.

    Args:
        parts: for every part how many items it has, and the bytes of each.

    Attributes:
        num_items: over all parts.
        nbytes: over all parts.
        largest_bytes: of the largest item; 0 where there is none.
    """

    def __init__(self, parts: Sequence[tuple[int, int]]) -> None:
        self._ends = list(itertools.accumulate(count for count, _ in parts))
        self._item_bytes = [nbytes for _, nbytes in parts]
        self.num_items = self._ends[-1] if self._ends else 0
        self.nbytes = sum(count * nbytes for count, nbytes in parts)
        self.largest_bytes = max((nbytes for count, nbytes in parts if count), default=0)

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """Cut into pieces of at most ``most_bytes``, in order, each item in exactly one.

        Raises:
            ValueError: an item is larger than that.
        """
        if self.largest_bytes > most_bytes:
            raise ValueError(f"an item of {self.largest_bytes} bytes does not fit into a piece of {most_bytes} bytes")
        first, count, used = 0, 0, 0
        start = 0
        for end, item_bytes in zip(self._ends, self._item_bytes, strict=True):
            left = end - start
            start = end
            while left:
                fitting = min(left, (most_bytes - used) // item_bytes)
                if not fitting:
                    yield Piece(first, count, used)
                    first, count, used = first + count, 0, 0
                    continue
                count += fitting
                used += fitting * item_bytes
                left -= fitting
        if count:
            yield Piece(first, count, used)

    def segments(self, first: int, num_items: int) -> list[Segment]:
        """The items ``first`` to ``first + num_items`` by part, in order.

        Raises:
            ValueError: there are not so many, or none is asked for.
        """
        if first < 0 or num_items <= 0 or first + num_items > self.num_items:
            raise ValueError(f"items {first} to {first + num_items} of {self.num_items}")
        found: list[Segment] = []
        part = bisect.bisect_right(self._ends, first)
        while num_items:
            begin = self._ends[part - 1] if part else 0
            taken = min(num_items, self._ends[part] - first)
            if taken:
                found.append(Segment(part, first - begin, first - begin + taken))
            first += taken
            num_items -= taken
            part += 1
        return found

    def bytes_of(self, segments: Sequence[Segment]) -> int:
        """Bytes of all items of ``segments``."""
        return sum((segment.stop - segment.start) * self._item_bytes[segment.part] for segment in segments)


class PiecePlan(NamedTuple):
    """How large the pieces of a move are, at most, and how many of them are under way at once."""

    piece_bytes: int
    in_flight: int


def plan_pieces(items: ItemTable, region_bytes: int) -> PiecePlan:
    """Use half of a staging region where pages allow: the other half is for others, should the owner freeze.

    Args:
        items: what moves.
        region_bytes: of the smaller one of the two regions.

    Raises:
        PlaneError: an item does not fit into it.
    """
    if items.largest_bytes > region_bytes:
        raise PlaneError(
            f"a page of {items.largest_bytes} bytes does not fit into the smaller staging buffer "
            f"of {region_bytes} bytes"
        )
    quarter = region_bytes // 4 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    piece_bytes = max(items.largest_bytes, min(PIECE_BYTES, quarter))
    return PiecePlan(piece_bytes, PIECES_IN_FLIGHT if piece_bytes <= quarter else 1)
