"""The state of every page of one pool, as arrays: who uses it, what it holds, where its bytes are.

A page is in exactly one state:

* *free*: no bytes belong to it;
* *locked*: at least one active sequence uses it; it must be on the device;
* *pinned*: no lock, but a lease lets somebody outside read or write its bytes: it neither moves nor goes;
* *held*: no lock and no pin, but a suspended sequence needs it; it may move to a colder level, it may not be dropped;
* *quarantined*: pinned, and a peer may still write into it: never committed, never matched;
* *droppable*: nobody needs it, the prefix tree knows it.

A page that nobody needs and that the tree does not know is freed at once. Held pages (except on the last level, where
they cannot move on) and droppable pages wait in the eviction queue of their level. Verbs come in pairs: ``lock`` and
``unlock``, ``pin`` and ``unpin``, ``hold`` and ``unhold``, ``promote`` and ``demote``, ``attach`` and ``detach``; a
count never goes negative. All methods take arrays of distinct pages.

A page number is not an address: ``slots`` gives the place of its bytes in the pool of its ``level`` (0 is the device).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import CacheIntegrityError, CacheStateError
from kvmesh.cache.expiry import PageExpiry
from kvmesh.cache.freelist import FreeList
from kvmesh.kernels import _native
from kvmesh.protocol.retention import DEFAULT_PRIORITY

__all__ = ["DEFAULT_PRIORITY", "DEVICE_LEVEL", "NO_NODE", "NO_PAGE", "PageCounts", "PageTable", "Pages"]

Pages = NDArray[np.int32]

NO_PAGE = -1
"""Also what a block table holds where there is no page (TensorRT-LLM's BAD_PAGE_INDEX)."""
NO_NODE = -1
DEVICE_LEVEL = 0

# A page's users are counted in one number, so that a change of state is one addition and its class one comparison.
_HOLD = 1
_PIN = 1 << 20
_LOCK = 1 << 40
_FIELD = _PIN - 1

_NONE = np.empty(0, dtype=np.int32)


class PageCounts(NamedTuple):
    """How many device pages of a pool are in each state; the parts add up to ``total``."""

    total: int
    free: int
    evictable: int
    """Droppable ones."""
    held: int
    locked: int
    pinned: int
    quarantined: int


class PageTable:
    """Bookkeeping of one pool's pages on all levels.

    Args:
        num_slots: slots of the pool by level; level 0 is the device.
        max_slots: the most slots that there may ever be over all levels (``resize``); the present ones when None.
    """

    def __init__(self, num_slots: Sequence[int], *, max_slots: int | None = None) -> None:
        num_pages = max(sum(num_slots), max_slots or 0)
        self.num_pages = num_pages
        self.num_slots = list(num_slots)
        """By level."""
        self.last_level = len(num_slots) - 1
        self.free_pages = FreeList(num_pages)
        self.free_slots = [FreeList(count) for count in num_slots]
        self.level: NDArray[np.uint8] = np.zeros(num_pages, dtype=np.uint8)
        self.slot: NDArray[np.int32] = np.full(num_pages, NO_PAGE, dtype=np.int32)
        """``NO_PAGE`` marks a free page."""
        self.group: NDArray[np.uint8] = np.zeros(num_pages, dtype=np.uint8)
        self.priority: NDArray[np.uint8] = np.zeros(num_pages, dtype=np.uint8)
        self.node: NDArray[np.int32] = np.full(num_pages, NO_NODE, dtype=np.int32)
        """Tree node that offers this page for reuse."""
        self.num_tokens: NDArray[np.int32] = np.zeros(num_pages, dtype=np.int32)
        """Tokens whose KV the page certainly holds; set when the page is attached."""
        self.quarantines: dict[int, int] = {}
        """Pages that peers may still write into, with the number of leases that say so."""
        self.damaged: set[int] = set()
        """Held pages whose bytes a cold tier has lost; they only wait for their users to leave."""
        self._is_quarantined: NDArray[np.bool_] = np.zeros(num_pages, dtype=np.bool_)
        self._num_quarantined = 0  # Those that are not locked.
        self._damaged_held = [0] * len(num_slots)  # By level.
        self._uses: NDArray[np.int64] = np.zeros(num_pages, dtype=np.int64)
        columns = (self._uses, self.level, self.group, self.priority, self.slot, self.node, self.num_tokens)
        self._states = _native.PageStates(columns, len(num_slots))
        self._expiry = PageExpiry()

    def counts(self, level: int = DEVICE_LEVEL) -> PageCounts:
        """Pages of ``level`` by state."""
        total, free, held = self.num_slots[level], len(self.free_slots[level]), self._states.held(level)
        queued = self._states.queued(level)
        evictable = queued if level == self.last_level else queued - self._queued_held(level)
        on_device = level == DEVICE_LEVEL
        quarantined = self._num_quarantined if on_device else 0
        locked = self._states.num_locked if on_device else 0
        pinned = self._states.fixed(level) - locked - quarantined
        return PageCounts(total, free, evictable, held, locked, pinned, quarantined)

    def movable(self, level: int, usable: Sequence[bool]) -> int:
        """Slots of ``level`` that an allocation can get now.

        Free ones, those of droppable pages, and those of held pages that find room on colder levels.

        Args:
            level: where.
            usable: by level, whether it still takes pages.
        """
        if not usable[level]:
            return 0
        room = len(self.free_slots[level]) + self._states.queued(level)
        if level == self.last_level:
            return room
        held = self._queued_held(level)
        return room - held + min(held, self.movable(level + 1, usable)) if held else room

    def gained(self, count: int, usable: Sequence[bool]) -> int:
        """How much :meth:`movable` of the device grows, at least, when ``count`` of its held pages are freed."""
        if not self.last_level:
            return count
        held, room = self._queued_held(DEVICE_LEVEL), self.movable(DEVICE_LEVEL + 1, usable)
        return count - min(held, room) + min(held - count, room)

    def slots(self, pages: Pages) -> Pages:
        """Slots of ``pages`` in the pools of their levels; ``NO_PAGE`` stays ``NO_PAGE``."""
        slots: Pages = self.slot[pages]
        slots[pages < 0] = NO_PAGE
        return slots

    def locked(self, page: int) -> bool:
        """Whether an active sequence uses ``page``."""
        return int(self._uses[page]) >= _LOCK

    def nbytes(self) -> int:
        """Bytes of all columns and queues."""
        columns = (
            *(self.level, self.slot, self.group, self.priority, self.node, self.num_tokens),
            *(self._uses, self._is_quarantined),
        )
        lists = (self.free_pages, *self.free_slots)
        return sum(column.nbytes for column in columns) + sum(4 * one.capacity for one in lists) + self._states.nbytes()

    def unused(self, pages: Pages) -> NDArray[np.bool_]:
        """Which of ``pages`` have no user at all."""
        idle: NDArray[np.bool_] = self._uses[pages] == 0
        return idle

    def sole_user(self, pages: Pages) -> NDArray[np.bool_]:
        """Which of ``pages`` have one lock and nothing else."""
        sole: NDArray[np.bool_] = self._uses[pages] == _LOCK
        return sole

    def uses(self, pages: Pages) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Locks, pins and holds of each of ``pages``."""
        uses = self._uses[pages]
        return uses >> 40, (uses >> 20) & _FIELD, uses & _FIELD

    def allocate(self, count: int, group: int, priorities: NDArray[np.uint8] | int) -> Pages:
        """Take ``count`` pages with a free slot on the device, locked once.

        Raises:
            CacheIntegrityError: fewer slots are free; make room first.
        """
        pages = self.place(count, DEVICE_LEVEL, group, priorities)
        self._change(pages, _LOCK)
        return pages

    def place(self, count: int, level: int, group: int, priorities: NDArray[np.uint8] | int) -> Pages:
        """Take ``count`` pages with a free slot on ``level`` that nobody uses yet: attach them at once.

        Raises:
            CacheIntegrityError: fewer slots are free.
        """
        slots = self.free_slots[level].take(count)
        pages = self.free_pages.take(count)
        self._states.place(pages, slots, level, group, priorities)
        return pages

    def retain(self, pages: Pages, durations_s: NDArray[np.float64]) -> None:
        """Let the priorities of ``pages`` fall back to the default that long after their first release."""
        self._expiry.add(pages, durations_s)

    def lock(self, pages: Pages) -> None:
        """An active sequence starts to use ``pages``."""
        self._change(pages, _LOCK)

    def unlock(self, pages: Pages) -> None:
        """An active sequence stops using ``pages``; those that become evictable queue up in this order.

        Raises:
            CacheIntegrityError: a page was not locked.
        """
        self._change(pages, -_LOCK)

    def hold(self, pages: Pages) -> None:
        """A suspended sequence starts to need ``pages``."""
        self._change(pages, _HOLD)

    def unhold(self, pages: Pages) -> None:
        """The counterpart of :meth:`hold`."""
        self._change(pages, -_HOLD)

    def promote(self, pages: Pages) -> None:
        """A suspended sequence becomes active: its holds become locks."""
        self._change(pages, _LOCK - _HOLD)

    def demote(self, pages: Pages) -> None:
        """An active sequence is suspended: its locks become holds."""
        self._change(pages, _HOLD - _LOCK)

    def pin(self, pages: Pages) -> None:
        """A lease starts to need the bytes of ``pages`` where they are."""
        self._change(pages, _PIN)

    def unpin(self, pages: Pages) -> None:
        """The counterpart of :meth:`pin`."""
        self._change(pages, -_PIN)

    def release_place(self, pages: Pages) -> None:
        """A lease goes on needing ``pages``, but they may move to another level."""
        self._change(pages, _HOLD - _PIN)

    def keep_place(self, pages: Pages) -> None:
        """The counterpart of :meth:`release_place`: they stay on the level where they are now."""
        self._change(pages, _PIN - _HOLD)

    def any_pinned(self, pages: Pages) -> bool:
        """Whether a lease needs one of ``pages`` where it is."""
        return bool((self._uses[pages] & (_FIELD * _PIN)).any())

    def quarantine(self, pages: Pages) -> None:
        """Mark pinned pages as possibly being written by a peer.

        Raises:
            CacheStateError: the tree offers one of them for reuse, so it cannot be a destination.
        """
        if (self.node[pages] != NO_NODE).any():
            raise CacheStateError("a page that the tree offers for reuse cannot be quarantined")
        new = pages[~self._is_quarantined[pages]]
        self._is_quarantined[new] = True
        self._num_quarantined += self._count_unlocked(new)
        for page in pages.tolist():
            self.quarantines[page] = self.quarantines.get(page, 0) + 1

    def unquarantine(self, pages: Pages) -> None:
        """The counterpart of :meth:`quarantine`.

        Raises:
            CacheIntegrityError: a page was not quarantined.
        """
        for page in pages.tolist():
            left = self.quarantines.get(page, 0) - 1
            if left < 0:
                raise CacheIntegrityError(f"page {page} is not quarantined")
            if left:
                self.quarantines[page] = left
            else:
                del self.quarantines[page]
                self._is_quarantined[page] = False
                self._num_quarantined -= not self.locked(page)

    def any_quarantined(self, pages: Pages) -> bool:
        """Whether the content of one of ``pages`` is not certain."""
        return bool(self.quarantines) and not self.quarantines.keys().isdisjoint(pages.tolist())

    def attach(self, pages: Pages, nodes: NDArray[np.int32], num_tokens: int | NDArray[np.int32]) -> None:
        """The tree's ``nodes`` offer ``pages``, which hold the KV of their first ``num_tokens`` tokens."""
        self.node[pages] = nodes
        self.num_tokens[pages] = num_tokens

    def detach(self, pages: Pages) -> None:
        """The tree forgets ``pages``: those that nobody needs are freed, the others when their last user leaves."""
        self.node[pages] = NO_NODE
        unused = pages[self._uses[pages] == 0]
        self._states.discard(unused)
        self._free(unused)

    def relocate(self, pages: Pages, level: int, slots: Pages) -> None:
        """The bytes of ``pages`` (in no queue) are now in ``slots`` of ``level``; their former slots become free."""
        self._states.relocate(pages, level)
        self._free_slots(pages)
        self.slot[pages] = slots
        self.level[pages] = level

    def enqueue(self, pages: Pages, *, front: bool = False) -> None:
        """Put relocated or popped pages (on one level, idle or held) into the queue of their level.

        Held pages do not queue on the last level, damaged ones nowhere.
        """
        if self.damaged:
            pages = _among(pages, self.damaged, wanted=False)
        self._states.push(pages, front)

    def pop(self, level: int, count: int) -> Pages:
        """Take up to ``count`` pages out of the queue of ``level``, the first to go first."""
        pages = np.empty(min(count, self._states.queued(level)), dtype=np.int32)
        self._states.pop(level, pages)
        return pages

    def num_queued(self, level: int) -> int:
        """Pages that can leave ``level``."""
        return self._states.queued(level)

    def is_queued(self, page: int) -> bool:
        """Whether ``page`` waits in the queue of its level."""
        return self._states.is_queued(page)

    def queued_mask(self) -> NDArray[np.bool_]:
        """Which of all pages wait in the queue of their level."""
        mask = np.empty(self.num_pages, dtype=np.bool_)
        self._states.queued_into(mask)
        return mask

    def damage(self, pages: Pages) -> None:
        """The bytes of ``pages``, which the tree has forgotten and somebody still needs, are lost."""
        new = _among(pages, self.damaged, wanted=False)
        self.damaged.update(new.tolist())
        self._count_damaged(new, 1)
        self._states.discard(new)

    def any_damaged(self, pages: Pages) -> bool:
        """Whether the bytes of one of ``pages`` are lost."""
        return bool(self.damaged) and not self.damaged.isdisjoint(pages.tolist())

    def held_mask(self, pages: Pages) -> NDArray[np.bool_]:
        """Which of ``pages`` are needed by somebody."""
        held: NDArray[np.bool_] = self._uses[pages] != 0
        return held

    def expire(self, now_s: float) -> list[tuple[Pages, int]]:
        """Let durations that have run out take effect.

        Returns:
            Committed pages whose priority changed, with the old priority.
        """
        changed: list[tuple[Pages, int]] = []
        for page in self._expiry.take(now_s):
            one = np.array([page], dtype=np.int32)
            old = int(self.priority[page])
            if old == DEFAULT_PRIORITY:
                continue
            self.priority[page] = DEFAULT_PRIORITY
            if self._states.is_queued(page):
                self._states.push(one, False)
            if self.node[page] != NO_NODE:
                changed.append((one, old))
        return changed

    def resize(self, level: int, num_slots: int) -> None:
        """Change the number of slots of a level; slots from ``num_slots`` on must be free.

        Raises:
            CacheIntegrityError: one of them is in use.
        """
        if num_slots >= self.num_slots[level]:
            self.free_slots[level].grow(num_slots)
        else:
            self.free_slots[level].shrink(num_slots)
        self.num_slots[level] = num_slots

    def repack(self, level: int, pages: Pages, slots: Pages) -> None:
        """The bytes of ``pages`` are now in other, free ``slots`` of the same level."""
        free = self.free_slots[level]
        left = self.slot[pages]
        free.replace(slots, left)
        self.slot[pages] = slots

    def pages_above(self, level: int, slot: int) -> Pages:
        """Pages of ``level`` in slots from ``slot`` on."""
        found = np.flatnonzero((self.slot >= slot) & (self.level == level))
        return found.astype(np.int32)

    def group_counts(self, level: int, group: int) -> tuple[int, int, int, int]:
        """Locked, pinned, held and droppable pages of ``group`` on ``level``; linear in pages."""
        here = (self.level == level) & (self.group == group) & (self.slot != NO_PAGE)
        uses = self._uses[here]
        locked, fixed, used = (int(np.count_nonzero(uses >= bound)) for bound in (_LOCK, _PIN, 1))
        return locked, fixed - locked, used - fixed, len(uses) - used

    def fixed(self, pages: Pages) -> NDArray[np.bool_]:
        """Which of ``pages`` are locked or pinned."""
        fixed: NDArray[np.bool_] = self._uses[pages] >= _PIN
        return fixed

    def _queued_held(self, level: int) -> int:
        return self._states.held(level) - self._damaged_held[level]

    def _change(self, pages: Pages, delta: int) -> None:
        if not len(pages):
            return
        freed = np.empty(len(pages), dtype=np.int32)
        quarantined = pages[self._is_quarantined[pages]] if self.quarantines else _NONE
        damaged = _among(pages, self.damaged) if self.damaged else _NONE
        unlocked = self._count_unlocked(quarantined)
        self._count_damaged(damaged, -1)
        try:
            count = self._states.change(pages, delta, freed)
        except ValueError as error:
            raise CacheIntegrityError(str(error)) from None
        finally:
            self._count_damaged(damaged, 1)
        self._num_quarantined += self._count_unlocked(quarantined) - unlocked
        if len(damaged):
            self._states.discard(damaged)
        if self._expiry.waiting and delta < 0:
            self._expiry.start(pages[(self._uses[pages] == 0) & (self.node[pages] != NO_NODE)])
        if count:
            self._free(freed[:count])

    def _count_unlocked(self, pages: Pages) -> int:
        return int(np.count_nonzero(self._uses[pages] < _LOCK)) if len(pages) else 0

    def _count_damaged(self, pages: Pages, change: int) -> None:
        """Add ``change`` for each of the damaged ``pages`` that is held."""
        if len(pages):
            uses = self._uses[pages]
            for level in self.level[pages[(uses > 0) & (uses < _PIN)]].tolist():
                self._damaged_held[level] += change

    def _free(self, pages: Pages) -> None:
        if not len(pages):
            return
        self._free_slots(pages)
        self.slot[pages] = NO_PAGE
        self.free_pages.put(pages)
        if self._expiry or self.damaged:
            for page in pages.tolist():
                self._expiry.forget(page)
                self.damaged.discard(page)

    def _free_slots(self, pages: Pages) -> None:
        if not self.last_level:
            self.free_slots[DEVICE_LEVEL].put(self.slot[pages])
            return
        levels = self.level[pages]
        for level in np.unique(levels).tolist():
            self.free_slots[level].put(self.slot[pages[levels == level]])


def _among(pages: Pages, some: Collection[int], *, wanted: bool = True) -> Pages:
    """Which of ``pages`` are among ``some``, or are not."""
    return pages[np.fromiter(((page in some) == wanted for page in pages.tolist()), np.bool_, len(pages))]
