"""The state of every page of one pool, as arrays: who uses it, what it holds, where its bytes are.

A page is in exactly one state:

* *free*: no bytes belong to it;
* *locked*: at least one active sequence uses it; it must stay where the device can read it;
* *held*: no lock, but a suspended sequence or a lease needs it; it may move, it may not be dropped;
* *quarantined*: held, not locked, and a peer may still write into it: never committed, never matched;
* *droppable*: nobody needs it, the prefix tree knows it; it waits in the eviction queue.

A page that nobody needs and that the tree does not know is freed at once. Verbs come in pairs: ``lock``/``unlock``,
``hold``/``unhold``, ``attach``/``detach``; a count never goes negative. All methods take arrays of distinct pages.

A page number is not an address: ``slots`` gives the place of its bytes in the pool of its ``level`` (0 is the device).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import CacheIntegrityError, CacheStateError
from kvmesh.cache.eviction import EvictionQueue
from kvmesh.cache.freelist import FreeList

__all__ = ["DEFAULT_PRIORITY", "DEVICE_LEVEL", "NO_NODE", "NO_PAGE", "PageCounts", "PageTable", "Pages"]

Pages = NDArray[np.int32]

NO_PAGE = -1
NO_NODE = -1
DEVICE_LEVEL = 0

DEFAULT_PRIORITY = 35
"""TensorRT-LLM's middle of 0 (first to go) to 100."""


class PageCounts(NamedTuple):
    """How many pages are in each state."""

    total: int
    free: int
    evictable: int
    held: int
    locked: int
    quarantined: int


class PageTable:
    """Bookkeeping of one pool's pages.

    Args:
        num_pages: pages of the pool; every one has a slot on the device.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.queue = EvictionQueue(num_pages)
        self.free_pages = FreeList(num_pages)
        self.free_slots = [FreeList(num_pages)]
        """Per level."""
        self.level: NDArray[np.uint8] = np.zeros(num_pages, dtype=np.uint8)
        self.slot: NDArray[np.int32] = np.full(num_pages, NO_PAGE, dtype=np.int32)
        self.group: NDArray[np.uint8] = np.zeros(num_pages, dtype=np.uint8)
        self.priority: NDArray[np.uint8] = np.zeros(num_pages, dtype=np.uint8)
        self.locks: NDArray[np.int32] = np.zeros(num_pages, dtype=np.int32)
        self.holds: NDArray[np.int32] = np.zeros(num_pages, dtype=np.int32)
        self.node: NDArray[np.int32] = np.full(num_pages, NO_NODE, dtype=np.int32)
        """Tree node that offers this page for reuse."""
        self.num_tokens: NDArray[np.int32] = np.zeros(num_pages, dtype=np.int32)
        """Tokens whose KV the page certainly holds; set when the page is attached."""
        self.quarantines: dict[int, int] = {}
        """Pages that peers may still write into, with the number of leases that say so."""
        self._num_locked = 0

    @property
    def num_available(self) -> int:
        """Pages that an allocation can get: free ones and, by eviction, droppable ones."""
        return len(self.free_pages) + len(self.queue)

    @property
    def counts(self) -> PageCounts:
        """Pages by state; the parts add up to ``total``."""
        free, evictable = len(self.free_pages), len(self.queue)
        quarantined = sum(1 for page in self.quarantines if not self.locks[page])
        held = self.num_pages - free - evictable - self._num_locked - quarantined
        return PageCounts(self.num_pages, free, evictable, held, self._num_locked, quarantined)

    def slots(self, pages: Pages) -> Pages:
        """Slots of ``pages`` in the pools of their levels; ``NO_PAGE`` stays ``NO_PAGE``."""
        slots: Pages = self.slot[pages]
        slots[pages < 0] = NO_PAGE
        return slots

    def allocate(self, count: int, group: int, priority: int) -> Pages:
        """Take ``count`` free pages with a slot on the device, locked once.

        Raises:
            CacheIntegrityError: fewer are free; make room first.
        """
        pages = self.free_pages.take(count)
        self.slot[pages] = self.free_slots[DEVICE_LEVEL].take(count)
        self.level[pages] = DEVICE_LEVEL
        self.group[pages] = group
        self.priority[pages] = priority
        self.num_tokens[pages] = 0
        self.locks[pages] = 1
        self._num_locked += count
        return pages

    def lock(self, pages: Pages) -> None:
        """An active sequence starts to use ``pages``."""
        self.queue.discard(pages)
        locks = self.locks[pages]
        self._num_locked += len(pages) - int(np.count_nonzero(locks))
        self.locks[pages] = locks + 1

    def unlock(self, pages: Pages) -> None:
        """An active sequence stops using ``pages``; those that become droppable queue up in this order.

        Raises:
            CacheIntegrityError: a page was not locked.
        """
        locks = self.locks[pages] - 1
        if locks.size and locks.min() < 0:
            raise CacheIntegrityError("unlock of a page that is not locked")
        self.locks[pages] = locks
        unlocked = locks == 0
        self._num_locked -= int(np.count_nonzero(unlocked))
        self._retire(pages[unlocked & (self.holds[pages] == 0)])

    def hold(self, pages: Pages) -> None:
        """A suspended sequence or a lease starts to need ``pages``."""
        self.queue.discard(pages)
        self.holds[pages] += 1

    def unhold(self, pages: Pages) -> None:
        """The counterpart of :meth:`hold`; pages that become droppable queue up in this order.

        Raises:
            CacheIntegrityError: a page was not held.
        """
        holds = self.holds[pages] - 1
        if holds.size and holds.min() < 0:
            raise CacheIntegrityError("unhold of a page that is not held")
        self.holds[pages] = holds
        self._retire(pages[(holds == 0) & (self.locks[pages] == 0)])

    def quarantine(self, pages: Pages) -> None:
        """Mark held pages as possibly being written by a peer.

        Raises:
            CacheStateError: the tree offers one of them for reuse, so it cannot be a destination.
        """
        if (self.node[pages] != NO_NODE).any():
            raise CacheStateError("a page that the tree offers for reuse cannot be quarantined")
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

    def any_quarantined(self, pages: Pages) -> bool:
        """Whether the content of one of ``pages`` is not certain."""
        return bool(self.quarantines) and not self.quarantines.keys().isdisjoint(pages.tolist())

    def attach(self, pages: Pages, nodes: NDArray[np.int32], num_tokens: int) -> None:
        """The tree's ``nodes`` offer ``pages``, which hold the KV of their first ``num_tokens`` tokens."""
        self.node[pages] = nodes
        self.num_tokens[pages] = num_tokens

    def detach(self, pages: Pages) -> None:
        """The tree forgets ``pages``: those that nobody needs are freed, the others when their last user leaves."""
        self.node[pages] = NO_NODE
        unused = pages[(self.locks[pages] == 0) & (self.holds[pages] == 0)]
        self.queue.discard(unused)
        self._free(unused)

    def _retire(self, pages: Pages) -> None:
        """Pages lost their last user: queue what the tree knows, free the rest."""
        known = self.node[pages] != NO_NODE
        kept = pages[known]
        self.queue.push(kept, self.priority[kept])
        self._free(pages[~known])

    def _free(self, pages: Pages) -> None:
        # Every page lies on the device until colder levels exist, hence one list of slots to give back to.
        self.free_slots[DEVICE_LEVEL].put(self.slot[pages])
        self.slot[pages] = NO_PAGE
        self.free_pages.put(pages)
