"""One sequence's pages in a state group: the live recurrent state, and snapshots of it that wait to be committed.

The live page is the sequence's own, whatever its length. A snapshot is a copy of it at one position; it belongs to the
block that contains the position, and becomes reusable together with that block. It has the face of
:class:`kvmesh.cache.blocks.GroupBlocks`, most of which means nothing to a group without blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvmesh.cache.pages import DEVICE_LEVEL, NO_PAGE, Pages, PageTable
from kvmesh.cache.windows import BlockRange

__all__ = ["StateBlocks"]


class _Snapshot(NamedTuple):
    block: int
    page: Pages


class StateBlocks:
    """Pages of one sequence in one state group.

    Args:
        table: bookkeeping of the group's pool.
    """

    scratch_range = BlockRange(0, 0)
    scratch_pages: Pages = np.empty(0, dtype=np.int32)
    stale = 0

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.live: Pages = _NONE
        """int32 ``[1]``, or empty before the first resume."""
        self._snapshots: list[_Snapshot] = []

    @property
    def all(self) -> Pages:
        """The live page: the whole "block table" of a state group."""
        return self.live

    def readable(self) -> Pages:
        """The live page, too."""
        return self.live

    def between(self, begin: int, end: int) -> Pages:
        """Snapshot of each of the blocks ``begin .. end - 1``, ``NO_PAGE`` where there is none."""
        pages: Pages = np.full(end - begin, NO_PAGE, dtype=np.int32)
        for block, page in self._snapshots:
            if begin <= block < end:
                pages[block - begin] = page[0]
        return pages

    def active(self, begin: int = 0) -> Pages:
        """The live page."""
        del begin
        return self.live

    def retained(self) -> Pages:
        """The waiting snapshots: held, whether the sequence is active or not."""
        return np.concatenate((_NONE, *(snapshot.page for snapshot in self._snapshots)))

    def missing(self, count: int, history: int, scratch: BlockRange) -> int:
        """Nothing: the live page came with the first resume."""
        del count, history, scratch
        return 0

    def extend(self, count: int, history: int, scratch: BlockRange, new: Pages) -> None:
        """A longer sequence needs no further page."""
        del count, history, scratch, new

    def append(self, page: Pages) -> None:
        """The live page, locked."""
        self.live = page

    def add_snapshot(self, block: int, page: Pages) -> None:
        """A held copy of the state, at a position inside or at the end of ``block``; it replaces an earlier one."""
        self._let_go(lambda other: other == block)
        self._snapshots.append(_Snapshot(block, page))

    def truncate(self, count: int) -> None:
        """Snapshots of blocks that go are of no use."""
        self._let_go(lambda block: block >= count)

    def free_scratch(self) -> None:
        """There are no scratch slots."""

    def freed_by(self, history: int, stored: int, *, storing: bool) -> int:
        """Nothing is freed by a longer history."""
        del history, stored, storing
        return 0

    def advance(self, history: int, stored: int, *, storing: bool, locked: bool) -> None:
        """No page of a state group goes stale."""
        del history, stored, storing, locked

    def freed_by_releasing(self) -> int:
        """Device pages that :meth:`release_retained` of all blocks would make available."""
        retained = self.retained()
        locks, pins, holds = self.table.uses(retained)
        alone = (locks == 0) & (pins == 0) & (holds == 1) & (self.table.level[retained] == DEVICE_LEVEL)
        return int(np.count_nonzero(alone))

    def release_retained(self, stored: int) -> None:
        """Snapshots of the first ``stored`` blocks are committed, or never will be."""
        self._let_go(lambda block: block < stored)

    def forget_damaged(self) -> None:
        """Let go of snapshots whose bytes a cold tier has lost: they must not be committed."""
        lost = {snapshot.block for snapshot in self._snapshots if self.table.any_damaged(snapshot.page)}
        self._let_go(lost.__contains__)

    def give_back(self, *, locked: bool) -> None:
        """Let go of everything."""
        if locked:
            self.table.unlock(self.live)
        else:
            self.table.unhold(self.live)
        self.table.unhold(self.retained())
        self.live, self._snapshots = _NONE, []

    def _let_go(self, gone: Callable[[int], bool]) -> None:
        for snapshot in [one for one in self._snapshots if gone(one.block)]:
            self._snapshots.remove(snapshot)
            self.table.unhold(snapshot.page)


_NONE: Pages = np.empty(0, dtype=np.int32)
