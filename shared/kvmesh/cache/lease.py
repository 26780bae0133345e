"""A lease: pages that must stay as they are while somebody outside the sequence reads or writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmesh.cache.errors import CacheStateError
from kvmesh.cache.pages import NO_NODE, NO_PAGE, Pages, PageTable

__all__ = ["PageLease"]


class PageLease:
    """Pins the pages of the first tokens of a sequence; they outlive the sequence until :meth:`release`.

    A lease may be kept as long as its owner wants; it is released once, on the cache's own thread.

    Attributes:
        num_tokens: tokens whose pages are pinned.
    """

    def __init__(
        self,
        num_tokens: int,
        tables: Sequence[PageTable],
        pages: Sequence[Pages],
        on_release: Callable[[PageLease], None],
    ) -> None:
        self.num_tokens = num_tokens
        self._tables = tables
        self._blocks = list(pages)
        self._pages: list[Pages] = [held[held != NO_PAGE] for held in pages]
        self._quarantined: list[Pages] = []
        self._on_release = on_release
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

    def page_ids(self, group: int) -> Pages:
        """Slots in the device pool of ``group``, one for each block, in order: int32 ``[blocks]``, -1 without a page.

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
            table.unpin(held[::-1])
        self._on_release(self)

    def _check(self) -> None:
        if self._released:
            raise CacheStateError("the page lease was released already")
