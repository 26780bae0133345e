"""The stack of free numbers."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.freelist import FreeList


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_free_list() -> None:
    free = FreeList(5)
    assert free.take(2).tolist() == [0, 1]
    free.put(pages(1))
    assert free.take(2).tolist() == [1, 2]
    with pytest.raises(CacheIntegrityError, match="3 numbers wanted, 2 free"):
        free.take(3)
    free.grow(8)
    assert (len(free), free.capacity) == (5, 8)
    assert free.take(5).tolist() == [3, 4, 5, 6, 7]
    free.put(np.arange(8, dtype=np.int32))
    assert free.take(8).tolist() == list(range(8))
    free.put(pages(*range(8)))
    free.take(2)
    with pytest.raises(CacheIntegrityError, match="in use"):
        free.shrink(1)
    free.put(pages(0))
    free.shrink(2)
    assert (len(free), free.capacity) == (1, 2)
    free.put(pages(1))
    with pytest.raises(CacheIntegrityError, match="twice"):
        free.put(pages(0))


@pytest.mark.parametrize(("numbers", "holds"), [((4, 1), True), ((4, 2), False), ((4, 4), False), ((4,), False)])
def test_what_is_free_can_be_checked(numbers: tuple[int, ...], holds: bool) -> None:
    free = FreeList(5)
    free.take(5)
    free.put(pages(*numbers))
    marks = np.array([False, True, False, False, True])
    assert free.holds_exactly(marks) == holds
    assert not free.holds_exactly(marks[:4])
    free._stack[0] = 5
    assert not free.holds_exactly(marks), "there is no such number"
