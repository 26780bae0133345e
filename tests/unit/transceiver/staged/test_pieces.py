"""Cutting a move into pieces: every item once, in order, within the bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.transceiver.staged.pieces import ItemTable, Piece, Segment

PARTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), max_size=8)


@given(parts=PARTS, spare=st.integers(0, 200))
def test_pieces_cover_every_item_exactly_once(parts: list[tuple[int, int]], spare: int) -> None:
    table = ItemTable(parts)
    most_bytes = table.largest_bytes + spare
    covered: list[tuple[int, int]] = []
    following = 0
    for piece in table.pieces(most_bytes):
        assert piece.first == following, "in order, without a gap"
        following += piece.num_items
        segments = table.segments(piece.first, piece.num_items)
        assert 0 < table.bytes_of(segments) == piece.nbytes <= most_bytes
        covered += [(part, item) for part, start, stop in segments for item in range(start, stop)]
    assert covered == [(part, item) for part, (count, _) in enumerate(parts) for item in range(count)]
    assert table.num_items == len(covered)
    assert table.nbytes == sum(parts[part][1] for part, _ in covered)


@given(parts=PARTS, spare=st.integers(0, 200))
def test_pieces_are_as_large_as_they_may_be(parts: list[tuple[int, int]], spare: int) -> None:
    table = ItemTable(parts)
    most_bytes = table.largest_bytes + spare
    sizes = [size for count, size in parts for _ in range(count)]
    pieces = list(table.pieces(most_bytes))
    for piece in pieces[:-1]:
        assert piece.nbytes + sizes[piece.first + piece.num_items] > most_bytes, "the next item does not fit"


def test_small_parts_share_a_piece_and_large_ones_take_several() -> None:
    table = ItemTable([(2, 10), (0, 999), (1, 5), (5, 20)])
    assert list(table.pieces(45)) == [Piece(0, 4, 45), Piece(4, 2, 40), Piece(6, 2, 40)]
    assert table.segments(0, 4) == [Segment(0, 0, 2), Segment(2, 0, 1), Segment(3, 0, 1)]


def test_what_does_not_fit_is_refused() -> None:
    table = ItemTable([(3, 10)])
    with pytest.raises(ValueError, match="10 bytes does not fit into a piece of 9"):
        list(table.pieces(9))
    for first, num_items in [(-1, 1), (0, 0), (0, 4), (3, 1)]:
        with pytest.raises(ValueError, match="of 3"):
            table.segments(first, num_items)
    assert list(ItemTable([]).pieces(0)) == []
