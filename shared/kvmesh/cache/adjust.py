"""Moves memory between the pools of a level, as the auto-tuner wants it (semantics §3.9).

Every sequence must be suspended: pages then lie where nobody computes with them. A pool that shrinks evicts what does
not fit, packs the rest into the slots that remain and gives its memory back; then the others grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from kvmesh.cache.device import DeviceMemoryError
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.pages import DEVICE_LEVEL
from kvmesh.cache.storage import Storage
from kvmesh.cache.store import BlockStore
from kvmesh.telemetry import get_logger

__all__ = ["adjust_level", "level_ratios"]

_log = get_logger("cache.adjust")


def level_ratios(layout: PageLayout, num_pages: Sequence[int]) -> list[Fraction]:
    """Share of the bytes of a level that each pool has."""
    sizes = [count * pool.page_bytes for count, pool in zip(num_pages, layout.pools, strict=True)]
    return [Fraction(size, sum(sizes)) for size in sizes]


def adjust_level(store: BlockStore, storage: Storage, level: int, target: Sequence[int], level_bytes: int) -> None:
    """Give every pool of ``level`` its ``target`` number of slots, as far as that is possible now.

    A pool whose pages are pinned where it should shrink stays as it is, and the others grow by so much less. So does a
    pool that the system refuses to change; a tier that takes no more pages meanwhile is disabled.
    """
    page_bytes = [pool.page_bytes for pool in store.layout.pools]
    for pool, wanted in enumerate(target):
        if wanted < store.tables[pool].num_slots[level]:
            _shrink(store, storage, level, pool, wanted)
    for pool, wanted in enumerate(target):
        used = sum(table.num_slots[level] * size for table, size in zip(store.tables, page_bytes, strict=True))
        have = store.tables[pool].num_slots[level]
        wanted = min(wanted, have + (level_bytes - used) // page_bytes[pool])
        if wanted > have and _resize(storage, level, pool, wanted):
            store.tables[pool].resize(level, wanted)


def _shrink(store: BlockStore, storage: Storage, level: int, pool: int, wanted: int) -> None:
    table = store.tables[pool]
    excess = table.num_slots[level] - wanted
    # Looked at first: nothing is evicted for a pool that stays as it is.
    if table.fixed(table.pages_above(level, wanted)).any() or table.movable(level, store.placement.usable) < excess:
        return
    if not store.placement.make_room(pool, level, excess):
        return
    above = table.pages_above(level, wanted)
    free = table.free_slots[level].free
    slots = np.sort(free[free < wanted])[: len(above)]
    if level == DEVICE_LEVEL:
        storage.copy(pool, table.slot[above], slots)
    else:
        try:
            intact = storage.move(pool, level, table.slot[above], level, slots)
        except TierFailedError as failure:
            store.placement.disable(failure)
            return
        left = store.placement.lose_damaged(pool, above, intact)
        above, slots = above[left], slots[left]
        if len(table.pages_above(level, wanted)) > len(above):
            return  # Somebody still holds a page that is damaged; its slot goes when they leave.
    table.repack(level, above, slots)
    table.resize(level, wanted)
    _resize(storage, level, pool, wanted)


def _resize(storage: Storage, level: int, pool: int, num_pages: int) -> bool:
    """Whether there was no problem; if there was one, the pool has the smaller of the two numbers of pages."""
    try:
        storage.resize(level, pool, num_pages)
    except (TierFailedError, DeviceMemoryError) as failure:
        _log.warning("a pool of the cache cannot change its size", level=level, pool=pool, reason=str(failure))
        return False
    return True
