"""What one sequence holds in all layer groups together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvmesh.cache.base import Scratch
from kvmesh.cache.blocks import GroupBlocks
from kvmesh.cache.layout import LayerGroupLayout
from kvmesh.cache.pages import DEVICE_LEVEL, NO_PAGE, Pages
from kvmesh.cache.states import StateBlocks
from kvmesh.cache.store import BlockMatch, BlockStore
from kvmesh.cache.tallies import SequenceTally
from kvmesh.cache.windows import BlockRange

__all__ = ["Holdings"]


class Holdings:
    """Pages of one sequence by layer group, held at first.

    Attributes:
        lost: a page that it needs was damaged in a cold tier.

    Args:
        store: where the pages are.
        match: what of its prompt is cached.
        history: matched tokens.
        tally: told of the pages that the sequence gets.
    """

    def __init__(self, store: BlockStore, match: BlockMatch, history: int, tally: SequenceTally) -> None:
        self.lost = False
        self._tally = tally
        self._store = store
        self._layouts = store.layout.groups
        self._groups: list[GroupBlocks | StateBlocks] = [
            StateBlocks(table)
            if group.kind == "state"
            else GroupBlocks(table, group, store.tokens_per_block, pages, history)
            for table, group, pages in zip(store.group_tables, self._layouts, store.pages_of(match.nodes), strict=True)
        ]
        self._copy_sources = store.copy_sources(match)
        """By layer group, what the first resume copies into a private page: a partial block, a state's snapshot."""
        for table, source in zip(store.group_tables, self._copy_sources, strict=True):
            table.hold(source)

    @property
    def any_scratch(self) -> bool:
        """Whether scratch slots are in use."""
        return any(len(blocks.scratch_pages) for blocks in self._groups)

    def matched(self) -> list[tuple[Pages, Pages]]:
        """By layer group, before the first resume: pages of whole blocks, and the one to be copied from."""
        return [(blocks.active(), tail) for blocks, tail in zip(self._groups, self._copy_sources, strict=True)]

    def states(self) -> Iterator[tuple[LayerGroupLayout, StateBlocks]]:
        """The state groups."""
        for layout, blocks in zip(self._layouts, self._groups, strict=True):
            if isinstance(blocks, StateBlocks):
                yield layout, blocks

    def active(self) -> list[Pages]:
        """Active pages of each group."""
        return [blocks.active() for blocks in self._groups]

    def between(self, begin: int, end: int) -> list[Pages]:
        """By layer group, what the blocks ``begin .. end - 1`` offer to the tree."""
        return [blocks.between(begin, end) for blocks in self._groups]

    def readable(self, num_blocks: int) -> list[Pages] | None:
        """By layer group, a copy of the first ``num_blocks`` entries of the block table, if all are on the device."""
        pages = [blocks.readable()[:num_blocks].copy() for blocks in self._groups]
        for blocks, own in zip(self._groups, pages, strict=True):
            if (blocks.table.level[own[own != NO_PAGE]] != DEVICE_LEVEL).any():
                return None
        return pages

    def slots(self, group: int) -> Pages:
        """The block table of ``group``."""
        blocks = self._groups[group]
        return blocks.table.slots(blocks.readable())

    def scratch(self, group: int) -> Scratch | None:
        """The scratch slots of ``group``, None when there are none."""
        blocks = self._groups[group]
        begin, end = blocks.scratch_range
        return None if begin == end else Scratch(begin, end, blocks.table.slots(blocks.scratch_pages))

    def used(self, group: int) -> tuple[Pages, Pages]:
        """Everything in ``group``, for checks: active pages and scratch slots, and what is held in any case."""
        blocks = self._groups[group]
        held = np.concatenate((blocks.retained(), self._copy_sources[group]))
        return np.concatenate((blocks.active(), blocks.scratch_pages)), held

    def any_quarantined(self, start: int) -> bool:
        """Whether a peer may write into an active page of a block from ``start`` on, or into one to be committed."""
        return any(
            blocks.table.any_quarantined(pages)
            for blocks in self._groups
            if blocks.table.quarantines
            for pages in (blocks.active(start), blocks.retained())
        )

    def promote(self) -> list[Pages]:
        """Turn the holds of the active pages into locks; returns those pages."""
        pages = self.active()
        for blocks, active in zip(self._groups, pages, strict=True):
            blocks.table.promote(active)
        return pages

    def demote(self, pages: Sequence[Pages]) -> None:
        """Turn the locks of ``pages`` into holds."""
        for blocks, active in zip(self._groups, pages, strict=True):
            blocks.table.demote(active)

    def bring_to_device(self) -> bool:
        """Move active (locked) pages that are on colder levels up; whether all are on the device now."""
        if not self._store.tables[0].last_level:
            return True
        cold: list[list[Pages]] = [[] for _ in self._store.tables]
        for layout, own in zip(self._layouts, self.active(), strict=True):
            table = self._store.tables[layout.pool]
            if table.last_level:
                if table.any_damaged(own):
                    self.lost = True
                    return False
                cold[layout.pool].append(own[table.level[own] != DEVICE_LEVEL])
        needs = [sum(map(len, parts)) for parts in cold]
        if not any(needs):
            return True
        if not self._store.can_allocate(needs):
            return False
        for pool, parts in enumerate(cold):
            intact = self._store.placement.bring(pool, np.concatenate(parts), DEVICE_LEVEL) if needs[pool] else None
            if intact is None and needs[pool]:
                return False
            if intact is not None and not intact.all():
                self.lost = True
        return not self.lost

    def copy_into(self, copies: Sequence[Pages]) -> bool:
        """Copy what was matched in part into ``copies`` (locked, at most one for each group), which become ours.

        Returns:
            False when a source is damaged; ``copies`` are given back then.
        """
        intact = True
        for layout, source, target in zip(self._layouts, self._copy_sources, copies, strict=True):
            if len(source):
                intact &= self._store.placement.copy_to_device(layout.pool, source, target)
        if not intact:
            for table, target in zip(self._store.group_tables, copies, strict=True):
                table.unlock(target)
            self.lost = True
            return False
        for group, (blocks, source, page) in enumerate(zip(self._groups, self._copy_sources, copies, strict=True)):
            if len(page):
                blocks.append(page)
                self._tally.tell(self._store.tallies.given_one, group, len(source) > 0)
        self._drop_copy_sources()
        return True

    def missing(self, count: int, history: int, scratch: Sequence[BlockRange]) -> list[int]:
        """Pages by layer group that :meth:`extend` with the same arguments will need."""
        return [blocks.missing(count, history, part) for blocks, part in zip(self._groups, scratch, strict=True)]

    def extend(
        self, count: int, history: int, scratch: Sequence[BlockRange], new: Sequence[Pages], generated: int
    ) -> None:
        """Add blocks up to ``count`` with ``new`` pages; the last ``generated`` ones are beyond the known tokens."""
        for group, (blocks, part, pages) in enumerate(zip(self._groups, scratch, new, strict=True)):
            blocks.extend(count, history, part, pages)
            if own := len(pages) - len(blocks.scratch_pages):
                self._tally.tell(self._store.tallies.given, group, own, generated, self._tally.again)

    def truncate(self, count: int) -> None:
        """Give back the pages of the blocks from ``count`` on."""
        for blocks in self._groups:
            blocks.truncate(count)

    def free_scratch(self) -> None:
        """Give the scratch slots back."""
        for blocks in self._groups:
            blocks.free_scratch()

    def freed_by(self, history: int, stored: int, *, storing: bool) -> list[int]:
        """Pages by pool that :meth:`advance` and :meth:`free_scratch` will make available, at least."""
        return self._store.by_pool(
            [blocks.freed_by(history, stored, storing=storing) + len(blocks.scratch_pages) for blocks in self._groups]
        )

    def freed_without_retaining(self, history: int, stored: int) -> list[int]:
        """As :meth:`freed_by`, when blocks that wait to be committed are not kept behind the window either."""
        freed = self.freed_by(history, stored, storing=False)
        released = self._store.by_pool([blocks.freed_by_releasing() for blocks in self._groups])
        # Some of these count as available already, because they could move to a colder level.
        return [own + self._store.placement.gained(pool, released[pool]) for pool, own in enumerate(freed)]

    def advance(self, history: int, stored: int, *, storing: bool, locked: bool) -> None:
        """Let go of what ``history`` leaves behind the windows (:meth:`GroupBlocks.advance`)."""
        for blocks in self._groups:
            blocks.advance(history, stored, storing=storing, locked=locked)

    def release_retained(self, stored: int) -> None:
        """Let go of what waited to be committed in the first ``stored`` blocks."""
        for blocks in self._groups:
            blocks.release_retained(stored)

    def forget_damaged(self) -> None:
        """Let go of pages that wait to be committed and are damaged."""
        for blocks in self._groups:
            blocks.forget_damaged()

    def give_back(self, *, locked: bool) -> None:
        """Let go of everything, last block first."""
        for blocks in self._groups:
            blocks.give_back(locked=locked)
        self._drop_copy_sources()

    def _drop_copy_sources(self) -> None:
        for table, source in zip(self._store.group_tables, self._copy_sources, strict=True):
            table.unhold(source)
        self._copy_sources = [source[:0] for source in self._copy_sources]
