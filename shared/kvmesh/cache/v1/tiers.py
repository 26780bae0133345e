"""Where the V1 cache's blocks are: allocation, eviction, offload to the host pool and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.device import DeviceBuffer
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.stats import CacheCounters
from kvmesh.cache.v1.block import DEVICE, HOST, Block
from kvmesh.cache.v1.index import BlockIndex
from kvmesh.cache.v1.usage import BlockUsage, Slots, slots_of

__all__ = ["BlockTiers", "PageMemory"]


class PageMemory(Protocol):
    """What V1 needs of :class:`kvmesh.cache.storage.Storage`."""

    @property
    def pools(self) -> Sequence[DeviceBuffer]:
        """Device memory by pool."""
        ...

    def copy(self, pool: int, src_slots: Slots, dst_slots: Slots) -> None:
        """Copy pages inside the device level."""
        ...

    def move(self, pool: int, src_level: int, src_slots: Slots, dst_level: int, dst_slots: Slots) -> NDArray[np.bool_]:
        """Copy pages between levels; which of them arrived intact."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class BlockTiers:
    """Allocates blocks, making room where needed.

    Args:
        layout: page sizes.
        usage: slots and users.
        index: the reusable blocks.
        memory: the bytes.
        counters: counted in here.
        offload_min_priority: blocks of a lower priority are dropped instead of offloaded.
    """

    def __init__(
        self,
        layout: PageLayout,
        usage: BlockUsage,
        index: BlockIndex,
        memory: PageMemory,
        counters: CacheCounters,
        offload_min_priority: int,
    ) -> None:
        self._layout = layout
        self._usage = usage
        self._index = index
        self._memory = memory
        self._counters = counters
        self._offload_min_priority = offload_min_priority

    def available(self) -> list[int]:
        """By pool, device pages that can be had now."""
        return [levels[DEVICE].available for levels in self._usage.pools]

    def reserve(self, needs: list[int]) -> bool:
        """Have ``needs[pool]`` free device slots, evicting what has to go. False: impossible, nothing has changed."""
        if any(need > can for need, can in zip(needs, self.available(), strict=True)):
            return False
        for pool, need in enumerate(needs):
            self._make_room(pool, need)
        return True

    def take(self, group: int, priorities: NDArray[np.uint8], durations_s: NDArray[np.float64]) -> list[Block]:
        """New private blocks for which room was reserved, locked once, one for each of the priorities."""
        slots = self._usage.pools[self._usage.pool_of_group[group]][DEVICE].free.take(len(priorities))
        return [
            self._usage.new_block(group, *facts)
            for facts in zip(slots.tolist(), priorities.tolist(), durations_s.tolist(), strict=True)
        ]

    def onboard(self, blocks: Iterable[Block]) -> bool:
        """Bring blocks of the host pool to device slots that were reserved; False: some were damaged and are lost."""
        by_pool: list[list[Block]] = [[] for _ in self._usage.pools]
        for block in blocks:
            by_pool[self._usage.pool_of_group[block.group]].append(block)
        intact = [self._onboard_pool(pool, cold) for pool, cold in enumerate(by_pool) if cold]
        return all(intact)

    def duplicate(self, source: Block, target: Block) -> bool:
        """Copy the content of a held block into a device block; False: it was damaged and is lost."""
        pool = self._usage.pool_of_group[source.group]
        if source.level == DEVICE:
            self._memory.copy(pool, slots_of([source]), slots_of([target]))
        elif not self._memory.move(pool, HOST, slots_of([source]), DEVICE, slots_of([target])).all():
            self._index.damage(source)
            return False
        self._usage.flows.add("copied", source.level, source.group, 1)
        self._counters.copied_pages += 1
        return True

    def _onboard_pool(self, pool: int, blocks: list[Block]) -> bool:
        free = self._usage.pools[pool][DEVICE].free
        targets = free.take(len(blocks))
        intact = self._memory.move(pool, HOST, slots_of(blocks), DEVICE, targets)
        for block, target, good in zip(blocks, targets, intact, strict=True):
            if good:
                self._index.relocate(block, DEVICE, int(target))
                self._usage.flows.add("onboarded", HOST, block.group, 1)
            else:
                free.put(np.array([target], dtype=np.int32))
                self._index.damage(block)
        count = int(np.count_nonzero(intact))
        self._counters.onboarded_pages += count
        self._counters.onboarded_bytes += count * self._layout.pools[pool].page_bytes
        return count == len(blocks)

    def _make_room(self, pool: int, count: int) -> None:
        """Evict until ``count`` device slots are free: lowest priority first, then least recently used, leaves only."""
        device = self._usage.pools[pool][DEVICE]
        leaving: list[tuple[Block, int]] = []
        while len(device.free) < count:
            block = device.queue.pop()
            assert block is not None
            before = len(device.free)
            host_slot = self._host_slot(pool) if block.priority >= self._offload_min_priority else None
            if host_slot is None:
                self._drop(block)
            else:
                leaving.append((block, block.slot))
                self._index.relocate(block, HOST, host_slot)
            self._counters.evicted_pages += len(device.free) - before
        self._offload(pool, leaving)

    def _drop(self, block: Block) -> None:
        """Give up a reusable block, and what continues it."""
        level = block.level
        count = self._index.drop(block)
        self._counters.dropped_pages += count
        self._usage.flows.add("dropped", level, block.group, count)

    def _host_slot(self, pool: int) -> int | None:
        """A free slot of the host pool, by eviction there if need be; None: there is none to be had."""
        if self._usage.num_levels == 1:
            return None
        host = self._usage.pools[pool][HOST]
        if not len(host.free):
            block = host.queue.pop()
            if block is None:
                return None
            self._drop(block)
        return int(host.free.take(1)[0])

    def _offload(self, pool: int, leaving: list[tuple[Block, int]]) -> None:
        """Copy the bytes of blocks that have left the device slots given with them; nobody reuses these before.

        A block that made room in the host pool for a later one in the same round is in no tree any more.
        """
        leaving = [(block, slot) for block, slot in leaving if block.node is not None]
        if not leaving:
            return
        blocks = [block for block, _ in leaving]
        sources = np.array([slot for _, slot in leaving], dtype=np.int32)
        try:
            intact = self._memory.move(pool, DEVICE, sources, HOST, slots_of(blocks))
        except TierFailedError:
            intact = np.zeros(len(blocks), dtype=np.bool_)
        for block, good in zip(blocks, intact, strict=True):
            if good:
                self._usage.flows.add("offloaded", HOST, block.group, 1)
            elif block.node is not None:
                self._drop(block)
        count = int(np.count_nonzero(intact))
        self._counters.offloaded_pages += count
        self._counters.offloaded_bytes += count * self._layout.pools[pool].page_bytes
