"""The eviction queue against a sorted list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.eviction import EvictionQueue, Stamps
from kvmesh.cache.freelist import FreeList

NUM_PAGES = 40
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"), st.lists(st.integers(0, NUM_PAGES - 1), unique=True, max_size=20), st.integers(0, 2)
        ),
        st.tuples(st.just("discard"), st.lists(st.integers(0, NUM_PAGES - 1), unique=True, max_size=20), st.just(0)),
        st.tuples(st.just("pop"), st.just([]), st.integers(0, 25)),
        st.tuples(st.just("pop and put back"), st.just([]), st.integers(0, 25)),
    ),
    max_size=60,
)


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


@given(STEPS)
def test_order(steps: list[tuple[str, list[int], int]]) -> None:
    stamps = Stamps(NUM_PAGES)
    queue = EvictionQueue(stamps)
    expected: list[tuple[int, int]] = []
    for verb, numbers, value in steps:
        if verb == "push":
            queued = {page for _, page in expected}
            fresh = [page for page in numbers if page not in queued]
            priorities = [(value + page) % 3 for page in fresh]
            queue.push(pages(*fresh), np.array(priorities, dtype=np.uint8))
            expected += zip(priorities, fresh, strict=True)
            expected.sort(key=lambda entry: entry[0])  # stable: oldest first within a priority
        elif verb == "discard":
            queue.discard(pages(*numbers))
            expected = [entry for entry in expected if entry[1] not in numbers]
        else:
            popped = queue.pop(value)
            assert popped.tolist() == [page for _, page in expected[:value]]
            if verb == "pop":
                expected = expected[value:]
            else:
                queue.push_front(popped, np.array([priority for priority, _ in expected[:value]], dtype=np.uint8))
        assert len(queue) == len(expected)
        assert set(np.flatnonzero(stamps.live).tolist()) == {page for _, page in expected}


def test_stale_entries_do_not_pile_up() -> None:
    queue = EvictionQueue(Stamps(8))
    everything = np.arange(8, dtype=np.int32)
    for _ in range(10_000):
        queue.push(everything, np.full(8, 35, dtype=np.uint8))
        queue.discard(everything)
    (ring,) = queue._rings.values()
    assert len(ring._pages) <= 512
    queue.push(everything[::-1], np.full(8, 35, dtype=np.uint8))
    assert queue.pop(100).tolist() == list(range(7, -1, -1))
    assert len(queue.pop(1)) == 0


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
