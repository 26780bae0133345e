"""A cache that keeps what windows need and nothing else; pages that nobody may read hold NaN."""

from __future__ import annotations

import numpy as np
import torch

from kvmesh.cache.base import Scratch
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.windows import BlockRange, scratch_range, stale_range

__all__ = ["FakePages", "FakeSequenceCache"]

POISON = 0xFF  # NaN in every floating-point format


class FakePages:
    """Device pools, all slots of which are free and poisoned."""

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        self.layout = layout
        self.memory = [torch.full((num_pages, pool.page_bytes), POISON, dtype=torch.uint8) for pool in layout.pools]
        self._free = [list(np.random.default_rng(3).permutation(num_pages)) for _ in layout.pools]
        self.used = 0
        self.most_used = 0

    @property
    def addresses(self) -> list[int]:
        """Of slot 0 of each pool."""
        return [pool.data_ptr() for pool in self.memory]

    def take(self, pool: int) -> int:
        self.used += 1
        self.most_used = max(self.most_used, self.used)
        return int(self._free[pool].pop())

    def give(self, pool: int, slot: int) -> None:
        """Whoever reads the slot again without having written it reads NaN."""
        self.used -= 1
        self.memory[pool][slot] = POISON
        self._free[pool].insert(0, slot)


class FakeSequenceCache:
    """The part of :class:`kvmesh.cache.base.SequenceCache` that the runner uses.

    Args:
        pages: where its pages come from.
        windows: whether blocks left of a window go.
        scratch: whether new blocks that are stale at the end of their step use scratch slots (semantics §3.7).
    """

    def __init__(self, pages: FakePages, *, windows: bool = True, scratch: bool = False) -> None:
        self._pages = pages
        self._windows = windows
        self._use_scratch = scratch
        self._tables: list[list[int]] = [[] for _ in pages.layout.groups]
        self._scratch: list[Scratch | None] = [None] * len(pages.layout.groups)
        self.scratch_blocks = 0

    def step(self, history: int, capacity: int) -> None:
        """Prepare a step that computes the tokens ``history .. capacity - 1``."""
        size = self._pages.layout.tokens_per_block
        for group, table in zip(self._pages.layout.groups, self._tables, strict=True):
            self._end_scratch(group.group_id, group.pool)
            window = group.window if self._windows else None
            for block in range(*stale_range(history, size, window)):
                if table[block] >= 0:
                    self._pages.give(group.pool, table[block])
                    table[block] = -1
            shared = scratch_range(history, capacity, size, window) if self._use_scratch else BlockRange(0, 0)
            for block in range(len(table), -(-capacity // size)):
                table.append(-1 if shared.begin <= block < shared.end else self._pages.take(group.pool))
            if shared.size:
                count = -(-shared.size // len(group.layers))
                slots = np.array([self._pages.take(group.pool) for _ in range(count)], dtype=np.int32)
                self._scratch[group.group_id] = Scratch(shared.begin, shared.end, slots)
                self.scratch_blocks += shared.size

    def block_table_into(self, group: int, row: np.ndarray) -> int:
        table = self._tables[group]
        row[: len(table)] = table
        return len(table)

    def scratch(self, group: int) -> Scratch | None:
        return self._scratch[group]

    def _end_scratch(self, group: int, pool: int) -> None:
        if (scratch := self._scratch[group]) is not None:
            for slot in scratch.slots:
                self._pages.give(pool, int(slot))
        self._scratch[group] = None
