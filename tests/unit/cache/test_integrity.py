"""The integrity check finds what it is there to find; the page table refuses wrong transitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvmesh.cache.errors import CacheIntegrityError, CacheStateError
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.pages import PageTable
from kvmesh.hashing import ReuseScope

Damage = Callable[[KvCacheManager], Callable[[], None]]


def one(page: int) -> np.ndarray:
    return np.array([page], dtype=np.int32)


def damage_lock(manager: KvCacheManager) -> Callable[[], None]:
    table = manager.store.tables[0]
    table.lock(one(0))
    return lambda: table.unlock(one(0))


def damage_hold(manager: KvCacheManager) -> Callable[[], None]:
    table = manager.store.tables[0]
    table.hold(one(1))
    return lambda: table.unhold(one(1))


def damage_node(manager: KvCacheManager) -> Callable[[], None]:
    table = manager.store.tables[0]
    before = table.node.copy()
    table.node[[0, 1]] = table.node[[1, 0]]

    def repair() -> None:
        table.node[:] = before

    return repair


def damage_slot(manager: KvCacheManager) -> Callable[[], None]:
    table = manager.store.tables[0]
    table.slot[0] += 1

    def repair() -> None:
        table.slot[0] -= 1

    return repair


def damage_coverage(manager: KvCacheManager) -> Callable[[], None]:
    table = manager.store.tables[0]
    table.num_tokens[0] -= 1

    def repair() -> None:
        table.num_tokens[0] += 1

    return repair


def damage_queue(manager: KvCacheManager) -> Callable[[], None]:
    table = manager.store.tables[0]
    page = table.pop(0, 1)
    return lambda: table.enqueue(page, front=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_lock, "locks differ"),
        (damage_hold, "holds differ"),
        (damage_node, "does not name the block"),
        (damage_slot, "slot is lost"),
        (damage_coverage, "does not cover"),
        (damage_queue, "eviction queue"),
    ],
)
def test_damage_is_found(make_manager, damage: Damage, message: str) -> None:
    manager = make_manager()
    tokens = np.arange(12, dtype=np.int32)
    for length in (12, 8):
        cache = manager.create(ReuseScope(), tokens[:length], "r")
        assert cache.resume()
        assert cache.resize(length)
        cache.commit(tokens[cache.committed : length])
        if length == 12:
            cache.close()
    manager.check_integrity()
    repair = damage(manager)
    with pytest.raises(CacheIntegrityError, match=message):
        manager.check_integrity()
    repair()
    manager.check_integrity()
    cache.close()


def test_counts_never_go_negative() -> None:
    table = PageTable([4])
    pages = table.allocate(2, 0, 35)
    with pytest.raises(CacheIntegrityError, match="not held"):
        table.unhold(pages)
    table.unlock(pages)
    with pytest.raises(CacheIntegrityError, match="not locked"):
        table.unlock(pages)
    with pytest.raises(CacheIntegrityError, match="not pinned"):
        table.unpin(pages)
    with pytest.raises(CacheIntegrityError, match="not quarantined"):
        table.unquarantine(pages)
    with pytest.raises(CacheIntegrityError, match="wanted"):
        table.allocate(5, 0, 35)
    assert table.counts() == (4, 4, 0, 0, 0, 0, 0)


def test_reusable_pages_are_no_destinations() -> None:
    table = PageTable([2])
    pages = table.allocate(1, 0, 35)
    table.attach(pages, one(7), 4)
    with pytest.raises(CacheStateError, match="quarantined"):
        table.quarantine(pages)
