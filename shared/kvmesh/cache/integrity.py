"""The cache's self-check: every page is in exactly one state, and everybody who uses it is counted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.lease import PageLease
from kvmesh.cache.pages import NO_NODE, NO_PAGE, PageTable
from kvmesh.cache.sequence import KvCache, SequenceState
from kvmesh.cache.store import BlockStore

__all__ = ["check_store"]


def check_store(store: BlockStore, sequences: Iterable[KvCache], leases: Iterable[PageLease]) -> None:
    """Check page tables, tree and users against each other.

    Args:
        store: tree and page tables.
        sequences: all open sequences.
        leases: all open leases.

    Raises:
        CacheIntegrityError: the first contradiction found.
    """
    for table in store.tables:
        _check_states(table)
        _check_slots(table)
    store.tree.check()
    _check_offers(store)
    _check_users(store, sequences, leases)


def _require(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise CacheIntegrityError(message)


def _check_states(table: PageTable) -> None:
    pages = np.arange(table.num_pages, dtype=np.int32)
    free = np.zeros(table.num_pages, dtype=np.bool_)
    free[table.free_pages.free] = True
    _require(int(free.sum()) == len(table.free_pages), "a page is twice in the free list")
    _require(table.locks.min(initial=0) >= 0 and table.holds.min(initial=0) >= 0, "a use count is negative")
    used = (table.locks > 0) | (table.holds > 0)
    known = table.node != NO_NODE
    droppable = table.queue.contains(pages)
    _require(not (free & (used | known | droppable)).any(), "a free page is in use")
    _require(
        bool(np.array_equal(droppable, known & ~used)), "the eviction queue does not hold exactly the droppable pages"
    )
    _require(bool((free | used | droppable).all()), "a page is lost: neither free, nor used, nor droppable")
    _require(int(droppable.sum()) == len(table.queue), "the eviction queue miscounts")
    for page in table.quarantines:
        _require(bool(table.holds[page] > 0 and not known[page]), "a quarantined page is not held, or is reusable")
    counts = table.counts
    _require(counts.locked == int((table.locks > 0).sum()), "the number of locked pages is wrong")
    _require(min(counts) >= 0 and sum(counts[1:]) == counts.total, "the states do not add up to all pages")


def _check_slots(table: PageTable) -> None:
    in_use = table.slot[table.slot != NO_PAGE]
    free = table.free_slots[0].free
    slots = np.concatenate((in_use, free))
    _require(bool(np.array_equal(np.sort(slots), np.arange(table.num_pages))), "a slot is lost or used twice")
    _require(len(free) == len(table.free_pages), "slots and pages are not freed together")


def _check_offers(store: BlockStore) -> None:
    """Tree and pages name each other, one page per block and group, covering the block."""
    offered = [0] * len(store.tables)
    nodes = store.tree.nodes()
    for group, table in enumerate(store.group_tables):
        pages = store.tree.pages(group)[nodes]
        _require(bool((pages != NO_PAGE).all()), f"a block offers no page in layer group {group}")
        _require(bool(np.array_equal(table.node[pages], nodes)), "a page does not name the block that offers it")
        _require(bool((table.group[pages] == group).all()), "a block offers a page of another layer group")
        lengths = store.tree.lengths(nodes)
        _require(bool((table.num_tokens[pages] == lengths).all()), "a page does not cover its block")
        offered[store.tables.index(table)] += len(pages)
    for count, table in zip(offered, store.tables, strict=True):
        _require(count == int((table.node != NO_NODE).sum()), "a page names a block that does not offer it")


def _check_users(store: BlockStore, sequences: Iterable[KvCache], leases: Iterable[PageLease]) -> None:
    locks = {id(table): np.zeros(table.num_pages, dtype=np.int64) for table in store.tables}
    holds = {id(table): np.zeros(table.num_pages, dtype=np.int64) for table in store.tables}
    for sequence in sequences:
        uses = locks if sequence.state is SequenceState.ACTIVE else holds
        for group, table in enumerate(store.group_tables):
            _count(uses[id(table)], sequence.held_pages(group))
    for lease in leases:
        for group, table in enumerate(store.group_tables):
            _count(holds[id(table)], lease.pages(group))
    for table in store.tables:
        _require(bool(np.array_equal(table.locks, locks[id(table)])), "locks differ from what active sequences use")
        _require(
            bool(np.array_equal(table.holds, holds[id(table)])), "holds differ from suspended sequences and leases"
        )


def _count(counts: NDArray[np.int64], pages: NDArray[np.int32]) -> None:
    np.add.at(counts, pages, 1)
