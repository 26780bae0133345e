"""One sequence's pages in one attention layer group, block by block.

Blocks from ``stale`` on are the *active* ones: locked while the sequence is active, held while it is suspended. In a
windowed group the window has passed the blocks before ``stale``; those from ``live`` on are *retained*: held although
nobody will read them again, because they are not committed for reuse yet. Before ``live`` there is nothing. A full
attention group has ``live == stale == 0`` for ever.
"""

from __future__ import annotations

import numpy as np

from kvmesh.cache.layout import LayerGroupLayout
from kvmesh.cache.pages import DEVICE_LEVEL, NO_PAGE, Pages, PageTable
from kvmesh.cache.windows import BlockRange, first_live_block

__all__ = ["GroupBlocks"]

_SLACK = 8
"""Room for the blocks of generated tokens in the first array."""


class GroupBlocks:
    """Pages of the blocks of one sequence in one group.

    Args:
        table: bookkeeping of the group's pool.
        group: the group.
        tokens_per_block: tokens of a block.
        pages: of the matched blocks.
        history: matched tokens.
    """

    def __init__(
        self, table: PageTable, group: LayerGroupLayout, tokens_per_block: int, pages: Pages, history: int
    ) -> None:
        self.table = table
        self._window = group.window
        self._num_layers = len(group.layers)
        self._size = tokens_per_block
        self.count = len(pages)
        """Blocks."""
        self.live = self.stale = min(self._first_live(history), len(pages))
        self.scratch_range = BlockRange(0, 0)
        self.scratch_pages: Pages = _NONE
        self._pages: Pages = np.concatenate((pages, np.empty(_SLACK, dtype=np.int32)))
        self._pages[: self.stale] = NO_PAGE
        table.hold(self.active())

    @property
    def all(self) -> Pages:
        """Page of every block, ``NO_PAGE`` where there is none (a view); the retained ones may be on any level."""
        return self._pages[: self.count]

    def readable(self) -> Pages:
        """Page of every block, ``NO_PAGE`` where there is none or the window has passed (perhaps a view)."""
        if self.live == self.stale:
            return self.all
        pages = self.all.copy()
        pages[self.live : self.stale] = NO_PAGE
        return pages

    def between(self, begin: int, end: int) -> Pages:
        """Pages of the blocks ``begin .. end - 1``, ``NO_PAGE`` where there is none (a view)."""
        return self._pages[begin:end]

    def active(self, begin: int = 0) -> Pages:
        """Pages of the active blocks, from block ``begin`` on."""
        return self._there(self._pages[max(begin, self.stale) : self.count])

    def retained(self) -> Pages:
        """Pages that only wait to be committed."""
        return self._there(self._pages[self.live : self.stale])

    def missing(self, count: int, history: int, scratch: BlockRange) -> int:
        """Pages that ``extend`` with the same arguments will need."""
        first = max(self.count, self._first_live(history))
        inside = max(0, min(scratch.end, count) - max(scratch.begin, first))
        return max(0, count - first) - inside + self.scratch_slots(scratch)

    def scratch_slots(self, scratch: BlockRange) -> int:
        """Slots that the blocks of ``scratch`` share: the layers, computed one after another, use the same places."""
        return -(-scratch.size // self._num_layers)

    def extend(self, count: int, history: int, scratch: BlockRange, new: Pages) -> None:
        """Add blocks up to ``count``; ``new`` are locked pages for those that need one, then the scratch slots."""
        shared = self.scratch_slots(scratch)
        own = new[: len(new) - shared]
        self.scratch_range, self.scratch_pages = scratch, new[len(new) - shared :]
        if count > len(self._pages):
            grown = np.empty(max(count + _SLACK, 2 * len(self._pages)), dtype=np.int32)
            grown[: self.count] = self._pages[: self.count]
            self._pages = grown
        added = self._pages[self.count : count]
        if len(own) == len(added):
            added[:] = own
        else:
            added[:] = NO_PAGE
            numbers = np.arange(self.count, count)
            needed = numbers >= self._first_live(history)
            needed &= (numbers < scratch.begin) | (numbers >= scratch.end)
            added[needed] = own
        self.count = count

    def append(self, page: Pages) -> None:
        """Add one block with a locked page."""
        self.extend(self.count + 1, 0, BlockRange(0, 0), page)

    def truncate(self, count: int) -> None:
        """Give back the locked pages of the blocks from ``count`` on."""
        self.table.unlock(self.active(count)[::-1])
        self.count = count

    def free_scratch(self) -> None:
        """Give the scratch slots back; their blocks have no page."""
        if len(self.scratch_pages):
            self.table.unlock(self.scratch_pages)
        self.scratch_range, self.scratch_pages = BlockRange(0, 0), _NONE

    def stale_at(self, history: int) -> int:
        """The first block that will be active at ``history``."""
        return max(self.stale, min(self._first_live(history), self.count))

    def freed_by(self, history: int, stored: int, *, storing: bool) -> int:
        """Pages that :meth:`advance` with the same arguments will make available, at least."""
        end = self.stale_at(history)
        if storing:
            end = min(end, max(stored, self.stale))
        if end <= self.stale:
            return 0
        leaving = self._there(self._pages[self.stale : end])
        return int(np.count_nonzero(self.table.sole_user(leaving)))

    def advance(self, history: int, stored: int, *, storing: bool, locked: bool) -> None:
        """The history has grown: let go of the blocks that the window has passed.

        Args:
            history: tokens.
            stored: leading blocks that are committed; of the others, those that may still be are retained.
            storing: whether more will be committed.
            locked: whether the active pages are locked (else held).
        """
        begin, end = self.stale, self.stale_at(history)
        if end == begin:
            return
        first_kept = min(max(stored, begin), end) if storing else end
        released = self._there(self._pages[begin:first_kept])
        if locked:
            self.table.unlock(released)
            self.table.demote(self._there(self._pages[first_kept:end]))
        else:
            self.table.unhold(released)
        self._pages[begin:first_kept] = NO_PAGE
        if self.live == begin:
            self.live = first_kept
        self.stale = end

    def freed_by_releasing(self) -> int:
        """Device pages that :meth:`release_retained` of all blocks would make available."""
        retained = self.retained()
        locks, pins, holds = self.table.uses(retained)
        alone = (locks == 0) & (pins == 0) & (holds == 1) & (self.table.level[retained] == DEVICE_LEVEL)
        return int(np.count_nonzero(alone))

    def release_retained(self, stored: int) -> None:
        """Let go of the retained pages of the first ``stored`` blocks: they are committed, or never will be."""
        end = min(stored, self.stale)
        if end > self.live:
            self.table.unhold(self._there(self._pages[self.live : end]))
            self._pages[self.live : end] = NO_PAGE
            self.live = end

    def forget_damaged(self) -> None:
        """Let go of retained pages whose bytes a cold tier has lost: they must not be committed."""
        if self.table.damaged and self.live < self.stale:
            waiting = self._pages[self.live : self.stale]
            lost = np.isin(waiting, list(self.table.damaged))
            self.table.unhold(waiting[lost])
            waiting[lost] = NO_PAGE

    def give_back(self, *, locked: bool) -> None:
        """Let go of everything, last block first."""
        self.free_scratch()
        active = self.active()[::-1]
        if locked:
            self.table.unlock(active)
        else:
            self.table.unhold(active)
        self.table.unhold(self.retained()[::-1])
        self.count = self.live = self.stale = 0

    def _first_live(self, history: int) -> int:
        return 0 if self._window is None else first_live_block(history, self._size, self._window)

    def _there(self, pages: Pages) -> Pages:
        return pages if self._window is None else pages[pages != NO_PAGE]


_NONE: Pages = np.empty(0, dtype=np.int32)
