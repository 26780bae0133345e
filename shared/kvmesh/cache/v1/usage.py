"""Who uses which block of the V1 cache: the slots of each pool, the state of each block, and who may go first.

Verbs come in pairs: ``lock``/``unlock``, ``hold``/``unhold``, ``pin``/``unpin``, ``quarantine``/``unquarantine``. A
block without users waits in the free queue of its pool and level if the tree offers it, else its slot is free at once.

The free queue is a prioritised LRU: all blocks of the lowest priority go first, inside a priority the one that was
released longest ago. Only leaves are queued: a block that others continue on its own level comes after them. In a group
with a sliding window this does not bind, for there a block is useful without what it continues.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.flows import PageFlows
from kvmesh.cache.freelist import FreeList
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.lazy_queue import LazyQueue
from kvmesh.cache.tallies import Tallies
from kvmesh.cache.v1.block import DEVICE, Block, BlockState

__all__ = ["BlockUsage", "Slots", "slots_of"]

Slots = NDArray[np.int32]


def slots_of(blocks: Iterable[Block]) -> Slots:
    """Slots of ``blocks``, int32."""
    return np.fromiter((block.slot for block in blocks), dtype=np.int32)


class LevelUse:
    """One pool on one level.

    Args:
        num_pages: its slots.
        num_groups: layer groups of all pools.
    """

    def __init__(self, num_pages: int, num_groups: int) -> None:
        self.free = FreeList(num_pages)
        self.queue: LazyQueue[Block] = LazyQueue()
        self.counts = [0] * len(BlockState)
        """Blocks by state."""
        self.group_counts = [[0] * len(BlockState) for _ in range(num_groups)]
        """Blocks by layer group and state."""

    @property
    def available(self) -> int:
        """Slots that are free or can be freed: whatever nobody uses can go, leaves first."""
        return len(self.free) + self.counts[BlockState.EVICTABLE]


class BlockUsage:
    """Slots and users.

    Args:
        layout: layer groups and pools; groups whose pages have the same size share a pool's slots.
        num_pages: ``num_pages[level][pool]``.
        now_s: monotonic seconds, for retention durations.
    """

    def __init__(self, layout: PageLayout, num_pages: Sequence[Sequence[int]], now_s: Callable[[], float]) -> None:
        self.pool_of_group = [group.pool for group in layout.groups]
        self.windowed = [group.window is not None for group in layout.groups]
        self.pools = [
            [LevelUse(counts[pool], len(layout.groups)) for counts in num_pages] for pool in range(len(layout.pools))
        ]
        """``pools[pool][level]``."""
        self.num_levels = len(num_pages)
        self.flows = PageFlows(len(num_pages), len(layout.groups))
        """What happened to blocks, by level and layer group."""
        self.tallies = Tallies(len(layout.groups), self.flows)
        """What sequences found and were given, by layer group."""
        self.quarantined = 0
        """Blocks that may still be written, over all pools; commits look only when there are any."""
        self._now_s = now_s
        self._expiring: LazyQueue[Block] = LazyQueue()
        self._numbers = itertools.count(1)

    def place_of(self, block: Block) -> LevelUse:
        """The pool and level that ``block`` is in."""
        return self.pools[self.pool_of_group[block.group]][block.level]

    def new_block(self, group: int, slot: int, priority: int, duration_s: float) -> Block:
        """A private block on the device, locked once; ``slot`` was taken from the pool's free list."""
        block = Block(group, DEVICE, slot, priority, duration_s, locks=1)
        self._count(block)
        return block

    def lock(self, block: Block) -> None:
        """A running sequence starts to use ``block``."""
        block.locks += 1
        self.update(block)

    def unlock(self, block: Block) -> None:
        """The counterpart of :meth:`lock`."""
        block.locks = _decrease(block.locks, "unlock")
        self.update(block)

    def hold(self, block: Block) -> None:
        """A sequence that does not run yet starts to need ``block``."""
        block.holds += 1
        self.update(block)

    def unhold(self, block: Block) -> None:
        """The counterpart of :meth:`hold`."""
        block.holds = _decrease(block.holds, "unhold")
        self.update(block)

    def pin(self, block: Block) -> None:
        """A lease starts to need ``block`` where it is."""
        block.pins += 1
        self.update(block)

    def unpin(self, block: Block) -> None:
        """The counterpart of :meth:`pin`."""
        block.pins = _decrease(block.pins, "unpin")
        self.update(block)

    def quarantine(self, block: Block) -> None:
        """A peer may still write into the pinned, private ``block``."""
        self.quarantined += block.quarantines == 0
        block.quarantines += 1
        self.update(block)

    def unquarantine(self, block: Block) -> None:
        """The counterpart of :meth:`quarantine`."""
        block.quarantines = _decrease(block.quarantines, "unquarantine")
        self.quarantined -= block.quarantines == 0
        self.update(block)

    def update(self, block: Block) -> None:
        """The users of ``block``, or whether the tree offers it, changed: count, queue or free it accordingly."""
        before = block.counted_as
        if block.node is None and not block.users:
            self._leave(block)
            self._expiring.discard(block)
            self.place_of(block).free.put(slots_of([block]))
            return
        self._count(block)
        if block.counted_as is BlockState.EVICTABLE and before is not BlockState.EVICTABLE:
            block.released = next(self._numbers)
            if block.duration_s != math.inf:
                # From the first release on, whether it is used again or not.
                self._expiring.push(block, self._now_s() + block.duration_s, block.released)
                block.duration_s = math.inf
        self.requeue(block)

    def requeue(self, block: Block) -> None:
        """Queue ``block`` if it may go now, else take it out of the queue."""
        queue = self.place_of(block).queue
        if block.counted_as is not BlockState.EVICTABLE or not self._may_go_first(block):
            queue.discard(block)
        elif block not in queue:
            queue.push(block, block.priority, block.released)

    def relocate(self, block: Block, level: int, slot: int) -> None:
        """The bytes of ``block`` are in another slot now; its old one is free. The tree is the caller's to tell."""
        self._leave(block)
        self.place_of(block).free.put(slots_of([block]))
        block.level, block.slot = level, slot
        self._count(block)

    def exchange(self, one: Block, other: Block) -> None:
        """Two blocks of a group swap their places. The tree is the caller's to tell."""
        self._leave(one)
        self._leave(other)
        one.level, other.level = other.level, one.level
        one.slot, other.slot = other.slot, one.slot
        self._count(one)
        self._count(other)

    def expired(self, now_s: float) -> list[Block]:
        """Blocks whose priority has lasted long enough; it is the default from now on."""
        blocks: list[Block] = []
        while (head := self._expiring.first()) is not None and head[0] <= now_s:
            blocks.append(head[1])
            self._expiring.discard(head[1])
        return blocks

    def set_priority(self, block: Block, priority: int, duration_s: float) -> None:
        """Give ``block`` a new priority, which lasts ``duration_s`` from its next release on; its age stays."""
        self._expiring.discard(block)
        block.priority, block.duration_s = priority, duration_s
        queue = self.place_of(block).queue
        if block in queue:
            queue.push(block, priority, block.released)

    def _may_go_first(self, block: Block) -> bool:
        """Whether nothing on its level or a warmer one continues ``block``."""
        assert block.node is not None
        return self.windowed[block.group] or not any(block.node.on_level[: block.level + 1])

    def _count(self, block: Block) -> None:
        state = block.state
        if state is not block.counted_as:
            place = self.place_of(block)
            for counts in (place.counts, place.group_counts[block.group]):
                if block.counted_as is not None:
                    counts[block.counted_as] -= 1
                counts[state] += 1
            block.counted_as = state

    def _leave(self, block: Block) -> None:
        """Take ``block`` out of the counts and the queue of its place."""
        place = self.place_of(block)
        place.queue.discard(block)
        if block.counted_as is not None:
            place.counts[block.counted_as] -= 1
            place.group_counts[block.group][block.counted_as] -= 1
            block.counted_as = None


def _decrease(count: int, verb: str) -> int:
    if count < 1:
        raise CacheIntegrityError(f"{verb} of a block that is not in use that way")
    return count - 1
