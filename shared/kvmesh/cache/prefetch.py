"""Brings a queued prompt's cached pages up from the disk to the host before it is scheduled (semantics §2, §3.8)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmesh.cache.pages import NO_NODE, NO_PAGE, Pages
from kvmesh.cache.store import BlockMatch, BlockStore
from kvmesh.cache.tree import Nodes
from kvmesh.cache.windows import first_live_block

__all__ = ["HOST_LEVEL", "fetch_ahead"]

HOST_LEVEL = 1
_MIN_SWAPPED_PAGES = 16
"""Pages that change places at once at least: what a full disk drops for that, the pages that go up make good."""


def fetch_ahead(store: BlockStore, found: BlockMatch, kept: Sequence[Nodes]) -> int:
    """Move what a sequence with this match would read from colder levels to the host; returns the number of pages.

    Where the host is full, pages that nobody needs go down, as many as come up; best effort.

    Args:
        store: of a cache with a host level and a colder one.
        found: what of the prompt is cached.
        kept: blocks of other prompts whose pages stay where they are.
    """
    return sum(_fetch(store, pool, found, kept) for pool in range(len(store.tables)))


def _fetch(store: BlockStore, pool: int, found: BlockMatch, kept: Sequence[Nodes]) -> int:
    table, placement = store.tables[pool], store.placement
    cold = _read_pages(store, pool, found)
    cold = cold[table.level[cold] > HOST_LEVEL]
    if not len(cold):
        return 0
    # Locked, they are in no queue: neither pushed down from the host nor dropped from the disk meanwhile.
    staying = _distinct([_read_pages(store, pool, found), *(_all_pages(store, pool, nodes) for nodes in kept)])
    staying = staying[table.level[staying] >= HOST_LEVEL]
    table.lock(staying)
    moved = 0
    room = table.free_slots[HOST_LEVEL]
    while len(cold):
        if not len(room):
            swapped = max(_MIN_SWAPPED_PAGES, len(table.free_slots[HOST_LEVEL + 1]))
            placement.push_down(pool, HOST_LEVEL, min(len(cold), swapped))
            if not len(room):
                break
        intact = placement.bring(pool, cold[: len(room)], HOST_LEVEL)
        if intact is None:
            break
        moved += int(np.count_nonzero(intact))
        cold = cold[len(intact) :]
        cold = cold[table.node[cold] != NO_NODE]  # A damaged block takes along what continues it.
    table.unlock(staying[::-1])
    return moved


def _read_pages(store: BlockStore, pool: int, found: BlockMatch) -> Pages:
    """Pages of ``pool`` that a sequence with this match reads: those in the windows, and what it copies."""
    size = store.tokens_per_block
    history = len(found.nodes) * size + found.partial_tokens
    parts = []
    for group, pages, source in zip(
        store.layout.groups, store.pages_of(found.nodes), store.copy_sources(found), strict=True
    ):
        if group.pool == pool:
            first = len(pages) if group.kind == "state" else first_live_block(history, size, group.window)
            parts += [pages[first:], source]
    return _distinct(parts)


def _all_pages(store: BlockStore, pool: int, nodes: Nodes) -> Pages:
    pages = store.pages_of(nodes)
    return np.concatenate([own for group, own in zip(store.layout.groups, pages, strict=True) if group.pool == pool])


def _distinct(parts: Sequence[Pages]) -> Pages:
    """The pages of ``parts`` in their order, each once."""
    pages = np.concatenate(parts)
    pages = pages[pages != NO_PAGE]
    first = np.unique(pages, return_index=True)[1]
    distinct: Pages = pages[np.sort(first)]
    return distinct
