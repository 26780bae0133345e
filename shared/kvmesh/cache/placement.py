"""On which level each page is: makes room by moving pages down or dropping them, and brings them back up.

When a level is full, its queue says who leaves. A page that somebody needs, or whose priority is high enough, falls to
the next colder level, where room is made in the same way; any other page is dropped, and so is everything that falls
off the last level. What a tier cannot give back intact is a miss, never wrong content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.flows import PageFlows
from kvmesh.cache.pages import DEVICE_LEVEL, NO_PAGE, Pages, PageTable
from kvmesh.cache.stats import CacheCounters
from kvmesh.cache.storage import Storage
from kvmesh.telemetry import get_logger

__all__ = ["Placement"]

_log = get_logger("cache.placement")


class Placement:
    """Moves pages between levels.

    Args:
        tables: page bookkeeping by pool.
        storage: the bytes.
        page_bytes: by pool.
        min_priority: lowest priority of an unreferenced page that may fall instead of being dropped.
        counters: where moves are counted.
        flows: where they are counted by level and layer group.
        drop: makes the tree forget pages of a pool, which frees those that nobody needs.
        moved: told of pages of a pool that went from a level to another.
    """

    def __init__(
        self,
        tables: Sequence[PageTable],
        storage: Storage,
        page_bytes: Sequence[int],
        *,
        min_priority: int,
        counters: CacheCounters,
        flows: PageFlows,
        drop: Callable[[int, Pages], None],
        moved: Callable[[int, Pages, int, int], None],
    ) -> None:
        self._tables = tables
        self._storage = storage
        self._page_bytes = page_bytes
        self._min_priority = min_priority
        self._counters = counters
        self._flows = flows
        self._drop = drop
        self._moved = moved
        self.usable = [True] * len(tables[0].num_slots)
        """By level, whether it still takes pages; the device always does."""

    def available(self, pool: int) -> int:
        """Device pages of ``pool`` that can be had now."""
        return self._tables[pool].movable(DEVICE_LEVEL, self.usable)

    def gained(self, pool: int, count: int) -> int:
        """How many more device pages of ``pool`` can be had, at least, when ``count`` of the held ones are freed."""
        return self._tables[pool].gained(count, self.usable)

    def make_room(self, pool: int, level: int, need: int) -> bool:
        """Have ``need`` free slots on ``level``; whether that was possible."""
        table = self._tables[pool]
        free = table.free_slots[level]
        stuck: list[Pages] = []
        while len(free) < need:
            victims = table.pop(level, need - len(free))
            if not len(victims):
                break
            before = len(free)
            remaining = self._expel(pool, level, victims)
            if len(remaining):
                stuck.append(remaining)
            if level == DEVICE_LEVEL:
                self._counters.evicted_pages += max(0, len(free) - before)
        for pages in reversed(stuck):
            table.enqueue(pages, front=True)
        return len(free) >= need

    def push_down(self, pool: int, level: int, need: int) -> None:
        """Have up to ``need`` free slots on ``level``, but let only pages leave that nobody needs."""
        table = self._tables[pool]
        free = table.free_slots[level]
        needed: list[Pages] = []
        # A level that takes nothing any more would have them dropped.
        while len(free) < need and self.usable[level + 1]:
            victims = table.pop(level, need - len(free))
            if not len(victims):
                break
            held = table.held_mask(victims)
            needed.append(victims[held])
            self._expel(pool, level, victims[~held])
        for pages in reversed(needed):
            table.enqueue(pages, front=True)

    def bring(self, pool: int, pages: Pages, level: int) -> NDArray[np.bool_] | None:
        """Move ``pages`` (locked, so in no queue; all colder than ``level``) up to ``level``.

        Returns:
            Which of them arrived intact; the others are lost, and the tree has forgotten them. None without room for
            all, or while one of them is being read where it is; then none has moved.
        """
        table = self._tables[pool]
        if table.any_pinned(pages) or not self.make_room(pool, level, len(pages)):
            return None
        intact = np.zeros(len(pages), dtype=np.bool_)
        sources = table.level[pages]
        for source in np.unique(sources).tolist():
            at = np.flatnonzero(sources == source)
            moving = pages[at]
            intact[at] = self._transfer(pool, moving, source, level)
        self._flows.note("onboarded", sources[intact], table.group[pages[intact]])
        count = int(np.count_nonzero(intact))
        self._counters.onboarded_pages += count
        self._counters.onboarded_bytes += count * self._page_bytes[pool]
        return intact

    def copy_to_device(self, pool: int, sources: Pages, targets: Pages) -> bool:
        """Copy the bytes of ``sources``, wherever they are, to the device pages ``targets``; whether all were intact.

        The tree forgets a source that is not.
        """
        table = self._tables[pool]
        good = True
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            one, to = np.array([source], dtype=np.int32), table.slot[[target]]
            level = int(table.level[source])
            if table.any_damaged(one):
                good = False
                continue
            if level == DEVICE_LEVEL:
                self._storage.copy(pool, table.slot[one], to)
            elif not self._storage.move(pool, level, table.slot[one], DEVICE_LEVEL, to)[0]:
                self.lose(pool, one)
                good = False
                continue
            self._note_copy(level, int(table.group[source]))
        return good

    def copy_out(self, pool: int, source: Pages, target: Pages) -> bool:
        """Copy the device page ``source`` to the page ``target`` of any level (arrays of one); whether it arrived."""
        table = self._tables[pool]
        level = int(table.level[target[0]])
        if level == DEVICE_LEVEL:
            self._storage.copy(pool, table.slot[source], table.slot[target])
            self._note_copy(DEVICE_LEVEL, int(table.group[source[0]]))
            return True
        try:
            arrived = bool(self._storage.move(pool, DEVICE_LEVEL, table.slot[source], level, table.slot[target])[0])
        except TierFailedError as failure:
            self.disable(failure)
            return False
        if arrived:
            self._note_offload(pool, level, table.group[source])
        return arrived

    def _note_copy(self, level: int, group: int) -> None:
        self._flows.add("copied", level, group, 1)
        self._counters.copied_pages += 1

    def _note_offload(self, pool: int, level: int, groups: NDArray[np.uint8]) -> None:
        """Pages of ``groups`` (uint8 ``[n]``) came to ``level`` from a warmer one."""
        self._flows.note("offloaded", level, groups)
        self._counters.offloaded_pages += len(groups)
        self._counters.offloaded_bytes += len(groups) * self._page_bytes[pool]

    def _expel(self, pool: int, level: int, victims: Pages) -> Pages:
        """Make popped ``victims`` leave ``level``; returns those that nobody can do without and nobody has room for."""
        table = self._tables[pool]
        needed = table.held_mask(victims)
        below = level + 1
        if level == table.last_level or not self.usable[below]:
            self._discard(pool, victims[~needed])
            return victims[needed]
        falling = needed | (table.priority[victims] >= self._min_priority)
        self._discard(pool, victims[~falling])
        return self._fall(pool, level, victims[falling])

    def _fall(self, pool: int, level: int, pages: Pages) -> Pages:
        table = self._tables[pool]
        below = level + 1
        pages, stuck = self._fit(pool, pages, table.movable(below, self.usable))
        self.make_room(pool, below, len(pages))
        pages, still_stuck = self._fit(pool, pages, len(table.free_slots[below]))
        stuck = np.concatenate((stuck, still_stuck))
        if not len(pages):
            return stuck
        try:
            intact = self._transfer(pool, pages, level, below)
        except TierFailedError as failure:
            self.disable(failure)
            needed = table.held_mask(pages)
            self._discard(pool, pages[~needed])
            return np.concatenate((stuck, pages[needed]))
        self._note_offload(pool, below, table.group[pages[intact]])
        table.enqueue(pages[intact])
        return stuck

    def _fit(self, pool: int, pages: Pages, room: int) -> tuple[Pages, Pages]:
        """Of ``pages``, those that are still there and fit into ``room``, and the needed ones that do not.

        Needed pages come first; of the others the oldest are dropped.
        """
        table = self._tables[pool]
        # Making room may have removed what these blocks continue, and them with it.
        pages = pages[table.slot[pages] != NO_PAGE]
        if len(pages) <= room:
            return pages, pages[:0]
        needed = table.held_mask(pages)
        at = np.flatnonzero(needed)
        stuck = pages[at[room:]]
        keep = needed.copy()
        keep[at[room:]] = False
        spare = max(0, room - len(at))
        others = np.flatnonzero(~needed)
        keep[others[len(others) - spare :]] = True
        self._discard(pool, pages[others[: len(others) - spare]])
        kept = pages[keep]
        return kept[table.slot[kept] != NO_PAGE], stuck

    def _transfer(self, pool: int, pages: Pages, source: int, target: int) -> NDArray[np.bool_]:
        """Move bytes and bookkeeping of ``pages`` between two levels, into slots that are free; which have arrived."""
        table = self._tables[pool]
        slots = table.free_slots[target].take(len(pages))
        try:
            intact = self._storage.move(pool, source, table.slot[pages], target, slots)
        except TierFailedError:
            table.free_slots[target].put(slots)
            raise
        arrived = self.lose_damaged(pool, pages, intact)
        if not arrived.all():
            table.free_slots[target].put(slots[~arrived])
        good = pages[arrived]
        table.relocate(good, target, slots[arrived])
        self._moved(pool, good, source, target)
        return arrived

    def _discard(self, pool: int, pages: Pages) -> None:
        if len(pages):
            table = self._tables[pool]
            pages = pages[table.slot[pages] != NO_PAGE]
            self._counters.dropped_pages += len(pages)
            self._flows.note("dropped", table.level[pages], table.group[pages])
            self._drop(pool, pages)

    def lose_damaged(self, pool: int, pages: Pages, intact: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Of ``pages`` that were read together lose those that are not ``intact``; which of the others are still there.

        What continues a lost block goes with it, and may have been read together with it.
        """
        if intact.all():
            return intact
        self.lose(pool, pages[~intact])
        left: NDArray[np.bool_] = intact & (self._tables[pool].slot[pages] != NO_PAGE)
        return left

    def lose(self, pool: int, pages: Pages) -> None:
        """The bytes of ``pages`` are damaged: the tree forgets them, and their users will find out."""
        table = self._tables[pool]
        self._counters.damaged_pages += len(pages)
        self._flows.note("damaged", table.level[pages], table.group[pages])
        self._drop(pool, pages)
        table.damage(pages[table.slot[pages] != NO_PAGE])

    def disable(self, failure: TierFailedError) -> None:
        """A tier takes nothing any more: what only the tree keeps there goes, what somebody needs can still be read."""
        level = failure.level
        if not self.usable[level]:
            return
        self.usable[level] = False
        _log.error("cache tier disabled: serving goes on without it", level=level, reason=str(failure))
        for pool, table in enumerate(self._tables):
            pages = table.pop(level, table.num_queued(level))
            needed = table.held_mask(pages)
            self._discard(pool, pages[~needed])
            table.enqueue(pages[needed])
