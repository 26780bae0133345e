from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.transceiver.runs import (
    MissingPageError,
    contiguous_runs,
    decode_pages,
    encode_pages,
    pair_pages,
)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


@given(st.lists(st.integers(0, 50), max_size=40))
def test_runs_name_every_page_in_order(pages: list[int]) -> None:
    runs = contiguous_runs(ids(*pages))
    assert [page for start, length in runs for page in range(start, start + length)] == pages
    assert all(first.start + first.length != second.start for first, second in itertools.pairwise(runs))


def test_pages_travel_as_little_endian_int32() -> None:
    assert encode_pages(ids(1, -1)) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert decode_pages(encode_pages(ids(3, 1, 2))).tolist() == [3, 1, 2]
    with pytest.raises(ValueError):
        decode_pages(b"\0\0\0")


def test_only_wanted_blocks_with_a_destination_move() -> None:
    assert pair_pages(ids(4, 5, 6), 1, ids(9, 8)).tolist() == [True, True]
    # Left of a window neither side keeps pages.
    assert pair_pages(ids(-1, -1, 6), 0, ids(-1, -1, 8)).tolist() == [False, False, True]
    # What the receiver does not keep need not be held, and what it keeps not need be sent is simply not asked for.
    assert pair_pages(ids(4, 5, 6), 0, ids(-1, 1, 2)).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("held", "first", "wanted"),
    [((4, 5), 0, (1, 2, 3)), ((4, 5), 1, (1, 2)), ((4, 5), -1, (1, 2, 3)), ((4, -1), 0, (1, 2))],
)
def test_blocks_that_are_not_held_cannot_be_had(held: tuple[int, ...], first: int, wanted: tuple[int, ...]) -> None:
    with pytest.raises(MissingPageError):
        pair_pages(ids(*held), first, ids(*wanted))
