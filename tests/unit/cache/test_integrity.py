"""The integrity check finds what it is there to find; the page table refuses wrong transitions."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence

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


def damage_pin(manager: KvCacheManager) -> Callable[[], None]:
    table = manager.store.tables[0]
    table.pin(one(0))
    return lambda: table.unpin(one(0))


def entry(column: Callable[[KvCacheManager], MutableSequence[int]], at: int, value: int) -> Damage:
    """Damages entry ``at`` of a column."""

    def damage(manager: KvCacheManager) -> Callable[[], None]:
        numbers = column(manager)
        before = int(numbers[at])
        assert before != value
        numbers[at] = value
        return lambda: numbers.__setitem__(at, before)

    return damage


def damage_mark(manager: KvCacheManager) -> Callable[[], None]:
    manager.store.tables[0].damaged.add(0)
    return lambda: manager.store.tables[0].damaged.discard(0)


def damage_quarantine(manager: KvCacheManager) -> Callable[[], None]:
    manager.store.tables[0].quarantines[0] = 1
    return manager.store.tables[0].quarantines.clear


def damage_key(manager: KvCacheManager) -> Callable[[], None]:
    index, node = manager.store.tree.index, one(CHAIN[-1])
    keys = index.remove(node)
    return lambda: index.add(keys, node)


def damage_name(manager: KvCacheManager) -> Callable[[], None]:
    """As many keys as nodes, one of them of a node that is free."""
    index, node, other = manager.store.tree.index, one(CHAIN[-1]), one(900)
    keys = index.remove(node)
    index.add(keys, other)

    def repair() -> None:
        index.remove(other)
        index.add(keys, node)

    return repair


def damage_roots(manager: KvCacheManager) -> Callable[[], None]:
    root = manager.store.tree.add_root(bytes(32))

    def repair() -> None:
        manager.store.tree._num_tokens.items[root] = -1
        manager.store.tree.index.remove(one(root))
        manager.store.tree._free.put(one(root))

    return repair


CHAIN = (1, 2, 3)
"""Nodes of the blocks; the root is node 0."""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_pin, "pins differ"),
        (damage_mark, "damaged page is offered"),
        (damage_quarantine, "quarantined page is not pinned"),
        (damage_key, "different keys"),
        (damage_name, "different keys"),
        (damage_roots, "root without blocks"),
        (entry(lambda manager: manager.store.tables[0].free_pages._stack, 0, 14), "free list"),
        (entry(lambda manager: manager.store.tables[0].free_pages._stack, 0, 0), "free list"),
        (entry(lambda manager: manager.store.tables[0].free_pages._stack, 0, 99), "free list"),
        (entry(lambda manager: manager.store.tables[0].free_slots[0]._stack, 0, 14), "slot is lost"),
        (entry(lambda manager: manager.store.tables[0].free_slots[0]._stack, 0, -2), "slot is lost"),
        (entry(lambda manager: manager.store.tables[0].slot, 0, 99), "slot that does not exist"),
        (entry(lambda manager: manager.store.tables[0].slot, 0, -2), "slot that does not exist"),
        (entry(lambda manager: manager.store.tables[0].group, 0, 1), "another layer group"),
        (entry(lambda manager: manager.store.tree.pages(0), CHAIN[1], -1), "offers no page"),
        (entry(lambda manager: manager.store.tree._free._stack, 0, CHAIN[1]), "tree node is lost"),
        (entry(lambda manager: manager.store.tree._parent.items, CHAIN[2], -1), "not in the tree"),
        (entry(lambda manager: manager.store.tree._parent.items, CHAIN[2], 800), "not in the tree"),
        (entry(lambda manager: manager.store.tree._parent.items, CHAIN[2], CHAIN[0]), "miscounts its children"),
        (entry(lambda manager: manager.store.tree._num_children.items, CHAIN[2], 1), "miscounts its children"),
        (entry(lambda manager: manager.store.tree._first_child.items, CHAIN[1], -1), "lists of children"),
        (entry(lambda manager: manager.store.tree._first_child.items, CHAIN[1], 1 << 30), "lists of children"),
        (entry(lambda manager: manager.store.tree._first_child.items, CHAIN[1], CHAIN[0]), "lists of children"),
        (entry(lambda manager: manager.store.tree._next.items, CHAIN[2], CHAIN[2]), "lists of children"),
        (entry(lambda manager: manager.store.tree._next.items, CHAIN[2], 800), "lists of children"),
        (entry(lambda manager: manager.store.tree._previous.items, CHAIN[2], CHAIN[0]), "lists of children"),
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
