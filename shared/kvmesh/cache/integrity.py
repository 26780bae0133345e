"""The cache's self-check: every page is in exactly one state, and everybody who uses it is counted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.lease import PageLease
from kvmesh.cache.pages import DEVICE_LEVEL, NO_NODE, NO_PAGE, PageTable
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
    free = table.slot == NO_PAGE
    _require(table.free_pages.holds_exactly(free), "the free list does not hold the free pages")
    locks, pins, holds = table.uses(pages)
    _require(min(locks.min(initial=0), pins.min(initial=0), holds.min(initial=0)) >= 0, "a use count is negative")
    used = (locks > 0) | (pins > 0) | (holds > 0)
    known = table.node != NO_NODE
    _require(not (free & (used | known)).any(), "a free page is in use")
    _require(bool((free | used | known).all()), "a page is lost: neither free, nor used, nor droppable")
    fixed = (locks > 0) | (pins > 0)
    _require(bool((table.level[locks > 0] == DEVICE_LEVEL).all()), "a locked page is not on the device")
    damaged = np.zeros(table.num_pages, dtype=np.bool_)
    damaged[list(table.damaged)] = True
    _require(not (damaged & (known | ~used)).any(), "a damaged page is offered for reuse, or kept for nobody")
    held = ~fixed & (holds > 0)
    waiting = (known & ~used) | (held & ~damaged & (table.level < table.last_level))
    queued = table.queued_mask()
    _require(bool(np.array_equal(queued, waiting)), "the eviction queues do not hold exactly what may leave")
    for level in range(table.last_level + 1):
        here = table.level == level
        _require(int((queued & here).sum()) == table.num_queued(level), "an eviction queue miscounts")
        counts = table.counts(level)
        _require(counts.held == int((held & here & ~free).sum()), "the number of held pages is wrong")
        _require(counts.evictable == int((known & ~used & here).sum()), "the number of evictable pages is wrong")
        _require(min(counts) >= 0 and sum(counts[1:]) == counts.total, "the states do not add up to all pages")
    for page in table.quarantines:
        _require(bool(pins[page] > 0 and not known[page]), "a quarantined page is not pinned, or is reusable")
    unsafe = sum(bool(locks[page] == 0) for page in table.quarantines)
    _require(table.counts().quarantined == unsafe, "the number of quarantined pages is wrong")
    _require(table.counts().locked == int((locks > 0).sum()), "the number of locked pages is wrong")


def _check_slots(table: PageTable) -> None:
    for level, free in enumerate(table.free_slots):
        in_use = table.slot[(table.slot != NO_PAGE) & (table.level == level)]
        inside = not len(in_use) or 0 <= in_use.min() <= in_use.max() < table.num_slots[level]
        _require(inside, "a page is in a slot that does not exist")
        unused = np.ones(table.num_slots[level], dtype=np.bool_)
        unused[in_use] = False
        once = len(in_use) == len(unused) - np.count_nonzero(unused)
        _require(once and free.holds_exactly(unused), "a slot is lost or used twice")


def _check_offers(store: BlockStore) -> None:
    """Tree and pages name each other; a full-attention group offers a page for every block, covering it."""
    offered = [0] * len(store.tables)
    nodes = store.tree.nodes()
    for group, table in enumerate(store.group_tables):
        pages = store.tree.pages(group)[nodes]
        here = pages != NO_PAGE
        layout = store.layout.groups[group]
        lengths = store.tree.lengths(nodes)
        if layout.has_every_page:
            _require(bool(here.all()), f"a block offers no page in layer group {group}")
            _require(bool((table.num_tokens[pages] == lengths).all()), "a page does not cover its block")
        pages, lengths = pages[here], lengths[here]
        _require(bool(np.array_equal(table.node[pages], nodes[here])), "a page does not name the block that offers it")
        _require(bool((table.group[pages] == group).all()), "a block offers a page of another layer group")
        covered = table.num_tokens[pages]
        _require(bool(((covered > 0) & (covered <= lengths)).all()), "a page covers nothing, or more than its block")
        offered[layout.pool] += len(pages)
    for count, table in zip(offered, store.tables, strict=True):
        _require(count == int((table.node != NO_NODE).sum()), "a page names a block that does not offer it")


def _check_users(store: BlockStore, sequences: Iterable[KvCache], leases: Iterable[PageLease]) -> None:
    expected = [np.zeros((3, table.num_pages), dtype=np.int64) for table in store.tables]
    for sequence in sequences:
        for group, layout in enumerate(store.layout.groups):
            active, held = sequence.used_pages(group)
            _count(expected[layout.pool][0 if sequence.state is SequenceState.ACTIVE else 2], active)
            _count(expected[layout.pool][2], held)
    for lease in leases:
        for group, layout in enumerate(store.layout.groups):
            _count(expected[layout.pool][2 if lease.movable else 1], lease.pages(group))
    for table, uses in zip(store.tables, expected, strict=True):
        found = table.uses(np.arange(table.num_pages, dtype=np.int32))
        names = ("locks differ from what active sequences use", "pins differ from the leases",
                 "holds differ from what suspended sequences use")  # fmt: skip
        for have, want, name in zip(found, uses, names, strict=True):
            _require(bool(np.array_equal(have, want)), name)


def _count(counts: NDArray[np.int64], pages: NDArray[np.int32]) -> None:
    np.add.at(counts, pages, 1)
