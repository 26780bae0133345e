"""A lease: pages that must stay as they are while somebody outside the sequence reads or writes them.

While nobody does so yet, their owner may let them move: they are kept as those of a suspended sequence are, and fall to
the colder tiers when the device is needed for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import CacheStateError
from kvmesh.cache.pages import NO_NODE, NO_PAGE, Pages, PageTable

__all__ = ["PageLease"]


class PageLease:
    """Pins the pages of the first tokens of a sequence; they outlive the sequence until :meth:`release`.

    A lease may be kept as long as its owner wants; it is released once, on the cache's own thread.

    Attributes:
        num_tokens: tokens whose pages are pinned.
        movable: whether the pages may move to other levels now.

    Args:
        num_tokens: see above.
        tables: bookkeeping by layer group.
        pages: by layer group the pages, one for each block.
        on_release: called once at the end.
        bring_up: moves pinned pages of a layer group from where no peer can read them to where one can; False: there is
            no room now.
    """

    def __init__(
        self,
        num_tokens: int,
        tables: Sequence[PageTable],
        pages: Sequence[Pages],
        on_release: Callable[[PageLease], None],
        bring_up: Callable[[int, Pages], bool],
    ) -> None:
        self.num_tokens = num_tokens
        self._tables = tables
        self._blocks = list(pages)
        self._pages: list[Pages] = [held[held != NO_PAGE] for held in pages]
        self._quarantined: list[Pages] = []
        self._on_release = on_release
        self._bring_up = bring_up
        self.movable = False
        self._released = False
        for table, held in zip(tables, self._pages, strict=True):
            table.pin(held)

    @property
    def released(self) -> bool:
        """Whether the pages were given back."""
        return self._released

    @property
    def quarantined(self) -> bool:
        """Whether :meth:`quarantine` was called and the lease is not released yet."""
        return bool(self._quarantined)

    @property
    def num_pages(self) -> int:
        """Pages over all layer groups."""
        return sum(len(held) for held in self._pages)

    def pages(self, group: int) -> Pages:
        """Bookkeeping numbers of the pinned pages in ``group`` (for checks; bytes are found by :meth:`page_ids`)."""
        return self._pages[group]

    @property
    def lost(self) -> bool:
        """Whether a colder tier could not give pages back intact: the lease can only be released."""
        return any(table.any_damaged(held) for table, held in zip(self._tables, self._pages, strict=True))

    def let_move(self) -> bool:
        """Nobody reads or writes the pages for now: they may fall to colder levels, and never go; whether they may.

        Raises:
            CacheStateError: the lease was released, or a peer may write into its pages.
        """
        self._check()
        if self._quarantined:
            raise CacheStateError("pages that a peer may write into cannot move")
        if not self.movable:
            self.movable = True
            for table, held in zip(self._tables, self._pages, strict=True):
                table.release_place(held)
        return True

    def keep_place(self) -> bool:
        """Somebody is about to read the pages: they stay where they are from now on, or are brought to where they can.

        Returns:
            False when there is no room for that now, or the pages are :attr:`lost`; then they may still move.

        Raises:
            CacheStateError: the lease was released.
        """
        self._check()
        if not self.movable:
            return True
        if self.lost:
            return False
        for table, held in zip(self._tables, self._pages, strict=True):
            table.keep_place(held)
        self.movable = False
        if all(self._bring_up(group, held) for group, held in enumerate(self._pages)) and not self.lost:
            return True
        self.let_move()
        return False

    def levels(self, group: int) -> NDArray[np.uint8]:
        """By block the level that its page is on: uint8 ``[blocks]``, 0 without a page.

        While the pages keep their place, any other level than the device's is that of the host tier.

        Raises:
            CacheStateError: the lease was released.
        """
        self._check()
        levels: NDArray[np.uint8] = self._tables[group].level[self._blocks[group]]
        levels[self._blocks[group] < 0] = 0
        return levels

    def page_ids(self, group: int) -> Pages:
        """Slots in the pool of ``group`` on their level, one for each block: int32 ``[blocks]``, -1 without a page.

        Raises:
            CacheStateError: the lease was released; the pages belong to others by now.
        """
        self._check()
        return self._tables[group].slots(self._blocks[group])

    def quarantine(self) -> None:
        """Say that a peer may still write into the pages that are not reusable blocks; they count as quarantined.

        Until the release they can neither be committed nor matched. Calling this twice is the same as once.

        Raises:
            CacheStateError: the lease was released.
        """
        self._check()
        if self._quarantined:
            return
        self._quarantined = [
            held[table.node[held] == NO_NODE] for table, held in zip(self._tables, self._pages, strict=True)
        ]
        for table, pages in zip(self._tables, self._quarantined, strict=True):
            table.quarantine(pages)

    def release(self) -> None:
        """Give the pages back: nobody outside reads or writes them any more.

        Raises:
            CacheStateError: the lease was released before.
        """
        self._check()
        self._released = True
        for table, pages in zip(self._tables, self._quarantined, strict=False):
            table.unquarantine(pages)
        self._quarantined = []
        for table, held in zip(self._tables, self._pages, strict=True):
            # Last block first, so that the leaf of the prefix is evicted before what it continues.
            (table.unhold if self.movable else table.unpin)(held[::-1])
        self._on_release(self)

    def _check(self) -> None:
        if self._released:
            raise CacheStateError("the page lease was released already")
