"""A lease on blocks of the V1 cache: they stay as they are while somebody outside the sequence reads or writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import CacheStateError
from kvmesh.cache.v1.block import Block
from kvmesh.cache.v1.usage import BlockUsage

__all__ = ["BlockLease"]


class BlockLease:
    """Pins the blocks of the first tokens of a sequence on the device; they outlive the sequence until :meth:`release`.

    A lease may be kept as long as its owner wants; it is released once, on the cache's own thread.

    Args:
        num_tokens: tokens that the blocks hold.
        usage: where they are pinned.
        blocks: by layer group; None where a window has passed.
        on_release: called once, at the end.
    """

    def __init__(
        self,
        num_tokens: int,
        usage: BlockUsage,
        blocks: Sequence[Sequence[Block | None]],
        on_release: Callable[[BlockLease], None],
    ) -> None:
        self.num_tokens = num_tokens
        self.blocks = [list(group) for group in blocks]
        """By layer group; for checks."""
        self._usage = usage
        self._quarantined: list[Block] = []
        self._on_release = on_release
        self._released = False
        for block in self.pinned():
            usage.pin(block)

    @property
    def released(self) -> bool:
        """Whether the blocks were given back."""
        return self._released

    @property
    def quarantined(self) -> bool:
        """Whether :meth:`quarantine` found blocks that may still be written, and the lease is not released yet."""
        return bool(self._quarantined)

    @property
    def num_pages(self) -> int:
        """Pages over all layer groups."""
        return len(self.pinned())

    def pinned(self) -> list[Block]:
        """All blocks, in order, group after group."""
        return [block for group in self.blocks for block in group if block is not None]

    def page_ids(self, group: int) -> NDArray[np.int32]:
        """Slots in the device pool of ``group``, one for each block, in order, -1 where a window has passed.

        Raises:
            CacheStateError: the lease was released; the pages belong to others by now.
        """
        self._check()
        slots = (-1 if block is None else block.slot for block in self.blocks[group])
        return np.fromiter(slots, dtype=np.int32)

    def levels(self, group: int) -> NDArray[np.uint8]:
        """All on the device."""
        return np.zeros(len(self.blocks[group]), dtype=np.uint8)

    def let_move(self) -> bool:
        """V1 keeps what is waited for on the device."""
        return False

    def keep_place(self) -> bool:
        """They never left."""
        return True

    @property
    def lost(self) -> bool:
        """Never: the device loses nothing."""
        return False

    def quarantine(self) -> None:
        """Say that a peer may still write into the blocks that are not reusable; they count as quarantined.

        Until the release they can neither be committed nor matched. Calling this twice is the same as once.

        Raises:
            CacheStateError: the lease was released.
        """
        self._check()
        if not self._quarantined:
            self._quarantined = [block for block in self.pinned() if block.node is None]
            for block in self._quarantined:
                self._usage.quarantine(block)

    def release(self) -> None:
        """Give the blocks back: nobody outside reads or writes them any more.

        Raises:
            CacheStateError: the lease was released before.
        """
        self._check()
        self._released = True
        for block in self._quarantined:
            self._usage.unquarantine(block)
        self._quarantined = []
        # Last block first, so that the leaf of the prefix is older than what it continues.
        for block in reversed(self.pinned()):
            self._usage.unpin(block)
        self._on_release(self)

    def _check(self) -> None:
        if self._released:
            raise CacheStateError("the page lease was released already")
