"""Retention durations (§3.4): when they begin and end, and that freed pages leave nothing behind."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cache.expiry import PageExpiry
from kvmesh.cache.lazy_queue import LazyQueue
from kvmesh.cache.pages import PageTable

FAR_S = 1e9
"""What the API allows: 10^12 ms."""


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_pages_that_were_freed_take_no_memory_until_their_time() -> None:
    table = PageTable([64])
    nodes = np.arange(64, dtype=np.int32)

    def serve(times: int) -> None:
        for _ in range(times):
            taken = table.allocate(64, 0, 80)
            table.retain(taken, np.full(64, FAR_S))
            table.attach(taken, nodes, 4)
            table.unlock(taken)
            table.detach(taken)

    serve(10)
    tracemalloc.start()
    try:
        serve(200)
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held_bytes < 64 * 1024, "12,800 pages came and went"


def test_a_duration_begins_with_the_first_release() -> None:
    expiry = PageExpiry()
    expiry.add(pages(3, 5, 7), np.array([1.0, np.inf, 2.0]))
    assert expiry.waiting
    assert expiry.take(10.0) == []
    expiry.start(pages(3, 5, 7))
    assert expiry
    assert not expiry.waiting
    assert expiry.take(10.9) == []
    expiry.start(pages(3))  # Released again: its time does not change.
    assert expiry.take(11.0) == [3]
    expiry.forget(7)
    assert not expiry
    assert expiry.take(99.0) == []


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 9), st.booleans()), max_size=600))
def test_entries_are_at_most_twice_the_members_and_a_few(steps: list[tuple[int, int, bool]]) -> None:
    queue: LazyQueue[int] = LazyQueue()
    model: dict[int, int] = {}
    for member, rank, add in steps:
        if add:
            queue.push(member, rank, member)
            model[member] = rank
        else:
            queue.discard(member)
            model.pop(member, None)
        assert len(queue._heap) <= 2 * len(queue) + 64
    order = sorted(model, key=lambda member: (model[member], member))
    assert [queue.pop() for _ in order] == order
    assert queue.pop() is None
