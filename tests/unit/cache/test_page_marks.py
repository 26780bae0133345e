"""Pages that are quarantined or damaged: counted right, at a cost that does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.pages import PageTable


class UnwalkedDict(dict[int, int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all quarantined pages are walked")


class UnwalkedSet(set[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all damaged pages are walked")


def test_quarantined_pages_are_counted_without_a_walk() -> None:
    """§3.2: locked pages are counted as locked, whatever else they are."""
    table = PageTable([10])
    table.quarantines = UnwalkedDict()
    pages = table.allocate(6, 0, 35)
    table.pin(pages[:4])
    table.quarantine(pages[:4])
    assert table.counts()[1:] == (4, 0, 0, 6, 0, 0)
    table.unlock(pages[1:])
    assert table.counts()[1:] == (6, 0, 0, 1, 0, 3)
    table.quarantine(pages[:2])
    table.unquarantine(pages[:4])
    assert table.counts()[1:] == (6, 0, 0, 1, 2, 1), "two leases quarantine the first two"
    table.hold(pages[1:2])
    table.promote(pages[1:2])
    assert table.counts()[1:] == (6, 0, 0, 2, 2, 0)
    table.demote(pages[1:2])
    assert table.counts()[1:] == (6, 0, 0, 1, 2, 1)
    table.unquarantine(pages[:2])
    assert table.counts()[1:] == (6, 0, 0, 1, 3, 0)


def test_damaged_pages_cost_nothing_to_others() -> None:
    """§3.2: a damaged page can only be waited for; it is held, but neither queues nor counts as evictable."""
    table = PageTable([4, 8])
    pages = table.allocate(4, 0, 35)
    table.attach(pages, np.arange(4, dtype=np.int32), 4)
    table.demote(pages)
    taken = table.pop(0, 4)
    table.relocate(taken, 1, table.free_slots[1].take(4))
    table = _with_damage(table, taken[:3])
    assert (table.counts(1).held, table.counts(1).evictable) == (4, 0)
    others = table.allocate(3, 0, 35)
    table.demote(others)
    assert (table.num_queued(0), table.counts(0).evictable, table.movable(0, [True, True])) == (3, 0, 4)
    table.promote(taken[:1])
    with pytest.raises(CacheIntegrityError):
        table.promote(taken[:1])
    table.demote(taken[:1])
    assert (table.counts(1).held, table.counts(1).evictable) == (4, 0)
    table.unhold(taken[:3])
    assert not table.damaged
    assert (table.counts(1).held, len(table.free_slots[1])) == (1, 7)


def test_a_damaged_page_that_waits_in_a_queue_leaves_it() -> None:
    """§3.8: nobody makes room by moving bytes that are lost."""
    table = PageTable([4, 8, 8])
    pages = table.allocate(4, 0, 35)
    table.attach(pages, np.arange(4, dtype=np.int32), 4)
    table.demote(pages)
    taken = table.pop(0, 4)
    table.relocate(taken, 1, table.free_slots[1].take(4))
    table.enqueue(taken)
    assert table.num_queued(1) == 4
    _with_damage(table, taken[1:3])
    table.damage(taken[1:2])
    assert (table.num_queued(1), table.counts(1).held, table.counts(1).evictable) == (2, 4, 0)
    assert table.movable(1, [True] * 3) == 4 + 2
    table.unhold(taken[1:2])
    assert (table.num_queued(1), table.counts(1).held, table.counts(1).evictable) == (2, 3, 0)


def _with_damage(table: PageTable, pages: np.ndarray) -> PageTable:
    table.damaged = UnwalkedSet()
    table.detach(pages)
    table.damage(pages)
    return table
